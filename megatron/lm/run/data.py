"""The data of a run: tokenizer, splits, and the batches that this rank reads from them."""

import itertools
import math

from torch.utils.data import Dataset

from megatron.lm.config import DataConfig, ModelConfig, TrainingConfig
from megatron.lm.config.sections.batch_sizes import BatchSizes
from megatron.lm.data.batch import batches
from megatron.lm.data.datasets import build_datasets, split_blends
from megatron.lm.data.documents import numbered
from megatron.lm.data.masked import MASKED, masked, model_vocabulary
from megatron.lm.data.preprocessing.indexing import read_counts
from megatron.lm.data.reading.order import check_same_data
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from megatron.lm.processes import process_groups
from megatron.lm.training.state import Batches, Training


class RunData:
    """Tokenizer and datasets of a run, the same on all ranks.

    Attributes:
        train, valid, test: datasets; None for a split without samples.
        vocab_size: of the tokenizer, with the tokens that the objective adds.

    Raises:
        ValueError: on every rank, if data or tokenizer are invalid, or differ between ranks.
    """

    def __init__(self, data: DataConfig, model: ModelConfig, settings: TrainingConfig, batch_sizes: BatchSizes, iterations: int) -> None:
        evaluated = settings.eval_iters * batch_sizes.final
        self.settings, self.objective, self.micro_batch_size, self.seed = data, model.objective, settings.micro_batch_size, settings.seed
        self.batch_size = batch_sizes.final
        self.tokenizer = build_tokenizer(data, model.vocab_size)
        counts = (batch_sizes.consumed(iterations), evaluated, evaluated)
        self.train, self.valid, self.test = build_datasets(data, self.tokenizer, counts, seq_length=model.seq_length, seed=settings.seed)
        splits = {"training": self.train, "validation": self.valid, "test": self.test}
        check_same_data(splits, self.tokenizer, settings.seed)
        self.vocab_size = model_vocabulary(model.objective, self.tokenizer)

    def batches(self, training: Training, dataset: Dataset, consumed_samples: int) -> Batches:
        """Return this rank's micro-batches of a dataset from a position on."""
        data, readers = self.settings, training.grid.batch
        return batches(
            masked(numbered(dataset, data, self.tokenizer), self.objective, data, self.tokenizer, self.seed),
            micro_batch_size=self.micro_batch_size,
            data_parallel_rank=readers.rank,
            data_parallel_size=readers.size,
            consumed_samples=consumed_samples,
            num_workers=data.num_workers,
            device=process_groups.device(),
            context=training.grid.context,
        )

    def training_batches(self, training: Training) -> Batches:
        """Return the micro-batches of the next steps. After rollbacks the data may end early; then it starts again."""
        assert self.train is not None
        if not training.passed_over:
            return self.batches(training, self.train, training.consumed_samples)
        whole = len(self.train) // self.batch_size * self.batch_size  # type: ignore[arg-type]
        rest = self.batches(training, self.train, (training.consumed_samples + training.passed_over) % whole)
        return itertools.chain(rest, self.batches(training, self.train, 0))

    def bits_per_byte(self, kind: str, loss: float) -> float | None:
        """Return the loss in bits per byte of text, if the split `kind` has one dataset with the counts from preprocessing."""
        blend = split_blends(self.settings)[("train", "valid", "test").index(kind)]
        # The loss of masked tokens is not a code length of the text.
        if blend is None or len(blend.prefixes) != 1 or self.objective == MASKED:
            return None
        counts = read_counts(blend.prefixes[0])
        return loss / math.log(2) * counts.tokens / counts.text_bytes if counts is not None else None

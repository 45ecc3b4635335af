"""The data of a run: tokenizer, splits, and the batches that this rank reads from them."""

import itertools
import math

import torch
from torch.utils.data import Dataset

from megatron.lm.config import Config
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

    def __init__(self, config: Config) -> None:
        ranks = torch.distributed.get_world_size()
        evaluated = config.training.eval_iters * config.global_batch_size(ranks)
        self.config = config
        self.tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        counts = (config.samples_read(ranks), evaluated, evaluated)
        seq_length, seed = config.model.seq_length, config.training.seed
        self.train, self.valid, self.test = build_datasets(config.data, self.tokenizer, counts, seq_length=seq_length, seed=seed)
        splits = {"training": self.train, "validation": self.valid, "test": self.test}
        check_same_data(splits, self.tokenizer, seed)
        self.vocab_size = model_vocabulary(config.model.objective, self.tokenizer)

    def batches(self, training: Training, dataset: Dataset, consumed_samples: int) -> Batches:
        """Return this rank's micro-batches of a dataset from a position on."""
        data, readers = self.config.data, training.grid.batch
        return batches(
            masked(numbered(dataset, data, self.tokenizer), self.config.model.objective, data, self.tokenizer, self.config.training.seed),
            micro_batch_size=self.config.training.micro_batch_size,
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
        batch = self.config.global_batch_size(torch.distributed.get_world_size())
        whole = len(self.train) // batch * batch  # type: ignore[arg-type]
        rest = self.batches(training, self.train, (training.consumed_samples + training.passed_over) % whole)
        return itertools.chain(rest, self.batches(training, self.train, 0))

    def bits_per_byte(self, kind: str, loss: float) -> float | None:
        """Return the loss in bits per byte of text, if the split `kind` has one dataset with the counts from preprocessing."""
        blend = split_blends(self.config.data)[("train", "valid", "test").index(kind)]
        # The loss of masked tokens is not a code length of the text.
        if blend is None or len(blend.prefixes) != 1 or self.config.model.objective == MASKED:
            return None
        counts = read_counts(blend.prefixes[0])
        return loss / math.log(2) * counts.tokens / counts.text_bytes if counts is not None else None

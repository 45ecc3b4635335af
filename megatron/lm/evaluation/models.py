"""One interface for the models to evaluate: a checkpoint of the trainer, or a Hugging Face folder."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.lm.hugging_face.folder import read_json
from megatron.lm.hugging_face.models import check_vocabulary, load_model, load_tokenizer
from megatron.lm.shell.exit_codes import one_line

_ROWS = 1024  # positions with log-probabilities in memory at once: 0.2 GB with a vocabulary of 50,000


class CheckpointModel:
    """A checkpoint of the trainer, with FP8 weights used as saved; requires process groups (`opened` creates them).

    The softmax is over the tokenizer's vocabulary, without padding.

    Attributes:
        name: as the user gave it.
        seq_length: context length in tokens.
        eod: id of the token before and after each document.
        about: metadata for the results file.
    """

    def __init__(self, path: Path) -> None:
        from megatron.lm.checkpoint import CheckpointReader, load_for_inference
        from megatron.lm.config.sections.precision import build_recipe
        from megatron.lm.evaluation.scoring_model import ScoringModel

        info = CheckpointReader(path).info
        model, config, self._tokenizer = load_for_inference(path)
        self.name, self.seq_length, self.eod = str(path), config.model.seq_length, self._tokenizer.eod
        if config.model.objective != "causal-lm":
            raise ValueError(f"{path} contains a model of --objective {config.model.objective}, which cannot score text: load a GPT")
        self._model = ScoringModel(model, self.seq_length)  # type: ignore[arg-type]
        self.about = {"kind": "checkpoint", "precision": build_recipe(config.precision).name, "iteration": info["iteration"]}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self._tokenizer.tokenize(text)

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Tensor]:
        """Return for each sequence the log-probabilities, FP32 in nats, of its tokens from its start (>= 1) on, given all tokens before; at
        most `seq_length` + 1 tokens, the last of which is only a target."""
        _check(sequences, starts, self.seq_length)
        hidden = self._model.hidden([sequence[:-1] for sequence in sequences])
        scores = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            places = hidden[row, start - 1 : len(sequence) - 1].split(_ROWS)
            targets = torch.tensor(sequence[start:], device=hidden.device).split(_ROWS)
            parts = [_score(self._model.head(x)[:, : self._tokenizer.vocab_size], y) for x, y in zip(places, targets, strict=True)]
            scores.append(torch.cat(parts))
        return scores


class FolderModel:
    """A Hugging Face folder, loaded with transformers (`megatron.lm.hugging_face`); also with FP8 weights in a layout of `export-fp8`.
    Attributes and methods as those of `CheckpointModel`."""

    def __init__(self, path: Path) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"transformers is missing to read the Hugging Face folder {path} ({error}): pip install -e '.[eval]'"
            ) from None
        self._tokenizer = load_tokenizer(path)
        model = load_model(path, "AutoModelForCausalLM", quantized=("compressed-tensors", "fp8"))
        check_vocabulary(model, self._tokenizer)
        self._network = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        eod = self._tokenizer.bos_token_id if self._tokenizer.bos_token_id is not None else self._tokenizer.eos_token_id
        length = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
        if eod is None or not isinstance(length, int) or length < 1:
            raise ValueError(f"{path} defines no beginning-of-document token or no sequence length: add them to its config.json")
        self.name, self.seq_length, self.eod = str(path), length, int(eod)
        quantization = read_json(path / "config.json").get("quantization_config")
        precision = str(model.dtype).removeprefix("torch.")
        if quantization:  # activations are FP8 too, unless the weights were dequantized
            precision = "fp8 export" if getattr(model.config, "quantization_config", None) else "fp8 export, weights only"
        self.about = {"kind": model.config.model_type, "precision": precision}

    def encode(self, text: str) -> list[int]:
        """As `CheckpointModel.encode`."""
        with one_line(f"the tokenizer of {self.name} cannot encode the text"):
            return self._tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Tensor]:
        """As `CheckpointModel.score`; sequences are right-padded, where the causal mask hides the padding."""
        _check(sequences, starts, self.seq_length)
        longest = max(map(len, sequences)) - 1
        tokens = torch.tensor([[*sequence[:-1], *[0] * (longest + 1 - len(sequence))] for sequence in sequences])
        logits = self._network(tokens.to(self._network.device)).logits
        return [
            _score(logits[row, start - 1 : len(sequence) - 1].float(), torch.tensor(sequence[start:], device=logits.device))
            for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True))
        ]


Model = CheckpointModel | FolderModel


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Model]:
    """Load the model at `path`, with process groups if it needs them, for the block.

    Raises:
        ValueError: if the path is neither a checkpoint nor a Hugging Face folder, it is damaged, or transformers is missing.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a checkpoint folder of the trainer, or a Hugging Face folder")
    if (path / "config.json").is_file():  # a Hugging Face folder
        yield FolderModel(path)
        return
    from megatron.lm.processes.cpu_home import cpu_home
    from megatron.lm.processes.process_groups import shutdown

    with cpu_home():  # only for the block: the next model may be from another library
        try:
            yield CheckpointModel(path)
        finally:
            shutdown()


def _check(sequences: Sequence[Sequence[int]], starts: Sequence[int], seq_length: int) -> None:
    for sequence, start in zip(sequences, starts, strict=True):
        if not 1 <= start < len(sequence) or len(sequence) > seq_length + 1:
            raise ValueError(
                f"cannot score a sequence of {len(sequence)} tokens from position {start}: at most {seq_length + 1} tokens, from 1 on"
            )


def _score(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities FP32 [n] of targets int64 [n] under logits FP32 [n, vocabulary], on the CPU."""
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's logits are NaN or infinite: it has diverged, load an older checkpoint")
    return (logits.gather(-1, targets.unsqueeze(-1))[:, 0] - logits.logsumexp(-1)).cpu()

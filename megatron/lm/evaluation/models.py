"""What is evaluated, behind one interface: a checkpoint of the trainer, or a folder of Hugging Face."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.lm.evaluation.generation import Generated, Sampling, generate

_ROWS = 1024  # positions of which log-probabilities are held at once: 0.2 GB with a vocabulary of 50,000


class Score(NamedTuple):
    """Of a sequence's tokens from some position on.

    Attributes:
        logprobs: FP32, of each token given all those before it, in nats.
        greedy: whether each of them was the likeliest.
    """

    logprobs: Tensor
    greedy: bool


class Model(Protocol):
    """A causal language model with its tokenizer.

    Attributes:
        name: as it was given.
        seq_length: tokens that it sees at once.
        eod: id that stands before a document, and after it.
        about: of the results' file.
    """

    name: str
    seq_length: int
    eod: int
    about: dict[str, Any]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Score]:
        """Of each sequence (at most `seq_length` + 1 tokens, the last of which is only told apart), its tokens from its start (>= 1) on."""


class CheckpointModel:
    """A checkpoint of the trainer, its FP8 weights as they are; needs process groups (`opened` makes them).

    The softmax is over the tokenizer's vocabulary, without the rows that pad it.
    """

    def __init__(self, path: Path) -> None:
        from megatron.lm.checkpoint import CheckpointReader, load_for_inference
        from megatron.lm.config.precision import build_recipe
        from megatron.lm.evaluation.decoding import Decoder

        info = CheckpointReader(path).info
        model, config, self._tokenizer = load_for_inference(path)
        self.name, self.seq_length, self.eod = str(path), config.model.seq_length, self._tokenizer.eod
        self._decoder = Decoder(model, self.seq_length)  # type: ignore[arg-type]
        self.about = {"kind": "checkpoint", "precision": build_recipe(config.precision).name, "iteration": info["iteration"]}

    def encode(self, text: str) -> list[int]:
        """As `Model`."""
        return self._tokenizer.tokenize(text)

    def decode(self, ids: Sequence[int]) -> str:
        """As `Model`."""
        return self._tokenizer.detokenize(list(ids))

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Score]:
        """As `Model`."""
        _check(sequences, starts, self.seq_length)
        hidden = self._decoder.hidden([sequence[:-1] for sequence in sequences])
        scores = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            places = hidden[row, start - 1 : len(sequence) - 1].split(_ROWS)
            targets = torch.tensor(sequence[start:], device=hidden.device).split(_ROWS)
            parts = [_told(self._decoder.head(x)[:, : self._tokenizer.vocab_size], y) for x, y in zip(places, targets, strict=True)]
            scores.append(Score(torch.cat([part.logprobs for part in parts]), all(part.greedy for part in parts)))
        return scores

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, stopped: Any = None) -> Generated:
        """Up to `n` tokens after each prompt (`megatron.lm.evaluation.generation.generate`)."""
        return generate(
            self._decoder,
            prompts,
            n,
            sampling,
            seq_length=self.seq_length,
            vocab_size=self._tokenizer.vocab_size,
            eod=self.eod,
            stopped=stopped,
        )


class FolderModel:
    """A folder of Hugging Face, read by transformers; FP8 weights of compressed-tensors too.

    Attributes:
        network, tokenizer: transformers' own, which lm-eval's adapter takes.
    """

    def __init__(self, path: Path) -> None:
        transformers = needed("transformers", f"to read the Hugging Face folder {path}")
        with _refused(path):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True)
        self.network = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        eod = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        length = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
        if eod is None or not length:
            raise ValueError(f"{path} names no token that begins a document, or no length of a sequence: add them to its config.json")
        self.name, self.seq_length, self.eod = str(path), int(length), int(eod)
        quantized = getattr(model.config, "quantization_config", None)
        self.about = {"kind": model.config.model_type, "precision": "fp8 export" if quantized else str(model.dtype).removeprefix("torch.")}

    def encode(self, text: str) -> list[int]:
        """As `Model`."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """As `Model`."""
        return self.tokenizer.decode(list(ids))

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Score]:
        """As `Model`; filled up behind, where a causal mask hides it."""
        _check(sequences, starts, self.seq_length)
        longest = max(map(len, sequences)) - 1
        tokens = torch.tensor([[*sequence[:-1], *[0] * (longest + 1 - len(sequence))] for sequence in sequences])
        logits = self.network(tokens.to(self.network.device)).logits
        return [
            _told(logits[row, start - 1 : len(sequence) - 1].float(), torch.tensor(sequence[start:], device=logits.device))
            for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True))
        ]


def is_folder_of_hugging_face(path: Path) -> bool:
    """Whether a path is read by transformers: it holds a `config.json`, which a checkpoint of the trainer does not."""
    return (path / "config.json").is_file()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[CheckpointModel | FolderModel]:
    """The model at `path`, and what it needs of this process, within the block.

    Raises:
        ValueError: neither a checkpoint nor a folder of Hugging Face is there, or it is damaged; transformers is missing.
    """
    if not path.exists():
        raise ValueError(f"--load {path} does not exist: give a folder of the trainer's checkpoints, or one of Hugging Face")
    if is_folder_of_hugging_face(path):
        yield FolderModel(path)
        return
    from megatron.lm.processes.cpu_home import cpu_home
    from megatron.lm.processes.process_groups import shutdown

    with cpu_home():  # left again: the next model may be another library's
        try:
            yield CheckpointModel(path)
        finally:
            shutdown()


def needed(name: str, what: str) -> Any:
    """The module of an extra; ValueError with how to install it where it is missing. `what` says what it is for."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is missing {what} ({error}): pip install -e '.[eval]'") from None


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, KeyError) as error:
        raise ValueError(f"{path} cannot be read by transformers ({str(error).strip().partition(chr(10))[0]})") from None


def _check(sequences: Sequence[Sequence[int]], starts: Sequence[int], seq_length: int) -> None:
    for sequence, start in zip(sequences, starts, strict=True):
        if not 1 <= start < len(sequence) or len(sequence) > seq_length + 1:
            raise ValueError(f"a sequence of {len(sequence)} tokens scored from {start} on: at most {seq_length + 1}, from 1 on")


def _told(logits: Tensor, targets: Tensor) -> Score:
    """logits FP32 [n, vocabulary], targets int64 [n]."""
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's logits are NaN or infinite: it has diverged, load an older checkpoint")
    logprobs = logits.gather(-1, targets.unsqueeze(-1))[:, 0] - logits.logsumexp(-1)
    return Score(logprobs.cpu(), bool((logits.argmax(-1) == targets).all()))

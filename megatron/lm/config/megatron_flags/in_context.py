"""Flags whose meaning depends on other flags of the command line, as in Megatron-LM's own checks of its arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.lm.config.blend_file import number_of
from megatron.lm.config.megatron_flags.topics.row import ACCEPTED, DROPPED, REFUSED, TRANSLATED, Verdict, setting_of

Values = tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """A command line by flag.

    Attributes:
        flags: flag with hyphens -> its values, from its last occurrence.
        preset: defaults of absent flags, by field name.
    """

    flags: Mapping[str, Values]
    preset: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, flag: str) -> bool:
        return flag in self.flags or bool(self.preset.get(setting_of(flag)))

    def value(self, flag: str) -> str | None:
        """Return the first value of a flag, or the preset's; None if both are absent."""
        if flag in self.flags:
            return self.flags[flag][0] if self.flags[flag] else None
        value = self.preset.get(setting_of(flag))
        return None if value is None else str(value)

    def count(self, flag: str) -> int | None:
        """Return the value as a whole number; None if it is absent or not a whole number."""
        value = self.value(flag)
        return int(value) if value is not None and value.isdecimal() else None


def _sequence_parallel(given: Given, values: Values) -> Verdict | None:
    if given.count("--tensor-model-parallel-size") in (None, 1) and "--model-parallel-size" not in given:
        return Verdict(DROPPED, "it splits sequences between tensor-parallel processes, and there is only one")
    return None


def _num_query_groups(given: Given, values: Values) -> Verdict | None:
    if "--group-query-attention" not in given:
        return Verdict(DROPPED, "without --group-query-attention each query head has its own keys and values")
    return None


def _no_position_embedding(given: Given, values: Values) -> Verdict | None:
    learned = given.value("--position-embedding-type") == "learned_absolute"
    return Verdict(REFUSED, "it contradicts --position-embedding-type learned_absolute: drop one") if learned else None


def _add_qkv_bias(given: Given, values: Values) -> Verdict | None:
    return None if "--disable-bias-linear" in given else Verdict(DROPPED, "without --disable-bias-linear every linear layer has a bias")


def _vocab_size(given: Given, values: Values) -> Verdict | None:
    kind = given.value("--tokenizer-type")
    if kind in (None, "NullTokenizer", "TikTokenizer"):
        return None
    return Verdict(DROPPED, f"the vocabulary comes from --tokenizer-type {kind}")


def _tiktoken(given: Given, values: Values) -> Verdict | None:
    chosen = given.value("--tokenizer-type") == "TikTokenizer"
    return None if chosen else Verdict(DROPPED, "it applies only to TikTokenizer, which is not selected")


def _legacy_tokenizer(given: Given, values: Values) -> Verdict | None:
    kind = given.value("--tokenizer-type")
    if kind in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        return None
    return Verdict(DROPPED, f"it does not change the vocabulary or the end of document of --tokenizer-type {kind}")


def _data_cache_path(given: Given, values: Values) -> Verdict | None:
    return Verdict(DROPPED, "mock documents have no index caches") if "--mock-data" in given else None


def _split(given: Given, values: Values) -> Verdict | None:
    """Strip the quotes that a script leaves around the value when it expands an array unquoted; Megatron-LM reads only the numbers."""
    if "--mock-data" in given:
        return Verdict(DROPPED, "mock documents are split into three equal parts for training, validation and test, as in Megatron-LM")
    bare = tuple(value.strip("'\"") for value in values)
    return Verdict(ACCEPTED, becomes=("--split", *bare)) if bare != values else None


def _calculate_per_token_loss(given: Given, values: Values) -> Verdict | None:
    uneven = next((flag for flag in ("--eod-mask-loss", "--objective") if flag in given), None)
    if uneven is None:
        return None
    return Verdict(
        REFUSED, f"with {uneven}, micro-batches have unequal numbers of tokens, and the trainer averages their gradients: drop one"
    )


def _weight_decay_end(given: Given, values: Values) -> Verdict | None:
    ends = {given.value(flag) for flag in ("--weight-decay", "--start-weight-decay", "--end-weight-decay")}
    if len({number_of(end) for end in ends if end is not None} - {None}) > 1:
        return Verdict(REFUSED, "weight decay is constant here: give --weight-decay alone")
    return None


def _virtual_stages(given: Given, values: Values) -> Verdict | None:
    layers, stages, virtual = given.count("--num-layers"), given.count("--pipeline-model-parallel-size") or 1, values[0]
    if not virtual.isdecimal() or not int(virtual):
        return Verdict(REFUSED, "give a whole number above 0")
    if int(virtual) == 1 or stages == 1:
        return Verdict(
            DROPPED, "one virtual stage per pipeline stage interleaves nothing" if int(virtual) == 1 else "there is only one pipeline stage"
        )
    parts = stages * int(virtual)
    if layers is None or layers % parts:
        return Verdict(
            REFUSED, f"--num-layers {layers} is not divisible by {stages} pipeline stages x {virtual}: choose a multiple of {parts}"
        )
    return Verdict(TRANSLATED, "", ("--num-layers-per-virtual-pipeline-stage", str(layers // parts)))


def _decoder_seq_length(given: Given, values: Values) -> Verdict | None:
    same = values[0] == given.value("--seq-length")
    return Verdict(DROPPED, "GPT has a single sequence length, --seq-length") if same else None


def _of_a_profile(given: Given, values: Values) -> Verdict | None:
    return None if "--profile" in given else Verdict(DROPPED, "without --profile nothing is profiled")


def _memory_snapshot_path(given: Given, values: Values) -> Verdict | None:
    return None if "--record-memory-history" in given else Verdict(DROPPED, "without --record-memory-history there is no snapshot")


JUDGES: Mapping[str, Callable[[Given, Values], Verdict | None]] = MappingProxyType(
    {
        "--sequence-parallel": _sequence_parallel,
        "--num-query-groups": _num_query_groups,
        "--no-position-embedding": _no_position_embedding,
        "--add-qkv-bias": _add_qkv_bias,
        "--vocab-size": _vocab_size,
        "--tiktoken-pattern": _tiktoken,
        "--tiktoken-num-special-tokens": _tiktoken,
        "--tiktoken-special-tokens": _tiktoken,
        "--legacy-tokenizer": _legacy_tokenizer,
        "--data-cache-path": _data_cache_path,
        "--split": _split,
        "--calculate-per-token-loss": _calculate_per_token_loss,
        "--start-weight-decay": _weight_decay_end,
        "--end-weight-decay": _weight_decay_end,
        "--num-virtual-stages-per-pipeline-rank": _virtual_stages,
        "--decoder-seq-length": _decoder_seq_length,
        "--profile-step-start": _of_a_profile,
        "--profile-step-end": _of_a_profile,
        "--profile-ranks": _of_a_profile,
        "--use-pytorch-profiler": _of_a_profile,
        "--memory-snapshot-path": _memory_snapshot_path,
    }
)

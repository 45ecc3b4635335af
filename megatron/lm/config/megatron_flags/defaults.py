"""Defaults that differ from Megatron-LM's: a line at the start lists them, and `--megatron-defaults` uses Megatron-LM's.

A default is listed if it changes the training or its speed, and if the run uses it and the command line does not set it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.lm.config.megatron_flags.fp8 import FP8_FLAGS, asks_for_fp8
from megatron.lm.config.megatron_flags.in_context import Given
from megatron.lm.config.megatron_flags.topics.row import setting_of
from megatron.lm.config.sections.precision import OPT_LEVELS
from megatron.lm.config.sections.schema import LARGEST_COUNT

PRECISIONS = ("--precision", "--opt-level", "--bf16", "--fp16", *FP8_FLAGS)


@dataclass(frozen=True)
class Default:
    """A default that differs.

    Attributes:
        what: the flag, or a description.
        megatron: Megatron-LM's default.
        ours: the trainer's.
        settings: the defaults of `--megatron-defaults`, by field name.
        unless: flags that set it explicitly.
        where: whether it applies with the flags on the command line.
    """

    what: str
    megatron: str
    ours: str
    settings: Mapping[str, Any]
    unless: tuple[str, ...]
    where: Callable[[Given], bool] = field(default=lambda given: True)

    def differs(self, given: Given) -> bool:
        """Return whether a run with these flags has the trainer's default."""
        return self.where(given) and not any(flag in given.flags or setting_of(flag) in given.preset for flag in self.unless)


def _dynamic_loss_scale(given: Given) -> bool:
    return "--fp16" in given and "--loss-scale" not in given


def _delayed(given: Given) -> bool:
    return _fp8(given) and given.value("--fp8-recipe") in (None, "delayed")


def _fp8(given: Given) -> bool:
    return asks_for_fp8(given) or given.value("--opt-level") in OPT_LEVELS[1:]


def _null_tokenizer(given: Given) -> bool:
    return given.value("--tokenizer-type") == "NullTokenizer"


DEFAULTS = (
    Default(
        "--position-embedding-type",
        "learned_absolute",
        "rope",
        {"position_embedding_type": "learned_absolute"},
        ("--position-embedding-type", "--use-rotary-position-embeddings"),
    ),
    Default("--hidden-dropout", "0.1", "0", {"hidden_dropout": 0.1}, ("--hidden-dropout",)),
    Default("--attention-dropout", "0.1", "0", {"attention_dropout": 0.1}, ("--attention-dropout",)),
    Default("precision", "FP32", "bf16", {"precision": "fp32"}, PRECISIONS),
    Default("NullTokenizer's end of document", "V", "V - 1", {}, (), _null_tokenizer),
    Default("--eval-interval", "none", "1000", {"eval_interval": LARGEST_COUNT}, ("--eval-interval",)),
    Default("--num-workers", "2", "0", {"num_workers": 2}, ("--num-workers",)),
    Default("--overlap-grad-reduce", "off", "on", {"overlap_grad_reduce": False}, ("--overlap-grad-reduce", "--no-overlap-grad-reduce")),
    Default(
        "--overlap-param-gather", "off", "on", {"overlap_param_gather": False}, ("--overlap-param-gather", "--no-overlap-param-gather")
    ),
    Default("--initial-loss-scale", "2^32", "2^16", {"initial_loss_scale": 2.0**32}, ("--initial-loss-scale",), _dynamic_loss_scale),
    Default("--loss-scale-window", "1000", "2000", {"loss_scale_window": 1000}, ("--loss-scale-window",), _dynamic_loss_scale),
    Default("--fp8-amax-history-len", "1", "16", {"fp8_amax_history_len": 1}, ("--fp8-amax-history-len",), _delayed),
    Default(
        "--fp8-amax-compute-algo",
        "most_recent",
        "max",
        {"fp8_amax_compute_algo": "most_recent"},
        ("--fp8-amax-compute-algo",),
        _delayed,
    ),
    Default("--fp8-min-gain", "0", "1", {"fp8_min_gain": 0.0}, ("--fp8-min-gain", "--bf16-linears"), _fp8),
)


def differing(given: Given) -> tuple[Default, ...]:
    """Return the defaults of a run with these flags that differ from Megatron-LM's."""
    return tuple(default for default in DEFAULTS if default.differs(given))


def described(defaults: tuple[Default, ...]) -> str:
    """Return a log line with each default, Megatron-LM's and the trainer's."""
    listed = ", ".join(f"{default.what} {default.megatron} -> {default.ours}" for default in defaults)
    return f"defaults that differ, Megatron-LM -> here (--megatron-defaults uses Megatron-LM's): {listed}"


def megatron_settings(defaults: tuple[Default, ...]) -> dict[str, Any]:
    """Return Megatron-LM's defaults, by field name."""
    return {name: value for default in defaults for name, value in default.settings.items()}


def null_vocabulary(values: dict[str, Any]) -> None:
    """Give NullTokenizer Megatron-LM's end of document: `--vocab-size V` counts the tokens before it, and its id is V."""
    if values["tokenizer_type"] == "NullTokenizer" and values["vocab_size"] is not None:
        values["vocab_size"] += 1

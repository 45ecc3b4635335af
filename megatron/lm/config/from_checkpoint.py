"""Take flags of the model from a checkpoint (`--use-checkpoint-args`), and override the command line with some of them.

Megatron-LM overrides most model flags with the checkpoint's, but not the model's size; a wrong size is refused when the checkpoint
is read. The attention backend and the standard deviation of initial weights do not describe a checkpoint and are not taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.sections.outputs import CheckpointConfig
from megatron.lm.config.sections.parallel import AXES, ParallelConfig
from megatron.lm.config.sections.schema import flag

Saved = Mapping[str, Mapping[str, Any]]  # section -> setting -> value, as in `checkpoint.json`

# Flags that the command line may set differently, as in Megatron-LM.
_GIVEN_FIRST = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "kv_channels", "max_position_embeddings"),
    *("make_vocab_size_divisible_by", "vocab_size", "num_layers_per_virtual_pipeline_stage"),
}
_LEFT_OUT = {"attention_backend", "init_method_std"}
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_GRID = (*AXES.values(), "num_layers_per_virtual_pipeline_stage")


@dataclass(frozen=True)
class TakenFlags:
    """Settings of a checkpoint.

    Attributes:
        settings: by field name, used as defaults.
        line: for the log.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    line: str | None = None

    def override(self, values: dict[str, Any], given: frozenset[str]) -> str | None:
        """Write the settings that Megatron-LM always takes into the parsed `values`; return a log line about flags in `given` they
        override."""
        ahead = {name: value for name, value in self.settings.items() if name not in _GIVEN_FIRST}
        lost = [f"{flag(name)} {values[name]} -> {value}" for name, value in ahead.items() if flag(name) in given and values[name] != value]
        values.update(ahead)
        return f"--use-checkpoint-args overrides the command line: {', '.join(lost)}" if lost else None


def taken(checkpoint: CheckpointConfig, saved: Saved | None) -> TakenFlags:
    """Return what `--use-checkpoint-args` takes from the `saved` settings; `saved` is None if there is no checkpoint yet."""
    if saved is None:
        return TakenFlags(
            line=f"--use-checkpoint-args: --load {checkpoint.load} contains no checkpoint, so the flags on the command line apply"
        )
    left_out = _LEFT_OUT | ({"vocab_size"} if checkpoint.no_use_tokenizer_model_from_checkpoint_args else set())
    wanted = {"model": [f.name for f in fields(ModelConfig) if f.name not in left_out]}
    if not checkpoint.no_use_tokenizer_model_from_checkpoint_args:
        wanted["data"] = list(_TOKENIZER)
    if checkpoint.use_mp_args_from_checkpoint_args:
        wanted["parallel"] = [f.name for f in fields(ParallelConfig) if f.name in _GRID]
    settings = {
        name: saved[section][name] for section, names in wanted.items() if section in saved for name in names if name in saved[section]
    }
    listed = ", ".join(f"{flag(name)} {value}" for name, value in settings.items() if value not in (None, False))
    return TakenFlags(settings, f"from the checkpoint in --load {checkpoint.load}: {listed}")

"""Settings that a run takes from its checkpoint: flags of the model (`--use-checkpoint-args`), scaling and rounding of a resume.

Megatron-LM overrides most model flags with the checkpoint's, but not the model's size; a wrong size is refused when the checkpoint
is read. The attention backend and the standard deviation of initial weights do not describe a checkpoint and are not taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.sections.outputs import CheckpointConfig
from megatron.lm.config.sections.parallel import AXES, ParallelConfig
from megatron.lm.config.sections.precision import RULE_SETTINGS, PrecisionConfig, gemm_name, rule_setting
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


def with_saved_scaling(precision: PrecisionConfig, saved: PrecisionConfig | None) -> PrecisionConfig:
    """Return the settings of a resume: scaling settings that are not set are taken from the checkpoint.

    A recipe with other default casts than the saved one, such as coat after O2, keeps its own scaling. A run that drops
    `--as-published` and names another recipe is converted to it; it may not go on in the same one.

    Args:
        precision: of the run that resumes.
        saved: of the run that wrote the checkpoint; None if none is resumed.

    Raises:
        ValueError: with each explicit setting that differs from the checkpoint's, or if the two follow different papers.
    """
    converts = saved is not None and precision.as_published is None and precision.requests and precision.named.name != saved.named.name
    if saved is not None and saved.as_published != precision.as_published and not converts:
        was = f"computed with --as-published {saved.as_published}" if saved.as_published else "did not compute as a paper does"
        fix = f"add --as-published {saved.as_published}" if saved.as_published else "drop the flag"
        convert = "" if precision.as_published else ", name another --precision to convert it"
        raise ValueError(
            f"the run that wrote the checkpoint {was}, and this one has --as-published {precision.as_published or 'not given'}: {fix} to "
            f"resume it{convert}, or add --finetune to start a new run from the weights"
        )
    if saved is None or precision.named.gemm is None or precision.named.gemm != saved.named.gemm:
        return precision
    stored = {"fp8_recipe": gemm_name(saved)} | {name: rule_setting(saved, name) for name in RULE_SETTINGS}
    given = {name: getattr(precision, name) for name in stored if getattr(precision, name) is not None}
    differing = [
        f"{flag(name)} {value} (saved: {'none' if stored[name] is None else stored[name]})"
        for name, value in given.items()
        if value != stored[name]
    ]
    if differing:
        raise ValueError(
            f"the checkpoint scales the operands of its GEMMs differently: {'; '.join(differing)}. Drop the flag to keep the saved "
            "scaling, or add --finetune to start a new run from the weights"
        )
    return replace(precision, **{name: getattr(saved, name) for name in stored if name not in given})


def with_saved_rounding(precision: PrecisionConfig, saved: PrecisionConfig | None) -> PrecisionConfig:
    """Return the settings of a resume: masters and moments are rounded as in the checkpoint, unless flags override this.

    If no optimizer state can be rounded stochastically in the new formats, as after a change of recipe, the recipe's own rounding applies.

    Args:
        precision: of the run that resumes.
        saved: of the run that wrote the checkpoint; None if none is resumed.
    """
    if saved is None:
        return precision
    for name in ("master_rounding", "moment_rounding"):
        before = getattr(saved.recipe.states, name)
        if getattr(precision, name) is None and before != getattr(precision.recipe.states, name):
            taken = replace(precision, **{name: before})
            try:
                _ = taken.recipe
            except ValueError:
                continue
            precision = taken
    return precision

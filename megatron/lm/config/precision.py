"""The recipe by name, and how it may be varied."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.lm.config.schema import COUNT, NON_NEGATIVE, POSITIVE, Interval, setting

if TYPE_CHECKING:
    from msamp.numerics.recipe import Recipe

OPT_LEVELS = ("O0", "O1", "O2", "O3")
STATE_FORMATS = ("fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
FP8_FORMATS = ("fp8-e4m3", "fp8-e5m2")
COAT_FORMATS = ("coat-e4m3", "coat-e5m2")
GRAD_ACCUM_DTYPES = ("fp8", "fp8-sr", "bf16", "fp32")
GRAD_ACCUM_PLACES = ("rank", "owner")
ACTIVATIONS_SAVED = ("compute", "coat")
FAST_ACCUMULATIONS = ("output", "all")
ATTENTION_PRECISIONS = ("bf16", "fp8")
OPTIMIZER_STATES = {"coat": "coat-e4m3"}  # name -> format of both moments
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def recipe_names() -> tuple[str, ...]:
    """What `--precision` takes: the built-in recipes and those registered."""
    from megatron.lm.config import baselines
    from msamp.numerics import recipe

    return (*recipe.names(), *baselines.names())


def gemm_names() -> tuple[str, ...]:
    """What `--fp8-recipe` takes."""
    from msamp.numerics.recipe import GEMMS

    return tuple(GEMMS)


def output_layer_precisions() -> tuple[str, ...]:
    """What `--output-layer-precision` takes."""
    from msamp.nn.vocabulary_loss import PRECISIONS

    return PRECISIONS


def roundings() -> tuple[str, ...]:
    """What `--master-rounding` and `--moment-rounding` take."""
    from msamp.numerics.stochastic_rounding import ROUNDINGS

    return ROUNDINGS


def amax_algorithms() -> tuple[str, ...]:
    """What `--fp8-amax-compute-algo` takes."""
    from msamp.numerics.scaling import ALGORITHMS

    return ALGORITHMS


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The recipe by name, and FP16's loss scale."""

    precision: str | None = setting(
        "recipe: bf16 has FP32 masters, bf16-* and collage-* are Collage's options with BF16 gradients (collage-fp8: pairs of BF16 and "
        "E4M3), coat has FP8 GEMMs, moments and saved activations, O1 to O3 are FP8-LM's levels, te-* are bf16 with Transformer Engine's "
        "layers where it is installed (te-bf16, or FP8 with delayed, current or block scaling), and others may be registered; without it "
        "and without --opt-level: bf16",
        None,
        choices=recipe_names,
    )
    opt_level: str | None = setting("how far FP8 reaches (O0 is bf16)", None, choices=OPT_LEVELS)
    bf16: bool = setting("the same as --precision bf16", False)
    fp16: bool = setting("the same as --precision fp16-amp: FP16 with FP32 masters and a loss scale", False)
    loss_scale: float | None = setting("a constant loss scale for fp16-amp; derived: a dynamic one", None, legal=POSITIVE)
    initial_loss_scale: float = setting(
        "where the dynamic loss scale of fp16-amp starts; Megatron-LM: 2^32",
        2.0**16,
        legal=Interval(0, 2.0**32, low_open=True),
    )
    min_loss_scale: float = setting("least dynamic loss scale; below it the run stops", 1.0, legal=POSITIVE)
    loss_scale_window: int = setting(
        "steps without overflow after which the dynamic loss scale doubles; Megatron-LM: 1000", 2000, legal=COUNT
    )
    hysteresis: int = setting(
        "overflows since the last doubling that halve the dynamic loss scale; earlier ones only skip their step",
        2,
        legal=COUNT,
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(RecipeConfig):
    """The recipe, and how its casts and formats may be varied (FP8-LM, table 6)."""

    fp8_recipe: str | None = setting(
        "how the operands of FP8 GEMMs are scaled: tensors by the amaxes of past steps (delayed) or by their own (tensorwise), blocks of "
        "128 by FP32 scales as in DeepSeek-V3 or by powers of two, or of 32 by shared exponents (mxfp8); derived: as in the checkpoint "
        "that is resumed, else the recipe's own, delayed at O1 to O3 and tensorwise with coat",
        None,
        choices=gemm_names,
    )
    fp8_amax_history_len: int | None = setting(
        "past steps of which delayed scaling takes amaxes; derived: the checkpoint's, else 16; Megatron-LM: 1",
        None,
        legal=Interval(1, 2**16),
    )
    fp8_amax_compute_algo: str | None = setting(
        "amax of the history that delayed scaling takes: largest or last; derived: the checkpoint's, else max; Megatron-LM: most_recent",
        None,
        choices=amax_algorithms,
    )
    fp8_margin: int | None = setting(
        "headroom that delayed scaling leaves for amaxes that grow: its scales are divided by 2^margin; derived: the checkpoint's, else 0",
        None,
        legal=Interval(0, 16),
    )
    fp8_fast_accumulation: str = setting(
        "which FP8 products of linear layers with one scale a tensor may add up in the tensor cores alone, at some 14 bits: the output, or "
        "all, the gradients too; the emulation on a CPU adds up in full either way",
        "output",
        choices=FAST_ACCUMULATIONS,
    )
    fp8_min_gain: float = setting(
        "least measured gain of a linear layer, time in BF16 over time in FP8 on this GPU; a layer below it stays BF16 at O1 to "
        "O3 and with coat; 0: all are FP8, nothing is measured. No effect at other precisions, so that one line of flags serves all",
        1.0,
        legal=NON_NEGATIVE,
    )
    fp8_gain_cache: str | None = setting("JSON file of the gains measured so far; derived: in the user's cache folder", None)
    bf16_linears: tuple[str, ...] | None = setting(
        "which linear layers of a transformer layer stay BF16 at O1 to O3 and with coat; derived: the choice of the checkpoint that is "
        "resumed, else by --fp8-min-gain",
        None,
        choices=LINEARS,
    )
    output_layer_precision: str = setting(
        "the LM head's products for the training loss: in the compute dtype, or at O1 to O3 and with coat in FP8 with scales just in time, "
        "with fp8 the one that makes the logits, with fp8-all its two gradients too; logits that are handed out stay in the compute dtype",
        "bf16",
        choices=output_layer_precisions,
    )
    attention_precision: str = setting(
        "the core of the attention: in the compute dtype, or at O1 to O3 and with coat in FP8 with delayed scales, by cuDNN's kernels on "
        "Hopper (heads of 128 channels) and later (extra `cudnn`), by their definition in plain torch on a CPU; generation keeps the "
        "compute dtype",
        "bf16",
        choices=ATTENTION_PRECISIONS,
    )
    master_format: str | None = setting("master weight where linear layers are FP8; derived: the recipe's own", None, choices=STATE_FORMATS)
    grad_format: str | None = setting("weight gradient where linear layers are FP8; derived: the recipe's own", None, choices=STATE_FORMATS)
    optimizer_state: str | None = setting(
        "both moments of matrices, wherever the update is FP32 arithmetic; coat is coat-e4m3: COAT's FP8 with a maximum and an "
        "exponent for each 128 of a row; derived: the level's own",
        None,
        choices=tuple(OPTIMIZER_STATES),
    )
    exp_avg_format: str | None = setting(
        "first moment where linear layers are FP8, COAT's wherever the update is FP32 arithmetic; derived: by --optimizer-state, else the "
        "level's own",
        None,
        choices=(*STATE_FORMATS, *COAT_FORMATS),
    )
    exp_avg_sq_format: str | None = setting(
        "second moment where linear layers are FP8, COAT's wherever the update is FP32 arithmetic; derived: by --optimizer-state, else the "
        "level's own",
        None,
        choices=(*STATE_FORMATS, *COAT_FORMATS),
    )
    master_rounding: str | None = setting(
        "how masters narrower than FP32 are stored: to nearest, which loses updates below half a code for good, or stochastically, by "
        "seeded thresholds, so that they arrive in the mean; derived: as in the checkpoint that is resumed, else the recipe's own",
        None,
        choices=roundings,
    )
    moment_rounding: str | None = setting(
        "how moments narrower than FP32 are stored, but for COAT's; derived: as in the checkpoint that is resumed, else the recipe's own",
        None,
        choices=roundings,
    )
    save_activations: str | None = setting(
        "how the inputs of norms, GELU and SwiGLU are kept for backward: in the compute dtype, or in E4M3 with a scale for every 16 "
        "channels (COAT); derived: compute, with --precision coat coat",
        None,
        choices=ACTIVATIONS_SAVED,
    )
    grad_accum_dtype: str | None = setting(
        "format of the sum over the micro-batches of a step; fp8-sr rounds stochastically; derived: bf16 where the weight gradients "
        "are FP8, with Collage's options and with coat's own gradients, else fp32",
        None,
        choices=GRAD_ACCUM_DTYPES,
    )
    grad_accum_on: str = setting(
        "where the micro-batches of a step add up: on each rank, for the whole model; or each leaves at once, and the owner of a row adds "
        "up in FP32: 4 bytes a parameter over all ranks together, and as many times the bytes on the wire as there are micro-batches",
        "rank",
        choices=GRAD_ACCUM_PLACES,
    )

    @property
    def requests(self) -> dict[str, str]:
        """The flags that ask for a recipe, as written -> the name that each one gives."""
        asked = {}
        if self.precision is not None:
            asked[f"--precision {self.precision}"] = self.precision
        if self.opt_level is not None:
            asked[f"--opt-level {self.opt_level}"] = self.opt_level
        if self.bf16:
            asked["--bf16"] = "bf16"
        if self.fp16:
            asked["--fp16"] = "fp16-amp"
        return asked

    @property
    def contradiction(self) -> str | None:
        """The error where two flags ask for different recipes."""
        if len({recipe_by_name(name).name for name in self.requests.values()}) > 1:
            return f"{' and '.join(self.requests)} contradict each other: keep one of them"
        return None

    @property
    def named(self) -> "Recipe":
        """The recipe that the flags name, without variations; bf16 without such a flag.

        Raises:
            ValueError: an unknown name, or two flags that ask for different ones.
        """
        if self.contradiction is not None:
            raise ValueError(self.contradiction)
        return recipe_by_name(next(iter(self.requests.values()), "bf16"))

    @functools.cached_property
    def recipe(self) -> "Recipe":
        """`named` with the scaling and the formats that the flags ask for. ValueError as for `named`, and for formats that it does not
        take."""
        from megatron.lm.config.recipe import build_recipe

        return build_recipe(self)

    def __getstate__(self) -> dict[str, object]:
        """Pickles the settings; another process looks the recipe up by its name."""
        return {key: value for key, value in self.__dict__.items() if key != "recipe"}

    @property
    def name(self) -> str:
        """A value of the recipe. ValueError as `named`."""
        return self.named.name

    @property
    def kept_activations(self) -> str:
        """How the inputs of norms and activations are kept for backward: one of `ACTIVATIONS_SAVED`."""
        return self.save_activations or self.named.activations

    @property
    def grad_accum(self) -> str:
        """The format in which the weight gradients of several micro-batches add up: one of `GRAD_ACCUM_DTYPES`, or "owner"."""
        return self.grad_accum_on if self.grad_accum_on == "owner" else self.grad_accum_dtype or self.recipe.accumulator


def recipe_by_name(name: str) -> "Recipe":
    """The recipe of `--precision`.

    Raises:
        ValueError: an unknown name.
    """
    from megatron.lm.config import baselines
    from msamp.numerics import recipe

    return baselines.find(name) or recipe.by_name(name)

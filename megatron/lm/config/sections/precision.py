"""Settings of the recipe and its variations, and the recipe built from the precision flags. Independent of shapes and devices.

msamp is imported where it is used, so that flags are parsed and refused without importing torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING

from megatron.lm.config.sections.schema import COUNT, COUNT_OR_ZERO, DECIBEL, NON_NEGATIVE, POSITIVE, SHARE, Range, names_in, setting

if TYPE_CHECKING:
    from megatron.lm.config.sections.model import ModelConfig
    from msamp.nn.saved_activations import Saved
    from msamp.numerics.recipe import Cast, Gemms, Recipe
    from msamp.numerics.scaling import Scaling

OPT_LEVELS = ("O0", "O1", "O2", "O3")
STATE_FORMATS = ("fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
FP8_FORMATS = ("fp8-e4m3", "fp8-e5m2")
COAT_FORMATS = ("coat-e4m3", "coat-e5m2")
GRAD_ACCUM_DTYPES = ("fp8", "fp8-sr", "bf16", "fp32")
ACTIVATIONS_SAVED = ("compute", "coat", "coat-exact")
MEASURED = "auto"  # a precision of attention that the start of a run decides
UPDATES = {"adam": "fp32", "sgd": "sgd-momentum", "muon": "muon"}  # --optimizer -> the update of msamp.optim
OPTIMIZER_STATES = {"coat": "coat-e4m3"}  # name -> format of both moments
RULE_SETTINGS = {"fp8_amax_history_len": "window", "fp8_amax_compute_algo": "algorithm", "fp8_margin": "margin"}  # flag -> the rule's
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def recipe_names() -> tuple[str, ...]:
    """Return the values of `--precision`: built-in and registered recipes."""
    from megatron.lm.config.sections.baselines import BASELINES
    from msamp.numerics import recipe

    return (*recipe.names(), *BASELINES)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Name of the recipe, and the loss scale of FP16."""

    precision: str | None = setting(
        "recipe: bf16 has FP32 masters; bf16-* and collage-* are Collage's options with BF16 gradients (collage-fp8: pairs of BF16 and "
        "E4M3); coat has FP8 GEMMs, moments and saved activations; O1 to O3 are FP8-LM's levels; te-* are bf16 with Transformer Engine's "
        "layers if it is installed (te-bf16, or FP8 with delayed, current or block scaling); further recipes can be registered; derived: "
        "--opt-level, else bf16",
        None,
        choices=recipe_names,
    )
    opt_level: str | None = setting("FP8-LM's level, which sets how much of the training is in FP8 (O0 is bf16)", None, choices=OPT_LEVELS)
    bf16: bool = setting("the same as --precision bf16", False)
    fp16: bool = setting("the same as --precision fp16-amp: FP16 with FP32 masters and a loss scale", False)
    as_published: str | None = setting(
        "compute as the paper does wherever the default differs: FP8-LM's exchange, mu, FP8 accumulation, nearest rounding and whole "
        "tensors; Collage's eps below the root and Fast2Sum for v; COAT's 16-bit weights and scales amax / 448. Without --precision or "
        "--opt-level: O3, collage-plus or coat; derived: nothing",
        None,
        choices=names_in("msamp.numerics.recipe", "PAPERS"),
    )
    loss_scale: float | None = setting("a constant loss scale for fp16-amp; derived: a dynamic one", None, legal=POSITIVE)
    initial_loss_scale: float = setting(
        "initial dynamic loss scale of fp16-amp; Megatron-LM: 2^32",
        2.0**16,
        legal=Range(0, 2.0**32, low_open=True),
    )
    min_loss_scale: float = setting("smallest dynamic loss scale; the run stops below it", 1.0, legal=POSITIVE)
    loss_scale_window: int = setting(
        "steps without overflow after which the dynamic loss scale doubles; Megatron-LM: 1000", 2000, legal=COUNT
    )
    hysteresis: int = setting(
        "overflows since the last doubling after which the dynamic loss scale is halved; earlier ones only skip their step",
        2,
        legal=COUNT,
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(RecipeConfig):
    """The recipe, and variations of its casts and formats (FP8-LM, table 6)."""

    fp8_recipe: str | None = setting(
        "scaling of the operands of FP8 GEMMs: per tensor, by the amaxes of past steps (delayed) or the current one (tensorwise), per "
        "block of 128, with FP32 scales as in DeepSeek-V3 or powers of two, or per block of 32 by OCP's rule (mxfp8) or Transformer "
        "Engine's (mxfp8-round-up); derived: the resumed checkpoint's, else the recipe's own: delayed at O1 to O3 and tensorwise with coat",
        None,
        choices=names_in("msamp.numerics.recipe", "GEMMS"),
    )
    fp8_amax_history_len: int | None = setting(
        "length of delayed scaling's amax history in steps; derived: the checkpoint's, else 16; Megatron-LM: 1",
        None,
        legal=Range(1, 2**16),
    )
    fp8_amax_compute_algo: str | None = setting(
        "which amax of the history delayed scaling uses, the largest or the last; derived: the checkpoint's, else max; Megatron-LM: "
        "most_recent",
        None,
        choices=names_in("msamp.numerics.scaling", "ALGORITHMS"),
    )
    fp8_margin: int | None = setting(
        "headroom of delayed scaling for growing amaxes: its scales are divided by 2^margin; derived: the checkpoint's, else 0",
        None,
        legal=Range(0, 16),
    )
    fp8_fast_accumulation: str | None = setting(
        "which FP8 GEMMs of linear layers with per-tensor scales may accumulate entirely in the tensor cores, with about 14 bits: none, "
        "the output, or all, including the gradients; default: the recipe's, the output in all built-in ones; the FP8 output layer always "
        "accumulates in full, as does the emulation on a CPU",
        None,
        choices=("none", "output", "all"),
    )
    fp8_min_gain: float = setting(
        "smallest measured gain of a linear layer, BF16 time / FP8 time on this GPU, and of attention with --attention-precision auto; "
        "what is below it stays in BF16 at O1 to O3 and with coat; 0: all is FP8 and nothing is measured; no effect at other precisions, "
        "so that the same flags work for all",
        1.0,
        legal=NON_NEGATIVE,
    )
    fp8_gain_cache: str | None = setting("JSON file with the gains measured so far; derived: in the user's cache folder", None)
    bf16_linears: tuple[str, ...] | None = setting(
        "linear layers of a transformer layer that stay in BF16 at O1 to O3 and with coat; derived: the resumed checkpoint's choice, else "
        "by --fp8-min-gain",
        None,
        choices=LINEARS,
    )
    first_last_layers_bf16: bool = setting(
        "keep the linear layers and the attention of the first and the last transformer layers in BF16 at O1 to O3 and with coat", False
    )
    num_layers_at_start_in_bf16: int = setting("first layers that --first-last-layers-bf16 keeps in BF16", 1, legal=COUNT_OR_ZERO)
    num_layers_at_end_in_bf16: int = setting("last layers that --first-last-layers-bf16 keeps in BF16", 1, legal=COUNT_OR_ZERO)
    smooth_swiglu: bool = setting(
        "Smooth-SwiGLU: give each channel of SwiGLU's output a power-of-two scale of its own in the cast to FP8, from the amaxes of past "
        "steps, and divide the next weight's columns by it; requires --swiglu and delayed scaling",
        False,
    )
    fp8_guard: bool = setting(
        "measure the casts of the FP8 linear layers every few steps, and compute a layer in BF16 while they lose too much; not for experts",
        False,
    )
    fp8_guard_interval: int = setting("steps from one check of --fp8-guard to the next", 50, legal=COUNT)
    fp8_guard_saturation: float = setting(
        "largest share of a cast's elements at the format's largest value that --fp8-guard accepts", 1e-3, legal=SHARE
    )
    fp8_guard_underflow: float = setting(
        "largest share of a cast's non-zero elements that become zero that --fp8-guard accepts", 0.5, legal=SHARE
    )
    fp8_guard_sqnr: float = setting(
        "smallest SQNR of a cast in dB that --fp8-guard accepts; rounding to E4M3 costs 31 dB and to E5M2 25 dB", 15.0, legal=DECIBEL
    )
    fp8_guard_shrinkage: float = setting(
        "largest share by which sums of FP8 products may be too small for --fp8-guard (--fp8-fast-accumulation none)", 0.02, legal=SHARE
    )
    fp8_guard_raise_after: int = setting("bad checks in a row after which --fp8-guard raises a layer to BF16", 2, legal=COUNT)
    fp8_guard_return_after: int = setting("good checks in a row after which --fp8-guard returns a layer to FP8", 4, legal=COUNT)
    output_layer_precision: str = setting(
        "precision of the LM head's GEMMs for the training loss: the compute dtype, or at O1 to O3 and with coat FP8 with just-in-time "
        "scales, fp8 for the logits, fp8-all for their two gradients too; returned logits stay in the compute dtype",
        "bf16",
        choices=names_in("msamp.nn.vocabulary_loss", "PRECISIONS"),
    )
    attention_precision: str = setting(
        "precision of the attention core: the compute dtype, or at O1 to O3 and with coat FP8 with delayed scales, with cuDNN's kernels on "
        "Hopper (heads of 128 channels) and later (extra `cudnn`), or their definition in plain torch on a CPU; auto: FP8 where the start "
        "measures a gain of at least --fp8-min-gain at the run's shape; generation uses the compute dtype",
        "bf16",
        choices=("bf16", "fp8", MEASURED),
    )
    optimizer: str = setting(
        "update of the weights: adam (AdamW), sgd (with momentum), or muon for the weights of FP8 linear layers and AdamW for the others",
        "adam",
        choices=tuple(UPDATES),
    )
    master_format: str | None = setting(
        "format of master weights where linear layers are FP8; derived: the recipe's own", None, choices=STATE_FORMATS
    )
    grad_format: str | None = setting(
        "format of weight gradients where linear layers are FP8; derived: the recipe's own", None, choices=STATE_FORMATS
    )
    optimizer_state: str | None = setting(
        "format of both moments of matrices, wherever the update is FP32 arithmetic; coat is coat-e4m3: COAT's FP8 with a maximum and an "
        "exponent per 128 elements of a row; derived: the level's own",
        None,
        choices=tuple(OPTIMIZER_STATES),
    )
    exp_avg_format: str | None = setting(
        "format of the first moment where linear layers are FP8, or COAT's wherever the update is FP32 arithmetic; derived: by "
        "--optimizer-state, else the level's own",
        None,
        choices=(*STATE_FORMATS, *COAT_FORMATS),
    )
    exp_avg_sq_format: str | None = setting(
        "format of the second moment where linear layers are FP8, or COAT's wherever the update is FP32 arithmetic; derived: by "
        "--optimizer-state, else the level's own",
        None,
        choices=(*STATE_FORMATS, *COAT_FORMATS),
    )
    master_rounding: str | None = setting(
        "rounding of masters narrower than FP32: nearest, which loses updates below half the distance to the next value, or stochastic "
        "with seeded thresholds, which applies them on average; derived: the resumed checkpoint's, else the recipe's own",
        None,
        choices=names_in("msamp.numerics.stochastic_rounding", "ROUNDINGS"),
    )
    moment_rounding: str | None = setting(
        "rounding of moments narrower than FP32, except COAT's; stochastic still rounds the second moment to nearest where that keeps it "
        "within 2 %, as in FP16 at --adam-beta2 0.95; derived: the resumed checkpoint's, else the recipe's own",
        None,
        choices=names_in("msamp.numerics.stochastic_rounding", "ROUNDINGS"),
    )
    save_activations: str | None = setting(
        "format in which the inputs of norms, GELU and SwiGLU are saved for backward: the compute dtype, or E4M3 with a scale per 16 "
        "channels (COAT), a power of two or, with coat-exact, the largest magnitude / 448; derived: compute, or coat with --precision coat",
        None,
        choices=ACTIVATIONS_SAVED,
    )
    grad_accum_dtype: str | None = setting(
        "format in which gradients accumulate over the micro-batches of a step; fp8-sr rounds stochastically; derived: bf16 where the "
        "weight gradients are FP8, with Collage's options and with coat's own gradients, else fp32",
        None,
        choices=GRAD_ACCUM_DTYPES,
    )
    grad_accum_on: str = setting(
        "where gradients accumulate over the micro-batches of a step: on each rank, for the whole model; or on the owner of each row, in "
        "FP32, to which every micro-batch sends its gradients: 4 bytes per parameter over all ranks together, and as many times the "
        "communication as there are micro-batches",
        "rank",
        choices=("rank", "owner"),
    )

    @property
    def requests(self) -> dict[str, str]:
        """Return the flags that select a recipe, as written, with the name of the recipe."""
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
        """Return the error if two flags select different recipes, or one that is not of the paper; otherwise None."""
        from msamp.numerics.recipe import PAPERS

        if len(asked := {recipe_by_name(name).name for name in self.requests.values()}) > 1:
            return f"{' and '.join(self.requests)} contradict each other: keep one of them"
        own = [recipe.name for recipe in PAPERS.get(self.as_published, ())] if self.as_published is not None else sorted(asked)
        if not asked <= set(own):
            return f"--as-published {self.as_published} is not for {' and '.join(self.requests)}: drop one, or choose {' or '.join(own)}"
        return None

    @property
    def named(self) -> Recipe:
        """The recipe that the flags select, without variations; without such a flag the paper's own, or bf16.

        Raises:
            ValueError: an unknown name, two flags that select different recipes, or a recipe that is not of the paper.
        """
        from msamp.numerics.recipe import as_published

        if self.contradiction is not None:
            raise ValueError(self.contradiction)
        asked = next(iter(self.requests.values()), None)
        if self.as_published is not None:
            return as_published(self.as_published, asked)
        return recipe_by_name(asked or "bf16")

    @functools.cached_property
    def recipe(self) -> Recipe:
        """`named` with the scaling and formats of the flags. ValueError as for `named`, and for formats that the recipe does not
        support."""
        return build_recipe(self)

    def __getstate__(self) -> dict[str, object]:
        """Pickle only the settings; another process looks the recipe up by name."""
        return {key: value for key, value in self.__dict__.items() if key != "recipe"}

    def layers_in_bf16(self, num_layers: int) -> frozenset[int]:
        """Return the transformer layers, from 0, that `--first-last-layers-bf16` keeps entirely in BF16."""
        if not self.first_last_layers_bf16:
            return frozenset()
        layers = range(num_layers)
        end = max(0, num_layers - self.num_layers_at_end_in_bf16)
        return frozenset(layers[: self.num_layers_at_start_in_bf16]) | frozenset(layers[end:])

    def fp8_experts(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the indices of the MoE layers that use FP8. Layers kept in BF16 are not included."""
        wide = self.layers_in_bf16(model.num_layers)
        return tuple(n for n in model.moe_layers if n not in wide) if self.named.fp8 else ()

    def fuses(self, model: ModelConfig, recipe: Recipe) -> bool:
        """Return whether the linear layers of a transformer layer, except `layers_in_bf16`, are two fused FP8 blocks in this recipe: all
        four in FP8, with casts that the block kernels support, and norms of queries and keys, if any, of each head."""
        fp8 = recipe.gemm is not None and recipe.gemm.fusible and not self.bf16_linears
        return fp8 and not model.hidden_dropout and model.qk_layernorm_scope == "head"

    @property
    def name(self) -> str:
        """Name of the recipe. ValueError as for `named`."""
        return self.named.name

    @property
    def kept_activations(self) -> str:
        """How inputs of norms and activation functions are saved for backward: one of `ACTIVATIONS_SAVED`."""
        return self.save_activations or self.named.activations

    @property
    def grad_accum(self) -> str:
        """Format in which weight gradients accumulate over micro-batches: one of `GRAD_ACCUM_DTYPES`, or "owner"."""
        return self.grad_accum_on if self.grad_accum_on == "owner" else self.grad_accum_dtype or self.recipe.accumulator


def recipe_by_name(name: str) -> Recipe:
    """Return the recipe with this name, as in `--precision`.

    Raises:
        ValueError: an unknown name.
    """
    from megatron.lm.config.sections.baselines import BASELINES
    from msamp.numerics import recipe

    return BASELINES.get(name) or recipe.by_name(name)


def build_recipe(precision: PrecisionConfig) -> Recipe:
    """Build the recipe that the flags select, with their scaling and state formats (Table 6 of FP8-LM).

    Raises:
        ValueError: flags that select two recipes, or formats that the recipe's update does not support.
    """
    from msamp.numerics import formats
    from msamp.numerics.recipe import KINDS
    from msamp.optim import updates

    recipe, gemm = precision.named, gemm_of(precision)
    moments = OPTIMIZER_STATES[precision.optimizer_state] if precision.optimizer_state else None
    names = {
        "master": precision.master_format,
        "grad": precision.grad_format,
        "m": precision.exp_avg_format or moments,
        "v": precision.exp_avg_sq_format or moments,
    }
    varied = recipe.with_states(**{key: formats.by_name(name) for key, name in names.items() if name is not None})
    varied = varied.with_rounding(master=precision.master_rounding, moments=precision.moment_rounding)
    if precision.optimizer != "adam":
        if varied.states.update != UPDATES["adam"]:
            raise ValueError(f"--optimizer {precision.optimizer} replaces AdamW, but the recipe has the update {varied.states.update!r}")
        update, whole = UPDATES[precision.optimizer], precision.optimizer == "muon"  # which orthogonalizes whole matrices
        old = [varied.formats_of(kind) for kind in KINDS]
        new = [states if whole and number else replace(states, update=update) for number, states in enumerate(old)]
        varied = replace(varied, states=new[0], matrices=new[1], vectors=new[2], whole_tensors=whole or varied.whole_tensors)
    for states in map(varied.formats_of, KINDS):
        updates.by_name(states.update).check_group(updates.format_names(states), decoupled=True)
    return varied if gemm is None or gemm == recipe.gemm else varied.with_gemm(gemm)


def gemm_of(precision: PrecisionConfig) -> Gemms | None:
    """Return the casts of the recipe's FP8 GEMMs, with the scaling rules and accumulation of the flags; None without FP8 GEMMs.

    Raises:
        ValueError: fast accumulation with block-scaled operands.
    """
    from msamp.numerics.recipe import GEMMS

    own = precision.named.gemm
    if own is None:
        return None
    given = {key: getattr(precision, name) for name, key in RULE_SETTINGS.items() if getattr(precision, name) is not None}
    gemm = own if precision.fp8_recipe is None else GEMMS[precision.fp8_recipe]
    gemm = _with_rules(gemm, lambda rule: replace(rule, **{key: given[key] for key in _settings(rule) & given.keys()}))  # type: ignore[type-var]
    return gemm if precision.fp8_fast_accumulation is None else gemm.with_fast(precision.fp8_fast_accumulation)


def _settings(rule: Scaling) -> set[str]:
    """Return the names of a scaling rule's settings."""
    return {field.name for field in fields(rule) if field.init} if is_dataclass(rule) else set()


def _with_rules(gemm: Gemms, change: Callable[[Scaling], Scaling]) -> Gemms:
    """Apply `change` to the scaling rule of every operand of the GEMMs."""
    from msamp.numerics.recipe import Gemms

    def cast(x: Cast) -> Cast:
        return replace(x, scaling=change(x.scaling))

    products = (gemm.output, gemm.grad_input, gemm.grad_weight)
    return Gemms(*(replace(product, left=cast(product.left), right=cast(product.right)) for product in products))


def rule_setting(precision: PrecisionConfig, name: str) -> int | str | None:
    """Return the value of one of `RULE_SETTINGS` in the scaling rules of this recipe; None if no rule has it."""
    gemm, key = gemm_of(precision), RULE_SETTINGS[name]
    rules = [cast.scaling for cast in gemm.casts.values()] if gemm is not None else []
    return next((getattr(rule, key) for rule in rules if key in _settings(rule)), None)


def gemm_name(precision: PrecisionConfig) -> str | None:
    """Return the value of `--fp8-recipe` for the casts of this recipe; None if they have no name."""
    from msamp.numerics.recipe import GEMMS

    return precision.fp8_recipe or next((name for name, gemm in GEMMS.items() if gemm == precision.named.gemm), None)


def saved_activations(precision: PrecisionConfig) -> Saved:
    """Return how the inputs of norms and activation functions are saved for backward."""
    from msamp.nn.saved_activations import AS_IT_IS, IN_EXACT_GROUPS, IN_GROUPS

    kept: dict[str, Saved] = {"compute": AS_IT_IS, "coat": IN_GROUPS, "coat-exact": IN_EXACT_GROUPS}
    return kept[precision.kept_activations]

"""The recipe that the precision flags make; nothing here knows shapes or devices."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

from megatron.lm.config.precision import OPTIMIZER_STATES, PrecisionConfig
from megatron.lm.config.schema import flag
from msamp.nn.saved_activations import AS_IT_IS, IN_GROUPS, Saved
from msamp.numerics import formats
from msamp.numerics.recipe import GEMMS, KINDS, Cast, Gemms, Product, Recipe
from msamp.numerics.scaling import Scaling
from msamp.optim import updates

SAVED: dict[str, Saved] = {"compute": AS_IT_IS, "coat": IN_GROUPS}  # by --save-activations
RULE_SETTINGS = {"fp8_amax_history_len": "window", "fp8_amax_compute_algo": "algorithm", "fp8_margin": "margin"}  # flag -> the rule's


def build_recipe(precision: PrecisionConfig) -> Recipe:
    """The recipe that the flags name, with the scaling and the state formats (Table 6 of FP8-LM) that they ask for.

    Raises:
        ValueError: flags that name two recipes, or formats that the update of theirs does not take.
    """
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
    for states in map(varied.formats_of, KINDS):
        updates.by_name(states.update).check_group(updates.format_names(states), decoupled=True)
    return varied if gemm is None or gemm == recipe.gemm else varied.with_gemm(gemm)


def gemm_of(precision: PrecisionConfig) -> Gemms | None:
    """How the operands of the recipe's FP8 GEMMs are cast, with what the flags ask of scaling rules and sums; None without FP8 GEMMs.

    Raises:
        ValueError: fast accumulation of operands in blocks.
    """
    own = precision.named.gemm
    if own is None:
        return None
    given = {key: getattr(precision, name) for name, key in RULE_SETTINGS.items() if getattr(precision, name) is not None}
    gemm = own if precision.fp8_recipe is None else GEMMS[precision.fp8_recipe]
    gemm = _with_rules(gemm, lambda rule: replace(rule, **{key: given[key] for key in _settings(rule) & given.keys()}))  # type: ignore[type-var]
    return gemm.all_fast() if precision.fp8_fast_accumulation == "all" else gemm


def _settings(rule: Scaling) -> set[str]:
    """What of a scaling rule can be set."""
    return {field.name for field in fields(rule) if field.init} if is_dataclass(rule) else set()


def _with_rules(gemm: Gemms, change: Callable[[Scaling], Scaling]) -> Gemms:
    """The GEMMs with the scaling rule of every operand changed."""

    def cast(x: Cast) -> Cast:
        return replace(x, scaling=change(x.scaling))

    def product(x: Product) -> Product:
        return replace(x, left=cast(x.left), right=cast(x.right))

    return Gemms(product(gemm.output), product(gemm.grad_input), product(gemm.grad_weight))


def rule_setting(precision: PrecisionConfig, name: str) -> int | str | None:
    """What one of `RULE_SETTINGS` is in the scaling rules of this recipe; None where no rule has it."""
    gemm, key = gemm_of(precision), RULE_SETTINGS[name]
    rules = [cast.scaling for cast in gemm.casts.values()] if gemm is not None else []
    return next((getattr(rule, key) for rule in rules if key in _settings(rule)), None)


def gemm_name(precision: PrecisionConfig) -> str | None:
    """What `--fp8-recipe` calls the way in which this recipe casts its operands; None where it has no name."""
    return precision.fp8_recipe or next((name for name, gemm in GEMMS.items() if gemm == precision.named.gemm), None)


def with_saved_scaling(precision: PrecisionConfig, saved: PrecisionConfig | None) -> PrecisionConfig:
    """The settings of a resume: what they leave open of how operands are scaled is as in the checkpoint.

    A recipe that casts its operands otherwise than the saved one does by itself, such as coat after O2, keeps its own scaling.

    Args:
        precision: of the run that resumes.
        saved: of the run that wrote the checkpoint; None where none is resumed.

    Raises:
        ValueError: naming each setting that is given and differs from the checkpoint's.
    """
    if saved is None or precision.named.gemm is None or precision.named.gemm != saved.named.gemm:
        return precision
    then = {"fp8_recipe": gemm_name(saved)} | {name: rule_setting(saved, name) for name in RULE_SETTINGS}
    given = {name: getattr(precision, name) for name in then if getattr(precision, name) is not None}
    differing = [
        f"{flag(name)} {value} (saved: {'none' if then[name] is None else then[name]})"
        for name, value in given.items()
        if value != then[name]
    ]
    if differing:
        raise ValueError(
            f"the checkpoint scales the operands of its GEMMs otherwise: {'; '.join(differing)}. Drop the flag to go on as the saved run "
            "did, or add --finetune to start anew from its weights"
        )
    return replace(precision, **{name: getattr(saved, name) for name in then if name not in given})


def with_saved_rounding(precision: PrecisionConfig, saved: PrecisionConfig | None) -> PrecisionConfig:
    """The settings of a resume: masters and moments are rounded as in the checkpoint, unless flags say otherwise.

    Where its optimizer formats leave nothing to round stochastically, as after a change of recipe, the recipe's own rounding stays.

    Args:
        precision: of the run that resumes.
        saved: of the run that wrote the checkpoint; None where none is resumed.
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


def saved_activations(precision: PrecisionConfig) -> Saved:
    """How the inputs of norms and activations are kept for backward."""
    return SAVED[precision.kept_activations]

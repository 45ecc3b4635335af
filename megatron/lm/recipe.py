"""The recipe that the precision flags name, and the formats of each kind of parameter; nothing here knows shapes or devices."""

from dataclasses import replace

from megatron.lm.config import PrecisionConfig
from msamp.nn.saved import AS_IT_IS, COAT, Saved
from msamp.numerics import formats, recipe
from msamp.numerics.recipe import Recipe, StateFormats
from msamp.numerics.scaling import Current, Delayed


def build_recipe(precision: PrecisionConfig) -> Recipe:
    """The preset that the flags name, with their scaling rule and state formats (Table 6 of FP8-LM)."""
    base = recipe.by_name(precision.name)
    if precision.fp8_scaling is not None:
        base = base.with_scaling(Current() if precision.fp8_scaling == "current" else Delayed())
    moments = {"coat": "coat-e4m3", None: None}[precision.optimizer_state]
    names = {
        "master": precision.master_format,
        "grad": precision.grad_format,
        "m": precision.exp_avg_format or moments,
        "v": precision.exp_avg_sq_format or moments,
    }
    return base.with_states(**{key: formats.by_name(name) for key, name in names.items() if name is not None})


def saved_activations(precision: PrecisionConfig) -> Saved:
    """How the inputs of norms and activations are kept for backward."""
    return COAT if precision.kept_activations == "coat" else AS_IT_IS


def states_by_kind(recipe: Recipe) -> dict[str, StateFormats]:
    """Formats of master, gradient and moments of linear weights, other matrices (embeddings, LM head) and vectors (norms, biases).

    At the FP8 levels the gradient of other matrices is BF16, their master and moments those of a
    linear weight.
    """
    matrix = replace(recipe.states, grad=formats.BF16) if recipe.fp8 else recipe.states
    return {"linear": recipe.states, "matrix": matrix, "vector": recipe.vectors}

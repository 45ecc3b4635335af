"""The papers' baselines as recipes: BF16 training with Transformer Engine's transformer layers, on the same model, data and seed.

A baseline differs from `bf16` (O0) only in its transformer layers: weights, master weights, gradients, moments, optimizer, gradient
exchange and embeddings are the same. It differs from `te-bf16` only in the FP8 of its GEMMs. Each recipe lists the fields of
megatron-core's TransformerConfig that select its layers; the modules come from megatron-core's `TESpecProvider`
(`megatron.lm.model.peer`).
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

from msamp.numerics.recipe import BF16, Recipe

PACKAGE = "transformer_engine"
INSTALL = "run `pip install -e '.[peers]'` with a CUDA compiler and cuDNN's headers (docs/guide/installation.md)"


@dataclass(frozen=True, kw_only=True)
class PeerRecipe(Recipe):
    """A recipe of Transformer Engine's layers.

    Attributes:
        core: fields of megatron-core's TransformerConfig that choose the FP8 of the layers, and their values.
        keeps_history: whether the layers scale by amaxes of past steps, which our checkpoints do not contain.
    """

    core: tuple[tuple[str, Any], ...] = ()
    keeps_history: bool = False


def _peer(name: str, keeps_history: bool = False, **core: Any) -> PeerRecipe:
    return PeerRecipe(
        name=name,
        compute=BF16.compute,
        gemm=None,
        weight=BF16.weight,
        states=BF16.states,
        vectors=BF16.vectors,
        core=tuple(core.items()),
        keeps_history=keeps_history,
    )


# Windows and formats as in Transformer Engine's own recipes: DelayedScaling's history of 1,024 and its maximum, E4M3 forward and
# E5M2 backward; Float8BlockScaling's E4M3 in all operands, with scales that are powers of two.
_ALL = (
    _peer("te-bf16"),
    _peer(
        "te-delayed",
        keeps_history=True,
        fp8="hybrid",
        fp8_recipe="delayed",
        fp8_margin=0,
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
    ),
    _peer("te-current", fp8="hybrid", fp8_recipe="tensorwise"),
    _peer("te-block", fp8="e4m3", fp8_recipe="blockwise"),
)
BASELINES = {recipe.name: recipe for recipe in _ALL}


def installed() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None

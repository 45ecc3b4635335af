"""The precision recipes as data: which tensor has which format (FP8-LM sections 2 and 3.3; Table 6 for the optimizer).

A recipe enters by a constant here; nothing in the training loop asks for a recipe's name.
"""

from dataclasses import dataclass, replace

import torch

from msamp.numerics.formats import ALL as ALL_FORMATS
from msamp.numerics.formats import BF16 as BF16_FORMAT
from msamp.numerics.formats import E4M3, E5M2, FP16, PLAIN_FP16, Format
from msamp.numerics.formats import FP32 as FP32_FORMAT
from msamp.numerics.granularity import TENSORWISE, Granularity
from msamp.numerics.scaling import Current, Delayed, Scaling


@dataclass(frozen=True)
class Cast:
    """How one GEMM operand is cast: format, scaling rule, granularity."""

    format: Format
    scaling: Scaling = Delayed()  # noqa: RUF009 - frozen, so sharing one default instance is safe
    granularity: Granularity = TENSORWISE

    def __str__(self) -> str:
        return f"{self.format} {self.scaling}"


@dataclass(frozen=True)
class Gemm:
    """The operands of the three GEMMs of a linear layer."""

    input: Cast
    weight: Cast
    grad_output: Cast


@dataclass(frozen=True)
class StateFormats:
    """The optimizer's four formats (FP8-LM equation 8 and Table 6). COAT's serve `m` and `v`; ValueError for another of them."""

    master: Format = FP32_FORMAT
    grad: Format = FP32_FORMAT
    m: Format = FP32_FORMAT
    v: Format = FP32_FORMAT

    def __post_init__(self) -> None:
        for name in ("master", "grad"):
            if getattr(self, name).group:
                legal = ", ".join(fmt.name for fmt in ALL_FORMATS)
                raise ValueError(f"{name} is {getattr(self, name)}, which is for the moments m and v alone; choose one of {legal}")

    def __str__(self) -> str:
        return f"master {self.master}, grad {self.grad}, m {self.m}, v {self.v}"


FP32_STATES = StateFormats()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One precision strategy.

    Attributes:
        name: what `--precision` and `--opt-level` call it.
        compute: format of activations, embeddings, norms and biases.
        gemm: operand casts of linear layers; None: the GEMM runs in `compute`.
        weight: format in which a linear weight stands between steps. Where it equals `states.master`, it is the master.
        states: optimizer formats of linear weights, embeddings and the LM head. Norms and biases always have FP32 states.
        fp8_wire: whether activations and their gradients travel in FP8 between tensor-parallel ranks, else in `compute`.
    """

    name: str
    compute: Format
    gemm: Gemm | None
    weight: Format
    states: StateFormats
    fp8_wire: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """torch dtype of activations."""
        return self.compute.dtype

    @property
    def fp8(self) -> bool:
        """True where linear layers run FP8 GEMMs."""
        return self.gemm is not None

    @property
    def scales_loss(self) -> bool:
        """True where gradients need a loss scale: they are computed in FP16, whose range ends at 2^-24 (Micikevicius et al. 2017)."""
        return self.compute.dtype is torch.float16

    def with_states(self, **formats: Format | None) -> "Recipe":
        """The recipe with some of `master`, `grad`, `m`, `v` replaced (None keeps the recipe's own): Table 6's rows."""
        states = replace(self.states, **{k: v for k, v in formats.items() if v is not None})
        return replace(self, states=states)

    def with_scaling(self, scaling: Scaling) -> "Recipe":
        """The recipe with activations and grad_outputs scaled by another rule."""
        if self.gemm is None:
            return self
        gemm = replace(
            self.gemm, input=replace(self.gemm.input, scaling=scaling), grad_output=replace(self.gemm.grad_output, scaling=scaling)
        )
        return replace(self, gemm=gemm)


# A weight changes once a step and its amax is known when it does, so its scale is always its own.
_GEMM = Gemm(input=Cast(E4M3), weight=Cast(E4M3, Current()), grad_output=Cast(E5M2))

FP32 = Recipe(name="fp32", compute=FP32_FORMAT, gemm=None, weight=FP32_FORMAT, states=FP32_STATES)
FP16_AMP = Recipe(name="fp16-amp", compute=PLAIN_FP16, gemm=None, weight=PLAIN_FP16, states=FP32_STATES)
BF16 = Recipe(name="bf16", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=FP32_STATES)
O1 = Recipe(name="O1", compute=BF16_FORMAT, gemm=_GEMM, weight=FP16, states=StateFormats(FP16, E4M3, FP32_FORMAT, FP32_FORMAT))
O2 = Recipe(name="O2", compute=BF16_FORMAT, gemm=_GEMM, weight=FP16, states=StateFormats(FP16, E4M3, E4M3, FP16))
O3 = Recipe(name="O3", compute=BF16_FORMAT, gemm=_GEMM, weight=E4M3, states=StateFormats(FP16, E4M3, E4M3, FP16), fp8_wire=True)

ALL = (FP32, FP16_AMP, BF16, O1, O2, O3)


def by_name(name: str) -> Recipe:
    """The preset that `--precision` or `--opt-level` names; O0 is bf16.

    Raises:
        ValueError: for an unknown name, listing those accepted.
    """
    for recipe in ALL:
        if recipe.name == ("bf16" if name == "O0" else name):
            return recipe
    raise ValueError(f"precision {name!r} is unknown; choose one of {', '.join(r.name for r in ALL)} (O0 is bf16)")

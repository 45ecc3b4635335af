"""The precision recipes as data: which tensor has which format (FP8-LM sections 2 and 3.3, Table 6 for the optimizer; Collage, Table 2;
COAT).

A recipe enters by a constant here; nothing in the training loop asks for a recipe's name.
"""

from dataclasses import dataclass, replace

import torch

from msamp.numerics.formats import ALL as ALL_FORMATS
from msamp.numerics.formats import BF16 as BF16_FORMAT
from msamp.numerics.formats import COAT_E4M3, E4M3, E5M2, FP16, PLAIN_FP16, REMAINDER_E4M3, Format
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


# The arithmetic of an update -> the states in which it keeps what rounding takes from weight and second moment.
REMAINDERS: dict[str, dict[str, Format]] = {
    "fp32": {},
    "a": {},
    "kahan": {"weight_remainder": BF16_FORMAT},
    "light": {"weight_remainder": BF16_FORMAT},
    "plus": {"weight_remainder": BF16_FORMAT, "exp_avg_sq_remainder": BF16_FORMAT},
    "fp8": {"weight_remainder": REMAINDER_E4M3, "exp_avg_sq_remainder": REMAINDER_E4M3},
}


def remainder_bytes(update: str) -> dict[str, int]:
    """Bytes an element that stand beside the weight ("master") and the second moment ("v")."""
    sizes = {key: fmt.bytes for key, fmt in REMAINDERS[update].items()}
    return {"master": sizes.get("weight_remainder", 0), "v": sizes.get("exp_avg_sq_remainder", 0)}


@dataclass(frozen=True)
class StateFormats:
    """The optimizer's four formats (FP8-LM equation 8 and Table 6), and the arithmetic of its update.

    Attributes:
        master, grad, m, v: of the master weight, the gradient and the two moments. COAT's serve `m` and `v`.
        update: "fp32", or one of Collage's in BF16 (algorithm 2 and Table 2), which takes BF16 in all four: "a" (BF16 alone), "kahan"
            (compensated weight), "light" (weight as a pair), "plus" (weight and v as pairs), "fp8" (plus, its remainders in E4M3).

    Raises:
        ValueError: COAT's format for another state, an unknown `update`, or one in BF16 with another format.
    """

    master: Format = FP32_FORMAT
    grad: Format = FP32_FORMAT
    m: Format = FP32_FORMAT
    v: Format = FP32_FORMAT
    update: str = "fp32"

    def __post_init__(self) -> None:
        if self.update not in REMAINDERS:
            raise ValueError(f"update {self.update!r} is unknown; choose one of {', '.join(REMAINDERS)}")
        if self.update != "fp32" and {self.master, self.grad, self.m, self.v} != {BF16_FORMAT}:
            raise ValueError(f"update {self.update!r} computes in BF16, and the formats are {self}; give bf16 for all four, or update fp32")
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
        states: optimizer formats of linear weights, embeddings and the LM head.
        vectors: optimizer formats of norms and biases.
        fp8_wire: whether activations and their gradients travel in FP8 between tensor-parallel ranks, else in `compute`.
    """

    name: str
    compute: Format
    gemm: Gemm | None
    weight: Format
    states: StateFormats
    vectors: StateFormats = FP32_STATES
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
        states = replace(self.states, **{k: v for k, v in formats.items() if v is not None})  # type: ignore[arg-type]
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

# Collage, Table 2, and pairs with 8 bits: the same states for every parameter, BF16 gradients. D-MW's weights are their own masters.
_A = StateFormats(BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, "a")
_KAHAN = StateFormats(BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, "kahan")
_LIGHT = StateFormats(BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, "light")
_PLUS = StateFormats(BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, "plus")
_FP8 = StateFormats(BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, "fp8")
_DMW = StateFormats(BF16_FORMAT, BF16_FORMAT, FP32_FORMAT, FP32_FORMAT)
_D = StateFormats(FP32_FORMAT, BF16_FORMAT, FP32_FORMAT, FP32_FORMAT)
BF16_A = Recipe(name="bf16-a", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_A, vectors=_A)
BF16_KAHAN = Recipe(name="bf16-kahan", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_KAHAN, vectors=_KAHAN)
BF16_DMW = Recipe(name="bf16-dmw", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_DMW, vectors=_DMW)
BF16_D = Recipe(name="bf16-d", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_D, vectors=_D)
COLLAGE_LIGHT = Recipe(name="collage-light", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_LIGHT, vectors=_LIGHT)
COLLAGE_PLUS = Recipe(name="collage-plus", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_PLUS, vectors=_PLUS)
COLLAGE_FP8 = Recipe(name="collage-fp8", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=_FP8, vectors=_FP8)

# COAT: operands of linear layers with one just-in-time scale a tensor, moments with range expansion, gradients in BF16. The GEMMs see a
# weight in E4M3 alone, so that is how it stands between steps. The third part, saved activations, is no matter of a recipe.
COAT = Recipe(
    name="coat", compute=BF16_FORMAT, gemm=_GEMM, weight=E4M3, states=StateFormats(FP32_FORMAT, BF16_FORMAT, COAT_E4M3, COAT_E4M3)
).with_scaling(Current())

ALL = (FP32, FP16_AMP, BF16, BF16_A, BF16_KAHAN, BF16_DMW, BF16_D, COLLAGE_LIGHT, COLLAGE_PLUS, COLLAGE_FP8, COAT, O1, O2, O3)


def by_name(name: str) -> Recipe:
    """The preset that `--precision` or `--opt-level` names; O0 is bf16.

    Raises:
        ValueError: for an unknown name, listing those accepted.
    """
    for recipe in ALL:
        if recipe.name == ("bf16" if name == "O0" else name):
            return recipe
    raise ValueError(f"precision {name!r} is unknown; choose one of {', '.join(r.name for r in ALL)} (O0 is bf16)")

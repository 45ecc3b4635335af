"""The precision recipes as data: which tensor has which format (FP8-LM sections 2 and 3.3, Table 6 for the optimizer; Collage, Table 2;
COAT).

A recipe enters by a constant here; nothing in the training loop asks for a recipe's name.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from msamp.numerics.formats import ALL as ALL_FORMATS
from msamp.numerics.formats import BF16 as BF16_FORMAT
from msamp.numerics.formats import COAT_E4M3, E4M3, E5M2, FP16, PLAIN_FP16, Format
from msamp.numerics.formats import FP32 as FP32_FORMAT
from msamp.numerics.granularity import TENSORWISE, Block, Granularity
from msamp.numerics.scaling import Current, Delayed, Exact, Scaling, SharedExponent
from msamp.numerics.stochastic_rounding import ROUNDINGS

KINDS = ("linear", "matrix", "vector")  # of parameters, by which formats differ
COLLAGE_UPDATES = ("a", "kahan", "light", "plus", "fp8")  # in BF16 arithmetic
LARGE = 4096  # rows and columns of a large operand


@dataclass(frozen=True)
class Cast:
    """How one GEMM operand is cast: format, scaling rule, granularity."""

    format: Format
    scaling: Scaling = Delayed()  # noqa: RUF009 - frozen, so sharing one default instance is safe
    granularity: Granularity = TENSORWISE

    @property
    def element_bytes(self) -> float:
        """Bytes an element of a large operand with its share of the scales, one for each set."""
        if self.granularity == TENSORWISE:
            return self.format.bytes
        sets = math.prod(self.granularity.scales_shape((LARGE, LARGE))) / LARGE**2
        return self.format.bytes + sets * self.scaling.kept_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.format} {self.scaling}" if self.granularity == TENSORWISE else f"{self.format} {self.scaling} {self.granularity}"


@dataclass(frozen=True)
class Product:
    """One GEMM: how its two operands are cast, blocks lying along the dimension that the GEMM sums over, and how it accumulates.

    Attributes:
        left, right: the operands.
        fast: the tensor cores may keep partial sums at reduced precision ("fast accumulation"); False wants the full sum.
    """

    left: Cast
    right: Cast
    fast: bool = False


@dataclass(frozen=True)
class Gemms:
    """The three GEMMs of a linear layer y = x W^T.

    Attributes:
        output: input times weight.
        grad_input: grad_output times weight.
        grad_weight: grad_output times input.
    """

    output: Product
    grad_input: Product
    grad_weight: Product

    @classmethod
    def of(cls, input: Cast, weight: Cast, grad_output: Cast) -> "Gemms":
        """Each tensor cast alike for both of its GEMMs; fast accumulation for the output, the full sum for gradients."""
        return cls(Product(input, weight, fast=True), Product(grad_output, weight), Product(grad_output, input))

    def all_fast(self) -> "Gemms":
        """With fast accumulation of the gradients too.

        Hopper then adds up all terms of a sum in the tensor cores, which keep some 14 bits, where the full sum goes on in FP32 from time to
        time. That takes fewer instructions, and less power. Blocks have no fast sum.

        Raises:
            ValueError: for operands in blocks.
        """
        if not self.tensorwise:
            raise ValueError("operands in blocks are added up in full: there is no fast accumulation of blocks; take one scale a tensor")
        return Gemms(*(replace(product, fast=True) for product in (self.output, self.grad_input, self.grad_weight)))

    @property
    def input(self) -> Cast:
        """How the input is cast for the output."""
        return self.output.left

    @property
    def weight(self) -> Cast:
        """How the weight is cast for the output."""
        return self.output.right

    @property
    def grad_output(self) -> Cast:
        """How the grad_output is cast for grad_input."""
        return self.grad_input.left

    @property
    def casts(self) -> dict[str, Cast]:
        """Tensor -> how it is cast."""
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}

    @property
    def tensorwise(self) -> bool:
        """Whether every operand has one scale a tensor: then payloads may be gathered over ranks, and made by fused kernels."""
        return all(cast.granularity == TENSORWISE for cast in self.casts.values())

    @property
    def fusible(self) -> bool:
        """Whether the kernels of the fused blocks can cast the operands: one scale a tensor, from a history or by `Current`."""
        return self.tensorwise and all(cast.scaling.window or type(cast.scaling) is Current for cast in self.casts.values())


@dataclass(frozen=True)
class StateFormats:
    """The optimizer's four formats (FP8-LM equation 8 and Table 6), and the arithmetic of its update.

    Attributes:
        master, grad, m, v: of the master weight, the gradient and the two moments. COAT's serve `m` and `v`.
        update: "fp32", AdamW; one of Collage's in BF16 (algorithm 2 and Table 2), which takes BF16 in all four: "a" (BF16 alone), "kahan"
            (compensated weight), "light" (weight as a pair), "plus" (weight and v as pairs), "fp8" (plus, its remainders in E4M3); or
            another that is registered with `msamp.optim.updates`. The optimizer refuses one that it does not know, and formats that the
            update does not take.
        master_rounding, moment_rounding: how masters and moments are stored in their formats, "nearest" or "stochastic". The latter lets
            updates below half a code arrive in the mean (`msamp.numerics.stochastic_rounding`). FP32 rounds nothing. COAT's moments are
            stored to nearest, because their groups follow the values. So is v where nearest rounding keeps it within 2 %, such as FP16 at
            beta2 0.95 (`kernels.reference.store.rounding_of`).

    Raises:
        ValueError: COAT's format for another state, an unknown rounding, and stochastic rounding of what is not rounded.
    """

    master: Format = FP32_FORMAT
    grad: Format = FP32_FORMAT
    m: Format = FP32_FORMAT
    v: Format = FP32_FORMAT
    update: str = "fp32"
    master_rounding: str = "nearest"
    moment_rounding: str = "nearest"

    def __post_init__(self) -> None:
        for name, rounds in self.rounded().items():
            if getattr(self, name) not in ROUNDINGS:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(ROUNDINGS)}")
            if getattr(self, name) != "nearest" and not rounds:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and with {self} there is nothing that it rounds: FP32 is not rounded, and COAT's "
                    "moments are stored to nearest; choose nearest, or another format"
                )
        for name in ("master", "grad"):
            if getattr(self, name).group:
                legal = ", ".join(fmt.name for fmt in ALL_FORMATS)
                raise ValueError(f"{name} is {getattr(self, name)}, which is for the moments m and v alone; choose one of {legal}")

    def rounded(self) -> dict[str, bool]:
        """Whether there is something to round stochastically, by the field that says so."""
        masters, moments = ([fmt.bytes < FP32_FORMAT.bytes and not fmt.group for fmt in x] for x in ((self.master,), (self.m, self.v)))
        return {"master_rounding": any(masters), "moment_rounding": any(moments)}

    def varied(self, **changes: Any) -> "StateFormats":
        """With some fields replaced. Where no master or moment is left that stochastic rounding concerns, its rounding becomes nearest, but
        for one that is itself among the changes.

        Raises:
            ValueError: as for the class.
        """
        plain = replace(self, master_rounding="nearest", moment_rounding="nearest")
        changed = replace(plain, **{name: value for name, value in changes.items() if name not in self.rounded()})
        kept = {name: getattr(self, name) for name, rounds in changed.rounded().items() if rounds}
        return replace(changed, **kept | {name: value for name, value in changes.items() if name in self.rounded()})

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
        states: optimizer formats of linear weights.
        matrices: optimizer formats of other matrices: embeddings, the LM head, linear layers that stay in 16 bits, kernels of convolutions.
            None: those of linear weights, with BF16 gradients where the recipe has FP8 GEMMs.
        vectors: optimizer formats of norms and biases.
        fp8_wire: whether activations and their gradients travel in FP8 between tensor-parallel ranks, else in `compute`.
        shards_optimizer: whether data-parallel ranks share the optimizer's states without being asked (ZeRO).
        accumulator: default dtype in which several micro-batches of a step add up: "bf16" or "fp32".
        activations: default way to keep the inputs of norms and activations for backward: "compute", as they are, or "coat", in FP8 groups.
    """

    name: str
    compute: Format
    gemm: Gemms | None
    weight: Format
    states: StateFormats
    matrices: StateFormats | None = None
    vectors: StateFormats = FP32_STATES
    fp8_wire: bool = False
    shards_optimizer: bool = False
    accumulator: str = "fp32"
    activations: str = "compute"

    @property
    def compute_dtype(self) -> torch.dtype:
        """torch dtype of activations."""
        return self.compute.dtype

    @property
    def fp8(self) -> bool:
        """True where linear layers run FP8 GEMMs."""
        return self.gemm is not None

    @property
    def fp8_gradients(self) -> bool:
        """True where the gradients of linear weights are FP8."""
        return self.states.grad.scaled and self.states.grad.bytes == 1

    @property
    def scales_loss(self) -> bool:
        """True where gradients need a loss scale: they are computed in FP16, and its range ends at 2^-24 (Micikevicius et al. 2017)."""
        return self.compute.dtype is torch.float16

    def formats_of(self, kind: str) -> StateFormats:
        """Optimizer formats of a kind of parameter, alike in the trainer and in a loop of one's own.

        Args:
            kind: "linear", a weight of a linear layer that the recipe converts; "matrix", another parameter with two dimensions or more;
                "vector", one with fewer.

        Raises:
            ValueError: for another kind.
        """
        match kind:
            case "linear":
                return self.states
            case "matrix":
                matrices = self.states if self.matrices is None else self.matrices
                return matrices.varied(grad=BF16_FORMAT) if self.fp8 and self.matrices is None else matrices
            case "vector":
                return self.vectors
        raise ValueError(f"kind of parameter is {kind!r}; it must be one of {', '.join(KINDS)}")

    def with_states(self, **formats: Format | None) -> "Recipe":
        """The recipe with some of `master`, `grad`, `m`, `v` replaced (None keeps the recipe's own): Table 6's rows. Other matrices follow
        in master and moments; their gradients stay.

        Another gradient format brings the accumulator that suits it: BF16 for FP8 gradients, else FP32.
        """
        given = {name: fmt for name, fmt in formats.items() if fmt is not None}
        states = self.states.varied(**given)
        matrices = None if self.matrices is None else self.matrices.varied(**{k: v for k, v in given.items() if k != "grad"})
        changed = replace(self, states=states, matrices=matrices)
        if states.grad == self.states.grad:
            return changed
        return replace(changed, accumulator="bf16" if changed.fp8_gradients else "fp32")

    def with_rounding(self, *, master: str | None = None, moments: str | None = None) -> "Recipe":
        """The recipe with masters or moments of matrices rounded "nearest" or "stochastic" as they are stored; None keeps the recipe's own.

        Raises:
            ValueError: for another word, and for stochastic rounding where nothing is rounded.
        """
        given = {"master_rounding": master, "moment_rounding": moments}
        chosen = {name: value for name, value in given.items() if value is not None}
        if not chosen:
            return self
        if "stochastic" in chosen.values() and self.states.update in COLLAGE_UPDATES:
            raise ValueError(
                f"{', '.join(chosen)}: recipe {self.name!r} has Collage's update {self.states.update!r}, and its BF16 arithmetic rounds "
                "to nearest; drop it, or take bf16-dmw, BF16 weights with FP32 moments"
            )
        varied = {name: getattr(self, name) for name in ("states", "matrices") if getattr(self, name) is not None}
        return replace(self, **{name: states.varied(**chosen) for name, states in varied.items()})

    def with_scaling(self, scaling: Scaling) -> "Recipe":
        """The recipe with activations and grad_outputs scaled by another rule; itself where there are no FP8 GEMMs."""
        if self.gemm is None:
            return self
        input, grad_output = (replace(cast, scaling=scaling) for cast in (self.gemm.input, self.gemm.grad_output))
        return self.with_gemm(Gemms.of(input, self.gemm.weight, grad_output))

    def with_gemm(self, gemm: Gemms) -> "Recipe":
        """The recipe with its FP8 GEMMs cast in another way, such as one of `GEMMS`.

        Operands in blocks do not travel in FP8 (`fp8_wire` becomes False): a block of grad_weight's operands lies along the tokens of
        several ranks, so the values have to be gathered.

        Raises:
            ValueError: for a recipe without FP8 GEMMs.
        """
        if self.gemm is None:
            raise ValueError(f"recipe {self.name} has no FP8 GEMM to cast in another way; take O1, O2 or O3")
        return replace(self, gemm=gemm, fp8_wire=self.fp8_wire and gemm.tensorwise)


# A weight changes once a step and its amax is known when it does, so its scale is always its own.
_GEMM = Gemms.of(input=Cast(E4M3), weight=Cast(E4M3, Current()), grad_output=Cast(E5M2))
_JUST_IN_TIME = Gemms.of(input=Cast(E4M3, Current()), weight=Cast(E4M3, Current()), grad_output=Cast(E5M2, Current()))


def _blocks(scaling: Scaling, along: Block, weight: Block) -> Gemms:
    """Operands in blocks, each E4M3: a block follows what it holds, so that gradients need no wider range [DeepSeek-V3, section 3.3.2]."""
    return Gemms.of(input=Cast(E4M3, scaling, along), weight=Cast(E4M3, scaling, weight), grad_output=Cast(E4M3, scaling, along))


# Ways to cast the operands of the FP8 GEMMs, in the words of Megatron-LM's `--fp8-recipe`. "blockwise" is DeepSeek-V3's, with FP32 scales,
# or with the power of two that Transformer Engine takes; "mxfp8" has a shared exponent for each 32 elements [OCP Microscaling v1.0].
GEMMS: dict[str, Gemms] = {
    "delayed": _GEMM,
    "tensorwise": _JUST_IN_TIME,
    "blockwise": _blocks(Exact(), Block(1, 128), Block(128, 128)),
    "blockwise-power-of-two": _blocks(Current(), Block(1, 128), Block(128, 128)),
    "mxfp8": _blocks(SharedExponent(), Block(1, 32), Block(1, 32)),
}

FP32 = Recipe(name="fp32", compute=FP32_FORMAT, gemm=None, weight=FP32_FORMAT, states=FP32_STATES)
FP16_AMP = Recipe(name="fp16-amp", compute=PLAIN_FP16, gemm=None, weight=PLAIN_FP16, states=FP32_STATES)
BF16 = Recipe(name="bf16", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=FP32_STATES)
# The paper rounds to nearest, which loses updates below half a code. Stochastic rounding delivers them, and a GPT-125M ends 0.15 to 0.17 %
# lower (eight paired seeds, docs/results); with_rounding gives the paper's.
_MASTERS = {"master_rounding": "stochastic"}
_ALL_STATES = {"master_rounding": "stochastic", "moment_rounding": "stochastic"}
O1 = Recipe(
    name="O1",
    compute=BF16_FORMAT,
    gemm=_GEMM,
    weight=FP16,
    states=StateFormats(FP16, E4M3, FP32_FORMAT, FP32_FORMAT, **_MASTERS),
    accumulator="bf16",
)
O2 = Recipe(
    name="O2",
    compute=BF16_FORMAT,
    gemm=_GEMM,
    weight=FP16,
    states=StateFormats(FP16, E4M3, E4M3, FP16, **_ALL_STATES),
    accumulator="bf16",
)
O3 = Recipe(
    name="O3",
    compute=BF16_FORMAT,
    gemm=_GEMM,
    weight=E4M3,
    states=StateFormats(FP16, E4M3, E4M3, FP16, **_ALL_STATES),
    fp8_wire=True,
    shards_optimizer=True,
    accumulator="bf16",
)

# Option of Collage's Table 2, or pairs with 8 bits ("fp8") -> the formats of its states, which are the same for every parameter.
COLLAGE_FORMATS = {
    **{update: StateFormats(BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, BF16_FORMAT, update) for update in COLLAGE_UPDATES},
    "d-mw": StateFormats(BF16_FORMAT, BF16_FORMAT, FP32_FORMAT, FP32_FORMAT),  # weights are their own masters
    "d": StateFormats(FP32_FORMAT, BF16_FORMAT, FP32_FORMAT, FP32_FORMAT),
}


def _collage(name: str, variant: str) -> Recipe:
    states = COLLAGE_FORMATS[variant]
    return Recipe(name=name, compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=states, vectors=states, accumulator="bf16")


BF16_A, BF16_KAHAN = _collage("bf16-a", "a"), _collage("bf16-kahan", "kahan")
BF16_DMW, BF16_D = _collage("bf16-dmw", "d-mw"), _collage("bf16-d", "d")
COLLAGE_LIGHT, COLLAGE_PLUS = _collage("collage-light", "light"), _collage("collage-plus", "plus")
COLLAGE_FP8 = _collage("collage-fp8", "fp8")

# COAT: operands of linear layers with one just-in-time scale a tensor, moments with range expansion, gradients in BF16. The GEMMs read a
# weight in E4M3 alone, so that it is stored in E4M3 between steps.
COAT = Recipe(
    name="coat",
    compute=BF16_FORMAT,
    gemm=_JUST_IN_TIME,
    weight=E4M3,
    states=StateFormats(FP32_FORMAT, BF16_FORMAT, COAT_E4M3, COAT_E4M3),
    accumulator="bf16",
    activations="coat",
)

ALL = (FP32, FP16_AMP, BF16, BF16_A, BF16_KAHAN, BF16_DMW, BF16_D, COLLAGE_LIGHT, COLLAGE_PLUS, COLLAGE_FP8, COAT, O1, O2, O3)
_TABLE: dict[str, Recipe] = {recipe.name: recipe for recipe in ALL}


def register(recipe: Recipe) -> Recipe:
    """Enter a recipe of one's own, so that `--precision`, `msamp.initialize` and checkpoints know it by its name; returns it.

    Every process that trains with it registers it.

    Raises:
        ValueError: the name belongs to another recipe.
    """
    if _TABLE.get(recipe.name, recipe) != recipe:
        raise ValueError(f"precision {recipe.name!r} is the name of another recipe; choose a name that is not one of {', '.join(names())}")
    return _TABLE.setdefault(recipe.name, recipe)


def names() -> tuple[str, ...]:
    """The names of all recipes, the built-in ones first."""
    return tuple(_TABLE)


def by_name(name: str) -> Recipe:
    """The recipe that `--precision` or `--opt-level` names; O0 is bf16.

    Raises:
        ValueError: for an unknown name, listing those accepted.
    """
    known = _TABLE.get("bf16" if name == "O0" else name)
    if known is None:
        raise ValueError(f"precision {name!r} is unknown; choose one of {', '.join(names())} (O0 is bf16)")
    return known

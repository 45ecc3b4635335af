"""Precision recipes as data: the format of every tensor in a training step, and where its scale comes from.

A recipe is a frozen dataclass. Layers, gradient synchronization and the optimizer read its fields, and nothing in the training loop
compares its name, so a new precision strategy is a new constant here, or a call of `register` in your own code. From the inside out:

    Cast            one GEMM operand: format, scaling rule, granularity
    Product         one GEMM: two casts, and whether the tensor cores may accumulate fast
    Gemms           the three GEMMs of a linear layer y = x W^T: output, grad_input, grad_weight
    StateFormats    the optimizer: master weight, gradient, m and v, how they are rounded, and which update runs on them
    Recipe          all of these, and the formats of activations, of other parameters and of stored weights

The recipes that FP8 training compares, with the formats of a linear layer's weight and the bytes per parameter that they add up to:

    recipe      GEMM operands       weight   master      grad    m       v       bytes
    O0 = bf16   BF16                BF16     FP32        FP32    FP32    FP32    2 + 4 + 4 + 4 + 4 = 18
    O1          E4M3, g in E5M2     FP16     the weight  E4M3    FP32    FP32    2 + 1 + 4 + 4 = 11
    O2          E4M3, g in E5M2     FP16     the weight  E4M3    E4M3    FP16    2 + 1 + 1 + 2 = 6
    O3          E4M3, g in E5M2     E4M3     FP16        E4M3    E4M3    FP16    1 + 2 + 1 + 1 + 2 = 7
    coat        E4M3, g in E5M2     E4M3     FP32        BF16    COAT's  COAT's  1 + 4 + 2 + 1 + 1 = 9, and scales of groups

FP16 here carries one scale per tensor. Where the weight's format equals the master's, the stored weight is the master. O3 stores a second
copy in E4M3 so that weights and activations can be communicated in FP8, and ZeRO divides the optimizer's part over the ranks.

Sources: FP8-LM sections 2 and 3.3 and Table 6 (O1 to O3), Collage Table 2 (`bf16-*`, `collage-*`), and COAT. Next: `formats`, `scaling` and
`granularity` define what a `Cast` names, `msamp.nn.gemm` runs the GEMMs, and `msamp.optim.optimizer` updates the states.
"""

import math
from dataclasses import dataclass, replace

import torch

from msamp.numerics.formats import BF16 as BF16_FORMAT
from msamp.numerics.formats import COAT_E4M3, E4M3, E5M2, FP16, PLAIN_FP16, Format
from msamp.numerics.formats import FP32 as FP32_FORMAT
from msamp.numerics.granularity import TENSORWISE, Block, Granularity
from msamp.numerics.scaling import Current, Delayed, Exact, Scaling, SharedExponent
from msamp.numerics.state_formats import FP32_STATES
from msamp.numerics.state_formats import StateFormats as StateFormats

KINDS = ("linear", "matrix", "vector")  # kinds of parameters, each with its own formats
COLLAGE_UPDATES = ("a", "kahan", "light", "plus", "fp8", "light-published", "plus-published")  # in BF16 arithmetic
LARGE = 4096  # rows and columns of a large operand


@dataclass(frozen=True)
class Cast:
    """How one GEMM operand is cast: format, scaling rule, granularity."""

    format: Format
    scaling: Scaling = Delayed()  # noqa: RUF009 - frozen, so sharing one default instance is safe
    granularity: Granularity = TENSORWISE

    @property
    def element_bytes(self) -> float:
        """Bytes per element of a large operand, including its share of the scales."""
        if self.granularity == TENSORWISE:
            return self.format.bytes
        sets = math.prod(self.granularity.scales_shape((LARGE, LARGE))) / LARGE**2
        return self.format.bytes + sets * self.scaling.kept_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.format} {self.scaling}" if self.granularity == TENSORWISE else f"{self.format} {self.scaling} {self.granularity}"


FAST_OUTPUT = True  # whether outputs accumulate fast by default


@dataclass(frozen=True)
class Product:
    """One GEMM: how its two operands are cast and how it accumulates. Blocks run along the dimension that the GEMM sums over.

    Attributes:
        left, right: the operands.
        fast: the tensor cores may keep partial sums at reduced precision ("fast accumulation"); False requires full accumulation.
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
        """Cast each tensor the same way for both of its GEMMs; accumulate the gradients in full and the output as `FAST_OUTPUT` says."""
        return cls(Product(input, weight, fast=FAST_OUTPUT), Product(grad_output, weight), Product(grad_output, input))

    def with_fast(self, products: str) -> "Gemms":
        """Return these GEMMs with fast accumulation in "none" of the products, the "output" alone, or "all".

        With fast accumulation Hopper keeps the whole sum in the tensor cores at about 14 bits; full accumulation moves partial sums to
        FP32, which costs time and power (`msamp.numerics.accumulation`). Block-scaled GEMMs always accumulate in full.

        Raises:
            ValueError: for another word, or "all" if the operands are block-scaled.
        """
        if products not in ("none", "output", "all"):
            raise ValueError(f"products are {products!r}; choose none, output or all")
        if products == "all" and not self.tensorwise:
            raise ValueError("block-scaled GEMMs have no fast accumulation; use one scale per tensor (delayed or tensorwise)")
        output, gradients = products != "none", products == "all"
        fast = ((self.output, output), (self.grad_input, gradients), (self.grad_weight, gradients))
        return Gemms(*(replace(product, fast=which) for product, which in fast))

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
        """Whether every operand has one scale per tensor, so that payloads may be gathered over ranks and written by fused kernels."""
        return all(cast.granularity == TENSORWISE for cast in self.casts.values())

    @property
    def fusible(self) -> bool:
        """Whether the fused blocks' kernels can cast the operands: one scale per tensor, from a history or by `Current`."""
        return self.tensorwise and all(cast.scaling.window or type(cast.scaling) is Current for cast in self.casts.values())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One precision strategy.

    Attributes:
        name: what `--precision` and `--opt-level` call it.
        compute: format of activations, embeddings, norms and biases.
        gemm: operand casts of linear layers; None: the GEMM runs in `compute`.
        weight: format in which a linear weight is stored between steps. Where it equals `states.master`, the weight is the master.
        states: optimizer formats of linear weights.
        matrices: optimizer formats of other matrices: embeddings, the LM head, linear layers that stay in 16 bits, kernels of convolutions.
            None: as for linear weights, with BF16 gradients where the recipe has FP8 GEMMs.
        vectors: optimizer formats of norms and biases.
        fp8_wire: whether tensor-parallel ranks send the partial sums of grad_input in FP8, and with `--tp-wire fp8` also of the output;
            otherwise they send `compute`. Operands are gathered in FP8 by every recipe with one scale per tensor, see `gathers_fp8`.
        shards_optimizer: whether the optimizer states are sharded over the data-parallel ranks by default (ZeRO).
        accumulator: default format for gradient accumulation over micro-batches: "bf16", "fp32" or "fp8".
        activations: how the inputs of norms and activation functions are saved for backward by default: "compute", in that format;
            "coat", in FP8 groups; or "coat-exact", in such groups with scales that map the largest element to the largest value.
        exchange: how FP8 gradients are summed over the ranks by default (`msamp.comm.exchange`).
        mu_rule: how the adaptive factor of that exchange falls (`msamp.comm.grad_scaling`); None: by the exchange's default.
        whole_tensors: whether each tensor has one owner, however uneven the load of the ranks becomes (FP8-LM, Algorithm 1).
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
    exchange: str = "fp32-sum"
    mu_rule: str | None = None
    whole_tensors: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """torch dtype of activations."""
        return self.compute.dtype

    @property
    def fp8(self) -> bool:
        """True where linear layers run FP8 GEMMs."""
        return self.gemm is not None

    @property
    def gathers_fp8(self) -> bool:
        """True where tensor-parallel ranks gather operands in FP8: with one scale per tensor, shared by the ranks, a rank that casts
        gathered values gets the codes that their owner would send. So the numbers are the same, in half the bytes."""
        return self.gemm is not None and self.gemm.tensorwise

    @property
    def fp8_gradients(self) -> bool:
        """True where the gradients of linear weights are FP8."""
        return self.states.grad.scaled and self.states.grad.bytes == 1

    @property
    def scales_loss(self) -> bool:
        """True where gradients need a loss scale, since they are computed in FP16, whose range ends at 2^-24 (Micikevicius et al. 2017)."""
        return self.compute.dtype is torch.float16

    def formats_of(self, kind: str) -> StateFormats:
        """Return the optimizer formats of a kind of parameter. The trainer and `msamp.initialize` use the same ones.

        Args:
            kind: "linear", a weight of a linear layer that the recipe converts; "matrix", another parameter with two dimensions or more;
                "vector", one with fewer.

        Raises:
            ValueError: if `kind` is none of these.
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
        """Return the recipe with some of `master`, `grad`, `m`, `v` replaced, as in Table 6; None keeps the recipe's own. Other matrices
        take the same master and moments, and keep their gradient format.

        A new gradient format also sets the matching accumulator: BF16 for FP8 gradients, else FP32.
        """
        given = {name: fmt for name, fmt in formats.items() if fmt is not None}
        states = self.states.varied(**given)
        matrices = None if self.matrices is None else self.matrices.varied(**{k: v for k, v in given.items() if k != "grad"})
        changed = replace(self, states=states, matrices=matrices)
        if states.grad == self.states.grad:
            return changed
        return replace(changed, accumulator="bf16" if changed.fp8_gradients else "fp32")

    def with_rounding(self, *, master: str | None = None, moments: str | None = None) -> "Recipe":
        """Return the recipe with "nearest" or "stochastic" rounding of the masters or moments of matrices; None keeps the recipe's own.

        Raises:
            ValueError: if the rounding is unknown, or stochastic where no state is rounded.
        """
        given = {"master_rounding": master, "moment_rounding": moments}
        chosen = {name: value for name, value in given.items() if value is not None}
        if not chosen:
            return self
        if "stochastic" in chosen.values() and self.states.update in COLLAGE_UPDATES:
            raise ValueError(
                f"{', '.join(chosen)}: recipe {self.name!r} uses Collage's update {self.states.update!r}, whose BF16 arithmetic rounds "
                "to nearest; drop the option, or use bf16-dmw, which has BF16 weights and FP32 moments"
            )
        varied = {name: getattr(self, name) for name in ("states", "matrices") if getattr(self, name) is not None}
        return replace(self, **{name: states.varied(**chosen) for name, states in varied.items()})

    def with_scaling(self, scaling: Scaling) -> "Recipe":
        """Return the recipe with another scaling rule for activations and grad_outputs; unchanged where there are no FP8 GEMMs."""
        if (gemm := self.gemm) is None:
            return self
        x, g = (replace(cast, scaling=scaling) for cast in (gemm.input, gemm.grad_output))
        products = replace(gemm.output, left=x), replace(gemm.grad_input, left=g), replace(gemm.grad_weight, left=g, right=x)
        return self.with_gemm(Gemms(*products))

    def with_gemm(self, gemm: Gemms) -> "Recipe":
        """Return the recipe with other casts for its FP8 GEMMs, such as one of `GEMMS`.

        Block-scaled operands are not communicated in FP8 (`fp8_wire` becomes False): a block of grad_weight's operands spans tokens of
        several ranks, so the values must be gathered before they are cast.

        Raises:
            ValueError: if the recipe has no FP8 GEMMs.
        """
        if self.gemm is None:
            raise ValueError(f"recipe {self.name} has no FP8 GEMMs, so their casts cannot be changed; use O1, O2 or O3")
        return replace(self, gemm=gemm, fp8_wire=self.fp8_wire and gemm.tensorwise)


# The optimizer changes a weight once per step and knows its amax, so a weight is always scaled by its current amax.
_GEMM = Gemms.of(input=Cast(E4M3), weight=Cast(E4M3, Current()), grad_output=Cast(E5M2))
_JUST_IN_TIME = Gemms.of(input=Cast(E4M3, Current()), weight=Cast(E4M3, Current()), grad_output=Cast(E5M2, Current()))
_EXACT = Gemms.of(input=Cast(E4M3, Exact()), weight=Cast(E4M3, Exact()), grad_output=Cast(E5M2, Exact()))


def _blocks(scaling: Scaling, along: Block, weight: Block) -> Gemms:
    """Block-scaled E4M3 operands: each block has its own scale, so that gradients need no wider range [DeepSeek-V3, section 3.3.2]."""
    return Gemms.of(input=Cast(E4M3, scaling, along), weight=Cast(E4M3, scaling, weight), grad_output=Cast(E4M3, scaling, along))


# How the operands of the FP8 GEMMs are cast, by the names of Megatron-LM's `--fp8-recipe`. "blockwise" is DeepSeek-V3's, with FP32 scales;
# "blockwise-power-of-two" has Transformer Engine's power-of-two scales; "mxfp8" shares an exponent over 32 elements [OCP Microscaling
# v1.0]; "mxfp8-round-up" rounds that exponent up, as Transformer Engine's MXFP8BlockScaling.
GEMMS: dict[str, Gemms] = {
    "delayed": _GEMM,
    "tensorwise": _JUST_IN_TIME,
    "blockwise": _blocks(Exact(), Block(1, 128), Block(128, 128)),
    "blockwise-power-of-two": _blocks(Current(), Block(1, 128), Block(128, 128)),
    "mxfp8": _blocks(SharedExponent(), Block(1, 32), Block(1, 32)),
    "mxfp8-round-up": _blocks(SharedExponent(round_up=True), Block(1, 32), Block(1, 32)),
}

FP32 = Recipe(name="fp32", compute=FP32_FORMAT, gemm=None, weight=FP32_FORMAT, states=FP32_STATES)
FP16_AMP = Recipe(name="fp16-amp", compute=PLAIN_FP16, gemm=None, weight=PLAIN_FP16, states=FP32_STATES)
BF16 = Recipe(name="bf16", compute=BF16_FORMAT, gemm=None, weight=BF16_FORMAT, states=FP32_STATES)
# The paper rounds to nearest, which loses updates below half a code. Stochastic rounding keeps them on average, and a GPT-125M reaches a
# loss 0.15 to 0.17 % lower (eight paired seeds, docs/results). `with_rounding` restores the paper's rounding.
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
O2 = replace(O1, name="O2", states=StateFormats(FP16, E4M3, E4M3, FP16, **_ALL_STATES))
O3 = replace(O2, name="O3", weight=E4M3, fp8_wire=True, shards_optimizer=True)

# An option of Collage's Table 2, or pairs with E4M3 remainders ("fp8") -> its state formats, which are the same for every parameter.
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

# COAT: linear layers with one just-in-time scale per tensor, moments with range expansion, gradients in BF16. The GEMMs read weights in
# E4M3 only, so weights are stored in E4M3 between steps.
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

# Paper -> the recipes that follow it, the one that it proposes first.
PAPERS = {"fp8-lm": (O3, O2, O1), "collage": (COLLAGE_PLUS, COLLAGE_LIGHT), "coat": (COAT,)}


def as_published(paper: str, recipe: Recipe | str | None = None) -> Recipe:
    """Return a recipe with its paper's arithmetic wherever the default differs; docs/guide/papers.md lists the differences.

    Args:
        paper: "fp8-lm", "collage" or "coat".
        recipe: one of `PAPERS[paper]`, or its name; None: the first.

    Raises:
        ValueError: an unknown paper, or a recipe of another one.
    """
    if paper not in PAPERS:
        raise ValueError(f"paper is {paper!r}; choose one of {', '.join(PAPERS)}")
    own = PAPERS[paper][0] if recipe is None else by_name(recipe)
    if own.name not in (names := [each.name for each in PAPERS[paper]]):
        raise ValueError(f"recipe {own.name!r} is not of the paper {paper!r}; choose one of {', '.join(names)}")
    if paper == "fp8-lm":
        nearest = own.with_rounding(master="nearest", moments="nearest")
        return replace(nearest, exchange="nccl", mu_rule="paper", accumulator="fp8", whole_tensors=True)
    if paper == "collage":
        states = replace(own.states, update=f"{own.states.update.removesuffix('-published')}-published")
        return replace(own, states=states, vectors=states)
    # The code that COAT's authors published casts 16-bit weights in every forward, with scales amax / 448.
    return replace(own, weight=FP16, gemm=_EXACT, activations="coat-exact")


def register(recipe: Recipe) -> Recipe:
    """Register a recipe, so that `--precision`, `msamp.initialize` and checkpoints accept its name; return the recipe.

    Every process that trains with it must register it.

    Raises:
        ValueError: if another recipe already has that name.
    """
    if _TABLE.get(recipe.name, recipe) != recipe:
        raise ValueError(f"precision {recipe.name!r} already names another recipe; choose a name that is not one of {', '.join(names())}")
    return _TABLE.setdefault(recipe.name, recipe)


def names() -> tuple[str, ...]:
    """The names of all recipes, the built-in ones first."""
    return tuple(_TABLE)


def by_name(name: str | Recipe) -> Recipe:
    """Return the recipe that `--precision` or `--opt-level` names, or the Recipe itself; O0 is bf16.

    Raises:
        ValueError: if the name is unknown; the message lists the accepted ones.
    """
    if (known := name if isinstance(name, Recipe) else _TABLE.get("bf16" if name == "O0" else name)) is None:
        raise ValueError(f"precision {name!r} is unknown; choose one of {', '.join(names())} (O0 is bf16)")
    return known


def describe(recipe: Recipe) -> str:
    """Return in one sentence what a recipe does to a linear layer and its optimizer states, with formats by the names of the flags."""
    states = recipe.states
    gemm = f"GEMMs in FP8, activations in {recipe.compute.name}" if recipe.fp8 else f"GEMMs and activations in {recipe.compute.name}"
    own = states.update != "fp32" or recipe.weight == states.master
    master = "which is its own master" if own else f"master weight {states.master.name}"
    moments = f"moments {states.m.name} and {states.v.name}"
    update = "" if states.update == "fp32" else f", Collage's update {states.update}"
    rounded = "" if states.master_rounding == "nearest" else ", masters rounded stochastically"
    return f"{gemm}; weight {recipe.weight.name}, {master}; gradient {states.grad.name}; {moments}{update}{rounded}"

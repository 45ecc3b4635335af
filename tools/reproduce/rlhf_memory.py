"""Count the bytes of PPO's models for a LLaMA's shape: FP8-LM, Table 4, measures LLaMA-7B in AlpacaFarm.

PPO holds four models: a policy and a value model, which are trained, and a frozen reference and reward model. At O0 all are in BF16; at
FP8 levels the linear weights of frozen ones take one byte (`megatron.lm.post.models.freeze`). The counts follow from the shapes and from
`Recipe.formats_of`; a scale per tensor (4 bytes) is left out.

The paper's 62 % is 16 bytes of state per parameter against 6, and its 16 bytes include an FP32 gradient. A BF16 model in the user's own
loop has BF16 gradients at O0, 14 bytes. So both cases are counted.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn

from msamp.numerics.recipe import BF16, O2, O3, Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.shard import gradient
from msamp.optim.updates import MASTER
from tools.reproduce.entry import Finding

WEIGHTS4, STATES4 = -32.0, -62.0  # percent, from BF16


@dataclass(frozen=True)
class Stored:
    """Bytes of models and optimizers by kind, and their number of parameters. Weights may be their own masters (O1, O2)."""

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0
    parameters: int = 0

    @property
    def states(self) -> int:
        """Return the bytes of the optimizers."""
        return self.masters + self.moments

    def __add__(self, other: "Stored") -> "Stored":
        ours, theirs = asdict(self), asdict(other)
        return Stored(**{kind: ours[kind] + theirs[kind] for kind in ours})


def stored(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Stored:
    """Return the bytes, scales included, of a model, its gradients and its optimizer; a parameter that two modules share counts once."""

    def size(x: torch.Tensor | None) -> int:
        return 0 if x is None else x.payload.nbytes + x.scale_inv.nbytes if isinstance(x, ScalingTensor) else x.nbytes

    total = Stored()
    for p in model.parameters():
        state = {} if optimizer is None else optimizer.state.get(p, {})
        tensors = {key: size(x) for key, x in state.items() if isinstance(x, torch.Tensor) and x.dim()}
        total += Stored(size(p), size(gradient(p)), tensors.pop(MASTER.key, 0), sum(tensors.values()), p.numel())
    return total


@dataclass(frozen=True)
class Shape:
    """Shape of a LLaMA without grouped queries; embedding and LM head are two matrices."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int

    def elements(self, outputs: int) -> dict[str, int]:
        """Return the elements by kind of parameter, for a head with `outputs` outputs: the vocabulary, or 1 for a value or reward model."""
        return {
            "linear": self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.ffn),
            "matrix": (self.vocabulary + outputs) * self.hidden,
            "vector": (2 * self.layers + 1) * self.hidden,
        }


LLAMA_7B = Shape(layers=32, hidden=4096, ffn=11008, vocabulary=32000)


def trained(shape: Shape, outputs: int, recipe: Recipe) -> Stored:
    """Return the bytes of a BF16 model that `msamp.initialize` trains with AdamW, including the gradients after backward on one process."""
    total = Stored()
    for kind, elements in shape.elements(outputs).items():
        formats, weight = recipe.formats_of(kind), recipe.weight if kind == "linear" else recipe.compute
        gradient = formats.grad.bytes if kind == "linear" and recipe.fp8_gradients else recipe.compute.bytes
        master = 0 if formats.master == weight else formats.master.bytes
        moments = formats.m.bytes + formats.v.bytes
        total += Stored(elements * weight.bytes, elements * gradient, elements * master, elements * moments, elements)
    return total


def frozen(shape: Shape, outputs: int, recipe: Recipe) -> Stored:
    """Return the bytes of a model that `megatron.lm.post.models.freeze` has frozen."""
    elements = shape.elements(outputs)
    linear = recipe.compute if recipe.gemm is None else recipe.gemm.weight.format
    weights = elements.pop("linear") * linear.bytes + sum(elements.values()) * recipe.compute.bytes
    return Stored(weights=weights, parameters=sum(shape.elements(outputs).values()))


def ppo(shape: Shape, recipe: Recipe) -> Stored:
    """Return the bytes of policy, value model, reference and reward model."""
    words, number = shape.vocabulary, 1
    kept = [build(shape, outputs, recipe) for build in (trained, frozen) for outputs in (words, number)]
    return sum(kept, Stored())


def counted(shape: Shape = LLAMA_7B, name: str = "LLaMA-7B") -> Iterator[Finding]:
    """Yield weights, and states with gradients, of all models of PPO, in percent relative to O0."""
    base = ppo(shape, BF16)
    wide = sum(sum(shape.elements(outputs).values()) for outputs in (shape.vocabulary, 1)) * 2  # FP32 in place of BF16 gradients
    for recipe in (O2, O3):
        models = ppo(shape, recipe)
        case = f"{recipe.name}, {name} counted"
        yield Finding(f"{case}: weights of all models from O0's", 100 * (models.weights / base.weights - 1), WEIGHTS4, "%")
        for gradients, more in (("BF16", 0), ("FP32", wide)):
            share = (models.states + models.gradients) / (base.states + base.gradients + more)
            yield Finding(f"{case}: states and gradients from O0's with {gradients} gradients", 100 * (share - 1), STATES4, "%")

"""Train with gradients that simulated ranks sum in FP8, to see what that costs in loss: FP8-LM, section 2.1.

One process trains a small GPT on bytes. Each of N ranks has its own sequence of a step's batch and its own gradient. The gradients of the
linear weights are scaled, rounded to E4M3 and summed by the trainer's own code (`msamp.comm`), with the strategies of Figure 7; everything
else is summed in FP32. Weights and AdamW's states are FP32 in all runs, so that only the sum differs. Ranks of one seed see the same
sequences under every strategy.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msamp.comm.exchange import FP32SumWire, NCCLWire
from msamp.comm.grad_scaling import MU_RULES, exceeds, next_mu
from msamp.numerics.formats import E4M3
from tools.reproduce.fig7 import exchange, shared_scales
from tools.reproduce.trainings import Bytes, Loop, pieces

UNQUANTIZED = "FP32 gradients"
# name -> rule for mu, or the factor of the payloads
STRATEGIES: Mapping[str, str] = MappingProxyType(
    {"fp32-sum": "post", "auto-halve": "halve", "auto-paper": "paper", "pre": "pre", "post": "post"}
)


class Summing:
    """The reduction of all linear weights' gradients by one of `STRATEGIES`, with a mu per weight."""

    def __init__(self, strategy: str, weights: int, ranks: int) -> None:
        self.rule, self.ranks = STRATEGIES[strategy], ranks
        self.adapts = self.rule in MU_RULES
        self.wire = FP32SumWire(E4M3) if strategy == "fp32-sum" else NCCLWire(E4M3)  # without NCCL it adds the ranks' payloads in a chain
        self.mu = torch.ones(weights, dtype=torch.float64)

    def mean(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the average over ranks of each weight's gradients, [N, rows, columns] each."""
        means, over = [], []
        for g, scale, mu in zip(gradients, shared_scales(gradients), self.mu.tolist(), strict=True):
            factor = scale * {"pre": 1 / self.ranks, "post": 1.0}.get(self.rule, mu)
            reduced, payloads = exchange(self.wire, g, factor)
            assert reduced.scale_inv is not None
            means.append((reduced.own.float() * reduced.scale_inv).view(g.shape[1:]))
            if self.adapts:
                saturated = (torch.stack([*payloads, reduced.own]).float().abs() >= E4M3.max).sum(1)
                over.append(exceeds(saturated.amax(), torch.tensor(g[0].numel())))
        if self.adapts:
            self.mu = next_mu(self.mu, torch.stack(over), self.ranks, self.rule)
        return means


def train(strategy: str, loop: Loop, text: Tensor, seed: int, every: int = 10) -> Iterator[tuple[int, float]]:
    """Train on the first 19 twentieths of a text, with as many ranks as a step has sequences.

    Args:
        strategy: a key of `STRATEGIES`, or `UNQUANTIZED`.
        loop: `batch` is the number of ranks.
        text: bytes, uint8.
        seed: of weights and sequences.
        every: steps between two losses.

    Yields:
        (step, mean training loss since the last one), and last (steps, validation loss on the rest), in nats per byte.
    """
    torch.manual_seed(seed)
    model, cut, losses = Bytes(loop), len(text) * 19 // 20, []
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=loop.lr, betas=(0.9, 0.95), weight_decay=0.1)
    of_layers = {id(p) for p in model.layers.parameters()}
    linear = [i for i, p in enumerate(parameters) if p.dim() == 2 and id(p) in of_layers]
    summing = None if strategy == UNQUANTIZED else Summing(strategy, len(linear), loop.batch)

    def loss_of(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    for step, tokens in enumerate(pieces(text[:cut], loop, loop.steps, seed), 1):
        for group in optimizer.param_groups:
            group["lr"] = loop.lr_at(step)
        of_ranks = []
        for sequence in tokens.split(1):
            loss = loss_of(sequence)
            of_ranks.append(torch.autograd.grad(loss, parameters))
            losses.append(float(loss.detach()))
        gradients = [torch.stack(parts) for parts in zip(*of_ranks, strict=True)]
        means = [g.mean(0) for g in gradients]
        if summing is not None:
            with torch.no_grad():
                for i, mean in zip(linear, summing.mean([gradients[i] for i in linear]), strict=True):
                    means[i] = mean
        for p, mean in zip(parameters, means, strict=True):
            p.grad = mean
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % every == 0:
            yield step, sum(losses) / len(losses)
            losses = []
    with torch.no_grad():
        valid = [float(loss_of(tokens)) for tokens in pieces(text[cut:], loop, 16, 0)]
    yield loop.steps, sum(valid) / len(valid)

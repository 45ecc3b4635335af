"""What tests of FSDP2 and of fused blocks share: nets, a loop, the filter that converts every linear layer, and what a call refuses."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from msamp.nn.saved_activations import AS_IT_IS, Saved
from msamp.nn.transformer_block import TransformerBlock


def everything(name: str, layer: nn.Linear) -> bool:
    return True


def message(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises, for ranks to return."""
    try:
        call()
    except (ValueError, RuntimeError) as error:  # torch wraps what loading raises
        return str(error)
    return "nothing was refused"


def wanting(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The losses of a step on each batch, the mean square of what the model misses."""
    losses = []
    for x, y in batches:
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context with as many threads as the ranks have: a CPU's product splits its sum by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Counted(DefaultAllGather):
    """FSDP's own all-gather, which remembers what it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[torch.dtype, int]] = []

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent.append((output_tensor.dtype, output_tensor.nbytes))
        return super().__call__(output_tensor, *args, **kwargs)


class Net(nn.Module):
    """Blocks whose rows two ranks share equally, unequally, and so that one has none."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)), nn.Linear(64, 33)])
        self.head = nn.Linear(33, 1)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FusedNet(nn.Module):
    """Two blocks of width 64 that run as fused functions once they are converted.

    Args:
        saved: how they keep the inputs of norms and activations.
    """

    def __init__(self, saved: Saved = AS_IT_IS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([TransformerBlock(64, 4, 48, bias=True, saved=saved) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert block.fused
            x = block(x)
        return x

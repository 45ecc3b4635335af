"""The ways in which a pair of `msamp.initialize` is carried over: loaded, copied, pickled, saved, converted a second time."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import msamp
from helpers.numerics import make

Pair = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[], nn.Module]


def net() -> nn.Module:
    """Two linear layers of 32 x 64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def begin(level: str, model: nn.Module | None = None, lr: float = 1e-2, **settings: Any) -> Pair:
    """The pair of `net()`, or of a model, with torch's AdamW."""
    model = net() if model is None else model
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), level, **{"clip_grad": float("inf"), **settings})


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a batch of 16 x 32, the same on every rank."""
    x = make("normal", (16, 32), step)
    return (model(x) - x.roll(1, 1)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of its state; on several processes the first one's, which has all of it under ZeRO."""
    states = optimizer.state_dict()
    if not torch.distributed.is_initialized():
        return copy.deepcopy(states)
    files = [_file(states)]  # plain pickle knows no float8
    torch.distributed.broadcast_object_list(files)
    return torch.load(io.BytesIO(files[0]), weights_only=True)


def _file(x: Any) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def written(x: Any) -> Any:
    """`x` after a file of torch.save that holds tensors only."""
    return torch.load(io.BytesIO(_file(x)), weights_only=True)


def _loaded_into_itself(pair: Pair, level: str, make_model: Make, settings: dict[str, Any]) -> Pair:
    states = copy.deepcopy(pair[0].state_dict()), states_of(pair[1])
    pair[0].load_state_dict(states[0])
    pair[1].load_state_dict(states[1])
    return pair


def _loaded_from_a_file(pair: Pair, level: str, make_model: Make, settings: dict[str, Any]) -> Pair:
    states = written([pair[0].state_dict(), states_of(pair[1])])
    model, optimizer = begin(level, make_model(), **settings)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return model, optimizer


def _second_call(pair: Pair, level: str, make_model: Make, settings: dict[str, Any]) -> Pair:
    """The states of the first optimizer go into the second."""
    states = states_of(pair[1])
    model, optimizer = begin(level, pair[0], **settings)
    optimizer.load_state_dict(states)
    return model, optimizer


_WAYS: dict[str, Callable[[Pair, str, Make, dict[str, Any]], Pair]] = {
    "load": _loaded_into_itself,
    "copy": lambda pair, *_: copy.deepcopy(pair),
    "pickle": lambda pair, *_: pickle.loads(pickle.dumps(pair)),
    "save": _loaded_from_a_file,
    "second call": _second_call,
}
WAYS = tuple(_WAYS)
COLLECTIVE = ("load", "save", "second call")  # what a loop on several processes does; the others refuse its optimizer by name


def carried(way: str, pair: Pair, level: str, make_model: Make = net, **settings: Any) -> Pair:
    """The pair after a way. `make_model` makes the unconverted model; `settings` are those of its `begin`."""
    return _WAYS[way](pair, level, make_model, settings)

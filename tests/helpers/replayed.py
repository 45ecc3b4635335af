"""CUDA graphs without a GPU: a replay runs again what was to be captured.

with replayed.on_a_cpu() as captures:
    graphs = StageGraphs(training, "step")
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from megatron.lm.graphs.replay import Captured, Replays
from msamp.comm.grad_sync import GradSync


class RunsAgain:
    """Stands for a CUDA graph: replayed, it runs what was captured."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.replays = run, 0

    def replay(self) -> None:
        self.replays += 1
        self.run()

    def reset(self) -> None:
        self.run = gone


def gone() -> None:
    raise AssertionError("replayed after its release")


class Captures(list[Captured]):
    """What was captured, in order; `before` is called ahead of each."""

    def before(self) -> None:
        pass


@contextlib.contextmanager
def on_a_cpu() -> Iterator[Captures]:
    """Graphs are stand-ins in this block."""
    captures = Captures()

    def capture(graphs: Replays, run: Callable[[], None], pool: Any, finishes: bool) -> Captured:
        captures.before()
        captures.append(Captured(RunsAgain(run), {}, finishes, []))  # type: ignore[arg-type]
        return captures[-1]

    cuda = {name: patch.object(torch.cuda, name, lambda *_: None) for name in ("Stream", "graph_pool_handle")}
    restored = patch.object(GradSync, "restore", lambda *_: None)  # the averages are there: it ran
    with cuda["Stream"], cuda["graph_pool_handle"], restored, patch.object(Replays, "_capture", capture):
        yield captures

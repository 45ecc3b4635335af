"""What `--fp8-guard` measures and does in a run: it arms the guard, checks after measured steps, and reports changes."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.shell.terminal import wrapped
from megatron.lm.training.state import Training
from msamp.nn.precision_guard import LayerGuard


class GuardLog:
    """Runs the guard of a training; without `--fp8-guard` nothing.

    Each change is a line of the log and an entry of kind "fp8_guard" in the metrics file: the iteration after which it applies, the layer,
    `raised`, `why`, and for a return the number of `steps` in BF16. `layers_in_bf16` is their number then.

    Args:
        training: the training state.
        metrics: receives the entries.
    """

    def __init__(self, training: Training, metrics: Metrics) -> None:
        self.training, self.metrics = training, metrics

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Measure the step inside the block if it is due."""
        guard = self.training.guard
        if guard is not None and guard.due(iteration):
            guard.arm()
        try:
            yield
        except BaseException:
            if guard is not None:
                guard.disarm()
            raise

    def check(self, iteration: int) -> bool:
        """Judge a measured step; return whether a layer changed. Collective, and waits for the device, after a measured step."""
        guard = self.training.guard
        if guard is None or not guard.armed:
            return False
        self.training.optimizer.wait()  # for ZeRO's weight gathers
        changes = guard.check(iteration)
        for change in changes:
            entry = {"kind": "fp8_guard", "iteration": iteration, "layers_in_bf16": len(guard.raised)}
            self.metrics.write(entry | {"layer": change.layer, "raised": change.raised, "why": change.why, "steps": change.steps})
            if self.metrics.main:
                print(wrapped(f"iteration {iteration}, --fp8-guard: {change}"), flush=True)
        return bool(changes)


def describe_guard(guard: LayerGuard) -> str:
    """Return a line about the guard for the start of a run."""
    bounds = asdict(guard.bounds)
    listed = f"saturation {bounds['saturation']:g}, underflow {bounds['underflow']:g}, SQNR {bounds['sqnr_db']:g} dB"
    raised = f"; {len(guard.raised)} of them are in BF16" if guard.raised else ""
    return f"FP8 guard: {len(guard.names)} linear layers, checked every {guard.every} steps for {listed}{raised}"

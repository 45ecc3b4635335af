"""The reports of `--fp8-guard`: a line at the start of a run, and one for each layer that it raises or returns."""

from collections.abc import Sequence
from dataclasses import asdict

from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.shell.terminal import wrapped
from msamp.nn.precision_guard import Change, LayerGuard


def report_changes(metrics: Metrics, guard: LayerGuard | None, changes: Sequence[Change]) -> None:
    """Print each change on rank 0, and write it to the metrics file as an entry of kind "fp8_guard": the iteration after which it applies,
    the layer, `raised`, `why`, for a return the number of `steps` in BF16, and how many `layers_in_bf16` there are then."""
    for change in changes:
        assert guard is not None
        entry = {"kind": "fp8_guard", "iteration": change.step, "layers_in_bf16": len(guard.raised)}
        metrics.write(entry | {"layer": change.layer, "raised": change.raised, "why": change.why, "steps": change.steps})
        if metrics.main:
            print(wrapped(f"iteration {change.step}, --fp8-guard: {change}"), flush=True)


def describe_guard(guard: LayerGuard) -> str:
    """Return a line about the guard for the start of a run."""
    bounds = asdict(guard.bounds)
    listed = f"saturation {bounds['saturation']:g}, underflow {bounds['underflow']:g}, SQNR {bounds['sqnr_db']:g} dB"
    raised = f"; {len(guard.raised)} of them are in BF16" if guard.raised else ""
    return f"FP8 guard: {len(guard.names)} linear layers, checked every {guard.every} steps for {listed}{raised}"

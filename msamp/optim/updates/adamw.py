"""AdamW with FP32 arithmetic and states in any format, from FP32 to E4M3 and COAT's (FP8-LM section 2.2; COAT, part 1)."""

from collections.abc import Mapping
from typing import Any

from msamp.kernels import ops
from msamp.kernels.reference.adamw import Hyper, hyper_numbers
from msamp.kernels.reference.adamw import adamw as reference_adamw
from msamp.kernels.reference.coat_adamw import coat_adamw as reference_coat_adamw
from msamp.kernels.tables import Tables
from msamp.numerics.range_expand import Expanded
from msamp.optim.states import warn_of
from msamp.optim.updates.update import Formats, State, StepInputs, Update, UpdateBatch

MOMENTS = (State("exp_avg", "m", "m"), State("exp_avg_sq", "v", "v", non_negative=True))


class AdamW(Update):
    """AdamW with FP32 arithmetic: `kernels.reference.adamw`, or `coat_adamw` if a moment has a COAT format."""

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Accept all formats, but warn about those with which training is known to fail."""
        warn_of(states)

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Return the hyperparameters in the order of `hyper_numbers`."""
        return hyper_numbers(Hyper(*super().numbers(group)))

    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        coat = any(isinstance(states[0], Expanded) for states in (batch.ms, batch.vs))
        kernel, twin = (ops.coat_adamw, reference_coat_adamw) if coat else (ops.adamw, reference_adamw)
        run = kernel if batch.by_rows else twin
        run(tables, batch, batch.hyper, *inputs, decoupled=batch.group["decoupled"], rounding=batch.rounding)

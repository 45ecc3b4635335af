"""The updates that an optimizer can take, each declared once: its states, what it refuses, and how it is launched and emulated.

The optimizer, its rehearsal, ZeRO, checkpoints, the plan of memory and the reports iterate over what an update declares. None of them
names a state. So a new update is one object, which may stand in a user's own file:

    class Momentum(Update):
        def run(self, tables, batch, inputs): ...

    updates.register(Momentum("momentum", (MASTER, State("momentum_buffer", "m", "momentum")), kept=("momentum_buffer",)))
    optimizer = FP8AdamW(params, formats=StateFormats(m=E4M3, update="momentum"))

Every process registers it before it builds an optimizer.

A state is a tensor in the shape of its parameter. Where ZeRO cuts a parameter into rows, the state is cut into the same rows; what a
format keeps for groups of a row (COAT) goes with the row. The number of steps, FP32 0-dim under the key `step`, is every update's and is
not declared.

**Scales.** A scaled state is stored in one pass, so its scale must be known before its values. It follows from a bound, and the bound from
the amax of the state as it was last stored, over the whole parameter. An update names the states of which it wants this amax (`kept`);
the optimizer keeps and combines them over the ranks, and hands them to `run` as rows of one table: 0 the gradient's (`GRAD`), then those
of `kept` in their order, then the master's.
"""

from msamp.optim.updates.registry import by_name, own_keys, register, remainders, take_options, updates_of
from msamp.optim.updates.update import (
    MASTER,
    WEIGHT,
    Formats,
    State,
    StepInputs,
    Update,
    UpdateBatch,
    format_names,
    formats_of,
    named_formats,
)

__all__ = [
    "MASTER", "WEIGHT", "Formats", "State", "StepInputs", "Update", "UpdateBatch", "by_name", "format_names", "formats_of",
    "named_formats", "own_keys", "register", "remainders", "take_options", "updates_of",
]  # fmt: skip

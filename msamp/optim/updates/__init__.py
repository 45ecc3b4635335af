"""The optimizer's update rules. Each declares its states, the arguments that it rejects, and how it runs on a batch of tensors.

The optimizer, `update_error`, ZeRO, checkpoints, the memory planner and reports read these declarations and name no state themselves. So a
new update rule is one object, which can be in a user's own file:

    class Momentum(Update):
        def run(self, tables, batch, inputs): ...

    updates.register(Momentum("momentum", (MASTER, State("momentum_buffer", "m", "momentum")), kept=("momentum_buffer",)))
    optimizer = LowPrecisionOptimizer(params, formats=StateFormats(m=E4M3, update="momentum"))

Every process must register it before it builds an optimizer.

A state is a tensor with the shape of its parameter. If ZeRO splits a parameter into rows, the state is split into the same rows, with the
group maxima and exponents of a format (COAT). The step count, FP32 0-dim under the key `step`, belongs to every update and is not declared.

**Scales.** A scaled state is stored in one pass, so its scale must be known before its values. It follows from a bound, and the bound from
the amax of the stored state over the whole parameter. An update lists the states whose amax it requires in `kept`. The optimizer remembers
these amaxes, combines them over ranks, and passes them to `run` as rows of one table: row 0 is the gradient's (`GRAD`), then the rows of
`kept` in order, then the master's.
"""

from msamp.optim.updates.registry import (
    by_name,
    expected_states,
    kept_states,
    own_keys,
    register,
    remainders,
    take_options,
    update_of,
    updates_of,
)
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
    "MASTER", "WEIGHT", "Formats", "State", "StepInputs", "Update", "UpdateBatch", "by_name", "expected_states",
    "format_names", "formats_of", "kept_states", "named_formats", "own_keys", "register", "remainders", "take_options", "update_of",
    "updates_of",
]  # fmt: skip

"""AdamW with states in any format, from FP32 to E4M3 and COAT's (FP8-LM section 2.2; COAT, part 1), and Collage's options of it: BF16
arithmetic with pairs of BF16 or a compensation (Collage, Table 2)."""

from collections.abc import Mapping
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.reference.adamw import Hyper, hyper_numbers, weight_bound
from msamp.kernels.reference.adamw import adamw as reference_adamw
from msamp.kernels.reference.coat_adamw import coat_adamw as reference_coat_adamw
from msamp.kernels.reference.collage import VARIANTS
from msamp.kernels.reference.collage import collage as reference_collage
from msamp.kernels.tables import Tables
from msamp.numerics.formats import BF16, REMAINDER_E4M3
from msamp.numerics.range_expand import Expanded
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.states import SEEN, warn_once
from msamp.optim.updates.update import MASTER, ROUNDING_FIELDS, WEIGHT, Formats, State, StepInputs, Update, UpdateBatch

MOMENTS = (State("exp_avg", "m", "m"), State("exp_avg_sq", "v", "v", non_negative=True))


class AdamW(Update):
    """AdamW with FP32 arithmetic: `kernels.reference.adamw`, or `coat_adamw` if a moment has a COAT format."""

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Accept all formats, but warn about those with which training is known to fail."""
        for named in SEEN.keys() & states.items():
            warn_once(SEEN[named])

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Return the hyperparameters in the order of `hyper_numbers`."""
        return hyper_numbers(Hyper(*super().numbers(group)))

    def weight_bounds(self, hyper: torch.Tensor, amaxes: torch.Tensor) -> torch.Tensor:
        return weight_bound(amaxes[self.master_row], hyper[0] * hyper[-1])

    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        coat = any(isinstance(states[0], Expanded) for states in (batch.ms, batch.vs))
        kernel, twin = (ops.coat_adamw, reference_coat_adamw) if coat else (ops.adamw, reference_adamw)
        run = kernel if batch.by_rows else twin
        run(tables, batch, batch.hyper, *inputs, decoupled=batch.group["decoupled"], rounding=batch.rounding)


class Collage(AdamW):
    """AdamW with BF16 arithmetic, a row of `kernels.reference.collage.VARIANTS` [Collage, algorithm 2 and Table 2]."""

    decoupled_only = True

    def check_group(self, states: Formats, decoupled: bool) -> None:
        """Require BF16 for all four formats."""
        four = {key: states[key] for key in ("master", "grad", "m", "v")}
        if any(states.get(name) == "stochastic" for name in ROUNDING_FIELDS):
            raise ValueError(
                f"update {self.name!r} rounds to nearest in BF16, but stochastic rounding was requested; choose nearest, or use update fp32"
            )
        if set(four.values()) != {BF16.name}:
            given = ", ".join(f"{key} {fmt}" for key, fmt in four.items())
            raise ValueError(
                f"update {self.name!r} computes in BF16, but the formats are {given}; set all four to bf16, or use update fp32"
            )

    def check_parameter(self, p: torch.Tensor) -> None:
        """Require a plain BF16 tensor."""
        if isinstance(p, ScalingTensor) or p.dtype is not torch.bfloat16:
            kind = "a ScalingTensor" if isinstance(p, ScalingTensor) else p.dtype
            raise ValueError(
                f"a parameter is {kind}; update {self.name!r} requires plain torch.bfloat16: pass an unconverted model.bfloat16()"
            )

    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        run = ops.collage if batch.by_rows else reference_collage
        run(tables, batch, batch.hyper, self.name, inputs.coefficient, inputs.usable)


def collage_update(name: str) -> Collage:
    """Return the update for a BF16 row of `VARIANTS`."""
    variant = VARIANTS[name]
    fmt = BF16 if variant.remainder is torch.bfloat16 else REMAINDER_E4M3
    states: tuple[State, ...] = MOMENTS
    if variant.weight != "nothing":
        states += (State("weight_remainder", fmt, MASTER.column, remainder_of=WEIGHT),)
    if variant.pair_v:
        states += (State("exp_avg_sq_remainder", fmt, "v", remainder_of="exp_avg_sq"),)
    return Collage(name, states, in_fp32="fp32")

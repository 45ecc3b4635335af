"""`StateFormats`: the formats of an optimizer's states and the arithmetic of its update, a part of a recipe (`msamp.numerics.recipe`)."""

from dataclasses import dataclass, replace
from typing import Any

from msamp.numerics.formats import ALL as ALL_FORMATS
from msamp.numerics.formats import FP32 as FP32_FORMAT
from msamp.numerics.formats import Format
from msamp.numerics.stochastic_rounding import ROUNDINGS


@dataclass(frozen=True)
class StateFormats:
    """The optimizer's four formats (FP8-LM equation 8 and Table 6), and the arithmetic of its update.

    Attributes:
        master, grad, m, v: formats of the master weight, the gradient and the two moments. COAT's formats are for `m` and `v` only.
        update: "fp32", AdamW; one of Collage's BF16 updates (algorithm 2 and Table 2), which require BF16 in all four: "a" (BF16 alone),
            "kahan" (compensated weight), "light" (weight as a pair), "plus" (weight and v as pairs), "fp8" (plus, with remainders in
            E4M3); or another update registered with `msamp.optim.updates`. The optimizer rejects an unknown update, and formats that the
            update does not support.
        master_rounding, moment_rounding: how masters and moments are rounded when they are stored, "nearest" or "stochastic". Stochastic
            rounding preserves updates below half a code on average (`msamp.numerics.stochastic_rounding`). FP32 is not rounded. COAT's
            moments are rounded to nearest, because their groups follow the values. So is v where nearest rounding keeps it within 2 %,
            such as FP16 at beta2 0.95 (`kernels.reference.store.rounding_of`).

    Raises:
        ValueError: COAT's format for another state, an unknown rounding, or stochastic rounding where no state is rounded.
    """

    master: Format = FP32_FORMAT
    grad: Format = FP32_FORMAT
    m: Format = FP32_FORMAT
    v: Format = FP32_FORMAT
    update: str = "fp32"
    master_rounding: str = "nearest"
    moment_rounding: str = "nearest"

    def __post_init__(self) -> None:
        for name, rounds in self.rounded().items():
            if getattr(self, name) not in ROUNDINGS:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(ROUNDINGS)}")
            if getattr(self, name) != "nearest" and not rounds:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but with {self} it rounds nothing: FP32 is not rounded, and COAT's moments are "
                    "rounded to nearest; choose nearest, or another format"
                )
        for name in ("master", "grad"):
            if getattr(self, name).group:
                legal = ", ".join(fmt.name for fmt in ALL_FORMATS)
                raise ValueError(f"{name} is {getattr(self, name)}, a format for the moments m and v only; choose one of {legal}")

    def rounded(self) -> dict[str, bool]:
        """Map `master_rounding` and `moment_rounding` to whether any of their states can be rounded stochastically."""
        masters, moments = ([fmt.bytes < FP32_FORMAT.bytes and not fmt.group for fmt in x] for x in ((self.master,), (self.m, self.v)))
        return {"master_rounding": any(masters), "moment_rounding": any(moments)}

    def varied(self, **changes: Any) -> "StateFormats":
        """Return a copy with some fields replaced. A rounding that no longer applies to any state becomes "nearest", unless it is itself
        among the changes.

        Raises:
            ValueError: as for the class.
        """
        plain = replace(self, master_rounding="nearest", moment_rounding="nearest")
        changed = replace(plain, **{name: value for name, value in changes.items() if name not in self.rounded()})
        kept = {name: getattr(self, name) for name, rounds in changed.rounded().items() if rounds}
        return replace(changed, **kept | {name: value for name, value in changes.items() if name in self.rounded()})

    def __str__(self) -> str:
        return f"master {self.master}, grad {self.grad}, m {self.m}, v {self.v}"


FP32_STATES = StateFormats()

"""Storage formats and their limits (FP8-LM appendix A.1; IEEE 754 for the wider ones)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Format:
    """A floating-point storage format.

    Attributes:
        name: its name in flags and recipes.
        dtype: the torch dtype of a payload.
        max: largest finite value.
        tiny: smallest normal value.
        smallest: smallest subnormal value.
        mantissa_bits: explicit fraction bits.
        scaled: True if a payload of this format has a `scale_inv`.
        group: how many elements of a row share a maximum and an exponent, both FP32, stored next to the payload [COAT]; 0: no groups.
    """

    name: str
    dtype: torch.dtype
    max: float
    tiny: float
    smallest: float
    mantissa_bits: int
    scaled: bool
    group: int = 0

    @property
    def gain(self) -> float:
        """The factor that gives values rounded to this format the slope 1 over the values before.

        An error of rounding to nearest is orthogonal to the rounded value, not to the value before, so the slope is 1 less the error's
        share of the energy: 4^-m / (32 ln 2) with m bits, 0.28 % in E5M2 and 0.07 % in E4M3, for any smooth distribution of normal numbers.
        """
        return 1 / (1 - 4.0**-self.mantissa_bits / (32 * math.log(2)))

    @property
    def bytes(self) -> int:
        """Bytes per element of the payload."""
        return self.dtype.itemsize

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of `shape`: the payload and the FP32 numbers of its groups, without a per-tensor scale."""
        *rows, columns = shape or (1,)
        return math.prod(rows) * (columns * self.bytes + (8 * -(-columns // self.group) if self.group else 0))

    def __str__(self) -> str:
        return self.name


E4M3 = Format("fp8-e4m3", torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 3, True)
E5M2 = Format("fp8-e5m2", torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2, True)
FP16 = Format("fp16", torch.float16, 65504.0, 2.0**-14, 2.0**-24, 10, True)
BF16 = Format("bf16", torch.bfloat16, (2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 7, False)
FP32 = Format("fp32", torch.float32, (2.0 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 23, False)

ALL = (FP32, BF16, FP16, E4M3, E5M2)
# Plain torch.float16, for classic FP16 training, which scales the loss instead. No flag or optimizer state uses it.
PLAIN_FP16 = replace(FP16, scaled=False)

# For remainders only: their unit follows from the first component of the pair (`mcf.remainder_payload`).
REMAINDER_E4M3 = replace(E4M3, name="remainder-e4m3", scaled=False)

# For optimizer states only: FP8 in groups of 128 with dynamic range expansion (`range_expand`).
COAT_E4M3 = replace(E4M3, name="coat-e4m3", scaled=False, group=128)
COAT_E5M2 = replace(E5M2, name="coat-e5m2", scaled=False, group=128)
EXPANDED = (COAT_E4M3, COAT_E5M2)


def by_name(name: str) -> Format:
    """Return the format of that name.

    Raises:
        ValueError: if the name is not one of `ALL` and `EXPANDED`.
    """
    for fmt in (*ALL, *EXPANDED):
        if fmt.name == name:
            return fmt
    raise ValueError(f"format {name!r} is unknown; choose one of {', '.join(f.name for f in (*ALL, *EXPANDED))}")


def of_dtype(dtype: torch.dtype) -> Format:
    """Return the format that stores `dtype`; for FP16 the scaled one, not `PLAIN_FP16`.

    Raises:
        ValueError: if no format stores `dtype`.
    """
    for fmt in ALL:
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"{dtype} is not a storage format; choose one of {', '.join(str(f.dtype) for f in ALL)}")

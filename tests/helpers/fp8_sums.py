"""FP8 products whose bits a Hopper GPU recorded (`golden/accumulation.py` wrote golden/accumulation.json), and what they are by definition.

Operands are integers of a recurrence, so every version of torch makes the same ones; their hash is in the file.
"""

import functools
import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import torch

from msamp.numerics.accumulation import product

FILE = Path(__file__).parents[1] / "golden" / "accumulation.json"
ROWS = 32  # rows and columns that are recorded
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE_INVS = 0.3, 1.7


class Case(NamedTuple):
    """Operands [ROWS, K], repeated to `size` rows for the GPU, whose kernels split short products along K but not large ones."""

    kind: str
    a: torch.dtype
    b: torch.dtype
    K: int
    size: int = ROWS

    def __str__(self) -> str:
        a, b = ("e4m3" if dtype == E4M3 else "e5m2" for dtype in (self.a, self.b))
        return f"{self.kind}, {a} x {b}, K {self.K}, {self.size} x {self.size}"


CASES = (
    Case("noise", E4M3, E4M3, 128),
    Case("noise", E4M3, E4M3, 208),
    Case("codes", E4M3, E4M3, 512),
    Case("codes", E5M2, E4M3, 512),
    Case("codes", E4M3, E5M2, 512),
    Case("special", E5M2, E4M3, 256),
    Case("mean", E5M2, E4M3, 1024),
    Case("positive", E4M3, E4M3, 4096, 2048),
    Case("outlier", E4M3, E4M3, 4096, 2048),
    Case("mean", E4M3, E5M2, 4096, 2048),
    Case("noise", E4M3, E4M3, 16384),
    Case("noise", E4M3, E5M2, 16384, 2048),
    Case("positive", E4M3, E4M3, 16384, 2048),
    Case("outlier", E5M2, E4M3, 16384, 2048),
)


def random_bits(count: int, seed: int) -> torch.Tensor:
    """int64 [count] of 32 bits."""
    x = torch.arange(count, dtype=torch.int64) + seed * 0x9E3779B9
    for _ in range(3):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def operand(kind: str, dtype: torch.dtype, K: int, seed: int) -> torch.Tensor:
    """FP8 [ROWS, K]: noise of about one deviation; its magnitudes; noise with a mean of 1; small noise with one product 2^16 times as
    large; every finite code; noise with NaN and Inf."""
    bits = random_bits(ROWS * K, seed).view(ROWS, K)
    if kind == "codes":
        lowest = 0x7F if dtype == E4M3 else 0x7C  # of the codes that are not finite
        codes = bits & 0xFF
        return torch.where((codes & 0x7F) >= lowest, 0, codes).to(torch.uint8).view(dtype)
    noise = (sum((bits >> shift) & 0xFF for shift in (0, 8, 16, 24)) - 510).float() / 128
    if kind == "positive":
        noise = noise.abs()
    elif kind == "mean":
        noise = noise + 1
    elif kind == "outlier":
        noise = noise / 16
        noise[:, K // 2] = 16
    codes = noise.to(dtype).view(torch.uint8)
    if kind == "special":  # versions of torch differ in their casts of Inf to E4M3, which has none
        codes[3, 5], codes[7, 100] = 0x7F, (0xFF if dtype == E4M3 else 0xFC)
    return codes.view(dtype)


def operands(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return operand(case.kind, case.a, case.K, 1), operand(case.kind, case.b, case.K, 2)


def in_pieces(a: torch.Tensor, b: torch.Tensor, accumulation: str, length: int) -> torch.Tensor:
    """`product` of pieces of `length` along K, added in FP32."""
    total: torch.Tensor | None = None
    for left, right in zip(a.split(length, 1), b.split(length, 1), strict=True):
        piece = product(left, right, accumulation)
        total = piece if total is None else total + piece
    return total


@functools.cache
def summed(case: Case, fast: bool, pieces: int = 1) -> torch.Tensor:
    """The sums of a case by the definition, FP32; pieces consist of blocks of 128."""
    return in_pieces(*operands(case), "fast" if fast else "full", 128 * math.ceil(math.ceil(case.K / 128) / pieces))


def defined(case: Case, fast: bool, out: torch.dtype, pieces: int = 1) -> torch.Tensor:
    """What `scaled_mm` returns by the definition."""
    return (summed(case, fast, pieces) * (torch.tensor(SCALE_INVS[0]) * torch.tensor(SCALE_INVS[1]))).to(out)


def digest(x: torch.Tensor) -> str:
    """The hash of a tensor's bits."""
    if x.is_floating_point() and x.element_size() > 1:
        x = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def values(x: torch.Tensor) -> list[str]:
    return [value.hex() for value in x.flatten()[:4].double().tolist()]

"""Seeded stochastic rounding of stored optimizer states: thresholds from a counter, and the cast that takes them.

A value x between two neighbours a < b of a format is rounded to b where its threshold r, uniform on [0, 1), satisfies
(x - a) / (b - a) + r >= 1, so that the mean of the stored value is x. Nearest rounding loses every update below half a code for good; here
it arrives in the mean.

**Thresholds.** r is a function of the tensor's key, the element's index in its shard and the step's number, and of nothing else. So the
bits do not depend on how ZeRO or FSDP cut the tensor, on CUDA graphs, on the number of micro-batches or on a resume:

    h = mix(key, index)                          32 bits, the same at every step
    r = (16 bits of h + 40503 step) mod 2^16     in units of 2^-16; 40503 / 2^16 is the golden ratio's fraction to 16 bits

Over the steps the thresholds of an element are a Kronecker sequence, which fills [0, 1) evenly: after n updates of f codes each the value
has moved by n f codes, to within a code or two, where independent draws would spread by sqrt(n f (1 - f)). Over the elements of a tensor
they are as good as independent. The first moment takes the low half of h, the master the high half, the second moment the high half of
h times an odd number.

**Bias.** A format drops `shift` = 23 - mantissa_bits bits of FP32. With shift <= 16 (FP16, BF16) the mean is exact for normal values. FP8
drops 20 or 21 bits, and 16 decide: the chance of rounding up is the multiple of 2^-16 nearest to the exact one, a bias of at most 2^-17
of a code. Below the smallest normal value `tiny`, x + tiny is rounded to FP32 first, a bias of at most 2^-24 tiny: 2^-14 of FP16's
smallest code.
"""

import hashlib

import torch

from msamp.numerics.formats import Format
from msamp.numerics.quantize import cast

ROUNDINGS = ("nearest", "stochastic")
STEP = 40503  # 2^16 times the fraction of the golden ratio
# Odd multipliers: the golden ratio's, and those of a hash of 32 bits that is known to mix well (C. Wellons' hash prospector).
SPREAD, FIRST, SECOND, HIGH = 0x9E3779B1, 0x21F0AAAD, 0xD35A2D97, 0x85EBCA6B
_PART = 2**22  # elements at a time: a few INT32 temporaries of 16 MiB


def tensor_key(seed: int, name: str, *coordinates: int) -> int:
    """The key of a tensor's thresholds: 64 bits, as a signed integer.

    Args:
        seed: of the run.
        name: of the parameter in the whole model, alike on all ranks that hold a copy of it.
        coordinates: what tells shards of one parameter apart that count their elements from 0, such as the tensor-parallel rank.
    """
    text = " ".join([str(seed), name, *map(str, coordinates)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _int32(x: int) -> int:
    """The low 32 bits as a signed integer, as torch multiplies them."""
    return (x + 2**31) % 2**32 - 2**31


def _mixed(h: torch.Tensor, bits: int) -> torch.Tensor:
    """h ^ (h >>> bits), of INT32 as if it had no sign."""
    return h ^ ((h >> bits) & (2 ** (32 - bits) - 1))


def hashes(key: int, index: torch.Tensor) -> torch.Tensor:
    """INT32, `mix(key, index)` of INT64 element indices, in their shape."""
    low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
    h = _mixed(low * _int32(SPREAD) + _int32(key), 16) * _int32(FIRST)
    h = _mixed(h, 15) * _int32(SECOND) + _int32(key >> 32) + high * _int32(HIGH)
    return _mixed(h, 15)


class Thresholds:
    """The thresholds of one tensor, or of a run of its elements, at one step.

    Args:
        key: of the tensor, by `tensor_key`.
        offset: index of the first element in the tensor's shard.
        step: number of the step, from 1; on a GPU a 0-dim tensor, which nothing waits for.
    """

    def __init__(self, key: int, offset: int, step: int | torch.Tensor) -> None:
        self.key, self.offset = key, offset
        self.turn = (step.long() * STEP & 0xFFFF).int() if isinstance(step, torch.Tensor) else step * STEP & 0xFFFF

    def of(self, state: str, start: int, count: int, device: torch.device) -> torch.Tensor:
        """INT32 [count] in [0, 2^16), from element `start` on; `state` is "m", "v" or "master"."""
        h = hashes(self.key, torch.arange(self.offset + start, self.offset + start + count, device=device))
        if state == "v":
            h = h * _int32(SPREAD)
        own = h if state == "m" else h >> 16
        return ((own & 0xFFFF) + self.turn) & 0xFFFF


def round_stochastically(x: torch.Tensor, thresholds: torch.Tensor, fmt: Format) -> torch.Tensor:
    """FP32 `x` rounded to a value of `fmt` by thresholds; values beyond the format's largest and NaN stay as they are.

    Args:
        x: FP32, any shape, already scaled.
        thresholds: INT32 in [0, 2^16), the shape of `x`.
        fmt: FP16, BF16, E4M3 or E5M2.
    """
    shift = 23 - fmt.mantissa_bits
    magnitude = x.abs()
    # Codes below `tiny` have the spacing that FP32 has between `tiny` and 2 `tiny` once as many bits are dropped. BF16 has FP32's
    # exponents, so its codes below `tiny` need no shift.
    base = torch.where(magnitude < fmt.tiny, fmt.tiny, 0.0) if fmt.scaled else torch.zeros_like(magnitude)
    added = thresholds >> (16 - shift) if shift <= 16 else (thresholds << (shift - 16)) + (1 << (shift - 17))
    bits = ((magnitude + base).view(torch.int32) + added) & -(1 << shift)
    rounded = torch.copysign(bits.view(torch.float32) - base, x)
    return torch.where(magnitude <= fmt.max, rounded, x)


def cast_stochastically(x: torch.Tensor, fmt: Format, thresholds: Thresholds, state: str) -> torch.Tensor:
    """`cast` with stochastic rounding: a payload of `fmt.dtype` in the shape of FP32 `x`, saturated; NaN stays NaN.

    Args:
        x: FP32, any shape, already scaled.
        fmt: FP16, BF16, E4M3 or E5M2.
        thresholds: those of the tensor.
        state: which of the element's thresholds: that of "m", "v" or "master".
    """
    flat, out = x.reshape(-1), torch.empty(x.numel(), dtype=fmt.dtype, device=x.device)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        out[start : start + _PART] = cast(round_stochastically(part, thresholds.of(state, start, part.numel(), x.device), fmt), fmt)
    return out.view(x.shape)

"""Seeded stochastic rounding of stored optimizer states: random words from a counter, and the cast that uses them.

Stochastic rounding stores a value x between two neighbouring codes a < b as b if a threshold r, uniform on [0, 1), satisfies
(x - a) / (b - a) + r >= 1, and as a otherwise, so that the mean of the stored value is x. Nearest rounding loses every update below half a
code for good; stochastic rounding keeps it on average.

**Random words.** r = w / 2^32, where w depends only on the tensor's key, the element's index in its shard, the state and the step number.
So the bits do not depend on how ZeRO or FSDP cut the tensor, on CUDA graphs, on the number of micro-batches or on a resume:

    h = mix(key, index // 4)                                     one hash for four elements
    w = h * SPREAD^(4 state + index % 4 + 1) + SPREAD * step     mod 2^32; SPREAD / 2^32 is the golden ratio's fraction

Over the steps, the thresholds of an element are a Kronecker sequence, which fills [0, 1) evenly: after n updates of f codes each, the value
has moved by n f codes to within a code or two, where independent draws would spread by sqrt(n f (1 - f)). Across elements and states the
thresholds behave like independent ones.

**Bias.** A format drops `shift` = 23 - mantissa_bits bits of FP32. The first `shift` bits of w are added to them before they are cut off,
so the mean over all w is exactly x. Below the smallest normal value `tiny`, x + tiny is rounded to FP32 first, a bias of at most 2^-24
tiny: 2^-14 of FP16's smallest code. FP16 masters skip that addition, which would cost a twentieth of the update's instructions. So a master
below `tiny`, which is 2^-29 of the largest magnitude that the scale leaves room for, is biased toward zero by up to one code of 2^-24 at
every step that changes it.
"""

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from msamp.numerics.formats import FP16, Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.quantize import cast
from msamp.numerics.scaling import Exact, scale_from_amax

if TYPE_CHECKING:
    from msamp.numerics.recipe import Cast

ROUNDINGS = ("nearest", "stochastic")
# Odd multipliers: the golden ratio's, and those of a 32-bit hash that is known to mix well (C. Wellons' hash prospector).
SPREAD, FIRST, SECOND, HIGH = 0x9E3779B1, 0x21F0AAAD, 0xD35A2D97, 0x85EBCA6B
LANES = 4  # elements that share a hash
STATES = ("m", "v", "master")
MULTIPLIERS = {name: tuple(pow(SPREAD, LANES * i + lane + 1, 2**32) for lane in range(LANES)) for i, name in enumerate(STATES)}
_PART = 2**22  # elements at a time: a few INT32 temporaries of 16 MiB


def unwrapped(name: str) -> str:
    """Return a name in a model without the parts that torch.compile and checkpoint_wrapper add, which a resumed run may not have."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def tensor_key(seed: int, name: str, *coordinates: int) -> int:
    """Return the key of a tensor's thresholds: 64 bits, as a signed integer.

    Args:
        seed: of the run.
        name: of the parameter in the whole model, the same on all ranks that hold a copy of it.
        coordinates: distinguish shards of one parameter that count their elements from 0, such as the tensor-parallel rank.
    """
    text = " ".join([str(seed), unwrapped(name), *map(str, coordinates)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _int32(x: Any) -> Any:
    """The low 32 bits of an integer or an INT64 tensor as a signed integer, the type that torch multiplies."""
    return (x + 2**31) % 2**32 - 2**31


def _mixed(h: torch.Tensor, bits: int) -> torch.Tensor:
    """h ^ (h >>> bits) of INT32, with an unsigned shift."""
    return h ^ ((h >> bits) & (2 ** (32 - bits) - 1))


def hashes(key: int, index: torch.Tensor) -> torch.Tensor:
    """INT32 `mix(key, index)`, in the shape of the INT64 `index`."""
    low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
    h = _mixed(low * _int32(SPREAD) + _int32(key), 16) * _int32(FIRST)
    h = _mixed(h, 15) * _int32(SECOND) + _int32(key >> 32) + high * _int32(HIGH)
    return _mixed(h, 15)


class Thresholds:
    """The random words of one tensor, or of a contiguous part of it, at one step.

    Args:
        key: of the tensor, by `tensor_key`.
        offset: index of the first element in the tensor's shard.
        step: number of the step, from 1; on a GPU a 0-dim tensor, so that nothing waits for the device.
    """

    def __init__(self, key: int, offset: int, step: int | torch.Tensor) -> None:
        self.key, self.offset = key, offset
        self.turn = _int32(step.long() * SPREAD).int() if isinstance(step, torch.Tensor) else _int32(step * SPREAD)
        self.shared: dict[tuple[int, int], torch.Tensor] = {}  # of all states: a byte for each element

    def of(self, state: str, start: int, count: int, device: torch.device) -> torch.Tensor:
        """INT32 [count], 32 random bits each, for the elements from `start`; `state` is "m", "v" or "master"."""
        first = self.offset + start
        if (start, count) not in self.shared:
            groups = torch.arange(first // LANES, -(-(first + count) // LANES), device=device)
            self.shared[start, count] = hashes(self.key, groups)
        words = torch.stack([self.shared[start, count] * _int32(x) for x in MULTIPLIERS[state]], 1).view(-1)
        return words[first % LANES :][:count] + self.turn


def round_stochastically(x: torch.Tensor, words: torch.Tensor, fmt: Format, *, subnormals: bool = True) -> torch.Tensor:
    """Round FP32 `x` to values of `fmt`, or to the value that would follow its largest; NaN where `x` is not finite.

    Args:
        x: FP32, any shape, already scaled.
        words: INT32 random bits, in the shape of `x`.
        fmt: FP16, BF16, E4M3 or E5M2.
        subnormals: False rounds values below `fmt.tiny` toward zero after the bits are added.
    """
    shift = 23 - fmt.mantissa_bits
    added = (words >> (32 - shift)) & ((1 << shift) - 1)
    magnitude = x.abs()
    # Codes below `tiny` have the spacing of FP32 between `tiny` and 2 `tiny` after `shift` bits are dropped. BF16 has FP32's exponents, so
    # its codes below `tiny` need no offset.
    base = (magnitude < fmt.tiny).float() * fmt.tiny if fmt.scaled and subnormals else 0.0
    raised = (magnitude + base).view(torch.int32) + added
    rounded = (raised & -(1 << shift)).view(torch.float32) - base
    if not subnormals:
        raised = raised.view(torch.float32)
        rounded = torch.where(raised < fmt.tiny, (raised / fmt.smallest).trunc() * fmt.smallest, rounded)
    return torch.where(magnitude < math.inf, torch.copysign(rounded, x), math.nan)


def cast_stochastically(
    x: torch.Tensor, fmt: Format, thresholds: Thresholds, state: str, no_gradient: torch.Tensor | None = None
) -> torch.Tensor:
    """`cast` with stochastic rounding: return a saturated payload of `fmt.dtype` in the shape of FP32 `x`; NaN where `x` is not finite.

    Args:
        x: FP32, any shape, already scaled.
        fmt: FP16, BF16, E4M3 or E5M2.
        thresholds: of the tensor.
        state: which of an element's words to use: "m", "v" or "master".
        no_gradient: bool in the shape of `x`, True for elements without a gradient, whose values below `fmt.tiny` are rounded toward zero;
            None: no elements.
    """
    subnormals = state != "master" or fmt is not FP16
    flat, out = x.reshape(-1), torch.empty(x.numel(), dtype=fmt.dtype, device=x.device)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        words = thresholds.of(state, start, part.numel(), x.device)
        if no_gradient is not None and fmt.scaled:
            words = words.masked_fill(no_gradient.reshape(-1)[start : start + _PART] & (part.abs() < fmt.tiny), 0)
        out[start : start + _PART] = cast(round_stochastically(part, words, fmt, subnormals=subnormals), fmt)
    return out.view(x.shape)


def off_ties(values: torch.Tensor, to: "Cast", master: Format, *, beside: bool = False) -> torch.Tensor:
    """Return a weight from a BF16 checkpoint in FP32, with values midway between two FP8 codes moved toward the code they are cast to.

    That is one in 16, and half of these codes would change in the first step along the gradient, however small. Each moves by whole steps
    of `master`, uniform in [0, half a step of BF16), by value and index, since wrappers change names. So an update changes codes in
    proportion to its size. Codes and values in BF16 keep their bits. Off BF16's grid few are midway: no value of a master `beside` the
    codes is rounded to midway (one in 128 in FP16, half of which would change codes). Others, and for an `Exact` cast all, are returned.

    Args:
        values: finite, any shape and float dtype.
        to, master: the cast to the codes, and the format in which the result will be stored.
    """
    moved = values.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    parts, fmt = moved.view(torch.int32).view(-1).split(_PART), to.format
    on_grid = not any(bool((part & 0xFFFF).any()) for part in parts)
    if isinstance(to.scaling, Exact) or not (on_grid or beside):
        return values
    scale = scale_from_amax(TENSORWISE.amax(moved), fmt.max)
    half, unit = 1 << (22 - fmt.mantissa_bits), 1 << (23 - master.mantissa_bits)
    for number, part in enumerate(parts):
        x = part.view(torch.float32).abs() * scale
        bits = (x + (x < fmt.tiny).float() * fmt.tiny).view(torch.int32)  # from `tiny` on, FP32 has the spacing of subnormal codes
        if not on_grid:  # nor to codes: an amax just above half the largest one keeps its scale
            off = (bits + half // 2) % half - half // 2
            part += off.sign() * (off.abs() <= unit // 2) * (unit // 2)
            continue
        (at,) = torch.where((bits & (2 * half - 1)) == half)
        steps = ((hashes(0, (part[at].long() << 32) + at + number * _PART) >> 17) & 0x7FFF) // unit * unit
        part[at] += torch.where((bits[at] & (2 * half)) > 0, steps, -steps)  # away from zero if the lower code is odd
    return moved

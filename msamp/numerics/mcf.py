"""Multi-component floats: a number as the unevaluated sum of two BF16 (Collage section 2.2 and 4.1; Dekker 1971; Knuth).

A pair (x, y) represents x + y, where x = BF16(x + y): x is the number rounded to BF16, and y is the rounding error. BF16 has 8 significant
bits, so an update below 2^-9 of its weight is lost. A second BF16 keeps it, at 2 bytes per parameter instead of 4 for an FP32 master. The
building block is the error-free sum, for |a| >= |b|:

    x = BF16(a + b)        y = BF16(b - BF16(x - a))        x + y = a + b exactly

A sum that overflows BF16 is not exact, and the pair is then not finite.

All functions are pure and elementwise, take and return BF16 tensors of broadcastable shapes, and round each elementary operation to BF16.
Eager torch does that with BF16 tensors: it computes one operation in FP32 and rounds, and FP32 has enough bits (24 >= 2 * 8 + 2) for the
two roundings of +, -, *, / and sqrt to equal one. `torch.compile` may keep FP32 between operations, and then the error terms below are
wrong: keep these functions out of compiled regions.

A remainder may be stored in E4M3, the 8 bits that Collage's abstract mentions. It needs no separate scale: its unit is the power of two
that makes half a unit in x's last place 256, which follows from x. That leaves 17 binades below, and 4 significant bits where BF16 has 8.
Remainders are uniform within half a unit in the last place, which does not use E4M3's exponent range well.
"""

from collections.abc import Callable

import torch
from torch import Tensor, bfloat16, float64, tensor

Pair = tuple[Tensor, Tensor]


def fast_two_sum(a: Tensor, b: Tensor) -> Pair:
    """Fast2Sum, 3 operations: (x, y), x = BF16(a + b), y = BF16(b - BF16(x - a)) [Collage, theorem 4.1].

    x + y = a + b exactly if |a| >= |b|, a's exponent is at least b's, or a is 0. Otherwise y may lose bits of a, while x is still correct.
    """
    x = a + b
    return x, b - (x - a)


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """TwoSum, 6 operations: (x, y), x = BF16(a + b), with x + y = a + b exactly for all finite a and b whose sum does not overflow."""
    x = a + b
    from_b = x - a
    return x, (a - (x - from_b)) + (b - from_b)


def two_product(a: Tensor, b: Tensor) -> Pair:
    """TwoProd: (x, y), x = BF16(a b) and its rounding error y.

    x + y = a b exactly if the product does not overflow and its last bit is not below BF16's smallest number, 2^-133 (|a b| >= 2^-118 is
    enough). The product of two BF16 numbers has 16 significant bits, so FP32 represents it exactly, and also its difference from x, which
    is what an FMA would return.
    """
    x = a * b
    return x, (a.float() * b.float() - x.float()).bfloat16()


def grow(pair: Pair, a: Tensor, add: Callable[[Tensor, Tensor], Pair] = fast_two_sum) -> Pair:
    """Grow: a pair plus a number, as a pair [Collage, algorithm 1].

    Args:
        pair: (x, y).
        a: the number.
        add: `fast_two_sum`, as in the paper, for |x| >= |a|; `two_sum` if |a| may exceed |x|.

    The only rounding is in y plus the error of x + a: at most 2^-15 of the larger of |x| and |a|.
    """
    x, y = pair
    u, v = add(x, a)
    return fast_two_sum(u, y + v)


def mul(first: Pair, second: Pair) -> Pair:
    """Mul: the product of two pairs, as a pair [Collage, algorithm 2].

    p = BF16(x1 x2) with its error e, then Fast2Sum(p, e + (x1 y2 + x2 y1)). The product y1 y2 and the rounding error of the correction are
    dropped: less than 2^-13 of the result.
    """
    (x1, y1), (x2, y2) = first, second
    p, e = two_product(x1, x2)
    return fast_two_sum(p, e + (x1 * y2 + x2 * y1))


def expansion(value: float) -> Pair:
    """Return a constant as a pair of 0-dim BF16 on the CPU: the rounded value and the rounded rest, both from FP64 [Collage, table 1].

    0.999 is (1, -0.001) and 0.99 (0.98828125, 0.00171661), where the paper's table prints 0.9893.
    """
    exact = tensor(value, dtype=float64, device="cpu")
    first = exact.to(bfloat16)
    return first, (exact - first.double()).to(bfloat16)


def load_pair(first: Tensor, payload: Tensor) -> Pair:
    """Return a pair from its first component (BF16) and its stored remainder (BF16 or E4M3, see `remainder_payload`).

    The remainder is converted to BF16 exactly, except for bits of an E4M3 remainder below 2^-133.
    """
    if payload.dtype is bfloat16:
        return first, payload
    return first, (payload.float() * _power(_exponent(first).clamp(min=17) - 16)).bfloat16()


def remainder_payload(pair: Pair, dtype: torch.dtype) -> Tensor:
    """Return the stored remainder y of a pair (x, y): y rounded to BF16, or to E4M3 without a scale, in a unit that follows from x.

    E4M3 rounds to nearest even and saturates where x would no longer be BF16(x + y): at half a unit in x's last place if x is even, which
    wins the tie, and at 15/16 of it if x is odd. NaN stays NaN. Below |x| = 2^-110 the unit stays that of 2^-110: FP32 can just represent
    its inverse, and every BF16 remainder there is still above E4M3's smallest number.

    Args:
        pair: x, BF16; y, BF16 or FP32.
        dtype: torch.bfloat16 or torch.float8_e4m3fn.
    """
    x, y = pair
    if dtype is bfloat16:
        return y.to(dtype)
    exponent = _exponent(x)
    half = _power((exponent + 118).clamp(max=135))
    limit = half - half / 16 * (x.view(torch.int16) & 1)
    return (y.float() * _power(270 - exponent.clamp(min=17))).clamp(-limit, limit).to(dtype)


def _exponent(x: Tensor) -> Tensor:
    """int32: the biased exponent of a BF16 tensor; 17 is the exponent of 2^-110."""
    return (x.view(torch.int16).int() >> 7) & 0xFF


def _power(biased: Tensor) -> Tensor:
    """FP32 powers of two with these biased exponents; 135 is the exponent of 256."""
    return (biased << 23).view(torch.float32)

"""Multi-component floats: a number as the unevaluated sum of two BF16 (Collage section 2.2 and 4.1; Dekker 1971; Knuth).

A pair (x, y) stands for x + y, where x = BF16(x + y): x alone is the number rounded to BF16, y what the rounding left over. All functions
are pure and elementwise, take and return BF16 tensors of shapes that broadcast, and round each elementary operation to BF16. That is what
eager torch does with BF16 tensors: it computes one operation in FP32 and rounds, and FP32 has enough digits (24 >= 2 * 8 + 2) for the two
roundings of +, -, *, / and sqrt to equal one. `torch.compile` may keep FP32 from one operation to the next, and then the errors below are
no longer what is computed: leave these functions out of a compiled region.

Why: BF16 has 8 significant bits, so that an update below 2^-9 of its weight is lost. A second BF16 keeps it, at 2 bytes where an FP32
master takes 4. The building block is the error-free sum, for |a| >= |b|:

    x = BF16(a + b)        y = BF16(b - BF16(x - a))        x + y = a + b exactly

No sum here is exact once it overflows BF16; a pair is then not finite.

A remainder may be stored in E4M3, the 8 bits that Collage's abstract announces. It needs no scale of its own: its unit is the power of two
that makes half a unit in x's last place 256, and x tells it. The range below is 17 binades; what E4M3 costs is digits, 4 where BF16 has 8.
Remainders are uniform within half an ulp, which wastes E4M3's exponent bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor, bfloat16, float64, tensor

Pair = tuple[Tensor, Tensor]


def fast_two_sum(a: Tensor, b: Tensor) -> Pair:
    """Fast2Sum, 3 operations: (x, y), x = BF16(a + b), y = BF16(b - BF16(x - a)) [Collage, theorem 4.1].

    x + y = a + b exactly where |a| >= |b|, a's exponent is at least b's, or a is 0. Elsewhere y may lack digits of a; x is right all the
    same.
    """
    x = a + b
    return x, b - (x - a)


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """TwoSum, 6 operations: (x, y), x = BF16(a + b), with x + y = a + b exactly for every finite a and b without overflow of the sum."""
    x = a + b
    from_b = x - a
    return x, (a - (x - from_b)) + (b - from_b)


def two_product(a: Tensor, b: Tensor) -> Pair:
    """TwoProd: (x, y), x = BF16(a b) and its rounding error y.

    x + y = a b exactly where the product does not overflow and its last digit is not below BF16's smallest number, 2^-133 (|a b| >= 2^-118
    is enough). The product of two BF16 has 16 digits: FP32 holds it exactly, and so its difference to x, which is what an FMA would return.
    """
    _check_bf16(a)
    _check_bf16(b)
    x = a * b
    return x, (a.float() * b.float() - x.float()).bfloat16()


def grow(pair: Pair, a: Tensor, add: Callable[[Tensor, Tensor], Pair] = fast_two_sum) -> Pair:
    """Grow: a pair plus a number, as a pair [Collage, algorithm 1].

    Args:
        pair: (x, y).
        a: the number.
        add: `fast_two_sum`, the paper's, for |x| >= |a|; `two_sum` where a may exceed x.

    The only rounding is that of y plus the error of x + a: at most 2^-15 of the larger of |x| and |a|.
    """
    x, y = pair
    u, v = add(x, a)
    return fast_two_sum(u, y + v)


def mul(first: Pair, second: Pair) -> Pair:
    """Mul: the product of two pairs, as a pair [Collage, algorithm 2].

    p = BF16(x1 x2) with its error e, then Fast2Sum(p, e + (x1 y2 + x2 y1)). The product y1 y2 and the rounding of the correction are lost:
    less than 2^-13 of the result.
    """
    (x1, y1), (x2, y2) = first, second
    p, e = two_product(x1, x2)
    return fast_two_sum(p, e + (x1 * y2 + x2 * y1))


def expansion(value: float) -> Pair:
    """A constant as a pair of 0-dim BF16 on the CPU: value rounded, and the rest rounded; both roundings from FP64 [Collage, table 1].

    0.999 is (1, -0.001) and 0.99 (0.98828125, 0.00171661), where the paper's table prints 0.9893.
    """
    exact = tensor(value, dtype=float64)
    first = exact.to(bfloat16)
    return first, (exact - first.double()).to(bfloat16)


def load_pair(first: Tensor, payload: Tensor) -> Pair:
    """A pair from its first component, BF16, and its remainder as stored, BF16 or E4M3 (`remainder_payload`).

    The remainder comes in BF16: exactly, but for digits of E4M3's below 2^-133.
    """
    if payload.dtype is bfloat16:
        return first, payload
    return first, (payload.float() * _power(_exponent(first).clamp(min=17) - 16)).bfloat16()


def remainder_payload(pair: Pair, dtype: torch.dtype) -> Tensor:
    """What stores the remainder y of a pair (x, y): BF16 [y rounded], or E4M3 [y in units of x's], torch.float8_e4m3fn without a scale.

    E4M3 rounds to nearest even and saturates where x would no longer be BF16(x + y): at half a unit in x's last place, which an even x
    wins as a tie, and at 15/16 of it where x is odd; NaN stays NaN. Below |x| = 2^-110 the unit stays that of 2^-110: its inverse FP32
    just holds, and every BF16 remainder there is still above E4M3's smallest number.

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
    """int32: the biased exponent of BF16; 17 is that of 2^-110."""
    return (x.view(torch.int16).int() >> 7) & 0xFF


def _power(biased: Tensor) -> Tensor:
    """FP32 powers of two by their biased exponents; 135 is that of 256."""
    return (biased << 23).view(torch.float32)


def _check_bf16(x: Tensor) -> None:
    if x.dtype is not bfloat16:
        raise ValueError(f"a factor is {x.dtype}; products of pairs are defined for torch.bfloat16: cast it first")

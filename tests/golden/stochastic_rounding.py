"""Writes stochastic_rounding.json: random words, stochastic casts and steps of AdamW with stochastic rounding, computed in NumPy from the
formulas alone.

    python tests/golden/stochastic_rounding.py

Nothing here is shared with msamp. Formats are lists of the values of their non-negative codes; a cast looks for the two neighbours of a
value and takes the upper one where the distance to the lower one and the word, as a fraction of 1, reach the distance between them. Arrays
are base64 of their little-endian bytes.

- `words`: key, offset, step -> UINT32 words of m, v and master. Exact.
- `casts`: FP32 values of 40 binades, values that a format holds, subnormals, and their words -> codes by format; `fp16-master` is FP16
  with subnormal values rounded toward zero. Exact.
- `adamw`: 12 steps with FP32 gradients: one spike, elements whose gradient ends, elements 1e-5 of the largest. Scales follow from bounds
  (DESIGN 4); m is E4M3, v FP16 and to nearest, the master FP16, betas 0.9 and 0.95, lr 1e-3, decay 0.1. Codes and scale_inv after each
  step. Scales exact; codes exact on a CPU with correctly rounded roots, elsewhere at most one code off in 1 %.
"""

import base64
import json
from pathlib import Path

import numpy as np

CASTS = [("fp8-e4m3", "fp8-e4m3", 7), ("fp8-e5m2", "fp8-e5m2", 7), ("fp16", "fp16", 15), ("fp16-master", "fp16", 15)]
M32, M64 = 2**32 - 1, 2**64 - 1
SHAPES = {"fp8-e4m3": (3, 7, 0x7F), "fp8-e5m2": (2, 15, 0x7C), "fp16": (10, 15, 0x7C00)}
F32 = np.float32


def positive_values(mantissa_bits: int, bias: int, codes: int) -> np.ndarray:
    """FP64: the values of the codes from 0 on."""
    exponent, mantissa = np.divmod(np.arange(codes), 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


VALUES = {name: positive_values(*shape) for name, shape in SHAPES.items()}


def mix(key: int, group: int) -> int:
    """32 bits of a key and the number of a group of four elements."""
    low, high, first, second = group & M32, group >> 32, key & M32, (key >> 32) & M32
    h = (low * 0x9E3779B1 + first) & M32
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & M32
    h = ((h ^ (h >> 15)) * 0xD35A2D97 + second + high * 0x85EBCA6B) & M32
    return h ^ (h >> 15)


def words(key: int, offset: int, step: int, count: int) -> dict[str, np.ndarray]:
    """Of m, v and master: UINT32."""
    found = {}
    for state, name in enumerate(("m", "v", "master")):
        values = []
        for index in range(offset, offset + count):
            multiplier = 0x9E3779B1 ** (4 * state + index % 4 + 1)
            values.append((mix(key & M64, index // 4) * multiplier + 0x9E3779B1 * step) & M32)
        found[name] = np.array(values, dtype=np.uint32)
    return found


def stochastic(x: np.ndarray, w: np.ndarray, fmt: str, toward_zero: bool = False) -> np.ndarray:
    """Codes of FP32 `x`, without the sign, as an integer."""
    table, mantissa_bits = VALUES[fmt], SHAPES[fmt][0]
    drop, tiny = 23 - mantissa_bits, table[2**mantissa_bits]
    added = w // np.uint32(2 ** (32 - drop))
    magnitude = np.abs(x).astype(np.float64)
    if toward_zero:  # FP32's own spacing below `tiny`
        exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1.0)))
        raised = np.minimum(magnitude + added * 2.0 ** (exponent - 23) * (magnitude > 0), table[-1])
        return np.searchsorted(table, raised, side="right") - 1
    magnitude = np.minimum(magnitude, table[-1])
    # Below the smallest normal value the distance is that of FP32's x + tiny.
    magnitude = np.where(magnitude < tiny, (magnitude.astype(F32) + F32(tiny)).astype(np.float64) - tiny, magnitude)
    lower = np.searchsorted(table, magnitude, side="right") - 1
    upper = np.minimum(lower + 1, len(table) - 1)
    gap = np.where(upper > lower, table[upper] - table[lower], 1.0)
    distance = (magnitude - table[lower]) / gap * 2**drop
    return np.where(distance + added >= 2**drop, upper, lower)


def scale_of(bound: np.float32, largest: float, last: float) -> float:
    """The largest power of two with bound * scale <= largest."""
    if not 0 < bound < np.inf:
        return last
    exponent = np.floor(np.log2(largest / float(bound)))
    for candidate in (exponent + 1, exponent, exponent - 1):
        if float(bound) * 2.0**candidate <= largest:
            return float(2.0**candidate)
    raise AssertionError


class Stored:
    """A state: codes, signs, and its scale."""

    def __init__(self, x: np.ndarray, fmt: str, name: str) -> None:
        self.fmt, self.name, self.scale = fmt, name, 1.0
        self.codes, self.negative = np.zeros(x.shape, np.int64), np.zeros(x.shape, bool)

    def values(self) -> np.ndarray:
        return (np.where(self.negative, -1.0, 1.0) * VALUES[self.fmt][self.codes] / self.scale).astype(F32)

    def amax(self) -> np.float32:
        return np.abs(self.values()).max()

    def store(self, x: np.ndarray, bound: np.float32, w: np.ndarray, no_gradient: np.ndarray | None = None) -> None:
        """Stochastically but for v, which keeps at least its smallest code; where it is silent toward zero, below the smallest normal."""
        self.scale = scale_of(bound, VALUES[self.fmt][-1], self.scale)
        y = x * F32(self.scale)
        if self.name == "v":
            self.codes = nearest(np.maximum(y, F32(VALUES[self.fmt][1])), self.fmt)
        else:
            if no_gradient is not None:
                w = np.where(no_gradient & (np.abs(y) < VALUES[self.fmt][2 ** SHAPES[self.fmt][0]]), np.uint32(0), w)
            self.codes = stochastic(y, w, self.fmt, toward_zero=self.name == "master")
        self.negative = np.signbit(x)

    def payload(self) -> np.ndarray:
        bits, kind = (15, np.uint16) if self.fmt == "fp16" else (7, np.uint8)
        return (self.codes | (self.negative.astype(np.int64) << bits)).astype(kind)


def nearest(x: np.ndarray, fmt: str) -> np.ndarray:
    """Codes to nearest even."""
    table = VALUES[fmt]
    magnitude = np.minimum(np.abs(x).astype(np.float64), table[-1])
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    low, high = magnitude - table[above - 1], table[above] - magnitude
    return np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x y + z, rounded once to FP32, as torch adds on a CPU."""
    return (np.float64(x) * np.float64(y) + np.float64(z)).astype(F32)


def steps_of_adamw(p: np.ndarray, gradients: np.ndarray, key: int, offset: int) -> list[dict[str, object]]:
    lr, beta1, beta2, eps, decay = 1e-3, 0.9, 0.95, 1e-8, 0.1
    m, v, master = Stored(p, "fp8-e4m3", "m"), Stored(p, "fp16", "v"), Stored(p, "fp16", "master")
    master.scale = scale_of(np.abs(p).max(), VALUES["fp16"][-1], 1.0)
    master.codes, master.negative = nearest(p * F32(master.scale), "fp16"), np.signbit(p)
    largest = (1 - beta1) / np.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    found = []
    for step, g in enumerate(gradients, 1):
        w, amax = words(key, offset, step, len(p)), np.abs(g).max()
        x = master.values() * F32(1 - lr * decay)
        new_m = fma(F32(1 - beta1), g - m.values(), m.values())
        new_v = fma(F32(1 - beta2) * g, g, v.values() * F32(beta2))
        d = np.sqrt(new_v) / F32((1 - beta2**step) ** 0.5) + F32(eps)
        top = d * F32(largest * (1 - beta1**step))
        x = x + F32(-(lr / (1 - beta1**step))) * np.maximum(np.minimum(new_m, top), -top) / d
        bounds = (
            F32(beta1) * m.amax() + F32(1 - beta1) * amax,
            F32(beta2) * v.amax() + F32(1 - beta2) * (amax * amax),
            F32(2) * master.amax(),
        )
        m.store(new_m, bounds[0], w["m"], no_gradient=g == 0)
        v.store(new_v, bounds[1], w["v"])
        master.store(x, bounds[2], w["master"])
        found.append({each.name: {"codes": packed(each.payload()), "scale_inv": 1.0 / each.scale} for each in (m, v, master)})
    return found


def packed(x: np.ndarray) -> str:
    """Base64 of the little-endian bytes."""
    return base64.b64encode(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")).tobytes()).decode()


def main() -> None:
    random = np.random.default_rng(20261125)
    keys = [int(k) for k in random.integers(-(2**63), 2**63, 3)]
    x = (random.standard_normal(400) * 2.0 ** random.integers(-30, 12, 400)).astype(F32)
    x[:24] = np.concatenate(
        [[0, -0.0, 1e9, -1e9], VALUES["fp8-e4m3"][[1, 2, 9, 126]], VALUES["fp16"][[1, 3, 1024, 31743]], random.random(12) * 2e-3]
    )
    w = random.integers(0, 2**32, 400).astype(np.uint32)
    p = (random.standard_normal(96) * 0.02).astype(F32)
    gradients = (random.standard_normal((12, 96)) * np.where(np.arange(96) % 4 == 3, 1e-5, 1.0)).astype(F32)
    gradients[2] *= np.where(np.arange(96) == 5, 1000, 1).astype(F32)
    gradients[4:, ::3] = 0
    golden = {
        "words": [
            {"key": key, "offset": offset, "step": step, **{name: packed(drawn) for name, drawn in words(key, offset, step, 32).items()}}
            for key in keys
            for offset, step in ((0, 1), (1001, 77777), (2**34 - 16, 3))
        ],
        "casts": {
            "x": packed(x),
            "words": packed(w),
            **{
                name: packed((stochastic(x, w, fmt, name != fmt) | (np.signbit(x).astype(np.int64) << bits)).astype(np.uint16))
                for name, fmt, bits in CASTS
            },
        },
        "adamw": {
            "p": packed(p),
            "gradients": packed(gradients),
            "key": keys[0],
            "offset": 40,
            "steps": steps_of_adamw(p, gradients, keys[0], 40),
        },
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

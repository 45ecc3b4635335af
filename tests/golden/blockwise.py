"""Writes blockwise.json: casts in blocks and the three products of a linear layer, computed in NumPy from the formulas alone.

    python tests/golden/blockwise.py

Nothing here is shared with msamp. Formats are lists of the values of their 128 non-negative codes, and a cast looks for the nearest one.
Arrays are base64 of their little-endian bytes: inputs in their own dtype, codes one byte, scale_inv FP32 or (E8M0) one byte, products FP64
rounded to FP32.

- `inputs`: what the casts name: magnitudes of 25 binades; zeros, subnormals, huge values and the neighbours of powers of two; blocks that
  are not finite. Both kinds of edge are short.
- `casts`: input -> codes and scale_inv, for every rule, block, format and dtype. Exact, but the sign of a NaN's code is free.
- `linear`: input, weight, grad_output -> output, grad_input and grad_weight of operands cast as `msamp.numerics.block_scale` says. To
  2e-6 of the largest: the products are FP64's.
"""

import base64
import json
import math
from pathlib import Path

import numpy as np

NAN_CODE = 0x7F


def positive_values(mantissa_bits: int, bias: int, codes: int) -> np.ndarray:
    """FP64: what the codes from 0 on stand for."""
    exponent, mantissa = np.divmod(np.arange(codes), 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


FORMATS = {"fp8-e4m3": positive_values(3, 7, 0x7F), "fp8-e5m2": positive_values(2, 15, 0x7C)}


def cast(x: np.ndarray, fmt: str) -> np.ndarray:
    """Codes (uint8) of FP32 `x`: the nearest value, of two the one with an even code, at most the largest."""
    table = FORMATS[fmt]
    magnitude = np.minimum(np.abs(x).astype(np.float64), table[-1])
    above = np.searchsorted(table, np.nan_to_num(magnitude)).clip(1, len(table) - 1)
    low, high = magnitude - table[above - 1], table[above] - magnitude
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return (np.where(np.isnan(x), NAN_CODE, code) | (np.signbit(x) << 7)).astype(np.uint8)


def value(codes: np.ndarray, fmt: str) -> np.ndarray:
    """FP64 values of codes; NaN of the codes beyond the format's values."""
    table = np.full(128, np.nan)
    table[: len(FORMATS[fmt])] = FORMATS[fmt]
    return np.where(codes >> 7, -1.0, 1.0) * table[codes & 0x7F]


def scales(amax: np.float32, fmt: str, rule: str) -> tuple[np.float32, float | int]:
    """scale and what is kept of scale_inv, of one block of finite values with that amax."""
    largest = FORMATS[fmt][-1]
    if rule == "fp32":
        if amax == 0:
            return np.float32(1), np.float32(1)
        scale_inv = np.float32(max(amax, np.float32(largest * 2.0**-126))) / np.float32(largest)
        return np.float32(1) / scale_inv, scale_inv
    if rule == "power-of-two":
        exponent = 0
        if amax > 0:  # the largest power of two with amax * 2^exponent <= largest; products with powers of two are exact in FP64
            exponent = math.floor(math.log2(largest / float(amax))) + 1
            while float(amax) * 2.0**exponent > largest:
                exponent -= 1
            exponent = min(max(exponent, -126), 126)
        return np.float32(2.0**exponent), np.float32(2.0**-exponent)
    floor_log2 = math.frexp(float(amax))[1] - 1 if amax > 0 else -math.inf
    exponent = int(max(floor_log2 - (math.frexp(largest)[1] - 1), -127))
    return np.float32(2.0**-exponent), exponent + 127


def quantize(x: np.ndarray, rows: int, columns: int, fmt: str, rule: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, the kept table of scale_inv, and the FP64 values that they stand for, of FP32 `x` [M, N] in blocks."""
    M, N = x.shape
    codes, decoded = np.zeros(x.shape, np.uint8), np.zeros(x.shape)
    kept = np.zeros((-(-M // rows), -(-N // columns)), np.uint8 if rule == "e8m0" else np.float32)
    for i in range(kept.shape[0]):
        for k in range(kept.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(k * columns, (k + 1) * columns)
            block = x[at]
            finite = bool(np.isfinite(block).all())
            scale, kept[i, k] = scales(np.abs(block).max(), fmt, rule) if finite else (np.float32(1), 255 if rule == "e8m0" else np.nan)
            with np.errstate(over="ignore"):
                codes[at] = cast(block * scale, fmt)
            scale_inv = 2.0 ** (int(kept[i, k]) - 127) if rule == "e8m0" else float(kept[i, k])
            decoded[at] = value(codes[at], fmt) * (scale_inv if finite else np.nan)
    return codes, kept, decoded


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """FP32 `x` as it is stored: FP32 and FP16 as themselves, BF16 as its upper 16 bits (truncated: any BF16 value will do)."""
    if dtype == "bfloat16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(np.float16 if dtype == "float16" else np.float32)


def widened(x: np.ndarray) -> np.ndarray:
    """FP32 of what `rounded` gave."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def text(x: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()


def inputs(rng: np.random.Generator, shape: tuple[int, int], columns: int) -> dict[str, np.ndarray]:
    """FP32: magnitudes of 25 binades; and blocks of zeros, of subnormals, of huge values, next to powers of two, not finite."""
    wide = np.exp(2 * rng.standard_normal(shape)) * rng.choice([-1.0, 1.0], shape)
    special = rng.standard_normal(shape).astype(np.float32)
    blocks = [slice(k, k + columns) for k in range(0, shape[1], columns)]
    factors = [0.0, -0.0, 2.0**-140, 2.0**-125, 2.0**-118, 2.0**126, 1.0]
    for i, at in enumerate((row, block) for row in range(shape[0]) for block in blocks):
        special[at] *= np.float32(factors[i % len(factors)])
        if i % len(factors) == 6:  # an amax beside a power of two, or beside a power of two times fp_max
            special[at] = special[at].clip(-1, 1)
            edges = [1.0, 1 - 2.0**-24, 1 + 2.0**-23, 1.75, 1.75 + 2.0**-23, 1.75 - 2.0**-23]
            special[at[0], at[1].start] = edges[i // len(factors) % len(edges)]
    bad = rng.standard_normal(shape).astype(np.float32)
    bad[0, 1], bad[1, -1], bad[2, 0], bad[2, 2] = np.nan, np.inf, -np.inf, np.nan
    return {"wide": wide.astype(np.float32), "special": special, "not finite": bad}


def casts() -> tuple[dict[str, str], list[dict]]:
    """Inputs by key, and the cases, which name them."""
    rng, stored, cases = np.random.default_rng(17), {}, []
    settings = [("fp32", 1, 128), ("power-of-two", 1, 128), ("e8m0", 1, 32), ("fp32", 16, 16), ("power-of-two", 16, 16), ("fp32", 128, 128)]
    shapes = {(1, 128): (14, 260), (1, 32): (14, 68), (16, 16): (37, 50), (128, 128): (130, 129)}
    made = {blocks: inputs(rng, shape, blocks[1]) for blocks, shape in shapes.items()}
    for rule, rows, columns in settings:
        for name, x in made[rows, columns].items():
            if rows == 128 and name != "wide":
                continue
            for dtype in ("float32", "bfloat16", "float16") if name == "wide" and rows < 128 else ("bfloat16" if rows > 1 else "float32",):
                with np.errstate(over="ignore"):
                    kind = rounded(x, dtype)
                key = f"{name} {dtype} {x.shape[0]} x {x.shape[1]}"
                stored[key] = text(kind)
                for fmt in FORMATS:
                    codes, kept, _ = quantize(widened(kind), rows, columns, fmt, rule)
                    case = {"x": key, "dtype": dtype, "shape": x.shape, "rule": rule, "rows": rows, "columns": columns, "format": fmt}
                    cases.append(case | {"codes": text(codes), "scale_inv": text(kept)})
    return stored, cases


def linear() -> dict:
    """One layer by every rule: 140 tokens, 132 in_features, 5 out_features, so that sums over tokens and in_features cross a block's edge.

    Of grad_input, every 20th row is kept.
    """
    rng, products = np.random.default_rng(18), []
    x = widened(rounded(rng.standard_normal((140, 132)) * np.exp(rng.standard_normal(132)), "bfloat16"))
    weight = widened(rounded(rng.standard_normal((5, 132)) * 0.02, "bfloat16"))
    grad = widened(rounded(rng.standard_normal((140, 5)) * np.exp(2 * rng.standard_normal((140, 1))) * 1e-4, "bfloat16"))
    for rule in ("fp32", "power-of-two", "e8m0"):
        columns, square = (32, False) if rule == "e8m0" else (128, True)

        def values(a: np.ndarray, rows: int = 1, columns: int = columns, rule: str = rule) -> np.ndarray:
            return quantize(np.ascontiguousarray(a), rows, columns, "fp8-e4m3", rule)[2]

        w = values(weight, 128 if square else 1)
        w_t = w.T if square else values(weight.T)
        results = {
            "output": values(x) @ w.T,
            "grad_input": (values(grad) @ w_t.T)[::20],
            "grad_weight": values(grad.T) @ values(x.T).T,
        }
        products.append({"rule": rule} | {name: text(product.astype(np.float32)) for name, product in results.items()})
    operands = {"input": x, "weight": weight, "grad_output": grad}
    stored = {name: {"shape": a.shape, "bfloat16": text(rounded(a, "bfloat16"))} for name, a in operands.items()}
    return {"operands": stored, "products": products}


def make() -> dict:
    stored, cases = casts()
    return {"inputs": stored, "casts": cases, "linear": linear()}


if __name__ == "__main__":
    Path(__file__).with_suffix(".json").write_text(json.dumps(make(), separators=(",", ":")) + "\n")

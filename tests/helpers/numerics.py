"""What the numerics tests share: inputs of three kinds, the three measures of loss, the table of limits, and the golden vectors.

SQNR alone is blind to elements that vanish, so a representation is always judged three ways at once. The limits were measured on the
inputs made here and set with a margin of about 0.5 dB and a tenth of a share.
"""

import base64
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from msamp.numerics.formats import Format
from msamp.numerics.metrics import saturation_frac, sqnr_db, undelivered_share, underflow_frac
from msamp.numerics.quantize import cast
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor

KINDS = ("normal", "channel-outlier", "log-normal")
SMALL, LARGE = (256, 128), (1024, 512)
GOLDEN = Path(__file__).parents[1] / "golden" / "golden.json"
BLOCKWISE = Path(__file__).parents[1] / "golden" / "blockwise.json"


class Measures(NamedTuple):
    """SQNR in dB, share of non-zero elements that became zero, share of elements at the format's largest value."""

    sqnr_db: float
    underflow: float
    saturation: float


def make(kind: str, shape: tuple[int, ...], seed: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """FP32 test input, the same on every device: standard normal; normal with every 32nd channel 50 times as large; log-normal
    magnitudes (sigma 2, some 25 binades) with random signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    if kind == "channel-outlier":
        x[..., ::32] *= 50.0
    elif kind == "log-normal":
        x = (2.0 * x).exp() * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)
    elif kind != "normal":
        raise ValueError(f"input kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return x.to(device)


def random_floats(count: int, seed: int = 0) -> torch.Tensor:
    """FP32 [count] of random bit patterns: all magnitudes, subnormals, infinities and NaN."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(np.float32).copy())


def every_bf16() -> torch.Tensor:
    """BF16 [65536]: every bit pattern once."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def codes(payload: torch.Tensor) -> torch.Tensor:
    """The bit patterns of an 8- or 16-bit payload as int32, on the CPU."""
    eight = payload.element_size() == 1
    raw = payload.detach().contiguous().view(torch.uint8 if eight else torch.int16).cpu().int()
    return raw if eight else raw & 0xFFFF


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit pattern of any plain tensor, so that NaN equals NaN and -0 differs from 0."""
    return x.detach().reshape(-1).contiguous().view(torch.uint8).cpu()


def bytes_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the bytes of tensors, a ScalingTensor's payload and scale apart: so that NaN equals NaN, and -0 is not 0."""
    plain = [part for x in tensors for part in ([x.payload, x.scale_inv] if isinstance(x, ScalingTensor) else [x])]
    return [x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).clone() for x in plain]


def through_a_file(x: Any, weights_only: bool = False, **options: Any) -> Any:
    """What `torch.load` reads from what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only, **options)


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def measure(x: torch.Tensor, approx: torch.Tensor, payload: torch.Tensor | None = None, fmt: Format | None = None) -> Measures:
    """The three measures of `approx` for `x`; saturation is that of `payload` (0 where there is none)."""
    saturation = saturation_frac(payload, fmt) if payload is not None and fmt is not None else 0.0
    return Measures(sqnr_db(x, approx), underflow_frac(x, approx), saturation)


def saturation_of_cast(x: torch.Tensor, fmt: Format) -> float:
    """Share of the elements of `x`, cast just in time, that are at the largest value of `fmt`."""
    scale = scale_from_amax(x.abs().amax().float(), fmt.max)
    return saturation_frac(cast(x.float() * scale, fmt), fmt)


def check(what: str, fmt: str, kind: str, shape: tuple[int, ...], measured: Measures) -> None:
    """Assert that all three measures keep within the table's limits."""
    within(measured, LIMITS[what, fmt, shape][KINDS.index(kind)], f"{what} {fmt} {kind} {shape}")


def within(measured: Measures, limits: tuple[float, float, float], what: str) -> None:
    """Assert that all three measures keep within limits."""
    limit = Measures(*limits)
    where = f"{what}: measured {measured}, limits {limit}"
    assert measured.sqnr_db >= limit.sqnr_db, where
    assert measured.underflow <= limit.underflow, where
    assert measured.saturation <= limit.saturation, where


def golden(key: str) -> Any:
    """One entry of the golden vectors, as it stands in the file."""
    return json.loads(GOLDEN.read_text())[key]


def blockwise() -> dict[str, Any]:
    """The golden vectors of casts in blocks, as golden/blockwise.py wrote them; `stored` reads their arrays."""
    return json.loads(BLOCKWISE.read_text())  # type: ignore[no-any-return]


def stored(text: str, dtype: torch.dtype, shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
    """A tensor of base64 text."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).view(shape)


def floats(values: list[Any]) -> torch.Tensor:
    """FP32 [n] from hexadecimal strings or numbers."""
    return torch.tensor([float.fromhex(v) if isinstance(v, str) else float(v) for v in values], dtype=torch.float64).float()


# (what, format or output dtype, shape) -> for each of KINDS: least SQNR in dB, largest underflow share, largest saturation share.
# A linear layer's shape is (tokens, in_features, out_features) and its saturation that of its worse operand; optimizer states are
# compared with FP32 ones after five steps.
LIMITS: dict[tuple[str, str, tuple[int, ...]], tuple[tuple[float, float, float], ...]] = {
    ("cast", "fp16", SMALL): ((73.1, 0, 0), (73.1, 0, 0), (74.9, 0, 0)),
    ("cast", "fp16", LARGE): ((73.1, 0, 0), (73.2, 0, 0), (74.0, 0, 0)),
    ("cast", "fp8-e4m3", SMALL): ((31.0, 0, 0), (31.2, 0.00027, 0), (32.3, 0.021, 0)),
    ("cast", "fp8-e4m3", LARGE): ((31.0, 1.3e-5, 0), (31.1, 0.00044, 0), (31.3, 0.046, 0)),
    ("cast", "fp8-e5m2", SMALL): ((24.9, 0, 0), (24.9, 0, 0), (27.6, 0, 0)),
    ("cast", "fp8-e5m2", LARGE): ((25.0, 0, 0), (25.0, 0, 2.1e-6), (23.8, 0, 0)),
    ("output", "bfloat16", (128, 64, 96)): ((28.5, 2e-4, 2e-5), (28.8, 2e-4, 2e-5), (28.8, 2e-4, 2e-5)),
    ("output", "bfloat16", (512, 256, 256)): ((28.4, 2e-4, 2e-5), (28.6, 2e-4, 2e-5), (28.8, 2e-4, 2e-5)),
    ("output", "float32", (128, 64, 96)): ((28.6, 2e-4, 2e-5), (28.9, 2e-4, 2e-5), (28.7, 2e-4, 2e-5)),
    ("output", "float32", (512, 256, 256)): ((28.5, 2e-4, 2e-5), (28.6, 2e-4, 2e-5), (28.8, 2e-4, 2e-5)),
    ("grad_input", "bfloat16", (128, 64, 96)): ((24.2, 2e-4, 2e-5), (24.2, 2e-4, 2e-5), (23.3, 2e-4, 2e-5)),
    ("grad_input", "bfloat16", (512, 256, 256)): ((24.2, 2e-4, 2e-5), (24.2, 2e-4, 2e-5), (25.9, 2e-4, 2e-5)),
    ("grad_input", "float32", (128, 64, 96)): ((24.2, 2e-4, 2e-5), (24.2, 2e-4, 2e-5), (23.5, 2e-4, 2e-5)),
    ("grad_input", "float32", (512, 256, 256)): ((24.3, 2e-4, 2e-5), (24.2, 2e-4, 2e-5), (25.9, 2e-4, 2e-5)),
    ("grad_weight", "bfloat16", (128, 64, 96)): ((24.0, 2e-4, 2e-5), (21.5, 2e-4, 2e-5), (20.9, 2e-4, 2e-5)),
    ("grad_weight", "bfloat16", (512, 256, 256)): ((24.0, 2e-4, 2e-5), (23.2, 2e-4, 2e-5), (26.3, 2e-4, 2e-5)),
    ("grad_weight", "float32", (128, 64, 96)): ((24.0, 2e-4, 2e-5), (19.6, 2e-4, 2e-5), (20.9, 2e-4, 2e-5)),
    ("grad_weight", "float32", (512, 256, 256)): ((24.0, 2e-4, 2e-5), (24.0, 2e-4, 2e-5), (26.3, 2e-4, 2e-5)),
    ("m", "fp8-e4m3", SMALL): ((25.4, 0.0025, 0), (25.6, 0.0024, 0), (26.8, 0.0027, 0)),
    ("m", "fp8-e4m3", LARGE): ((25.4, 0.0025, 0), (25.5, 0.0026, 0), (26.6, 0.0099, 0)),
    ("v", "fp16", SMALL): ((28.6, 0, 0), (28.2, 0, 0), (22.8, 0, 0)),
    ("v", "fp16", LARGE): ((28.6, 0, 0), (28.6, 0, 0), (30.5, 0, 0)),
    ("master", "fp16", SMALL): ((50.8, 0, 0), (50.5, 0, 0), (42.0, 0, 0)),
    ("master", "fp16", LARGE): ((50.9, 0, 0), (50.4, 0, 0), (38.0, 0, 0)),
    # FP8 attention by its definition, each scale just in time, causal or not: (tokens, heads, channels of a head). Queries and keys of the
    # kind, of root mean square 1: with outliers in their channels a softmax of few tokens.
    ("attention", "fp8-e4m3", (64, 4, 32)): ((24.7, 2e-4, 0), (17.5, 7e-4, 0.0012), (24.6, 6e-4, 0)),
    # COAT in groups of 128, with and without expansion, and in groups of 16; the largest element of a group is at the format's maximum.
    ("expanded", "fp8-e4m3", SMALL): ((37.1, 0, 0.0099), (37.5, 0, 0.0091), (38.3, 0, 0.009)),
    ("expanded", "fp8-e4m3", LARGE): ((37.0, 0, 0.0099), (37.3, 0, 0.009), (41.3, 0, 0.009)),
    ("expanded", "fp8-e5m2", SMALL): ((36.1, 0, 0.01), (36.4, 0, 0.0091), (38.3, 0, 0.009)),
    ("expanded", "fp8-e5m2", LARGE): ((36.0, 0, 0.01), (36.3, 0, 0.009), (40.2, 0, 0.009)),
    ("group 128", "fp8-e4m3", SMALL): ((31.2, 0, 0.0113), (34.5, 3.4e-5, 0.0094), (39.8, 0.00017, 0.009)),
    ("group 128", "fp8-e4m3", LARGE): ((31.2, 7e-6, 0.0112), (35.2, 0.00013, 0.0091), (40.5, 0.00024, 0.009)),
    ("group 128", "fp8-e5m2", SMALL): ((25.3, 0, 0.0142), (29.4, 0, 0.01), (33.7, 0, 0.0094)),
    ("group 128", "fp8-e5m2", LARGE): ((25.3, 0, 0.0143), (29.2, 0, 0.0097), (34.5, 0, 0.0095)),
    ("group 16", "fp8-e4m3", SMALL): ((31.0, 0, 0.0042), (31.2, 3.4e-5, 0.0046), (32.3, 6.8e-5, 0.0034)),
    ("group 16", "fp8-e4m3", LARGE): ((31.0, 9e-6, 0.004), (31.1, 6.8e-5, 0.0038), (31.3, 5.9e-5, 0.0038)),
    ("group 16", "fp8-e5m2", SMALL): ((24.9, 0, 0.0083), (24.9, 0, 0.0082), (27.6, 0, 0.0083)),
    ("group 16", "fp8-e5m2", LARGE): ((25.0, 0, 0.0084), (25.0, 0, 0.008), (23.8, 0, 0.0079)),
    # Blocks by each scale rule. With FP32 scales the largest element of a block is at the format's maximum; by E8M0's rule more saturate.
    ("block(1 x 128) fp32", "fp8-e4m3", SMALL): ((31.2, 0, 0.011), (34.5, 3.4e-05, 0.0093), (39.8, 0.00017, 0.009)),
    ("block(1 x 128) fp32", "fp8-e4m3", LARGE): ((31.2, 6.3e-06, 0.011), (35.2, 0.00013, 0.0091), (40.5, 0.00023, 0.009)),
    ("block(1 x 128) fp32", "fp8-e5m2", SMALL): ((25.3, 0, 0.014), (29.4, 0, 0.0099), (33.7, 0, 0.0094)),
    ("block(1 x 128) fp32", "fp8-e5m2", LARGE): ((25.3, 0, 0.014), (29.2, 0, 0.0096), (34.5, 0, 0.0094)),
    ("block(1 x 128) power-of-two", "fp8-e4m3", SMALL): ((31.0, 0, 0.00034), (31.2, 0.0001, 0.0007), (32.3, 0.00037, 0.0007)),
    ("block(1 x 128) power-of-two", "fp8-e4m3", LARGE): ((31.0, 8.4e-06, 0.0003), (31.1, 0.0002, 0.00048), (31.3, 0.00041, 0.00044)),
    ("block(1 x 128) power-of-two", "fp8-e5m2", SMALL): ((24.9, 0, 0.00074), (24.9, 0, 0.0011), (27.6, 0, 0.0014)),
    ("block(1 x 128) power-of-two", "fp8-e5m2", LARGE): ((25.0, 0, 0.00077), (25.0, 0, 0.001), (23.8, 0, 0.00098)),
    ("block(1 x 32) e8m0", "fp8-e4m3", SMALL): ((30.1, 0, 0.013), (28.7, 3.4e-05, 0.0076), (27.2, 0.0001, 0.0094)),
    ("block(1 x 32) e8m0", "fp8-e4m3", LARGE): ((30.1, 8.4e-06, 0.013), (27.3, 0.0001, 0.0086), (28.4, 8.6e-05, 0.0092)),
    ("block(1 x 32) e8m0", "fp8-e5m2", SMALL): ((24.8, 0, 0.016), (24.3, 0, 0.0094), (25.4, 0, 0.012)),
    ("block(1 x 32) e8m0", "fp8-e5m2", LARGE): ((24.8, 0, 0.017), (24.0, 0, 0.011), (23.3, 0, 0.012)),
    ("block(128 x 128) fp32", "fp8-e4m3", SMALL): ((31.0, 0, 0.00017), (30.9, 0.00017, 6.7e-05), (34.2, 0.0061, 6.7e-05)),
    ("block(128 x 128) fp32", "fp8-e4m3", LARGE): ((31.0, 1e-05, 0.00013), (31.0, 0.00031, 0.0001), (33.2, 0.0088, 7.6e-05)),
    ("block(128 x 128) power-of-two", "fp8-e4m3", SMALL): ((31.0, 0, 0), (31.2, 0.00027, 0), (32.3, 0.015, 0)),
    ("block(128 x 128) power-of-two", "fp8-e4m3", LARGE): ((31.0, 1.3e-05, 0), (31.1, 0.00044, 0), (31.3, 0.013, 4.2e-06)),
}

# Most by which a product of blocks by Hopper may differ from its emulation, in shares of the norm: tensor cores keep 13 or so bits of the
# sum within a block, and BF16 rounds the result once.
BLOCK_NOISE = {torch.float32: 1e-3, torch.bfloat16: 4e-3}

# Largest difference between the logits of a model here and of the same weights in transformers, FP32, in shares of the largest logit. On
# one CPU they were equal bit for bit; another order of summation costs about 1e-6, the other GELU (erf for tanh) 2e-4.
HF_LOGITS = 1e-5
# Norm of the error that FP8 weights and FP8 activations leave in the logits of a random model, in shares of the logits' norm: 0.08 to 0.10.
FP8_LOGITS = 0.15


class CoatStep(NamedTuple):
    """Most by which one step of the Triton kernel with COAT's moments may differ from its twin: maxima and FP32 masters (relative); the
    share of codes that differ; the share of exponents that differ by more than 1e-4 (a group's smallest value may be what is left of two
    that cancel); the amaxes kept (relative: one place of FP8 or FP16)."""

    numbers: float
    codes: float
    exponents: float
    kept: float


COAT_STEP = CoatStep(numbers=1e-5, codes=5e-4, exponents=5e-3, kept=0.07)

# Least SQNR in dB of v, of m and of the way of the weights with COAT's E4M3 states against FP32 ones, after 200 steps with the same
# gradients; 21, 25 and 25 dB with groups and no expansion.
# Gradients of a fused half of a layer whose norm and activation inputs are kept in groups of 16 in E4M3, against those of the same half
# that keeps them in BF16: for each of KINDS least SQNR in dB of the gradient of x (the residual's is exact) and of every parameter's.
COAT_GRADIENTS = {
    "attention": ((48.1, 26.5), (56.8, 18.9), (62.5, 26.8)),
    "mlp": ((27.8, 21.0), (37.2, 21.1), (44.2, 21.7)),
}

# Gradients of FP8 attention by its definition against FP64, on the same inputs: for each of KINDS least SQNR in dB of dQ, dK and dV.
ATTENTION_GRADIENTS = ((18.8, 19.1, 20.1), (8.3, 10.4, 14.6), (21.1, 16.4, 20.9))
# cuDNN's FP8 attention against its definition, SQNR in dB: they round the softmax at other places. `again`: gradients of two runs.
ATTENTION_KERNEL = {"o": 28.0, "dq": 20.0, "dk": 20.0, "dv": 20.0, "again": 30.0}


def undelivered_frac(update: torch.Tensor, effective: torch.Tensor) -> float:
    """`undelivered_share` from its tensors, in FP64."""
    update, effective = update.double(), effective.double()
    return undelivered_share(float(update.abs().sum()), float((update.sign() * effective).sum()))

"""The op table: schema, fake (shape) version and dispatch of every kernel, as torch operators `torch.ops.msamp.*`.

A CPU tensor gets the reference twin; a CUDA tensor the Triton kernel, or the twin where Triton is not installed.
Operators rather than bare functions, so that torch.compile keeps a layer in one graph.
"""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from msamp.kernels import scaled_mm as _gemm
from msamp.kernels.reference.block_cast import new_operand, no_operand
from msamp.kernels.tables import Tables
from msamp.numerics.granularity import Block

_LIBRARY = torch.library.Library("msamp", "DEF")
_SCHEMAS = (
    "amax(Tensor x) -> Tensor",
    "cast(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    (
        "cast_transpose(Tensor x, Tensor? scale, Tensor(a!)? amax_slot, ScalarType dtype, bool row, bool col, bool colsum, "
        "Tensor(b!)? scale_inv_slot=None) -> (Tensor y, Tensor y_t, Tensor scale_inv, Tensor sums)"
    ),
    "cast_transposed(Tensor x, Tensor scale_inv, ScalarType dtype) -> Tensor",
    (
        "block_cast(Tensor x, Tensor? multiplier, Tensor(a!)? amax_slot, *, int rows, int columns, ScalarType dtype, str scale_rule, "
        "bool row, bool col) -> (Tensor y, Tensor scale_inv, Tensor y_t, Tensor scale_inv_t)"
    ),
    "group_cast(Tensor x, int size, ScalarType dtype) -> (Tensor y, Tensor exponents)",
    "group_decode(Tensor payload, Tensor exponents, int size, ScalarType dtype) -> Tensor",
    "transpose(Tensor x) -> Tensor",
    (
        "activate(Tensor y, str kind, Tensor? scale, Tensor(a!)? amax_slot, ScalarType dtype, Tensor(b!)? scale_inv_slot=None) "
        "-> (Tensor a, Tensor scale_inv)"
    ),
    (
        "activate_backward(Tensor grad_a, Tensor y, str kind, Tensor a_scale_inv, ScalarType a_dtype, Tensor? scale, "
        "Tensor(a!)? amax_slot, ScalarType dtype, bool colsum, Tensor(b!)? scale_inv_slot=None) "
        "-> (Tensor g, Tensor g_t, Tensor scale_inv, Tensor a_t, Tensor sums)"
    ),
    "rotary_(Tensor(a!) qkv, Tensor cos, Tensor sin, int heads, int groups) -> ()",
    (
        "rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor? scale, Tensor(a!)? amax_slot, "
        "ScalarType dtype, bool colsum, Tensor(b!)? scale_inv_slot=None) -> (Tensor g, Tensor g_t, Tensor scale_inv, Tensor sums)"
    ),
    "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor weights) -> Tensor",
    (
        "normalize(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool rms, Tensor? scale, Tensor(a!)? amax_slot, "
        "ScalarType dtype, Tensor(b!)? scale_inv_slot=None) -> (Tensor sum, Tensor y, Tensor scale_inv, Tensor mean, Tensor rstd)"
    ),
    (
        "normalize_transposed(Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? bias, bool rms, Tensor scale_inv, "
        "ScalarType dtype) -> Tensor"
    ),
    (
        "normalize_backward(Tensor grad_y, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? grad_residual, bool rms) "
        "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"
    ),
    "sum_parts(Tensor[] parts, ScalarType dtype) -> Tensor[]",
    "scale_from_amax(Tensor amax, float fp_max, Tensor? last, float otherwise) -> Tensor",
    "tally_(Tensor(a!) row, Tensor x, Tensor payload, Tensor scale_inv) -> ()",
    "tally_update_(Tensor(a!) row, Tensor before, Tensor wanted, Tensor stored, Tensor scale_inv) -> ()",
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    (
        "block_scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype, *, int[] a_block, "
        "int[] b_block) -> Tensor"
    ),
)
# The file of an operator, where it holds several.
_FILES = {
    "cast_transposed": "cast_transpose",
    "activate_backward": "activate",
    "group_decode": "group_cast",
    "rotary_backward": "rotary",
    "normalize_transposed": "normalize",
    "normalize_backward": "normalize",
    "tally_update_": "tally",
}


@functools.cache
def _implementation(name: str, device_type: str) -> Callable[..., object]:
    """The function that runs `name` on a device type."""
    if name in ("scaled_mm", "block_scaled_mm"):
        return getattr(_gemm, name)  # type: ignore[no-any-return]
    file = _FILES.get(name, name.removesuffix("_"))
    has_kernel = device_type == "cuda" and importlib.util.find_spec(f"msamp.kernels.triton.{file}") is not None
    has_triton = importlib.util.find_spec("triton") is not None
    if has_kernel and not has_triton:
        warnings.warn(f"Triton is not installed, {name} runs as plain torch operations, slower; pip install triton", stacklevel=2)
    package = "triton" if has_kernel and has_triton else "reference"
    return getattr(importlib.import_module(f"msamp.kernels.{package}.{file}"), name)


def _on_cpu(name: str) -> Callable[..., object]:
    return lambda *args, **flags: _implementation(name, "cpu")(*args, **flags)


def _on_cuda(name: str) -> Callable[..., object]:
    def run(x: torch.Tensor | list[torch.Tensor], *args: object, **flags: object) -> object:
        device = x[0].device if isinstance(x, list) else x.device
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its arguments are on
            return _implementation(name, "cuda")(x, *args, **flags)

    return run


def _parts(name: str, x: torch.Tensor, *of: Any) -> int:
    """How many parts of its rows an operator adds up by themselves on the device of `x`: a kernel says it, a twin makes one."""
    module = importlib.import_module(_implementation(name, x.device.type).__module__)
    return module.parts(*of) if hasattr(module, "parts") else 1  # type: ignore[no-any-return]


def _fake_amax(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


def _fake_cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_layouts(
    x: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, row: bool, col: bool, parts: int | None, slot: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a kernel that makes a [M, N] operand of `dtype` leaves: both layouts, scale_inv and column sums, empty where not asked for."""
    y, y_t = x.new_empty(shape if row else 0, dtype=dtype), x.new_empty(shape[::-1] if col else 0, dtype=dtype)
    scale_inv = x.new_empty(() if dtype.itemsize == 1 and slot is None else 0, dtype=torch.float32)
    return y, y_t, scale_inv, scale_inv.new_empty(0 if parts is None else (parts, shape[1]))


def _fake_cast_transpose(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    colsum: bool,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = _parts("cast_transpose", x, x.shape[0]) if colsum else None
    return _fake_layouts(x, (x.shape[0], x.shape[1]), dtype, row, col, parts, scale_inv_slot)


def _fake_cast_transposed(x: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


def _fake_block_cast(
    x: torch.Tensor,
    multiplier: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    *,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    scale_rule: str,
    row: bool,
    col: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (M, N), block = x.shape, Block(rows, columns)
    y, scale_inv = new_operand(x, (M, N), block, dtype, scale_rule) if row else no_operand(x, dtype, scale_rule)
    y_t, scale_inv_t = new_operand(x, (N, M), block, dtype, scale_rule) if col else no_operand(x, dtype, scale_rule)
    return y, scale_inv, y_t, scale_inv_t


def _fake_group_cast(x: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[0], -(-x.shape[1] // size)), dtype=torch.uint8)


def _fake_group_decode(payload: torch.Tensor, exponents: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(payload.shape, dtype=dtype)


def _fake_transpose(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def _fake_activate(
    y: torch.Tensor,
    kind: str,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (y.shape[0], y.shape[1] // (2 if kind == "swiglu" else 1))
    a, _, scale_inv, _ = _fake_layouts(y, shape, dtype, True, False, None, scale_inv_slot)
    return a, scale_inv


def _fake_activate_backward(
    grad_a: torch.Tensor,
    y: torch.Tensor,
    kind: str,
    a_scale_inv: torch.Tensor,
    a_dtype: torch.dtype,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    colsum: bool,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    quantised = dtype.itemsize == 1
    parts = _parts("activate_backward", y, y.shape[0], kind) if colsum else None
    g, g_t, scale_inv, sums = _fake_layouts(y, (y.shape[0], y.shape[1]), dtype, True, quantised, parts, scale_inv_slot)
    return g, g_t, scale_inv, y.new_empty((grad_a.shape[1], grad_a.shape[0]) if quantised else 0, dtype=a_dtype), sums


def _fake_in_place(*args: object) -> None:
    return None


def _fake_rotary_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    colsum: bool,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    s, b, heads, d = dq.shape
    parts = _parts("rotary_backward", dq, s * b) if colsum else None
    return _fake_layouts(dq, (s * b, (heads + 2 * dk.shape[2]) * d), dtype, True, dtype.itemsize == 1, parts, scale_inv_slot)


def _fake_cross_entropy_(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.float32)


def _fake_normalize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    rms: bool,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x.new_empty(0 if residual is None else x.shape)
    scale_inv = x.new_empty(() if dtype.itemsize == 1 and scale_inv_slot is None else 0, dtype=torch.float32)
    mean = x.new_empty(0 if rms else x.shape[0], dtype=torch.float32)
    return total, x.new_empty(x.shape, dtype=dtype), scale_inv, mean, x.new_empty(x.shape[0], dtype=torch.float32)


def _fake_normalize_transposed(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rms: bool,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


def _fake_normalize_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    grad_residual: torch.Tensor | None,
    rms: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_weight = x.new_empty((_parts("normalize_backward", x, x.shape[0], x.shape[1], x.device), x.shape[1]), dtype=torch.float32)
    return x.new_empty(x.shape), grad_weight, grad_weight.new_empty(0 if rms else grad_weight.shape)


def _fake_sum_parts(parts: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[1], dtype=dtype) for x in parts]


def _fake_scale_from_amax(amax: torch.Tensor, fp_max: float, last: torch.Tensor | None, otherwise: float) -> torch.Tensor:
    return amax.new_empty(amax.shape)


def _fake_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _fake_block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    a_block: list[int],
    b_block: list[int],
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_FAKES: dict[str, Callable[..., object]] = {
    "amax": _fake_amax,
    "cast": _fake_cast,
    "cast_transpose": _fake_cast_transpose,
    "cast_transposed": _fake_cast_transposed,
    "block_cast": _fake_block_cast,
    "group_cast": _fake_group_cast,
    "group_decode": _fake_group_decode,
    "transpose": _fake_transpose,
    "activate": _fake_activate,
    "activate_backward": _fake_activate_backward,
    "rotary_": _fake_in_place,
    "rotary_backward": _fake_rotary_backward,
    "cross_entropy_": _fake_cross_entropy_,
    "normalize": _fake_normalize,
    "normalize_transposed": _fake_normalize_transposed,
    "normalize_backward": _fake_normalize_backward,
    "sum_parts": _fake_sum_parts,
    "scale_from_amax": _fake_scale_from_amax,
    "tally_": _fake_in_place,
    "tally_update_": _fake_in_place,
    "scaled_mm": _fake_scaled_mm,
    "block_scaled_mm": _fake_block_scaled_mm,
}


def _register() -> None:
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, _on_cpu(name), "CPU")
        _LIBRARY.impl(name, _on_cuda(name), "CUDA")
        torch.library.register_fake(f"msamp::{name}", _FAKES[name], lib=_LIBRARY)


_register()


def _over_many(name: str) -> Callable[..., Any]:
    """The function over many tensors of that name, on the device of its `Tables`.

    No operator: its lists change from step to step, and no graph of torch.compile holds an optimizer.
    """

    def run(tables: Tables, *args: Any) -> Any:
        device = tables.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return _implementation(name, device.type)(tables, *args)

    return run


adamw = _over_many("adamw")
coat_adamw = _over_many("coat_adamw")
collage = _over_many("collage")
grad_stats = _over_many("grad_stats")
pack = _over_many("pack")

activate = torch.ops.msamp.activate.default
activate_backward = torch.ops.msamp.activate_backward.default
amax = torch.ops.msamp.amax.default
block_cast = torch.ops.msamp.block_cast.default
block_scaled_mm = torch.ops.msamp.block_scaled_mm.default
cast = torch.ops.msamp.cast.default
cast_transpose = torch.ops.msamp.cast_transpose.default
cast_transposed = torch.ops.msamp.cast_transposed.default
cross_entropy_ = torch.ops.msamp.cross_entropy_.default
group_cast = torch.ops.msamp.group_cast.default
group_decode = torch.ops.msamp.group_decode.default
normalize = torch.ops.msamp.normalize.default
normalize_backward = torch.ops.msamp.normalize_backward.default
normalize_transposed = torch.ops.msamp.normalize_transposed.default
rotary_ = torch.ops.msamp.rotary_.default
rotary_backward = torch.ops.msamp.rotary_backward.default
scale_from_amax = torch.ops.msamp.scale_from_amax.default
scaled_mm = torch.ops.msamp.scaled_mm.default
sum_parts = torch.ops.msamp.sum_parts.default
tally_ = torch.ops.msamp.tally_.default
tally_update_ = torch.ops.msamp.tally_update_.default
transpose = torch.ops.msamp.transpose.default

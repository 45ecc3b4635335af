"""The op table: schema, fake (shape) version and dispatch of every kernel, as torch operators `torch.ops.msamp.*`.

A CPU tensor gets the reference twin; a CUDA tensor the Triton kernel, or the twin where Triton is not installed.
Operators rather than bare functions, so that torch.compile keeps a layer in one graph.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable

import torch

from msamp.kernels import scaled_mm as _gemm

_LIBRARY = torch.library.Library("msamp", "DEF")
_SCHEMAS = (
    "amax(Tensor x) -> Tensor",
    "cast(Tensor x, Tensor scale, Tensor(a!)? amax_slot, ScalarType dtype) -> Tensor",
    "cast_transpose(Tensor x, Tensor scale, Tensor(a!)? amax_slot, ScalarType dtype) -> (Tensor, Tensor)",
    "square_sum(Tensor x, Tensor factor, float units) -> Tensor",
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
)


@functools.cache
def _implementation(name: str, device_type: str) -> Callable[..., object]:
    """The function that runs `name` on a device type."""
    if name == "scaled_mm":
        return _gemm.scaled_mm
    has_kernel = device_type == "cuda" and importlib.util.find_spec(f"msamp.kernels.triton.{name}") is not None
    has_triton = importlib.util.find_spec("triton") is not None
    if has_kernel and not has_triton:
        warnings.warn(f"Triton is not installed, {name} runs as plain torch operations, slower; pip install triton", stacklevel=2)
    package = "triton" if has_kernel and has_triton else "reference"
    return getattr(importlib.import_module(f"msamp.kernels.{package}.{name}"), name)


def _on_cpu(name: str) -> Callable[..., object]:
    return lambda *args: _implementation(name, "cpu")(*args)


def _on_cuda(name: str) -> Callable[..., object]:
    def run(x: torch.Tensor, *args: object) -> object:
        with torch.cuda.device(x.device):  # Triton launches on the current device, whatever its arguments are on
            return _implementation(name, "cuda")(x, *args)

    return run


def _fake_amax(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


def _fake_cast(x: torch.Tensor, scale: torch.Tensor, amax_slot: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, amax_slot: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


def _fake_square_sum(x: torch.Tensor, factor: torch.Tensor, units: float) -> torch.Tensor:
    return x.new_empty((2,), dtype=torch.int64)


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


_FAKES: dict[str, Callable[..., object]] = {
    "amax": _fake_amax,
    "cast": _fake_cast,
    "cast_transpose": _fake_cast_transpose,
    "square_sum": _fake_square_sum,
    "scaled_mm": _fake_scaled_mm,
}


def _register() -> None:
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, _on_cpu(name), "CPU")
        _LIBRARY.impl(name, _on_cuda(name), "CUDA")
        torch.library.register_fake(f"msamp::{name}", _FAKES[name], lib=_LIBRARY)


_register()

amax = torch.ops.msamp.amax.default
cast = torch.ops.msamp.cast.default
cast_transpose = torch.ops.msamp.cast_transpose.default
scaled_mm = torch.ops.msamp.scaled_mm.default
square_sum = torch.ops.msamp.square_sum.default

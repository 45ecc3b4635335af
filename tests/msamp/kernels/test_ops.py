"""The op table: what torch knows of each operator, and which implementation a device gets."""

import pytest
import torch
from numerics import codes, make

from msamp.kernels import ops
from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.cast import cast
from msamp.kernels.reference.cast_transpose import cast_transpose
from msamp.kernels.reference.square_sum import square_sum
from msamp.kernels.scaled_mm import scaled_mm
from msamp.numerics.formats import E4M3, E5M2


def arguments(device: torch.device | str) -> dict[str, tuple]:
    x, scale, slot = make("normal", (24, 40), device=device), torch.tensor(2.0, device=device), torch.zeros((), device=device)
    a, b = (make("normal", (m, 40), seed=m, device=device).to(E4M3.dtype) for m in (24, 56))
    bias = make("normal", (56,), device=device).bfloat16()
    return {
        "amax": (x,),
        "cast": (x, scale, slot, E4M3.dtype),
        "cast_transpose": (x, scale, slot, E5M2.dtype),
        "square_sum": (x, torch.tensor(0.25, dtype=torch.float64, device=device), 2.0**40),
        "scaled_mm": (a, b, scale, scale, bias, torch.bfloat16, True),
    }


NAMES = tuple(arguments("cpu"))
TWINS = {"amax": amax, "cast": cast, "cast_transpose": cast_transpose, "square_sum": square_sum, "scaled_mm": scaled_mm}


def outputs(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake_agree_with_what_runs(name, device):
    args = arguments(device)[name]
    if name != "scaled_mm":  # opcheck itself cannot compare FP8 operands
        torch.library.opcheck(getattr(torch.ops.msamp, name).default, args, test_utils="test_schema")
    real = outputs(getattr(ops, name)(*args))
    with torch._subclasses.FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = outputs(getattr(ops, name)(*fake_args))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride(), r.device.type) == (f.shape, f.dtype, f.stride(), f.device.type)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_gives_what_the_twin_gives(name, device):
    args, same = arguments(device)[name], arguments(device)[name]
    for got, want in zip(outputs(getattr(ops, name)(*args)), outputs(TWINS[name](*same)), strict=True):
        assert codes(got).equal(codes(want)) if got.element_size() == 1 else got.equal(want)
    for a, b in zip(args, same, strict=True):
        if isinstance(a, torch.Tensor) and a.ndim == 0:
            assert a.equal(b), "both raise the slot alike"


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_found_under_torch_ops(name):
    assert getattr(ops, name) is getattr(torch.ops.msamp, name).default


def test_a_cpu_tensor_gets_the_twin_and_a_gpu_one_triton():
    assert ops._implementation("cast", "cpu") is cast
    assert ops._implementation("cast_transpose", "cpu") is cast_transpose
    assert ops._implementation("amax", "cuda") is amax, "there is no Triton amax: the twin is one pass already"
    pytest.importorskip("triton")
    for name in ("cast", "cast_transpose"):
        assert ops._implementation(name, "cuda").__module__ == f"msamp.kernels.triton.{name}"


def test_all_of_a_linear_layer_s_operators_stay_in_one_graph(device):
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        one, slot = torch.ones((), device=x.device), torch.zeros((), device=x.device)
        x8 = ops.cast(x, one, slot, E4M3.dtype)
        w8 = ops.cast_transpose(w, one, None, E4M3.dtype)[1]
        return ops.scaled_mm(x8, w8, one, one, None, torch.float32, False) + slot + ops.amax(w)

    x, w = make("normal", (16, 32), device=device), make("normal", (32, 48), seed=1, device=device)
    torch._dynamo.reset()
    assert torch.compile(function, backend="aot_eager", fullgraph=True)(x, w).equal(function(x, w))

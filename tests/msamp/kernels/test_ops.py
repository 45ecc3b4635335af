"""The op table: what torch knows of each operator, and which implementation a device gets."""

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.agreement import assert_codes
from helpers.numerics import bits, make
from msamp.kernels import ops, reference, scaled_mm
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.tensor import ScalingTensor


def arguments(device: torch.device | str) -> dict[str, tuple]:
    """Of every operator; its flags are in FLAGS."""
    x, scale, slot = make("normal", (24, 40), device=device), torch.tensor(2.0, device=device), torch.zeros((), device=device)
    angles = make("normal", (6, 8), device=device)
    a, b = (make("normal", (m, 40), seed=m, device=device).to(E4M3.dtype) for m in (24, 56))
    bias = make("normal", (56,), device=device).bfloat16()
    exact = [make("normal", (m, 40), seed=m, device=device).round().to(E4M3.dtype) for m in (24, 56)]  # sums of integers, in any order
    offsets, both = torch.tensor([10, 24], dtype=torch.int32, device=device), scale.repeat(2)
    return {
        "amax": (x,),
        "cast": (x, scale, E4M3.dtype),
        "cast_columns": (x, scale, scale.repeat(40), E4M3.dtype),
        "cast_transpose": (x, scale, slot, E5M2.dtype),
        "cast_transposed": (x, scale, E5M2.dtype),
        "group_cast": (x, 16, E4M3.dtype),
        "group_decode": (a, torch.full((24, 3), 120, dtype=torch.uint8, device=device), 16, torch.bfloat16),
        "transpose": (a,),
        "weight_scales": (x.half(), scale, 448.0),
        "activate": (x, "swiglu", scale, slot, E4M3.dtype),
        "activate_backward": (x, x, "gelu", scale, E4M3.dtype, None, slot, E5M2.dtype),
        "rotary_": (x.view(6, 2, 80).clone(), angles, angles, 2, 1),
        "rotary_backward": (x.view(6, 2, 4, 20), *x.view(2, 6, 2, 2, 20), angles, angles, None, slot, E5M2.dtype),
        "cross_entropy_": (x.clone(), torch.arange(24, device=device), torch.ones(24, device=device)),
        "sum_parts": ([x, make("normal", (7, 3), device=device)], torch.bfloat16),
        "sum_payloads": (x, scale, torch.bfloat16),
        "scale_from_amax": (x.abs(), 448.0, None, 2.0),
        "tally_": (torch.zeros(8, dtype=torch.float64, device=device), a.float() * 1.01, a, scale),
        "tally_update_": (torch.zeros(7, dtype=torch.float64, device=device), x, x * 1.01, (x * 1.02).half(), scale),
        "scaled_mm": (a, b, scale, scale, bias, torch.bfloat16),
        "grouped_mm": (exact[0], exact[1].view(2, 28, 40), offsets, scale, both, torch.bfloat16),
        "grouped_mm_grad_weight": (*(exact[0].t().contiguous() for _ in range(2)), offsets, scale, scale, torch.float32),
        "grouped_tiles": (offsets, 30, 16),
        "group_tokens": (torch.arange(48, device=device).view(24, 2) % 5, 5, 8),
        "permute": (a, torch.arange(-1, 31, dtype=torch.int32, device=device), 2),
        "unpermute": (x, torch.arange(24, dtype=torch.int32, device=device).view(12, 2)),
        "expert_cast": (x.view(3, 8, 40), scale.repeat(3), E4M3.dtype),
        "expert_swiglu": (x, x[:, 0].abs(), scale, slot, E4M3.dtype),
        "expert_swiglu_backward": (x[:, :20], x, x[:, 0].abs(), scale, E4M3.dtype, scale, slot, E5M2.dtype),
        "block_cast": (x, scale, slot),
        "block_scaled_mm": (a, b, torch.full((24, 1), 0.5, device=device), torch.full((1, 1), 0.25, device=device), bias, torch.bfloat16),
    }


FLAGS: dict[str, dict[str, Any]] = {
    "cast_transpose": {"row": True, "col": True},
    "activate_backward": {"colsum": True},
    "rotary_backward": {"colsum": True},
    "scaled_mm": {"fast_accum": True},
    "grouped_mm": {"fast_accum": True},
    "grouped_mm_grad_weight": {"fast_accum": False},
    "permute": {"row": True, "col": True},
    "block_cast": {"rows": 1, "columns": 32, "dtype": E4M3.dtype, "scale_rule": "fp32", "row": True, "col": True},
    "block_scaled_mm": {"a_block": [1, 128], "b_block": [128, 128]},
}
NAMES = tuple(arguments("cpu"))
# opcheck itself cannot compare FP8 operands.
FP8_OPERANDS = ("scaled_mm", "block_scaled_mm", "transpose", "group_decode", "tally_", "grouped_mm", "grouped_mm_grad_weight", "permute")
MODULES = [
    scaled_mm,
    *(importlib.import_module(f"msamp.kernels.reference.{at.stem}") for at in Path(reference.__path__[0]).glob("[!_]*.py")),
]
ROUNDED_OTHERWISE = (
    "activate",
    "activate_backward",
    "expert_swiglu",
    "expert_swiglu_backward",
    "cross_entropy_",
    "rotary_",
    "rotary_backward",
)  # a GPU's exponentials and the order of its sums


def twin_of(name: str) -> Any:
    (twin,) = {getattr(module, name) for module in MODULES if getattr(getattr(module, name, None), "__module__", "") == module.__name__}
    return twin


def outputs(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple | list) else [] if result is None else [result]


class Seen(TorchDispatchMode):
    """Notes the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def check_schema_fake_and_dispatch(name, device):
    """Schema and fake agree with what runs, and a dispatch mode sees it."""
    args, flags = arguments(device)[name], FLAGS.get(name, {})
    if name not in FP8_OPERANDS:
        torch.library.opcheck(getattr(torch.ops.msamp, name).default, args, flags, test_utils="test_schema")
    with torch.no_grad(), Seen() as seen:
        real = outputs(getattr(ops, name)(*args, **flags))
    assert seen.names[0] == f"msamp.{name}.default"
    with torch._subclasses.FakeTensorMode() as mode:
        fake_args = pytree.tree_map_only(torch.Tensor, mode.from_tensor, list(args))
        fake = outputs(getattr(ops, name)(*fake_args, **flags))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride(), r.device.type) == (f.shape, f.dtype, f.stride(), f.device.type)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_gives_what_the_twin_gives_with_and_without_the_dispatcher(name, device):
    check_schema_fake_and_dispatch(name, device)
    args, plain, same, flags = *(arguments(device)[name] for _ in range(3)), FLAGS.get(name, {})
    results = outputs(getattr(torch.ops.msamp, name).default(*args, **flags))
    with torch.no_grad():
        undispatched = outputs(getattr(ops, name)(*plain, **flags))
    assert all(bits(a).equal(bits(b)) for a, b in zip(undispatched, results, strict=True))
    assert all(bits(a).equal(bits(b)) for a, b in zip(args, plain, strict=True) if isinstance(a, torch.Tensor)), "arguments change alike"
    for got, want in zip(results, outputs(twin_of(name)(*same, **flags)), strict=True):
        if got.element_size() == 1:
            assert_codes(got, want, 1e-3 if name in ROUNDED_OTHERWISE else 0.0)
        elif name in ROUNDED_OTHERWISE:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        else:
            assert got.equal(want)
    for a, b in zip(args, same, strict=True):
        if isinstance(a, torch.Tensor) and a.element_size() > 1:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=f"{name} changes its arguments in another way")


def test_autograd_traces_and_tensors_that_are_not_plain_keep_the_dispatcher(device):
    x = torch.ones(2, device=device)
    assert not ops._unseen(x), "gradients are enabled"
    with torch.no_grad():
        assert ops._unseen(x)
        assert ops._unseen(torch.nn.Parameter(x))
        assert not ops._unseen(ScalingTensor.quantize(x, E4M3))
        with Seen():
            assert not ops._unseen(x)
        assert "msamp.amax" in torch.fx.experimental.proxy_tensor.make_fx(ops.amax, pre_dispatch=True)(x).code


def test_a_cpu_tensor_gets_the_twin_and_a_gpu_one_triton():
    amax = twin_of("amax")
    assert ops._implementation(amax, "cuda") is amax, "there is no Triton amax: the twin is one pass already"
    pytest.importorskip("triton")
    for twin in map(twin_of, ("cast", "cast_transpose")):
        assert ops._implementation(twin, "cpu") is twin
        assert ops._implementation(twin, "cuda").__module__ == f"msamp.kernels.triton.{twin.__name__}"


def test_all_of_a_linear_layer_s_operators_stay_in_one_graph(device):
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        one, slot = torch.ones((), device=x.device), torch.zeros((), device=x.device)
        x8 = ops.cast(x, one, E4M3.dtype)
        w8 = ops.cast_transpose(w, one, slot, E4M3.dtype, col=True)[1]
        return ops.scaled_mm(x8, w8, one, one, None, torch.float32, fast_accum=False) + slot + ops.amax(w)

    x, w = make("normal", (16, 32), device=device), make("normal", (32, 48), seed=1, device=device)
    torch._dynamo.reset()
    assert torch.compile(function, backend="aot_eager", fullgraph=True)(x, w).equal(function(x, w))


def test_operators_on_blocks_stay_in_one_graph(device):
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        slot = torch.zeros((), device=x.device)
        flags = {"dtype": E4M3.dtype, "scale_rule": "fp32", "row": True, "col": False}
        x8, x_scale_inv, *_ = ops.block_cast(x, None, slot, rows=1, columns=128, **flags)
        w8, w_scale_inv, *_ = ops.block_cast(w, None, None, rows=128, columns=128, **flags)
        return ops.block_scaled_mm(x8, w8, x_scale_inv, w_scale_inv, None, torch.float32, a_block=(1, 128), b_block=(128, 128)) + slot

    x, w = make("normal", (16, 320), device=device), make("normal", (48, 320), seed=1, device=device)
    torch._dynamo.reset()
    assert torch.compile(function, backend="aot_eager", fullgraph=True)(x, w).equal(function(x, w))


def test_gradients_on_several_devices_are_refused():
    with pytest.raises(ValueError, match="gradients are on cpu, meta; pass gradients of one device"):
        ops.grad_stats(Tables(torch.device("cpu")), [torch.ones(3), torch.ones(3, device="meta")])


def test_kernels_repeat_names_and_defaults_of_their_twins():
    """Types and shapes are declared by the twin alone."""
    pytest.importorskip("triton")
    for file in sorted(Path(reference.__path__[0]).glob("*.py")):
        if importlib.util.find_spec(f"msamp.kernels.triton.{file.stem}") is None or file.stem == "__init__":
            continue
        twins, kernels = (importlib.import_module(f"msamp.kernels.{room}.{file.stem}") for room in ("reference", "triton"))
        for name, kernel in inspect.getmembers(kernels, inspect.isfunction):
            twin = getattr(twins, name, None)
            if kernel.__module__ == kernels.__name__ and not name.startswith("_") and inspect.isfunction(twin):
                ours, theirs = ([(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (kernel, twin))
                assert ours == theirs, (file.stem, name)

"""One list of all of torch's foreach and elementwise functions, on tensors as gradients and weights of every level are: each has the
result of the values, or names the dense form."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import msamp
from helpers.numerics import make
from msamp.numerics.formats import E4M3, FP16, Format
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import ScalingTensor

aten = torch.ops.aten
every_format = pytest.mark.parametrize("fmt", [E4M3, FP16], ids=str)


def in_format(fmt: Format) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ScalingTensor.quantize(x, fmt)


STORED = {
    "fp8-e4m3": in_format(E4M3),
    "fp16": in_format(FP16),
    "gradient": lambda x: FP8Gradient(ScalingTensor.quantize(x, E4M3)),
    "wide gradient": lambda x: FP8Gradient(ScalingTensor.quantize(x, E4M3)).add_(0.0),
}
every_form = pytest.mark.parametrize("form", STORED)
RANDOM = ("bernoulli", "rand", "dropout", "normal", "uniform", "exponential", "geometric", "log_normal", "cauchy", "poisson", "random")
VALUES: dict[str, Any] = {
    "number": 0.5,
    "Optional[number]": 0.5,
    "int": 1,
    "float": 0.5,
    "bool": False,
    "str": "floor",
    "Optional[float]": 0.5,
}


def overloads(*, foreach: bool) -> list[Any]:
    found = []
    listed = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    for name in sorted(listed):
        packet = getattr(aten, name, None)
        if packet is None or name.startswith("_foreach_") != foreach:
            continue
        for each in packet.overloads():
            op = getattr(packet, each)
            first = op._schema.arguments[:1]
            takes = bool(first) and str(first[0].type) == ("List[Tensor]" if foreach else "Tensor")
            if takes and not any(a.is_out for a in op._schema.arguments) and (foreach or torch.Tag.pointwise in op.tags):
                found.append(op)
    return found


def given(op: Any, plain: bool, form: str) -> list[Any] | None:
    """Arguments that its schema takes; None where this test knows none."""

    def tensor(seed: int) -> torch.Tensor:
        x = STORED[form](make("normal", (4, 6), seed).abs() * 0.4 + 0.1)
        return x.dequantize() if plain else x

    arguments: list[Any] = []
    for place, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind not in ("Tensor", "number")):
            break
        if kind == "Tensor":
            single = op._opname.startswith("_foreach_")
            arguments.append(torch.tensor(0.5) if single else tensor(place))
        elif kind == "List[Tensor]":
            arguments.append([tensor(place), tensor(place + 9)])
        elif kind == "List[number]":
            arguments.append([0.5, 0.25])
        elif kind in VALUES:
            arguments.append(VALUES[kind])
        else:
            return None
    return arguments


def flat(x: Any) -> list[Any]:
    return [y for each in x for y in flat(each)] if isinstance(x, list | tuple) else [x]


@every_form
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "elementwise"])
@pytest.mark.filterwarnings("ignore")
def test_every_elementwise_function_has_the_result_of_the_values_or_names_the_dense_form(foreach, form):
    served, refused, wrong = 0, [], []
    for op in overloads(foreach=foreach):
        arguments, values = given(op, False, form), given(op, True, form)
        if arguments is None or any(word in op._opname for word in RANDOM):
            continue
        try:
            want = op(*values)
        except Exception:  # arguments that torch itself does not take, such as floats for bitwise_and
            continue
        try:
            got = op(*arguments)
        except RuntimeError as error:
            refused.append(str(op))
            wrong += [] if "call .dequantize() first" in str(error) else [f"{op}: {error}"]
            continue
        served += 1
        if any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
            got, want = arguments[0], values[0]
        tolerance = 0.07 if form == E4M3.name and op._schema.is_mutable else 2e-3
        for a, b in zip(flat(got), flat(want), strict=True):
            if isinstance(a, torch.Tensor):
                a, b = (x.dequantize() if isinstance(x, ScalingTensor | FP8Gradient) else x for x in (a, b))
                if "gradient" not in form and op._schema.is_mutable:
                    b = b.where(b.isfinite(), torch.nan)
                if not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
                    wrong.append(f"{op}: {a.flatten()[:3].tolist()} for {b.flatten()[:3].tolist()}")
    assert not wrong
    assert served > (80 if foreach else 150)
    assert len(refused) < 0.1 * served, refused


@every_format
def test_clipping_by_foreach_folds_into_the_scale(fmt):
    x = ScalingTensor.quantize(make("normal", (4, 6)), fmt)
    values, payload = x.dequantize(), x.payload.clone()
    torch._foreach_mul_([x], torch.tensor(0.3))
    torch._foreach_div_([x], 2.0)
    assert x.payload.view(torch.uint8).equal(payload.view(torch.uint8))
    assert torch.allclose(x.dequantize(), values * 0.15)
    torch._foreach_copy_([x], [values])
    assert x.dequantize().equal(values)
    torch._foreach_zero_([x])
    assert x.dequantize().eq(0).all()


CUT = {"slice": lambda x: x[1:3], "row": lambda x: x[0], "split": lambda x: x.split(2), "rows": list}


@pytest.mark.parametrize("name", CUT)
def test_a_part_names_the_dense_form(name):
    """A view of a part could be written to, and would need a scale of its own."""
    with pytest.raises(RuntimeError, match=r"call \.dequantize\(\) first"):
        CUT[name](ScalingTensor.quantize(make("normal", (4, 6)), E4M3))


def gradients_are_tensors(level: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    spread = {"zero": False} if torch.distributed.is_initialized() else {}
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), level, **spread)
    for step in range(2):
        optimizer.zero_grad()
        (model(x := make("normal", (16, 32), step)) - x).square().mean().backward()
        gs = [p.grad for p in model.parameters()]
        flat_gradient = torch.cat([g.view(-1) for g in gs])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)
        assert torch.allclose(flat_gradient.norm(), norm.float(), rtol=1e-3)
        assert not any(torch.isnan(p.grad).any() for p in model.parameters())
        assert torch.allclose(torch.cat([p.grad.view(-1) for p in model.parameters()]).norm(), torch.tensor(1e-3), rtol=1e-2)
        assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())
        for p in model.parameters():
            assert torch.sgn(p).abs().max() <= 1
            assert (p > -1e3).all()
        optimizer.step()
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
def test_gradients_and_weights_of_every_level_are_tensors(level):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients_are_tensors(level)

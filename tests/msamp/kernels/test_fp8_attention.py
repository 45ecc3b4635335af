"""Which machine computes FP8 attention, and on a GPU cuDNN's kernels against their definition."""

import importlib.util
import math

import pytest
import torch

from helpers.numerics import ATTENTION_KERNEL, make
from msamp.kernels import fp8_attention
from msamp.kernels.fp8_attention import attention_backward, attention_forward, check_available, check_width, default_scale, prepare
from msamp.kernels.reference import fp8_attention as twin
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)


def test_widths_that_no_kernel_takes_are_refused():
    for width in (16, 64, 128):
        check_width(width)
    for width in (0, 24, 144):
        with pytest.raises(ValueError, match=f"heads have {width} channels; FP8 attention requires a multiple of 16 up to 128"):
            check_width(width)


def test_a_gpu_that_has_none_is_refused_by_name(monkeypatch):
    check_available(CPU, 64)
    on_a_gpu(monkeypatch, (8, 9))
    with pytest.raises(ValueError, match=r"card \(compute capability 8.9\) has no FP8 attention, which requires 9.0 or later"):
        check_available(CUDA, 128)
    on_a_gpu(monkeypatch, (9, 0))
    check_available(CUDA, 128)
    with pytest.raises(ValueError, match=r"heads have 64 channels; .* requires 128: use --kv-channels 128"):
        check_available(CUDA, 64)
    on_a_gpu(monkeypatch, (10, 0))
    check_available(CUDA, 64)
    on_a_gpu(monkeypatch, (9, 0), installed=False)
    with pytest.raises(ValueError, match=r"cuDNN's frontend, which is not installed: pip install -e '\.\[cudnn\]'"):
        check_available(CUDA, 128)


def test_a_cpu_follows_the_definition_and_prepares_nothing():
    prepare((8, 1, 2, 16), 1, 0.25, CPU, causal=True, keys=8, gradients=False)
    assert fp8_attention._forward_graph.cache_info().currsize == 0
    q, k, v = (make("normal", (8, 1, n, 16), seed=n).to(E4M3.dtype) for n in (2, 1, 1))
    given = (q, k, v, torch.ones(3), torch.ones(()), default_scale(16))
    for mine, theirs in zip(attention_forward(*given, causal=True), twin.attention_forward(*given, causal=True), strict=True):
        assert mine.float().equal(theirs.float())
    assert default_scale(16) == 0.25


# queries, batch, heads, groups, channels, causal, keys
SHAPES = [(256, 2, 4, 4, 128, True, 256), (1024, 1, 8, 2, 128, True, 1024), (512, 2, 2, 2, 128, False, 512)]
PARTS = [(512, 2, 4, 2, 128, False, 256), (256, 1, 8, 2, 128, False, 512)]  # of a ring of ranks


def operands(shape, kind: str = "normal") -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of query, key and value with their scale_inv, and the output's gradient with its own."""
    s, b, heads, groups, d, _, keys = shape
    made = []
    for i, (length, n) in enumerate(((s, heads), (keys, groups), (keys, groups), (s, heads))):
        x, fmt = make(kind, (length, b, n, d), seed=i, device="cuda"), E4M3 if i < 3 else E5M2
        scale = scale_from_amax(x.abs().amax(), fmt.max)
        made.append((quantize(x, scale, fmt), inverse(scale)))
    return [x for x, _ in made[:3]], torch.stack([s for _, s in made[:3]]), made[3][0], made[3][1]


def both(way, shape, kind: str = "normal"):
    """Output, statistics and amax, then gradients and amaxes, by `way`, with scales of powers of two."""
    codes, scale_invs, grad, grad_scale_inv = operands(shape, kind)
    factor, causal = 1 / math.sqrt(shape[4]), shape[5]
    o_scale = inverse(scale_invs[2])
    o, stats, amax = way.attention_forward(*codes, scale_invs, o_scale, factor, causal=causal)
    scales = torch.tensor([2.0**8, 2.0**7, 2.0**7, 2.0**7], device="cuda")
    given = twin.AttentionScales(scale_invs, inverse(o_scale), grad_scale_inv, scales, inverse(scales[0]))
    *gradients, amaxes = way.attention_backward(*codes, o, grad, stats, given, factor, causal=causal)
    values = [dequantize(o, inverse(o_scale)), *(dequantize(g, inverse(s)) for g, s in zip(gradients, scales[1:], strict=True))]
    return values, stats, torch.cat([amax.view(1), amaxes]), (o, *gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES + PARTS, ids=str)
def test_cudnn_and_the_definition_agree(shape):
    pytest.importorskip("cudnn")
    got, stats, amaxes, _ = both(fp8_attention, shape)
    want, wanted_stats, wanted_amaxes, _ = both(twin, shape)
    found = {name: sqnr_db(right, mine) for name, right, mine in zip(("o", "dq", "dk", "dv"), want, got, strict=True)}
    assert all(found[name] > ATTENTION_KERNEL[name] for name in found), found
    torch.testing.assert_close(stats, wanted_stats, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(amaxes, wanted_amaxes, rtol=0.05, atol=0.0)


@pytest.mark.gpu
def test_run_to_run_and_from_a_captured_graph():
    pytest.importorskip("cudnn")
    shape = SHAPES[1]
    codes, scale_invs, grad, grad_scale_inv = operands(shape)
    factor, o_scale = 1 / math.sqrt(shape[4]), inverse(scale_invs[2])
    scales = torch.tensor([2.0**8, 2.0**7, 2.0**7, 2.0**7], device="cuda")

    def run():
        o, stats, amax = attention_forward(*codes, scale_invs, o_scale, factor, causal=True)
        given = twin.AttentionScales(scale_invs, inverse(o_scale), grad_scale_inv, scales, inverse(scales[0]))
        return o, stats, amax, *attention_backward(*codes, o, grad, stats, given, factor, causal=True)

    first, again = run(), run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    for others in (again, captured):
        for name, a, b in zip(("o", "stats", "amax"), first, others, strict=False):
            assert a.float().equal(b.float()), name
        for name, a, b in zip(("dq", "dk", "dv"), first[3:6], others[3:6], strict=True):
            # dQ is a sum over blocks of keys in any order, and now and then an element rounds to its neighbour.
            assert sqnr_db(a.float(), b.float()) > ATTENTION_KERNEL["again"], name


@pytest.mark.gpu
def test_scales_change_between_replays_and_saturate():
    pytest.importorskip("cudnn")
    codes, scale_invs, _, _ = operands(SHAPES[0])
    scale = inverse(scale_invs[2]).clone()
    attention_forward(*codes, scale_invs, scale, 0.1, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _, _ = attention_forward(*codes, scale_invs, scale, 0.1, causal=True)
    graph.replay()
    before = o.float()
    scale.mul_(2.0**-3)
    graph.replay()
    assert sqnr_db(before / 8, o.float()) > 25
    scale.mul_(2.0**20)
    graph.replay()
    assert o.float().abs().amax() == E4M3.max

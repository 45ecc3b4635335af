"""The table of COAT's ranges and errors: of moments made by hand, and of a checkpoint that a tiny run wrote."""

from dataclasses import replace

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.numerics import make
from megatron.lm.checkpoint import latest
from msamp.kernels import ops
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.quantize import dequantize
from msamp.numerics.scaling import Exact
from tools.reproduce import coat_flow, coat_states
from tools.reproduce.coat_flow import FLOWS, Flow, Llama, bf16, by_tensor, in_groups
from tools.reproduce.trainings import Loop

EPS = 1e-8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of an O0 run."""
    root = tmp_path_factory.mktemp("coat")
    return checkpoints.saved(tiny.write_data(root), root / "O0", opt_level="O0")


def test_ranges_by_hand():
    m = torch.zeros(1, 384)
    m[0, :128] = torch.linspace(-4.0, -2.0, 128)
    m[0, 128:256] = 10.0 ** torch.linspace(-2, 2, 128)
    row = coat_states.range_row([(m, m.square())], "m")
    assert (row["what"], row["range_p10"], row["range_p90"], row["page_range"]) == ("range of m", "2", "2", "1000")
    assert coat_states.range_row([(m, m.square())] * 2, "v")["range_p90"] == "1e+08"
    steps = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0]).repeat_interleave(128).view(5, 128)
    steps[:, 0] = 1.0
    row = coat_states.range_row([(steps, steps.square())], "m")
    assert (row["range_p10"], row["range_median"], row["range_p90"]) == ("2", "5", "7")


def test_moments_that_fit_have_no_error():
    """Two magnitudes in a group that are the ends of the range: largest and smallest code whether expanded or not."""
    m, v = (torch.where(torch.arange(256) % 2 == 0, fmt.max, fmt.smallest) for fmt in (E4M3, E5M2))
    for expand in (False, True):
        row = coat_states.error_row([(m, v), (m.view(2, 128), v.view(2, 128))], (E4M3, E5M2), expand, EPS)
        assert (row["m"], row["v"], row["expand"]) == ("fp8-e4m3", "fp8-e5m2", "yes" if expand else "no")
        assert float(row["sqnr_db"]) > 110
        assert (row["underflow_m"], row["underflow_v"]) == ("0", "0")


def test_a_v_that_vanishes_leaves_the_update_to_eps_and_expansion_keeps_it():
    m, v = torch.full((128,), 1e-3), torch.full((128,), 1e-6)
    v[5] = 1e-14
    plain, expanded = (coat_states.error_row([(m, v)], (E4M3, E4M3), expand, EPS) for expand in (False, True))
    assert float(plain["underflow_v"]) == pytest.approx(1 / 128, rel=1e-3)
    assert float(plain["mse"]) == pytest.approx((1e-3 / 1e-8 - 1e-3 / (1e-7 + 1e-8)) ** 2 / 128, rel=1e-3)
    assert float(expanded["underflow_v"]) == 0
    assert float(expanded["sqnr_db"]) > 40


def test_a_checkpoint_gives_the_whole_table(folder):
    found = coat_states.measured(folder)
    assert {tuple(row) for row in found} == {coat_states.COLUMNS}
    assert [row["weights"] for row in found] == [kind for kind in ("linear", "embedding", "vector", "all") for _ in range(2 + 8)]
    elements = {row["weights"]: row["elements"] for row in found}
    assert elements["all"] == elements["linear"] + elements["embedding"] + elements["vector"]
    assert elements["linear"] == 2 * 12 * 32 * 32
    stored = checkpoints.tensors(latest(folder))
    assert elements["all"] == sum(x.numel() for key, x in stored.items() if key.startswith("exp_avg/"))
    better = [float(row["group_error"]) for row in found if row["weights"] == "linear" and row["expand"]]
    assert all(with_ < without for without, with_ in zip(better[:4], better[4:], strict=True))


# COAT's flow, emulated: what is rounded where, and that the gradient passes.


LOOP = Loop(width=32, layers=2, length=16, batch=4, steps=20, warm_up=2)


def test_roundings_have_one_scale_per_tensor_or_per_16_channels():
    x = make("normal", (4, 32), 0)
    x[:, 16:] *= 1e-6
    assert in_groups(x)[:, 16:].ne(0).all()
    assert by_tensor(E4M3)(x)[:, 16:].eq(0).all()
    for rounded, bits in ((in_groups(x), 4), (by_tensor(E5M2)(x[:, :16]), 3), (bf16(x), 8)):
        error = (rounded - x[:, : rounded.shape[1]]).abs() / x[:, : rounded.shape[1]].abs()
        assert 0 < error.median() < 2.0**-bits
    assert in_groups(in_groups(x)).equal(in_groups(x))


def layer_outputs(flow: Flow) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of a model, and the gradient of the first linear weight."""
    torch.manual_seed(0)
    model = Llama(LOOP, flow)
    scores = model(torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1)))
    scores.square().mean().backward()
    grad = model.linear["qkv_0"].grad
    assert grad is not None
    return scores.detach(), grad


def test_each_flow_rounds_more_than_the_one_before_it():
    plain, plain_grad = layer_outputs(FLOWS["bf16"])
    errors = []
    for name in ("FP8 gradients", "FP8 weights", "FP8 GEMMs", "FP8 flow"):
        scores, grad = layer_outputs(FLOWS[name])
        errors.append(float((scores - plain).norm() / plain.norm()))
        assert 0 < (grad - plain_grad).norm() / plain_grad.norm() < 0.5
    assert errors[0] == 0 < 1e-3 < errors[1] < errors[2] < errors[3] < 0.3


def test_the_residual_stream_and_the_outputs_of_linear_layers_are_bf16_and_what_layers_read_is_fp8(monkeypatch):
    """As in the code that COAT's authors published: per layer two norms' inputs, gate, up and SiLU in groups; four inputs and weights."""
    grouped, whole = [], []
    monkeypatch.setattr(coat_flow, "in_groups", lambda x: grouped.append(x.shape[-1]) or x)
    monkeypatch.setattr(coat_flow, "TENSOR", lambda x: whole.append(tuple(x.shape)) or x)
    model = Llama(LOOP, FLOWS["FP8 flow"], rotary=True)
    model(torch.zeros(2, 16, dtype=torch.int64))
    assert sorted(grouped) == [32] * 2 * LOOP.layers + [80] * 3 * LOOP.layers
    assert len(whole) == 8 * LOOP.layers


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_by_tensor_is_the_library_s(fmt: Format, dtype: torch.dtype):
    x = make("log-normal", (64, 32), 0).to(dtype)
    scale_inv = Exact().scale_inv(ops.amax(x), fmt.max)
    assert by_tensor(fmt)(x).equal(dequantize(ops.cast(x, scale_inv.reciprocal(), fmt.dtype), scale_inv, dtype))
    assert by_tensor(fmt)(torch.zeros_like(x)).eq(0).all()


def test_rotary_embeddings_depend_on_distances_alone():
    q, k = (make("normal", (6, 8), seed) for seed in (1, 2))
    shifted = [coat_flow.rotated(torch.cat([torch.zeros(3, 8), x]))[3:] for x in (q, k)]
    assert torch.allclose(coat_flow.rotated(q) @ coat_flow.rotated(k).t(), shifted[0] @ shifted[1].t(), atol=1e-5)


def test_a_training_lowers_the_loss_and_repeats():
    text = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog. " * 60), dtype=torch.uint8)
    first, second = (list(coat_flow.train(FLOWS["FP8 flow"], replace(LOOP, layers=1), text, seed=3)) for _ in range(2))
    assert first == second
    assert [step for step, _ in first] == [10, 20, 20]
    assert first[1][1] < first[0][1] < 5.7

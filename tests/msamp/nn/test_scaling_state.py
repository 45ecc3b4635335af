"""The scales between steps: recorded, rolled, shared by ranks, saved."""

import copy

import pytest
import torch
from torch import nn

from helpers import dist
from helpers.definitions import AmaxHistory
from helpers.numerics import make
from msamp.nn.convert import convert
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, LinearScaling, ScalingState
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.scaling import Current, Delayed, scale_from_amax
from msamp.numerics.tensor import ScalingTensor


def scaling(rule=None, wire=None) -> LinearScaling:
    return LinearScaling((recipe.O2 if rule is None else recipe.O2.with_scaling(rule)).gemm, wire=wire)


def model(rule=None) -> nn.Module:
    torch.manual_seed(0)
    level = recipe.O2 if rule is None else recipe.O2.with_scaling(rule)
    return convert(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), level)


def test_forty_rolls_give_the_scales_of_the_definition():
    layer = scaling()
    holder = nn.ModuleList([layer])
    state = ScalingState(holder)
    histories = [AmaxHistory(Delayed(16), fmt) for fmt in (E4M3, E5M2)]
    amaxes = 10 ** (torch.rand(40, 2, generator=torch.Generator().manual_seed(1)) * 8 - 4)
    for i, amax in enumerate(amaxes):
        want = [float(h.step(a)) for h, a in zip(histories, amax, strict=True)]
        slots = layer.slots(record=True)
        assert layer.delayed == (i >= 16)
        for slot, a, w in zip(slots, amax, want, strict=True):
            assert slot.scale is None if i < 16 else (slot.scale == w and slot.scale_inv == 1 / w)
            slot.amax.copy_(a)
        state.roll()
    assert layer.seen == 40
    assert layer.steps == 16  # the host counts no further than the window
    assert layer.history.equal(amaxes[-16:].t())


def rolled(layers: list[LinearScaling], amaxes: list[torch.Tensor]) -> None:
    """Steps of some layers in one model; `amaxes` by layer, [steps, rows]."""
    state = ScalingState(nn.ModuleList(layers))
    for step in range(len(amaxes[0])):
        for layer, amax in zip(layers, amaxes, strict=True):
            for slot, a in zip(layer.slots(record=True), amax[step], strict=True):
                slot.amax.copy_(a)
        state.roll()


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    {
        "zero": ("scale", 0.0, r"scale contains 0; it must be in \[1.17549e-38, 8.50706e\+37\]"),
        "infinite": ("scale", float("inf"), "scale contains inf"),
        "NaN": ("scale", float("nan"), "scale contains nan"),
        "negative": ("scale", -2.0, "scale contains -2"),
        "beyond the rule": ("scale", 2.0**127, "scale contains 1.70141e"),
        "no power of two": ("scale", 3.0, "scale contains 3; it must be a power of two"),
        "another's inverse": ("scale_inv", 2.0**-20, "scale_inv is .*; it must be the inverse of scale"),
        "an infinite amax": ("amax", float("inf"), "amax contains inf; it must be in"),
        "a negative amax": ("history", -1.0, "history contains -1; it must be in"),
        "a negative count": ("seen", -1, "seen contains -1; it must be in"),
    }.values(),
)
def test_a_saved_state_that_no_run_can_have_had_is_refused(name: str, bad: float, said: str):
    layer = scaling()
    rolled([layer], [torch.rand(20, 2, generator=torch.Generator().manual_seed(1))])
    state = {key: x.clone() for key, x in layer.state_dict().items()}
    layer.check_state(state)
    state[name].view(-1)[0] = bad
    with pytest.raises(ValueError, match=said):
        layer.check_state(state)
    with pytest.raises(ValueError, match=r"history is torch\.float64; it must be torch\.float32"):
        layer.check_state({"history": layer.history.double()})


def test_layers_with_and_without_partial_sums_roll_together_as_each_alone():
    wires = (None, E5M2, E4M3, None, E5M2)
    draw = torch.Generator().manual_seed(2)
    amaxes = [10 ** (torch.rand(20, 2 if wire is None else 3, generator=draw) * 8 - 4) for wire in wires]
    together = [scaling(wire=wire) for wire in wires]
    rolled(together, amaxes)
    for layer, wire, amax in zip(together, wires, amaxes, strict=True):
        alone = scaling(wire=wire)
        rolled([alone], [amax])
        for name, found in layer.named_buffers():
            assert found.equal(alone.get_buffer(name)), (wire, name)
        assert layer.history.equal(amax[-16:].t())
        for row, fmt in enumerate((E4M3, E5M2) if wire is None else (E4M3, E5M2, wire)):
            assert layer.slots(record=False)[row].scale == scale_from_amax(amax[-16:, row].amax(), fmt.max)


def test_a_roll_empties_the_step_s_amaxes():
    net = model()
    state = ScalingState(net)
    net(make("normal", (8, 32))).sum().backward()
    recorded = net[0].scaling.amax.clone()
    assert (recorded > 0).all()
    state.roll()
    assert net[0].scaling.amax.eq(0).all()
    assert net[0].scaling.history[:, -1].equal(recorded)
    assert net[0].scaling.scale[INPUT] == scale_from_amax(recorded[INPUT], E4M3.max)
    assert net[0].scaling.scale[GRAD_OUTPUT] == scale_from_amax(recorded[GRAD_OUTPUT], E5M2.max)


def test_a_step_that_saw_nothing_finite_keeps_the_last_scale():
    layer = scaling(Delayed(2))
    state = ScalingState(nn.ModuleList([layer]))
    for amax in (10.0, 10.0, float("inf")):
        layer.amax.fill_(amax)
        state.roll()
    assert layer.scale.tolist() == [32.0, 4096.0]
    for _ in range(2):
        layer.amax.fill_(1.0)
        state.roll()
    assert layer.scale.tolist() == [256.0, 32768.0]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_weight_s_scale_is_that_of_its_own_amax(size):
    layer, weight = scaling(), ScalingTensor.quantize(make("normal", (32, 16)) * size, FP16)
    multiplier, scale_inv = layer.weight_scales(weight)
    want = scale_from_amax(weight.dequantize().abs().amax(), E4M3.max)
    assert scale_inv == 1 / want
    assert multiplier == want * weight.scale_inv


def test_the_weight_s_scale_is_taken_once_as_long_as_the_weight_stands():
    layer, weight = scaling(), ScalingTensor.quantize(make("normal", (32, 16)), FP16)
    first = layer.weight_scales(weight)
    assert layer.weight_scales(weight) is first
    weight.store_(weight.dequantize() * 100)
    assert layer.weight_scales(weight)[1] != first[1]


@pytest.mark.parametrize("rule", [None, Current()], ids=str)
def test_the_weights_scales_of_all_layers_are_taken_together_after_an_update(rule, monkeypatch, device):
    net = model(rule).to(device)
    state, layers = ScalingState(net), [layer for layer in net if isinstance(layer, FP8Linear)]
    state.measure_weights()  # no forward yet: nothing to do
    net(make("normal", (4, 32), device=device))
    for i, layer in enumerate(layers):
        layer.weight.store_(layer.weight.dequantize(torch.float32) * (3.0 + i))
    expected = [layer.scaling._fresh_weight_scales(layer.weight) for layer in layers]
    state.measure_weights()
    monkeypatch.setattr("msamp.nn.scaling_state.ops.weight_scales", lambda *of: pytest.fail("a layer measured its weight by itself"))
    found = [layer.scaling.weight_scales(layer.weight) for layer in layers]
    for got, want in zip(found, expected, strict=True):
        assert all(a.equal(b) and a.data_ptr() % 16 == 0 for a, b in zip(got[1:], want[1:], strict=True))
        assert got[0].equal(want[0])
    state.measure_weights()  # nothing was written
    assert all(layer.scaling.weight_scales(layer.weight) is scales for layer, scales in zip(layers, found, strict=True))


def test_a_weight_that_is_written_after_the_measure_is_measured_again():
    net = model()
    state, layer = ScalingState(net), net[0]
    net(make("normal", (4, 32)))
    state.measure_weights()
    layer.weight.store_(layer.weight.dequantize(torch.float32) * 1000)
    multiplier, scale_inv = layer.scaling.weight_scales(layer.weight)
    assert (multiplier, scale_inv) == layer.scaling._fresh_weight_scales(layer.weight)


def test_kept_slots_follow_the_buffers_and_the_watches(device):
    layer = scaling().to(device)
    first = layer.slots(record=True)
    assert layer.slots(record=True) is first
    assert layer.slots(record=False)[INPUT].amax is None
    layer.watches[INPUT] = watch = lambda *seen: None
    assert [slot.watch for slot in layer.slots(record=True)] == [watch, None]
    assert layer.slots(record=False)[INPUT].watch is None
    layer.watches.clear()
    assert layer.slots(record=True)[INPUT].watch is None
    other = copy.deepcopy(layer)
    assert other.slots(record=True)[INPUT].amax.data_ptr() == other.amax.data_ptr() != layer.amax.data_ptr()
    layer.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()}, assign=True)
    layer.slots(record=True)[GRAD_OUTPUT].amax.fill_(3.0)
    assert layer.amax.tolist() == [0.0, 3.0]


def test_buffers_are_saved_and_the_host_s_count_follows():
    net = model()
    state = ScalingState(net)
    for _ in range(17):
        net(make("normal", (8, 32))).sum().backward()
        state.roll()
    saved = net.state_dict()
    assert {k.removeprefix("0.scaling.") for k in saved if k.startswith("0.scaling.")} == {"amax", "history", "scale", "scale_inv", "seen"}
    other = model()
    assert not other[0].scaling.delayed
    other.load_state_dict(saved)
    assert other[0].scaling.seen == 17
    assert other[0].scaling.steps == 16
    assert other[0].scaling.delayed


def batch(step: int, rank: int) -> torch.Tensor:
    return make("normal", (8, 32), seed=10 * step + rank) * (1.0 + rank * (step - 9))


def _train_on_a_rank() -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    net = model()
    state = ScalingState(net)
    for step in range(18):
        net(batch(step, rank)).sum().backward()
        state.roll(torch.distributed.group.WORLD)
    return {k: v.clone() for k, v in net.named_buffers()}


def test_a_roll_over_ranks_makes_their_histories_equal():
    first, second = dist.run(_train_on_a_rank, 2)
    assert first.keys() == second.keys()
    assert all(first[k].equal(second[k]) for k in first)
    want = [max(batch(step, rank).abs().max().item() for rank in range(2)) for step in range(2, 18)]
    assert first["0.scaling.history"][INPUT].tolist() == want


# ---------------------------------------------------------------------------------------------------------- skipped steps


def usable(value: bool) -> torch.Tensor:
    return torch.tensor(value)


def buffers(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in layer.state_dict().items()}


@pytest.mark.parametrize("rule", [None, Delayed(1), Delayed(3, "most_recent")])
def test_a_skipped_step_leaves_no_trace(rule):
    layer = scaling(rule)
    state = ScalingState(layer)
    for step in range(24):
        layer.amax.copy_(torch.tensor([1.0, 2.0]) * (1 + step % 5))
        state.roll(usable=usable(True))
        before, filled = buffers(layer), layer._filled
        layer.amax.copy_(torch.tensor([3e20, 1e30]))
        state.roll(usable=usable(False))
        assert all(x.equal(before[name]) for name, x in layer.state_dict().items())
        assert layer._filled == filled
        assert layer.steps >= min(int(layer.seen), layer.window)
        assert layer.delayed == (step + 1 >= layer.window)


def _skip_on_ranks() -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    net = model(Delayed(4))
    state = ScalingState(net)
    for step in range(8):
        (net(batch(step, rank)).sum() * (1e30 if step == 5 else 1.0)).backward()
        state.roll(torch.distributed.group.WORLD, usable(step != 5))
    return {k: v.clone() for k, v in net.named_buffers()}


def test_a_step_skipped_on_all_ranks_is_in_no_rank_s_history():
    first, second = dist.run(_skip_on_ranks, 2)
    assert all(first[k].equal(second[k]) for k in first)
    assert first["0.scaling.seen"] == 7
    want = [max(batch(step, rank).abs().max().item() for rank in range(2)) for step in (3, 4, 6, 7)]
    assert first["0.scaling.history"][INPUT].tolist() == want
    assert (first["2.scaling.history"][GRAD_OUTPUT] == 1.0).all()


@pytest.mark.parametrize("finite", [True, False])
def test_amaxes_of_an_abandoned_backward_are_dropped_or_at_most_twice_the_largest_known(finite):
    layer = scaling(Delayed(4))
    state = ScalingState(layer)
    layer.amax.copy_(torch.tensor([3.0, 1e20]))
    state.abandon(torch.tensor(finite))
    assert layer.amax.tolist() == pytest.approx([3.0, 1e20] if finite else [0.0, 0.0])  # nothing is known yet
    layer.amax.copy_(torch.tensor([3.0, 5.0]))
    state.roll()
    for amaxes in ([4.0, 1e20], [4.0, float("inf")], [4.0, float("nan")]):
        layer.amax.copy_(torch.tensor(amaxes))
        state.abandon(torch.tensor(finite))
        bounded = 0.0 if amaxes[1] != amaxes[1] else 10.0
        assert layer.amax.tolist() == ([4.0, bounded] if finite else [0.0, 0.0])


def test_a_layer_that_was_pickled_before_there_were_sums_is_read():
    scales = LinearScaling(recipe.O2.gemm)
    state = scales.__getstate__()
    del state["sums"]
    older = LinearScaling.__new__(LinearScaling)
    older.__setstate__(state)
    assert older.tallies is None

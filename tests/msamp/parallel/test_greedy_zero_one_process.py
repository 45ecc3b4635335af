"""ZeRO on one process: what is refused, and modules that wait for their own weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import msamp
from msamp.nn.transformer_block import TransformerBlock
from msamp.numerics.formats import FP32
from msamp.numerics.recipe import FP32_STATES, by_name
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO


def test_a_synchroniser_that_does_not_shard_is_refused():
    model = nn.Linear(4, 4)
    sync = grad_sync(model, dict.fromkeys(model.parameters(), FP32))
    with pytest.raises(ValueError, match="build it with shard=True, or leave out shard"):
        ZeRO(sync)


def test_deferred_weights_are_gathered_by_wait_and_not_read_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    sync = grad_sync(model, dict.fromkeys(model.parameters(), FP32), shard=True, bucket_elements=20)
    sent: list[str] = []

    def all_gather(own: torch.Tensor, sizes: list[int], what: str) -> torch.Tensor:
        sent.append(what)
        sync.sent.add("weight", "all-gather", own.nbytes)
        return own

    sync.sender.peers = SimpleNamespace(ranks=2, rank=0, all_gather=all_gather)  # type: ignore[assignment]
    shard = ZeRO(sync)
    versions = [p._version for p in model.parameters()]
    with shard.deferring():
        shard.send_weights({})
    assert shard.deferred
    assert not sent
    for read in (lambda: model(torch.ones(1, 4)), lambda: model[1](torch.ones(1, 4)), model.state_dict):
        with pytest.raises(RuntimeError, match=r"not been gathered.*wait\(\) on every rank"):
            read()
    with pytest.raises(RuntimeError, match="not been gathered"):
        model.load_state_dict({})
    shard.wait()
    assert len(sent) == len(sync.buckets)
    assert not sync.sent.rows(), "a step counts one all-gather"
    assert not shard.deferred
    assert [p._version for p in model.parameters()] == versions, "the optimizer would take the weights for written from outside"
    model(torch.ones(1, 4))
    shard.send_weights({})
    assert not shard.deferred
    assert len(sent) == 2 * len(sync.buckets)
    assert sync.sent.total("weight") > 0
    whole = sent[3:]
    sent.clear()
    for act, count in ((lambda: shard.start_gather(ahead=1), 1), (lambda: model[0](torch.ones(1, 4)), 2), (shard.wait, 3)):
        act()
        assert sent == whole[:count]


def test_a_parameter_unknown_to_the_synchroniser_is_refused_and_nothing_changes():
    model, later = nn.Linear(4, 4), nn.Parameter(torch.ones(3, 2))
    sync = grad_sync(model, dict.fromkeys(model.parameters(), FP32), shard=True)
    message = r"a parameter of shape \(3, 2\) is unknown to the gradient synchronizer; rebuild synchronizer and optimizer"
    with pytest.raises(ValueError, match=message):
        LowPrecisionOptimizer([*model.parameters(), later], formats=FP32_STATES, shard=ZeRO(sync))
    optimizer = LowPrecisionOptimizer(model.parameters(), formats=FP32_STATES, shard=ZeRO(sync))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [later]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    assert len(optimizer.holdings()) == 2


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, set[str], set[str]]:
    """A model whose weights are all on their way, as on a GPU after `step`; the names of their events; those waited for."""
    waited: set[str] = set()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(wait_event=waited.add))
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return model, watch(model), waited


def watch(model: nn.Module) -> set[str]:
    sync = grad_sync(model, dict.fromkeys(model.parameters(), FP32), shard=True, bucket_elements=1)
    model.kept_alive = shard = ZeRO(sync)  # type: ignore[assignment]
    shard.watch_forward()
    shard._pending.update({bucket: str(bucket) for bucket in sync.buckets})  # type: ignore[misc]
    return {str(bucket) for bucket in sync.buckets}


def test_a_module_waits_for_its_own_weights_and_those_that_it_takes_from_its_children(watched):
    """nn.MultiheadAttention reads its projection's weight without calling the projection."""
    model, events, waited = watched
    model.linear1(torch.ones(1, 16))
    assert waited == {"linear1.weight", "linear1.bias"}
    waited.clear()
    model.self_attn(*[torch.ones(1, 3, 16)] * 3)
    assert waited == {name for name in events if name.startswith("self_attn")}


def test_a_fused_block_stays_fused_and_waits_for_all_its_weights(watched):
    block = msamp.convert(TransformerBlock(32, 2, 32), by_name("O3"), lambda *_: True)
    events, waited = watch(block), watched[2]
    assert block.fused
    for call in (block, block.forward):
        waited.clear()
        call(torch.ones(16, 1, 32))
        assert waited == events


@pytest.mark.parametrize("what", ["save", "save a part", "load", "load a part"])
def test_weights_on_their_way_arrive_before_a_model_is_saved_or_loaded(watched, what):
    model, events, waited = watched
    part = model.self_attn if "part" in what else model
    state = (nn.TransformerEncoderLayer(16, 2, 32) if part is model else nn.MultiheadAttention(16, 2)).state_dict()
    part.state_dict() if what.startswith("save") else part.load_state_dict(state)
    assert waited >= ({name for name in events if name.startswith("self_attn")} if "part" in what else events)

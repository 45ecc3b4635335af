"""COAT under FSDP2: weights are gathered as stored, in E4M3, and each rank keeps FP32 masters and expanded moments of its rows."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import msamp
from helpers import dist
from helpers.fsdp_nets import Counted, FusedNet, everything, message, one_thread, trained, wanting
from msamp.integrations import fsdp
from msamp.nn.saved_activations import IN_GROUPS
from msamp.numerics.recipe import COAT
from msamp.numerics.tensor import ScalingTensor

STEPS = 5
WIDE = 160  # a row of the second layer: a whole group of 128 and a short one


class Net(nn.Module):
    """COAT's norm and activation; rows that ranks share equally, unequally, and so that the last ranks have none; a frozen layer."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(10, WIDE)
        parts = nn.Linear(WIDE, WIDE), msamp.Activation("gelu"), msamp.LayerNorm(WIDE)
        self.blocks = nn.ModuleList([nn.Sequential(*parts), nn.Linear(WIDE, 33), nn.Linear(33, 33)])
        self.blocks[2].requires_grad_(False)
        self.head = nn.Linear(33, 1)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(10, (32,), generator=torch.Generator().manual_seed(step + 2))
    return tokens, torch.tanh(tokens[:, None] / 5 - 1)


def sharded(model: nn.Module, recipe: Any = "coat", **options: Any):
    fsdp.prepare(model, recipe, accept=everything)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model, fsdp.optimizer(model, wanting(model), recipe, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, ranks: int = 1) -> list[float]:
    """Losses of steps on this rank's share of each batch."""
    return trained(model, optimizer, ([x[rank::ranks] for x in batch(step)] for step in steps))


def one_process(model: nn.Module, run: Callable[..., Any], **options: Any):
    """The result of `run`, weights and states."""
    with one_thread():
        model, optimizer = msamp.initialize(model, wanting(model), "coat", accept=everything, **options)
        return run(model, optimizer), bits(dict(model.state_dict())), bits(optimizer.state_dict()["state"])


def bits(x: Any) -> Any:
    """Names, formats and bits of a state, which travel between processes (pickle cannot read float8 tensors) and compare by ==."""
    if isinstance(x, dict):
        return {key: bits(value) for key, value in x.items()}
    if isinstance(x, ScalingTensor):
        return bits(x.payload), bits(x.scale_inv)
    return x.dtype, tuple(x.shape), x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The bits that the first rank would save: weights and optimizer states."""
    return bits(fsdp.model_state(model)), bits(optimizer.state_dict()["state"])


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Parameter -> state -> dtype and shape of what this rank stores."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    own = {names[holding.index]: optimizer.state[holding.weight] for holding in optimizer.holdings() if optimizer.state[holding.weight]}
    return {name: {key: (x.dtype, tuple(x.shape)) for key, x in state.items()} for name, state in own.items()}


def saved_for_backward(model: nn.Module) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of what the first block saves for backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append((x.dtype, tuple(x.shape))), x)[1], lambda x: x):
        model.blocks[0](torch.ones(32, WIDE))
    return kept


def several(folder: str) -> dict[str, Any]:
    """What two ranks do in one start of processes: runs in which both have the same batch, what they save, and what is refused."""
    rank = torch.distributed.get_rank()
    model, optimizer = sharded(Net(), clip_grad=0.5)
    model.blocks[1].set_custom_all_gather(counted := Counted())
    alike = train(model, optimizer, range(STEPS))
    weights, states = fsdp.model_state(model), optimizer.state_dict()
    if rank == 0:
        torch.save((weights, states), f"{folder}/saved.pt")
    before = bits(weights), bits(states["state"])
    own = {
        "alike": (alike, *before),
        "sent": list(counted.sent),
        "stored": stored(model, optimizer),
        "activations": saved_for_backward(model),
        "copies": [message(lambda: how(optimizer)) for how in (copy.deepcopy, pickle.dumps)],  # noqa: B023 - called at once
    }
    (model(batch(0)[0]).sum() * (float("nan") if rank else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    own["skipped"] = optimizer.skipped_steps, state_of(model, optimizer) == before
    own["went on"] = train(model, optimizer, range(STEPS, STEPS + 2))

    model, optimizer = sharded(Net(dtype=torch.bfloat16))
    own["bf16"] = train(model, optimizer, range(STEPS)), *state_of(model, optimizer)
    own["batches"] = train(*sharded(Net()), range(STEPS), rank, 2)
    model, optimizer = sharded(FusedNet(IN_GROUPS))
    own["fused"] = train_fused(model, optimizer), *state_of(model, optimizer)

    model, optimizer = sharded(Net())
    plain = Net()
    adam = wanting(plain)
    train(plain, adam, range(1))
    own["no master"] = message(lambda: optimizer.load_state_dict(adam.state_dict()))
    grouped = replace(COAT, name="coat-vectors", vectors=COAT.states)
    own["vectors"] = message(lambda: sharded(Net(), grouped))
    return own


def train_fused(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    xs = (torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(step)) for step in range(STEPS))
    return trained(model, optimizer, ((x, torch.tanh(x)) for x in xs))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("fsdp_coat"))
    return folder, dist.run(several, 2, folder)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return train(model, optimizer, range(STEPS))


@pytest.mark.promise("FSDP2", "COAT has one process's losses, weights and states, bit for bit, also with fused blocks.")
@pytest.mark.parametrize(
    ("which", "model", "run", "options"),
    [
        ("alike", Net, steps, {"clip_grad": 0.5}),
        ("bf16", lambda: Net(dtype=torch.bfloat16), steps, {}),
        ("fused", lambda: FusedNet(IN_GROUPS), train_fused, {}),
    ],
    ids=["fp32", "bf16", "fused"],
)
def test_sharded_training_has_the_bits_of_one_process(ranks, which, model, run, options):
    (losses, weights, states), (again, *_) = (own[which] for own in ranks[1])
    expected, expected_weights, expected_states = one_process(model(), run, **options)
    assert losses == again == expected
    assert len(set(losses)) == STEPS
    assert weights == expected_weights
    assert states == expected_states


def test_ranks_with_batches_of_their_own_train_like_one_process_with_all(ranks):
    losses = torch.tensor([own["batches"] for own in ranks[1]]).mean(0)
    expected, *_ = one_process(Net(), steps)
    assert torch.allclose(losses, torch.tensor(expected), rtol=0.02)


@pytest.mark.promise(
    "FSDP2", "At COAT each rank stores the moments of its rows of matrices in FP8, with a maximum and an exponent per group."
)
def test_each_rank_stores_its_rows_of_the_moments_in_fp8(ranks):
    for rank, own in enumerate(ranks[1]):
        for name, whole, columns, master in (
            ("words.weight", 10, WIDE, {}),
            ("blocks.0.0.weight", WIDE, WIDE, {"master"}),
            ("blocks.1.weight", 33, WIDE, {"master"}),
            ("head.weight", 1, 33, {"master"}),
        ):
            rows = len(range(whole)[rank * -(-whole // 2) :][: -(-whole // 2)])
            if not rows:
                assert name not in own["stored"]
                continue
            moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), (torch.float8_e4m3fn, (rows, columns)))
            groups = {key + of: (torch.float32, (rows, -(-columns // 128))) for key in moments for of in ("_max", "_k")}
            masters = dict.fromkeys(master, (torch.float32, (rows, columns)))
            assert own["stored"][name] == {"step": (torch.float32, ())} | moments | groups | masters
        assert ("head.weight" in own["stored"]) == (rank == 0)
        assert own["stored"]["blocks.1.bias"]["exp_avg"][0] is torch.float32


def test_norms_and_activations_of_a_sharded_block_keep_their_inputs_in_fp8_groups(ranks):
    for own in ranks[1]:
        kept = own["activations"]
        assert kept.count((torch.uint8, (32, WIDE // 16))) == 2  # the exponents of the groups of activation and norm
        assert (torch.float32, (32, WIDE)) not in kept


def test_a_step_of_which_one_rank_has_no_finite_gradient_leaves_no_trace(ranks):
    assert [own["skipped"] for own in ranks[1]] == [(1, True)] * 2


def resumed(folder: str) -> tuple[list[float], bool]:
    """What ranks do with the states that `several` saved: save them again, and train on."""
    model, optimizer = sharded(Net(1), clip_grad=0.5)
    train(model, optimizer, range(1))  # what this step leaves has to go
    weights, states = torch.load(f"{folder}/saved.pt")
    fsdp.load_model(model, weights)
    optimizer.load_state_dict(states)
    again = state_of(model, optimizer)
    kept = bool(torch.distributed.get_rank()) or again == (bits(weights), bits(states["state"]))
    return train(model, optimizer, range(STEPS, STEPS + 2)), kept


@pytest.mark.promise("FSDP2", "COAT resumes bit for bit on the same and on another number of ranks, and on one process.")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_run_resumes_with_the_bits_of_one_that_went_on(ranks, number):
    folder, (first, _) = ranks
    for losses, kept in dist.run(resumed, number, folder):
        assert kept
        assert losses == first["went on"]


def test_one_process_takes_up_what_several_saved(ranks):
    folder, (first, _) = ranks
    weights, states = torch.load(f"{folder}/saved.pt")

    def take_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert bits(optimizer.state_dict()["state"]) == bits(states["state"])
        return train(model, optimizer, range(STEPS, STEPS + 2))

    assert one_process(Net(1), take_up, clip_grad=0.5)[0] == first["went on"]


def test_what_cannot_be_sharded_or_copied_is_refused_with_the_fix(ranks):
    for own in ranks[1]:
        assert all("cannot be copied or pickled; load its state_dict() into a new one" in text for text in own["copies"])
        assert "blocks.0.0.weight has no master, and a rank of FSDP2 has no whole weight to initialize it from" in own["no master"]
        assert "has moments in coat-e4m3, whose groups are along dim 0 of a vector, where FSDP2 cuts it over 2 ranks" in own["vectors"]

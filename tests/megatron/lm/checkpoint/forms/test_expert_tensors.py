"""Experts as one tensor or as one per expert: the same bits, with scales, groups and steps."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.lm.checkpoint.content import group_keys, scale_key
from megatron.lm.checkpoint.files.storage import Item, Stored, write
from megatron.lm.checkpoint.forms.expert_tensors import as_wanted, separate

WHOLE = "decoder.layers.1.mlp.experts.fc1_weight"
E, N, K = 4, 6, 8
NORM = "decoder.layers.1.input_layernorm.weight"


def stored(folder: Path, *items: Item) -> Stored:
    folder.mkdir()
    write(folder, [*items, Item.whole(f"model/{NORM}", torch.ones(K))])
    return Stored(folder)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_one(folder: Path, x: Tensor) -> Stored:
    """As ranks under ZeRO write: experts 0 to 2 and expert 3 apart, moments in groups, and one number of steps."""
    items = [Item(f"model/{WHOLE}", part, x.shape, (first, 0, 0)) for first, part in ((0, x[:3]), (3, x[3:]))]
    groups = [Item.whole(key, numbers(E, N, 1) + i) for i, key in enumerate(group_keys(f"exp_avg/{WHOLE}", (0, 0, 0)))]
    return stored(folder, *items, Item.whole(f"exp_avg/{WHOLE}", x + 1), *groups, Item.whole(f"step/{WHOLE}", torch.tensor(7.0)))


def by_expert(folder: Path, x: Tensor, steps: tuple[float, ...] = (7.0,) * E) -> Stored:
    items = []
    for e, part in enumerate(x):
        key = f"model/{WHOLE}.{e}"
        items += [Item(key, rows, (N, K), (at, 0)) for at, rows in ((0, part[:2]), (2, part[2:]))]
        items += [Item.whole(scale_key(key, (at, 0)), torch.tensor(2.0**e + at)) for at in (0, 2)]
        items += [Item.whole(f"step/{WHOLE}.{e}", torch.tensor(steps[e])), Item.whole(f"exp_avg/{WHOLE}.{e}", part - 1)]
        items += [Item.whole(group, torch.full((N, 1), float(e))) for group in group_keys(f"exp_avg/{WHOLE}.{e}", (0, 0))]
    return stored(folder, *items)


def test_one_tensor_is_read_by_expert(tmp_path: Path):
    x = numbers(E, N, K).bfloat16()
    whole = in_one(tmp_path / "one", x)
    wanted = as_wanted(whole, {NORM, *(f"{WHOLE}.{e}" for e in range(E))})
    assert wanted.tensors == separate(whole).tensors
    for e in range(E):
        assert torch.equal(wanted.tensor(f"model/{WHOLE}.{e}"), x[e])
        assert torch.equal(wanted.tensor(f"exp_avg/{WHOLE}.{e}"), (x + 1)[e])
        assert wanted.tensor(f"step/{WHOLE}.{e}") == 7
        for group, all_of_it in zip(group_keys(f"exp_avg/{WHOLE}.{e}", (0, 0)), group_keys(f"exp_avg/{WHOLE}", (0, 0, 0)), strict=True):
            assert torch.equal(wanted.tensor(group), whole.tensor(all_of_it)[e])
    assert not [key for key in wanted.tensors if key.endswith("_weight") or "@0,0,0" in key]
    assert f"model/{NORM}" in wanted.tensors
    assert f"model/{WHOLE}" in whole.tensors  # the checkpoint itself stays


def test_experts_are_read_as_one_tensor(tmp_path: Path):
    x = numbers(E, N, K).to(torch.float8_e4m3fn)
    experts = by_expert(tmp_path / "each", x.float())
    wanted = as_wanted(experts, {WHOLE, NORM})
    assert torch.equal(wanted.tensor(f"model/{WHOLE}"), x.float())
    assert torch.equal(wanted.tensor(f"exp_avg/{WHOLE}"), x.float() - 1)
    assert wanted.tensor(f"step/{WHOLE}") == 7
    for e, at in itertools.product(range(E), (0, 2)):
        assert wanted.tensor(scale_key(f"model/{WHOLE}", (e, at, 0))) == 2.0**e + at
    for group in group_keys(f"exp_avg/{WHOLE}", (3, 0, 0)):
        assert torch.equal(wanted.tensor(group), torch.full((1, N, 1), 3.0))
    assert separate(experts) is experts
    again = separate(wanted)
    assert again.tensors.keys() == experts.tensors.keys()
    assert all(torch.equal(again.tensor(key), experts.tensor(key)) for key in again.tensors)


def test_a_checkpoint_in_the_form_of_the_run_stays_itself(tmp_path: Path):
    whole = in_one(tmp_path / "one", numbers(E, N, K))
    assert as_wanted(whole, {WHOLE, NORM}) is whole
    experts = by_expert(tmp_path / "each", numbers(E, N, K))
    assert as_wanted(experts, {f"{WHOLE}.{e}" for e in range(E)}) is experts


def test_damaged_experts_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"experts of step/.* differ, and a run that stores them as one tensor has one number"):
        as_wanted(by_expert(tmp_path / "steps", numbers(E, N, K), steps=(7, 7, 7, 6)), {WHOLE})
    gap = stored(tmp_path / "gap", *(Item.whole(f"model/{WHOLE}.{e}", numbers(N, K)) for e in (0, 2)))
    with pytest.raises(ValueError, match="are not of one shape and dtype; load an older checkpoint"):
        as_wanted(gap, {WHOLE})
    uneven = stored(tmp_path / "uneven", *(Item.whole(f"model/{WHOLE}.{e}", numbers(N + e, K)) for e in (0, 1)))
    with pytest.raises(ValueError, match="are not of one shape and dtype; load an older checkpoint"):
        as_wanted(uneven, {WHOLE})
    moments = stored(tmp_path / "moments", Item.whole(f"model/{WHOLE}", numbers(E, N, K)), Item.whole(f"exp_avg/{WHOLE}", numbers(3, N, K)))
    with pytest.raises(ValueError, match=r"exp_avg/.* is \(3, 6, 8\), of 4 experts"):
        separate(moments)
    (key, _) = group_keys(f"model/{WHOLE}", (0, 0, 0))
    groups = stored(tmp_path / "groups", Item.whole(f"model/{WHOLE}", numbers(E, N, K)), Item.whole(key, numbers(2, N, 1)))
    with pytest.raises(ValueError, match=r"\.max@0,0,0 is \(2, 6, 1\)"):
        separate(groups)

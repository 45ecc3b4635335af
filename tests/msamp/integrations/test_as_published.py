"""`msamp.recipes.as_published` in a loop: two processes train so, and what a GradSync does is the paper's."""

import pytest
import torch
from torch import nn

import msamp
from helpers import dist
from msamp.integrations import fsdp

PAPERS = {"fp8-lm": torch.float32, "collage": torch.bfloat16, "coat": torch.float32}


def trained() -> dict[str, tuple[list[float], str, bool]]:
    found = {}
    for paper, dtype in PAPERS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, low = msamp.initialize(model, optimizer, msamp.recipes.as_published(paper))
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).to(dtype)
        losses = []
        for _ in range(8):
            loss = (model(x).float() - x.float()).square().mean()
            loss.backward()
            low.step()
            low.zero_grad()
            losses.append(float(loss.detach()))
        sync = low.grad_sync
        assert sync is not None
        cut = any(len(bucket.pieces) > len({piece.index for piece in bucket.pieces}) for bucket in sync.buckets)
        found[paper] = losses, str(sync), cut
    return found


def test_two_processes_train_in_the_papers_arithmetic():
    for rank in dist.run(trained, 2):
        assert all(losses[-1] < losses[0] for losses, _, _ in rank.values())
        assert "nccl with auto-scaling" in rank["fp8-lm"][1]
        assert not rank["fp8-lm"][2]


def test_fully_shard_which_has_its_own_sums_refuses_the_papers_exchange():
    recipe = msamp.recipes.as_published("fp8-lm", "O2")
    with pytest.raises(ValueError, match="'O2' sums gradients by the exchange 'nccl', and fully_shard sums them itself"):
        fsdp.prepare(nn.Sequential(nn.Linear(32, 32)), recipe)

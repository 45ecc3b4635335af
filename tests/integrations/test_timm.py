"""Models of timm: a vision transformer, and a network of convolutions with linear layers between."""

import functools
import warnings

import pytest
import torch

from helpers import dist, host_loops, hosts
from helpers.vision_runs import check_it_trains_saves_and_resumes, loss_of_pictures

timm = hosts.need("timm")


def vit(depth: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=32, embed_dim=32, depth=depth, num_heads=2)


def convnext() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.models.ConvNeXt(num_classes=32, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32))


@pytest.mark.promise("Hosts", "A vision transformer and a ConvNeXt of timm train, save and resume bit for bit.")
@pytest.mark.parametrize(("build", "level"), [(vit, "O2"), (vit, "O3"), (convnext, "O2")])
def test_models_train_save_and_resume(build, level, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what stays wide
        check_it_trains_saves_and_resumes(build, level, tmp_path)


def test_a_compiled_model_trains_alike():
    host_loops.check_the_compiled_model_trains_alike(functools.partial(vit, depth=1), loss_of_pictures)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_processes_train_as_one(level):
    ranks = dist.run(of_a_rank, 2, level)
    host_loops.check_two_processes_are_one(ranks, of_a_rank(level))


def of_a_rank(level: str) -> dict[str, object]:
    return host_loops.on_this_rank(vit, loss_of_pictures, level)

"""Models of torchvision: layers whose weights others read, in-place activations, convolutions."""

import pytest
import torch

import msamp
from helpers import dist, host_loops, hosts
from helpers.vision_runs import check_it_trains_saves_and_resumes, loss_of_pictures

torchvision = hosts.need("torchvision")


def swin() -> torch.nn.Module:
    torch.manual_seed(0)
    return torchvision.models.SwinTransformer([4, 4], 32, [1, 1], [2, 2], [4, 4], num_classes=32, stochastic_depth_prob=0.0)


@pytest.mark.promise("Hosts", "torchvision's Swin trains, saves and resumes bit for bit.")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_swin_trains_saves_and_resumes(level, tmp_path):
    check_it_trains_saves_and_resumes(swin, level, tmp_path)


def test_a_convolutional_network_says_how_little_becomes_fp8():
    with pytest.warns(UserWarning, match=r"less than half of the model's weight GEMMs(.*\n)+.*a convolution"):
        msamp.initialize(torchvision.models.resnet18(num_classes=16))


def test_a_compiled_model_trains_alike():
    host_loops.check_the_compiled_model_trains_alike(swin, loss_of_pictures)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_processes_train_as_one(level):
    ranks = dist.run(of_a_rank, 2, level)
    host_loops.check_two_processes_are_one(ranks, of_a_rank(level))


def of_a_rank(level: str) -> dict[str, object]:
    return host_loops.on_this_rank(swin, loss_of_pictures, level)

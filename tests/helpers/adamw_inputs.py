"""The numbers that the tests of AdamW's kernels share."""

import torch

from msamp.kernels.reference.adamw import Hyper, hyper_numbers

HYPER = {"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def hyper(device: torch.device | str, **changed: float) -> torch.Tensor:
    """The learning rate, betas, eps and weight decay as the kernels take them, FP64, with the named ones changed."""
    return torch.tensor(hyper_numbers(Hyper(**{**HYPER, **changed})), dtype=torch.float64, device=device)

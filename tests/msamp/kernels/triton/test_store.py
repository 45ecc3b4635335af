"""Stores of the Triton kernels against the golden vectors; against their twin, bit for bit: test_adamw.py."""

import importlib
from pathlib import Path

import pytest
import torch

from msamp.kernels.tables import Tables


def reference_tests():
    spec = importlib.util.spec_from_file_location("reference_test_store", Path(__file__).parents[1] / "reference" / "test_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_of_adamw_are_the_golden_ones(triton_device):
    if torch.device(triton_device).type == "cuda":
        pytest.skip("the golden steps have a CPU's order of operations; on a GPU the kernel is compared with its twin")
    kernel = importlib.import_module("msamp.kernels.triton.adamw").adamw
    reference_tests().check_golden(kernel, Tables(torch.device(triton_device)))

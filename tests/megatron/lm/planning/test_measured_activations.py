"""Activations of a layer as the plan predicts them against what a forward on a CPU keeps for backward."""

import gc
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import tiny
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model import fp8_layers, linear
from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import build_model
from megatron.lm.planning import memory
from megatron.lm.processes import process_groups
from msamp.numerics.tensor import ScalingTensor
from tools.bench.bench_step import random_batches

SHAPE = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4 --lr 1e-3 --vocab-size 60 "
    "--make-vocab-size-divisible-by 32 --tokenizer-type NullTokenizer --fp8-min-gain 0 --train-iters 10000 --dry-run"
)
NIGHTLY = pytest.mark.nightly(5)
CASES = {
    "fp16-amp": (),
    "O0": NIGHTLY,
    "O0 --recompute-granularity selective --recompute-modules mlp core_attn": NIGHTLY,
    "O1": NIGHTLY,
    "O2 --swiglu --ffn-hidden-size 512 --group-query-attention --num-query-groups 1 --disable-bias-linear": (),
    "O2 --qk-layernorm --hidden-size 512 --num-attention-heads 4 --group-query-attention --num-query-groups 2": (),
    "O2 --bf16-linears linear_qkv --recompute-granularity selective --recompute-modules mlp core_attn": NIGHTLY,
    "O3": NIGHTLY,
    "O2 --save-activations coat --swiglu --ffn-hidden-size 512 --recompute-granularity selective --recompute-modules core_attn": (),
    "O0 --save-activations coat --swiglu --ffn-hidden-size 512": NIGHTLY,
    "O3 --normalization RMSNorm --recompute-granularity selective --recompute-modules mlp core_attn": NIGHTLY,
}


class Alive(TorchDispatchMode):
    """Track the storages of plain tensors that operations create inside the context; earlier ones do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), counts=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, counts=True)
        return result

    def _note(self, values: Any, counts: bool) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and not isinstance(x, ScalingTensor):
                storage = x.untyped_storage()
                known = self.storages.get(storage._cdata)
                if known is None or known[0].expired():  # an address may be reused
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() if counts else 0)

    def size(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.clone()
        ctx.save_for_backward(query, key, value, output)
        return output


class KeepingAttention(nn.Module):
    """Attention that saves what the GPU's kernels save; a CPU computes and saves in FP32."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return Keep.apply(query, key, value).flatten(2)


@contextmanager
def configured(case: str) -> Iterator[Config]:
    """The configuration of a case with its FP8 layers chosen, in a trainer's process."""
    level, *flags = shlex.split(case)
    named = "--precision" if level == "fp16-amp" else "--opt-level"
    config = parse_args([*SHAPE.split(), *flags, named, level])
    with tiny.started(tiny.config("corpus")):
        yield replace(config, precision=fp8_layers.decide(*tiny.parts(config), fp8_layers.default_measure())[0])


def forward_bytes(config: Config, layers: int) -> int:
    """Bytes that the forward of one micro-batch saves for backward in a model of `layers` layers."""
    config = replace(config, model=replace(config.model, num_layers=layers))
    batch = next(random_batches(config, 128, process_groups.device()))
    model = build_model(*tiny.parts(config), build_recipe(config.precision), 128).train()
    for parent in list(model.modules()):
        if isinstance(getattr(parent, "core_attention", None), SDPAttention):
            parent.core_attention = KeepingAttention()

    def forward() -> Tensor:
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])

    forward()  # allocates what is created once and stays
    gc.collect()
    with Alive() as alive:
        loss = forward()
    kept = alive.size()
    del loss
    return kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="follows the storages of a CPU")
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in CASES.items()])
def test_a_layer_keeps_what_the_plan_says(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "native_bf16", lambda device: True)  # as on a GPU; a CPU without keeps FP32 copies for its BF16 GEMMs
    with configured(case) as config:
        measured = forward_bytes(config, 2) - forward_bytes(config, 1)
        predicted = sum(memory.activation_parts(config).values())
    assert measured == pytest.approx(predicted, rel=0.015)  # the norms' statistics, a few bytes per token

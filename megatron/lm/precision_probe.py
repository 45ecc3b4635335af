"""Samples what FP8 costs a run: underflow, saturation and SQNR of the operands of its linear layers, on single iterations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.lm.distributed import chunks
from megatron.lm.model.initial import named_globally
from megatron.lm.model.linear import FP8Gemm
from msamp.numerics.metrics import saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.recipe import Cast
from msamp.numerics.scaling import inverse, scale_from_amax

Write = Callable[[dict[str, Any]], None]


def sample(x: Tensor, cast: Cast, scale: Tensor | None) -> dict[str, float]:
    """Underflow and saturation shares and SQNR (dB) of quantising `x` with `scale` (None: just in time)."""
    x = x.detach().float()
    if scale is None:
        scale = scale_from_amax(cast.granularity.amax(x), cast.format.max)
    payload = quantize(x, scale, cast.format)
    values = dequantize(payload, inverse(scale))
    return {
        "underflow": underflow_frac(x, values),
        "saturation": saturation_frac(payload, cast.format),
        "sqnr_db": sqnr_db(x, values),
    }


@contextmanager
def probing(model: nn.Module, iteration: int, write: Write) -> Iterator[None]:
    """While inside, every FP8 linear layer of `model` reports its input, weight and grad_output once, with the scales it uses.

    Layers have their names in the whole model. Just in time a tensor-parallel layer's shard is judged by its own amax.

    Fused layers are computed unfused meanwhile (`megatron.lm.model.layer`): a sampled iteration's losses, gradients and amaxes differ
    from the usual ones by the rounding of BF16 intermediate values, and not at all where layers are unfused anyway.

    Costs host syncs, so a run samples only every `--log-underflow-interval` iterations.
    """
    handles = [
        layer.register_forward_hook(_Reporter(name, iteration, write))
        for chunk in chunks(model)
        for name, layer in named_globally(chunk)
        if isinstance(layer, FP8Gemm)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reporter:
    """Forward hook of one layer; the first micro-batch of the iteration reports, the others pass."""

    def __init__(self, name: str, iteration: int, write: Write) -> None:
        self.name, self.iteration, self.write = name, iteration, write
        self.done = False

    def __call__(self, layer: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> None:
        if self.done or not torch.is_grad_enabled():
            return
        self.done = True
        gemm = layer.scaling.gemm
        input_slot, grad_slot = layer.scaling.slots(record=False)[:2]
        self._report("input", sample(args[0], gemm.input, input_slot.scale))
        self._report("weight", sample(layer.weight.dequantize(torch.float32), gemm.weight, None))
        if output[0].requires_grad:
            output[0].register_hook(lambda g: self._report("grad_output", sample(g, gemm.grad_output, grad_slot.scale)))

    def _report(self, tensor: str, values: dict[str, float]) -> None:
        self.write({"kind": "underflow", "iteration": self.iteration, "layer": self.name, "tensor": tensor, **values})

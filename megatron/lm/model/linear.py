"""The linear layers in the model's ModuleSpec slots: megatron-core's column- and row-parallel layers around our GEMMs."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron.lm.config import ParallelConfig
from megatron.lm.processes.grid import Grid, Ranks
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes, all_gather_sent, all_reduce_sent
from msamp.kernels.scaled_mm import native_bf16
from msamp.nn.expert_layer import Experts
from msamp.nn.linear import describe_gemm, scaling_parameter
from msamp.nn.linear_fn import linear
from msamp.nn.raised_linear import bf16_linear, bf16_weight, observe_input, observe_output
from msamp.nn.scaling_state import WIRE, LinearScaling
from msamp.numerics.formats import of_dtype
from msamp.numerics.recipe import BF16, Recipe
from msamp.parallel import vocabulary
from msamp.parallel.expert_parallel import ExpertParallel
from msamp.parallel.tensor_parallel import TensorParallel
from msamp.parallel.tensor_parallel import column_linear as fp8_column_linear
from msamp.parallel.tensor_parallel import row_linear as fp8_row_linear


class Counted(nn.Module):
    """Mixin for a megatron-core linear layer that counts the bytes its megatron-core collectives send, in the compute dtype.

    Attributes:
        sent: the counter; None without tensor parallelism, or if the layer's own collectives count.
        what: prefix of the collectives' names.
        gathers_again: whether backward gathers the input a second time, as megatron-core's layers do.
    """

    tp_group: dist.ProcessGroup
    sent: WireBytes | None = None
    what = ""
    gathers_again = True

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        if self.sent is not None:
            (self._count_row if isinstance(self, RowParallelLinear) else self._count_column)(self.sent, input_, output)
        return output, _bias_to_add(bias)

    def _count_column(self, sent: WireBytes, x: Tensor, y: Tensor) -> None:
        ranks = self.tp_group.size()
        size = all_gather_sent(x.nbytes, ranks)
        if not self.sequence_parallel:
            _after(x, lambda: self._add(sent, "grad_input all-reduce", all_reduce_sent(x.nbytes, ranks)))
            return
        self._add(sent, "input all-gather", size)
        if self.gathers_again:
            _after(x, lambda: self._add(sent, "input all-gather again", size))
        _after(x, lambda: self._add(sent, "grad_input reduce-scatter", size))

    def _count_row(self, sent: WireBytes, x: Tensor, y: Tensor) -> None:
        ranks = self.tp_group.size()
        if not self.sequence_parallel:
            self._add(sent, "output all-reduce", all_reduce_sent(y.nbytes, ranks))
            return
        size = all_gather_sent(y.nbytes, ranks)  # also the size of the reduce-scatter: a slice to each of the others
        self._add(sent, "output reduce-scatter", size)
        _after(y, lambda: self._add(sent, "grad_output all-gather", size))

    def _add(self, sent: WireBytes, collective: str, size: int) -> None:
        sent.add("activation", self.what + collective, size)


def _bias_to_add(bias: Tensor | None) -> Tensor | None:
    """Return the bias for another module to add, not as the Parameter itself, which the first forward of a recomputed MLP would return."""
    return bias if bias is None or torch.is_grad_enabled() else bias.detach()


def _after(x: Tensor, count: Callable[[], None]) -> None:
    """Run `count` after the gradient of `x` was computed."""
    if torch.is_grad_enabled() and x.requires_grad:
        x.register_hook(lambda _: count())


def _description(layer: Any, precision: str) -> str:
    """Return a layer in one line: megatron-core's versions print the parts of a layer in different places."""
    size = f"in_features={layer.input_size}, out_features={layer.output_size}, bias={layer.bias is not None}"
    return f"{type(layer).__name__}({size}, TP={layer.tp_group.size()}, {precision})"


class FP8Gemm(Counted):
    """Mixin for a megatron-core linear layer with its weight in the recipe's format and its three GEMMs in FP8.

    With tensor parallelism, operands are gathered in FP8, and partial sums are sent in the compute dtype, or in FP8 at O3 (`converter`,
    FP8-LM Figure 2). Block-scaled operands are cast after megatron-core's collectives, which send the compute dtype. A layer that
    `--fp8-guard` raised computes in BF16, with megatron-core's collectives.

    Attributes:
        recipe: set by the subclass.
        smooth: set by the subclass: whether each channel of the input has its own scale (`msamp.nn.channel_scales`).
        scaling: scales of input, grad_output and weight, and of the activations that a tensor-parallel layer sends.
        converter: set by `connect`.
    """

    recipe: Recipe
    smooth = False
    weight: nn.Parameter
    converter: TensorParallel | None = None
    _initial_weight: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gemm = self.recipe.gemm
        assert gemm is not None
        wire = None
        if self.recipe.fp8_wire and self.tp_group.size() > 1:
            wire = (gemm.input if isinstance(self, RowParallelLinear) else gemm.grad_output).format
        channels = self.weight.shape[1] if self.smooth else 0
        self.scaling = LinearScaling(gemm, device=self.weight.device, wire=wire, channels=channels)
        self.start_from(self.weight.detach())

    @property
    def gathers_again(self) -> bool:  # type: ignore[override]
        """False in FP8, whose backward keeps the gathered input."""
        return self.scaling.raised

    def start_from(self, values: Tensor) -> None:
        """Set the initial weight to `values`, in the compute dtype."""
        marks = self.weight.__dict__
        self.weight = scaling_parameter(values, self.recipe)
        for name in marks.keys() - self.weight.__dict__.keys():  # megatron-core's attributes on how the weight is split
            setattr(self.weight, name, marks[name])
        own_master = self.recipe.weight == self.recipe.states.master
        self._initial_weight = None if own_master else values

    def take_initial_weight(self) -> Tensor | None:
        """Return the weight before FP8 rounding, for the master weight, and release it; None from the second call on."""
        values, self._initial_weight = self._initial_weight, None
        return values

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """megatron-core's, in which the scales of channels are split over tensor-parallel ranks as the weight's columns are."""
        entries: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if self.scaling.channels is not None:
            assert metadata is not None
            own = {f"scaling.channels.{name}": x for name, x in self.scaling.channels.named_buffers()}
            axes, copies = dict.fromkeys(own, 0), metadata["dp_cp_group"]
            entries |= make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=copies)
        return entries

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.converter is not None and self.scaling.raised:
            output, bias = super().forward(input_, *args, **kwargs)
            (self._count_row if isinstance(self, RowParallelLinear) else self._count_column)(self.converter.sent, input_, output)
            return output, bias
        if self.converter is None or not isinstance(self, RowParallelLinear):
            return super().forward(input_, *args, **kwargs)
        output = fp8_row_linear(input_, self.weight, self.scaling, self.converter)  # type: ignore[arg-type]
        if self.skip_bias_add or self.bias is None:
            return output, _bias_to_add(self.bias)
        return output + self.bias, None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        if self.scaling.raised:
            return self._raised(input, weight, bias, **kwargs)
        if self.converter is not None:
            return fp8_column_linear(input, weight, bias, self.scaling, self.converter)  # type: ignore[arg-type]
        if kwargs["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        elif kwargs["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return linear(input, weight, bias, self.scaling)  # type: ignore[arg-type]

    def _raised(self, x: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        """Compute the layer in BF16 with megatron-core's collectives, and record its casts to FP8 (`msamp.nn.raised_linear`).

        Tensor-parallel ranks would send partial sums of a row-parallel layer's output, or of a column-parallel layer's grad_input; those of
        the latter are recorded after megatron-core has added them.
        """
        wire, row = len(self.scaling.casts) > WIRE, isinstance(self, RowParallelLinear)
        x, w = observe_input(x, self.scaling, sums=wire and not row), bf16_weight(weight)
        if kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]:
            y = super()._forward_impl(x, w, bias, **kwargs)  # type: ignore[misc]
        else:
            y = bf16_linear(x, w, bias)
        return observe_output(y, self.scaling, sums=wire and row)

    def __repr__(self) -> str:
        return _description(self, f"{describe_gemm(self.scaling.gemm, self.weight)}, scaling {self.scaling.gemm.input.scaling}")


class WideGemm(Counted):
    """Mixin for a megatron-core linear layer whose GEMMs run in the compute dtype with torch.

    On one rank the GEMM adds the bias before it rounds, which saves megatron-core's extra kernel. A CPU that only emulates BF16 multiplies
    the BF16 values in FP32 and rounds once, as tensor cores do; its BF16 GEMM is tens of times slower.
    """

    bias: nn.Parameter | None
    skip_bias_add: bool

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        return output, None if self._adds_bias else bias

    @property
    def _adds_bias(self) -> bool:
        """Return whether the GEMM adds the bias that megatron-core would leave to the next module."""
        return self.skip_bias_add and self.tp_group.size() == 1

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        if kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]:
            return super()._forward_impl(input, weight, bias, **kwargs)  # type: ignore[misc]
        bias = self.bias if self._adds_bias else bias
        if input.dtype != torch.bfloat16 or native_bf16(input.device):
            return functional.linear(input, weight, bias)
        return functional.linear(input.float(), weight.float(), None if bias is None else bias.float()).to(input.dtype)

    def __repr__(self) -> str:
        return _description(self, f"weight and GEMM {of_dtype(self.config.params_dtype)}")  # type: ignore[union-attr,arg-type]


class HeadGemm(WideGemm):
    """`WideGemm` of the LM head, which counts its traffic separately.

    Attributes:
        peers: the ranks over which the vocabulary is split, set by `connect`; None without tensor parallelism.
    """

    what = vocabulary.WHAT
    peers: Peers | None = None


@functools.cache
def _bind(base: type[nn.Module], recipe: Recipe, wide: type[nn.Module] = WideGemm, *, smooth: bool = False) -> type[nn.Module]:
    """Return a subclass of `base` with the GEMMs of `recipe`; `smooth` as in `FP8Gemm`."""
    if recipe.fp8:
        return type(f"FP8{base.__name__}", (FP8Gemm, base), {"recipe": recipe, "smooth": smooth})
    return type(base.__name__, (wide, base), {})


def layer_linears(recipe: Recipe, bf16: Collection[str] = (), *, smooth: bool = False) -> dict[str, type[nn.Module]]:
    """Return the linear-layer classes of a transformer layer by slot, constructed as megatron-core's; those in `bf16` have the GEMMs of O0.
    With `smooth`, the channels of the MLP's activation have their own scales in FP8."""
    first, last = ColumnParallelLinear, RowParallelLinear
    bases = {"linear_qkv": first, "linear_proj": last, "linear_fc1": first, "linear_fc2": last}
    return {slot: _bind(base, BF16 if slot in bf16 else recipe, smooth=smooth and slot == "linear_fc2") for slot, base in bases.items()}


def output_linear() -> type[nn.Module]:
    """Return the class of the LM head, which stays in the compute dtype in every recipe."""
    return _bind(ColumnParallelLinear, BF16, HeadGemm)


def travels(model: nn.Module) -> str | None:
    """Describe how tensor-parallel ranks exchange activations, and why; None with megatron-core's collectives or without any."""
    return next((layer.converter.travels for layer in model.modules() if isinstance(layer, FP8Gemm) and layer.converter is not None), None)


def connect(model: nn.Module, parallel: ParallelConfig, sent: WireBytes, *, measure: bool) -> None:
    """Connect the tensor-parallel layers of a model to their shared FP8 converter, those without one to the byte counter `sent`, and the
    experts to the ranks that share them. `measure`: whether `--tp-transport auto` may choose by times.

    Raises:
        ValueError: if `--tp-transport copies` is impossible on these ranks.
    """
    layers = list(model.modules())
    if parallel.expert_model_parallel_size > 1:
        shared = ExpertParallel(_group(Grid.current().experts), wire=parallel.moe_wire or "fp8", sent=sent)
        for layer in layers:
            if isinstance(layer, Experts):
                layer.ranks = shared
    if parallel.tensor_model_parallel_size == 1:
        return
    group = _group(Grid.current().tensor)

    def count_embedding(layer: VocabParallelEmbedding, _: Any, output: Tensor) -> None:
        # Every rank has some rows of the vocabulary and zeros for the other tokens, which an all-reduce sums.
        size = all_gather_sent(output.nbytes, group.size())
        if layer.reduce_scatter_embeddings:
            sent.add("activation", "embedding reduce-scatter", size)
            _after(output, lambda: sent.add("activation", "embedding all-gather", size))
        else:
            sent.add("activation", "embedding all-reduce", all_reduce_sent(output.nbytes, group.size()))

    converter = None
    recipes = [layer.recipe for layer in layers if isinstance(layer, FP8Gemm) and layer.recipe.gathers_fp8]
    if recipes:
        converter = TensorParallel(
            group,
            sequence_parallel=parallel.sequence_parallel,
            wire=parallel.tp_wire,
            grad_wire="fp8" if recipes[0].fp8_wire else "bf16",
            saved_input=parallel.tp_saved_input,
            sent=sent,
            transport=parallel.tp_transport,
            measure=measure,
        )
    for layer in layers:
        if isinstance(layer, FP8Gemm) and layer.recipe.gathers_fp8:
            layer.converter = converter
        elif isinstance(layer, Counted):
            layer.sent = sent
            if isinstance(layer, HeadGemm):
                layer.peers = Peers(group, sent) if converter is None else converter.peers
        elif isinstance(layer, VocabParallelEmbedding):
            layer.register_forward_hook(count_embedding)


def _group(ranks: Ranks) -> ProcessGroup:
    assert ranks.group is not None
    return ranks.group

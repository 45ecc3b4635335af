"""Settings of parallelism and communication, and the axes along which they split a run over its processes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.lm.config.sections.schema import COUNT, Range, names_in, setting

if TYPE_CHECKING:
    from msamp.comm.exchange import Exchange

CP_COMM_TYPES = ("p2p", "a2a")
# Axis of the grid of processes -> the setting with its size. The data axes follow from the number of processes (`ProcessAxes`).
AXES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert tensor": "expert_tensor_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class ProcessAxes:
    """Sizes of the grid of processes along its axes, as megatron-core defines them.

    Processes are numbered along tensor, then context, data and pipeline:

        world = tensor x context x data x pipeline

    The experts of a mixture of experts (MoE) divide the same processes of a pipeline stage differently:

        tensor x context x data = expert_tensor x expert x expert_data

    Attributes:
        tensor: processes that share each layer.
        context: processes that share each sequence.
        data: processes, or groups of them, that read different samples.
        pipeline: processes that share the stack of layers.
        expert: processes that share the experts of a layer.
        expert_tensor: processes that share each expert.
        expert_data: processes with the same part of the same experts.
    """

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int

    @property
    def model(self) -> int:
        """Processes that together have one copy of the model's parameters, experts excepted."""
        return self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Processes with the same part of the model, experts excepted: they average its gradients, and ZeRO shards over them."""
        return self.context * self.data

    def __str__(self) -> str:
        context = f" x CP {self.context}" if self.context > 1 else ""
        experts = f", experts: TP {self.expert_tensor} x EP {self.expert} x DP {self.expert_data}" if self.splits_experts else ""
        return f"TP {self.tensor}{context} x PP {self.pipeline} x DP {self.data}{experts}"

    @property
    def splits_experts(self) -> bool:
        """Whether experts are divided differently from the rest of the model."""
        return self.expert > 1 or self.expert_tensor != self.tensor


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism of a model over processes."""

    tensor_model_parallel_size: int = setting("processes that share each layer (TP)", 1, legal=COUNT)
    pipeline_model_parallel_size: int = setting("processes that share the stack of layers (PP)", 1, legal=COUNT)
    context_parallel_size: int = setting("processes that share each sequence (CP)", 1, legal=COUNT)
    cp_comm_type: str = setting(
        "communication of attention between context-parallel processes: p2p, a ring in which keys and values travel from process to "
        "process, or a2a, all-to-alls after which each process has some heads of whole sequences",
        "p2p",
        choices=CP_COMM_TYPES,
    )
    cp_wire: str | None = setting(
        "format in which keys and values, and with a2a queries, travel between context-parallel processes: the compute dtype, or at O1 to "
        "O3 and with coat E4M3 with one scale per tensor and process, half the bytes; all gradients travel in the compute dtype. With "
        "--attention-precision fp8 all of them travel in FP8, and so does a2a's output, as its kernels read and write them; derived: bf16, "
        "or fp8 with --attention-precision fp8",
        None,
        choices=("bf16", "fp8"),
    )
    expert_model_parallel_size: int = setting("processes that share the experts of a layer (EP)", 1, legal=COUNT)
    expert_tensor_parallel_size: int | None = setting(
        "processes that share each expert; derived: --tensor-model-parallel-size. Only 1 is supported", None, legal=COUNT
    )
    moe_wire: str | None = setting(
        "format in which processes that share FP8 experts send each other tokens and gradients: FP8, or BF16 with the same results and "
        "twice the bytes; fp8-sums: the sums that return in FP8 too, rounded once more; derived: fp8. Experts in BF16 send BF16",
        None,
        choices=("fp8", "bf16", "fp8-sums"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting("layers of one virtual stage (interleaved PP)", None, legal=COUNT)
    sequence_parallel: bool = setting("split norms and dropout along the sequence between the TP processes", False)
    tp_wire: str = setting(
        "format of the reduction of a row-parallel layer's output at O3 with tensor parallelism: BF16, or FP8 that each process sums in "
        "FP32",
        "bf16",
        choices=("bf16", "fp8"),
    )
    tp_saved_input: str = setting(
        "what a column-parallel layer keeps of its gathered FP8 input for backward with --sequence-parallel: its own shard, which is "
        "gathered again in backward, or all of it",
        "shard",
        choices=("shard", "gathered"),
    )
    tp_transport: str = setting(
        "transport of activations between tensor-parallel processes at O1 to O3: NCCL, copies between the GPUs of one host, or auto, the "
        "faster of the two, tested and measured at the start; with --deterministic, auto means copies where they are possible",
        "auto",
        choices=("auto", "nccl", "copies"),
    )
    use_distributed_optimizer: bool = setting(
        "shard the optimizer's states over the data-parallel processes: ZeRO, which O3 always has", False
    )
    distributed_backend: str = setting("collectives; auto: nccl with CUDA, else gloo", "auto", choices=("auto", "nccl", "gloo"))
    distributed_timeout_minutes: float = setting(
        "minutes without progress until a process names the stuck rank and ends", 10.0, legal=Range(0, 60 * 24 * 365, low_open=True)
    )

    def axes(self, world_size: int) -> ProcessAxes:
        """Return the grid of `world_size` processes; its data axes are rounded down unless `world_size` is a multiple of `unit`."""
        tensor, context, pipeline = self.tensor_model_parallel_size, self.context_parallel_size, self.pipeline_model_parallel_size
        expert, expert_tensor = self.expert_model_parallel_size, self.expert_tensor_parallel_size or tensor
        return ProcessAxes(
            tensor=tensor,
            context=context,
            data=world_size // (tensor * context * pipeline),
            pipeline=pipeline,
            expert=expert,
            expert_tensor=expert_tensor,
            expert_data=world_size // (expert_tensor * expert * pipeline),
        )

    def virtual_stages(self, num_layers: int) -> int | None:
        """Return the model chunks per pipeline stage of a model with `num_layers`; None without interleaving."""
        layers = self.num_layers_per_virtual_pipeline_stage
        return num_layers // self.pipeline_model_parallel_size // layers if layers else None

    def rows(self, seq_length: int) -> int:
        """Return the tokens of each sequence whose hidden states a process has between two layers, which it also sends to the next
        stage."""
        return seq_length // (self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1))

    @property
    def shares_heads(self) -> bool:
        """Whether context-parallel processes divide the heads of attention between them (`--cp-comm-type a2a`)."""
        return self.context_parallel_size > 1 and self.cp_comm_type == "a2a"

    @property
    def unit(self) -> int:
        """The number of processes must be a multiple of it."""
        one = self.axes(1)
        return one.pipeline * math.lcm(one.tensor * one.context, one.expert_tensor * one.expert)

    @property
    def given(self) -> dict[str, int]:
        """Size of each axis by its setting: of tensor and pipeline parallelism, and of the other axes in `AXES` if they are used."""
        always = (AXES["tensor"], AXES["pipeline"])
        sizes = {setting: getattr(self, setting) for setting in AXES.values()}
        return {setting: size for setting, size in sizes.items() if setting in always or size != getattr(type(self), setting)}


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Communication between data-parallel processes (FP8-LM, section 2.1 and figure 7)."""

    grad_exchange: str = setting(
        "how FP8 gradients are summed over the ranks: in FP32 by their owner, or in FP8 by NCCL as in the paper",
        "fp32-sum",
        choices=names_in("msamp.comm.exchange", "names"),
    )
    grad_scaling: str | None = setting(
        "guard against overflow of --grad-exchange nccl: a factor mu that adapts itself, or division by the number of ranks "
        "before or after the sum; derived: auto",
        None,
        choices=names_in("msamp.comm.grad_scaling", "GRAD_SCALINGS"),
    )
    mu_rule: str | None = setting(
        "how mu of --grad-scaling auto decreases when gradients saturate: by half, or at once to 1/2 as in the paper; derived: halve",
        None,
        choices=names_in("msamp.comm.grad_scaling", "MU_RULES"),
    )
    overlap_grad_reduce: bool = setting("send gradients bucket by bucket during backward; on by default, unlike in Megatron-LM", True)
    overlap_param_gather: bool = setting(
        "gather weights under ZeRO bucket by bucket while the next forward runs; on by default, unlike in Megatron-LM", True
    )
    ddp_bucket_size: int | None = setting("elements in a bucket of gradients or weights; derived: 2^27", None, legal=COUNT)

    @property
    def exchange(self) -> "Exchange":
        """The gradient exchange of `--grad-exchange`. ValueError for an unknown one."""
        from msamp.comm import exchange

        return exchange.by_name(self.grad_exchange)

    @property
    def gradient_scaling(self) -> str | None:
        """One of the exchange's scalings; None if the exchange has none, because it cannot overflow."""
        return self.grad_scaling or next(iter(self.exchange.scalings), None)

    @property
    def mu_adaptation(self) -> str | None:
        """One of `MU_RULES`; None if mu is not adaptive."""
        from msamp.comm.grad_scaling import GRAD_SCALINGS

        scaling = self.gradient_scaling
        return self.mu_rule or ("halve" if scaling is not None and GRAD_SCALINGS[scaling].adapts else None)

    @property
    def bucket_size(self) -> int:
        """Elements per bucket; a larger tensor has its own bucket."""
        return self.ddp_bucket_size or 2**27

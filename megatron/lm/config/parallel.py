"""Settings of parallelism and communication."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.lm.config.schema import COUNT, Interval, setting

if TYPE_CHECKING:
    from msamp.comm.exchange import Exchange

TP_WIRES = ("bf16", "fp8")
TP_TRANSPORTS = ("auto", "nccl", "copies")
TP_SAVED_INPUTS = ("shard", "gathered")


def exchange_names() -> tuple[str, ...]:
    """Return the values of `--grad-exchange`: built-in and registered gradient exchanges."""
    from msamp.comm import exchange

    return exchange.names()


def grad_scalings() -> tuple[str, ...]:
    """Return the values of `--grad-scaling` over all exchanges."""
    from msamp.comm.grad_scaling import GRAD_SCALINGS

    return tuple(GRAD_SCALINGS)


def mu_rules() -> tuple[str, ...]:
    """Return the values of `--mu-rule`."""
    from msamp.comm.grad_scaling import MU_RULES

    return MU_RULES


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism of a model over processes."""

    tensor_model_parallel_size: int = setting("processes that share each layer (TP)", 1, legal=COUNT)
    pipeline_model_parallel_size: int = setting("processes that share the stack of layers (PP)", 1, legal=COUNT)
    num_layers_per_virtual_pipeline_stage: int | None = setting("layers of one virtual stage (interleaved PP)", None, legal=COUNT)
    sequence_parallel: bool = setting("split norms and dropout along the sequence between the TP processes", False)
    tp_wire: str = setting(
        "format of the reduction of a row-parallel layer's output at O3 with tensor parallelism: BF16, or FP8 that each process sums in "
        "FP32",
        "bf16",
        choices=TP_WIRES,
    )
    tp_saved_input: str = setting(
        "what a column-parallel layer keeps of its gathered FP8 input for backward with --sequence-parallel: its own shard, which is "
        "gathered again in backward, or all of it",
        "shard",
        choices=TP_SAVED_INPUTS,
    )
    tp_transport: str = setting(
        "transport of activations between tensor-parallel processes at O1 to O3: NCCL, copies between the GPUs of one host, or auto, the "
        "faster of the two, tested and measured at the start; with --deterministic, auto means copies where they are possible",
        "auto",
        choices=TP_TRANSPORTS,
    )
    use_distributed_optimizer: bool = setting(
        "shard the optimizer's states over the data-parallel processes: ZeRO, which O3 always has", False
    )
    distributed_backend: str = setting("collectives; auto: nccl with CUDA, else gloo", "auto", choices=("auto", "nccl", "gloo"))
    distributed_timeout_minutes: float = setting(
        "minutes without progress until a process names the stuck rank and ends", 10.0, legal=Interval(0, 60 * 24 * 365, low_open=True)
    )


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Communication between data-parallel processes (FP8-LM, section 2.1 and figure 7)."""

    grad_exchange: str = setting(
        "how FP8 gradients are summed over the ranks: in FP32 by their owner, or in FP8 by NCCL as in the paper",
        "fp32-sum",
        choices=exchange_names,
    )
    grad_scaling: str | None = setting(
        "guard against overflow of --grad-exchange nccl: a factor mu that adapts itself, or division by the number of ranks "
        "before or after the sum; derived: auto",
        None,
        choices=grad_scalings,
    )
    mu_rule: str | None = setting(
        "how mu of --grad-scaling auto decreases when gradients saturate: by half, or at once to 1/2 as in the paper; derived: halve",
        None,
        choices=mu_rules,
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
        """One of `mu_rules`; None if mu is not adaptive."""
        from msamp.comm.grad_scaling import GRAD_SCALINGS

        scaling = self.gradient_scaling
        return self.mu_rule or ("halve" if scaling is not None and GRAD_SCALINGS[scaling].adapts else None)

    @property
    def bucket_size(self) -> int:
        """Elements per bucket; a larger tensor has its own bucket."""
        return self.ddp_bucket_size or 2**27

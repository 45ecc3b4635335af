"""A cluster: its GPUs, GPUs per host, and the bandwidth of their links."""

from dataclasses import dataclass

from megatron.lm.config import Config


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind.

    Attributes:
        gpus, per_host: total number, and number per host.
        link: bytes/s from a GPU to others on its host, as NCCL reaches.
        network: bytes/s from a GPU to other hosts.
        latency: seconds per collective, in addition to the time for its bytes.
    """

    gpus: int
    per_host: int
    link: float
    network: float
    latency: float

    def data_parallel_peers(self, config: Config) -> tuple[int, int]:
        """Return (ranks that average gradients, those of them on one host). Rank order is tensor, context, data, pipeline."""
        axes = config.axes(self.gpus)
        return axes.copies, max(1, min(axes.copies, self.per_host // axes.tensor))

    def crosses_hosts(self, config: Config) -> bool:
        """Return whether neighboring pipeline stages are on different hosts."""
        axes = config.axes(self.gpus)
        return self.gpus > self.per_host and axes.copies * axes.tensor >= self.per_host

    def context_link(self, config: Config) -> float:
        """Return the bytes/s between context-parallel ranks: of the network if they are on several hosts."""
        axes = config.axes(self.gpus)
        return self.link if axes.tensor * axes.context <= self.per_host else self.network

    def expert_link(self, config: Config) -> float:
        """Return the bytes/s between processes that share experts, whose numbers are adjacent: of the network if they are on several
        hosts."""
        axes = config.axes(self.gpus)
        return self.link if axes.expert * axes.expert_tensor <= self.per_host else self.network

    def copies(self, config: Config) -> bool:
        """Return whether tensor-parallel ranks copy the activations of FP8 layers to each other's GPUs, as `--tp-transport auto` chooses on
        a host with NVLink under sequence parallelism. The rate is of two cards; of more it is an extrapolation."""
        parallel = config.parallel
        near = parallel.tensor_model_parallel_size <= self.per_host
        return near and parallel.tp_transport != "nccl" and parallel.sequence_parallel and config.precision.recipe.gathers_fp8

    def exchange_seconds(self, size: float, config: Config) -> float:
        """Return the seconds in which each data-parallel rank sends `size` bytes in all, an equal part to every other one."""
        ranks, near = self.data_parallel_peers(config)
        if ranks == 1:
            return 0.0
        share = size / (ranks - 1)
        return share * (near - 1) / self.link + share * (ranks - near) / self.network

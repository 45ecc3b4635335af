"""The machines: GPUs, how many share a host, and what their links carry."""

from dataclasses import dataclass

from megatron.lm.config import Config


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind.

    Attributes:
        gpus, per_host: in all, and on one host.
        link: bytes/s that a GPU sends to others of its host, as NCCL reaches them.
        network: bytes/s that a GPU sends to other hosts.
        latency: seconds that a collective takes beside its bytes.
    """

    gpus: int
    per_host: int
    link: float
    network: float
    latency: float

    def data_parallel_peers(self, config: Config) -> tuple[int, int]:
        """(data-parallel ranks, those of them on one host): ranks stand tensor first, then data, then pipeline."""
        copies = config.data_parallel_size(self.gpus)
        return copies, max(1, min(copies, self.per_host // config.parallel.tensor_model_parallel_size))

    def crosses_hosts(self, config: Config) -> bool:
        """Whether neighbouring pipeline stages stand on different hosts."""
        return (
            self.gpus > self.per_host and config.data_parallel_size(self.gpus) * config.parallel.tensor_model_parallel_size >= self.per_host
        )

    def exchange_seconds(self, size: float, config: Config) -> float:
        """Seconds in which each data-parallel rank sends `size` bytes in all, the same to every other one."""
        ranks, near = self.data_parallel_peers(config)
        if ranks == 1:
            return 0.0
        share = size / (ranks - 1)
        return share * (near - 1) / self.link + share * (ranks - near) / self.network

"""Expert parallelism: the tokens of all ranks in one byte per element, and the sums of their experts' results (`msamp.nn.expert_ranks`).

For T tokens of width h on each of N ranks, a rank sends per layer:

    all-gather of the tokens            (N - 1) T h bytes      E4M3
    reduce-scatter of the output        2 (N - 1) T h          BF16, added before it is sent; the receiver sums in FP32. E4M3: half as many
    all-gather of the grad_output       (N - 1) T h            E5M2
    reduce-scatter of grad_input        2 (N - 1) T h          BF16, as the output. E5M2: half as many
    routing and its gradient            12 (N - 1) T k         FP32 probabilities, INT32 choices

An all-to-all in BF16 that sends each of a token's k choices to its expert's rank, where (N - 1) / N of them are on other ranks, has

    2 x 4 (N - 1) / N T k h

in dispatch and combine, forward and backward: 8 k / N instead of 6, for k = 8 and N = 2 more than five times as many. For N > 4 k / 3 the
all-gather sends more, which is the price of fixed shapes. All ranks cast with one scale: delayed scaling gives them one, since its
histories are rolled over them, and just-in-time scaling costs an all-reduce of one number.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels import ops
from msamp.parallel.sequence_parallel import KIND, shared_amax

WIRES = ("fp8", "bf16", "fp8-sums")


class ExpertParallel:
    """The ranks of a process group that share the experts of each layer: `msamp.nn.expert_ranks.ExpertRanks`.

    Args:
        group: the ranks; all have the same number of tokens in every forward.
        wire: "fp8" sends tokens and gradients of FP8 experts in FP8, "bf16" in their own dtype, for twice the bytes and the same bits.
            "fp8-sums" sends the sums of their results in FP8 too: E4M3 forward and E5M2 backward, with one just-in-time scale for all
            ranks. Other experts always have their own dtype on the wire.
        sent: the counter of sent bytes, kind "activation"; None creates one.

    Raises:
        ValueError: an invalid `wire`.
    """

    def __init__(self, group: dist.ProcessGroup, *, wire: str = "fp8", sent: WireBytes | None = None) -> None:
        if wire not in WIRES:
            raise ValueError(f"wire is {wire!r}; choose one of {', '.join(WIRES)}")
        self.peers = Peers(group, WireBytes() if sent is None else sent)
        self.ranks, self.rank = self.peers.ranks, self.peers.rank
        self.fp8, self.fp8_sums = wire != "bf16", wire == "fp8-sums"
        self._tokens: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertParallel":
        return self  # a copy of a layer shares its experts with the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError(
            "experts that several ranks share cannot be pickled, since their process group cannot: save the model's state dict"
        )

    def check_tokens(self, tokens: int) -> None:
        """Raise a ValueError unless every rank has `tokens` tokens, now and in every forward. Collective in the first forward only: later
        ones must have the same number, since a rank with another one would leave the others waiting."""
        if self._tokens is None:
            counts: list[int] = [0] * self.ranks
            self.peers.run(lambda: dist.all_gather_object(counts, tokens, group=self.peers.group), "comparison of the ranks' tokens")
            if len(set(counts)) > 1:
                raise ValueError(
                    f"the ranks that share experts have {', '.join(map(str, counts))} tokens; each must have the same number: use equal "
                    "micro-batches"
                )
            self._tokens = tokens
        if tokens != self._tokens:
            raise ValueError(
                f"a rank that shares experts has {tokens} tokens, and had {self._tokens} before; the number must not change: drop the "
                "last, incomplete micro-batch"
            )

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        return shared_amax(amax, self.peers)

    def start_gather(self, rows: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        what = f"the tokens of experts ({label})"
        pending = self.peers.start_all_gather(rows.view(-1), [rows.numel()] * self.ranks, what, KIND, label)
        return lambda: pending.wait().view(self.ranks * rows.shape[0], *rows.shape[1:])

    def start_sum(
        self, partial: torch.Tensor, label: str, scale_inv: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Callable[[], torch.Tensor]:
        size = partial.numel() // self.ranks
        pending = self.peers.start_all_to_all(partial.view(-1), [size] * self.ranks, f"the sums of experts ({label})", KIND, label)

        def wait() -> torch.Tensor:
            received = pending.wait().view(self.ranks, size)
            return ops.sum_payloads(received, scale_inv, dtype or partial.dtype).view(partial.shape[0] // self.ranks, *partial.shape[1:])

        return wait

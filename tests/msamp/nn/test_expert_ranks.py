"""What a rank sees of the routing of all ranks, with ranks that are simulated in this process."""

from collections.abc import Callable

import torch

from msamp.nn.expert_ranks import gathered_routing


class Twice:
    """Two ranks with the same tokens, of which this is one."""

    ranks, fp8, fp8_sums = 2, True, False

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def start_gather(self, rows: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat([rows, rows])

    def start_sum(self, partial: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        own = partial.chunk(2)[self.rank]
        return lambda: own * 2  # the other rank has the same


def test_experts_of_other_ranks_become_minus_one_and_probabilities_have_gradients():
    probs = torch.tensor([[0.5, 0.25], [1.0, -0.0], [3e-39, 2.0]], requires_grad=True)  # every bit travels, as integers
    experts = torch.tensor([[0, 3], [2, -1], [1, 2]])
    for rank, own in ((0, [[0, -1], [-1, -1], [1, -1]]), (1, [[-1, 1], [0, -1], [-1, 0]])):
        found, chosen = gathered_routing(probs, experts, Twice(rank), first=2 * rank, count=2)  # type: ignore[arg-type]
        assert torch.equal(found, torch.cat([probs, probs]))
        assert chosen.tolist() == own + own
        grad = torch.arange(12.0).view(6, 2)
        (back,) = torch.autograd.grad(found, probs, grad)
        assert torch.equal(back, 2 * grad.chunk(2)[rank])

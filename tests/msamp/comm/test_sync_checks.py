"""The comparison of the ranks' models, where some parameters have other replicas. The other checks are tested through `GradSync`."""

import torch

from helpers import dist
from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.counters import WireBytes
from msamp.comm.sync_checks import check_same_on_all_ranks
from msamp.numerics.formats import BF16


def verdicts() -> list[str]:
    """What two ranks with the same weight, and one expert each, are told: with the experts apart, and without."""
    rank = torch.distributed.get_rank()
    shared, expert = torch.zeros(2), torch.zeros(3)
    names, formats = {shared: "weight", expert: f"expert.{rank}"}, {shared: BF16, expert: BF16}
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    said = []
    for others in (OtherRanks(Peers(None, WireBytes()), [expert], 0.5), None):
        try:
            check_same_on_all_ranks(names, formats, peers, others)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_experts_of_other_ranks_are_other_parameters():
    for apart, together in dist.run(verdicts, 2):
        assert apart == ""
        assert "where rank 0 has expert.0 (3,) torch.float32, gradient bf16, rank 1 has expert.1" in together

"""FP8-LM Figure 7 on real ranks: gradients that the trainer's exchange sums, compared bit for bit with the simulated sum of fig7.py.

    torchrun --nproc-per-node 2 tools/reproduce/fig7_nccl.py --train-data-path data/enwik8/train_text_document \\
        --tokenizer-type GPT2BPETokenizer --vocab-file data/enwik8/encoder.json --merge-file data/enwik8/vocab.bpe
    python tools/reproduce/fig7_nccl.py --rows tools/reproduce/results/fig7/fig7_nccl.csv     the table once more, nothing measured

Two to four data-parallel ranks train a GPT with `--grad-exchange nccl`, then each takes the gradients of a micro-batch of its own. The
wires of `msamp.comm` sum them: over NCCL by an FP8 all-reduce and, as under ZeRO, by a reduce-scatter; over gloo by the owner of the rows,
in rank order. Strategies, measures and flags are those of fig7.py; mu adapts on simulated sums.

Each sum is compared with sums that every process computes for itself from the gradients of all ranks:

- chain, chains-of-8-then-tree, tree: share of the elements whose bits equal the sum in that order (`sum_orders.py`). With two ranks there
  is one addition, so all three are the same sum. For `fp32-sum`, which rounds once, all three are the simulated FP32 sum.
- some_chain: share of runs of 512 elements that the chain over the ranks in some order reproduces in every bit. A ring of N ranks sums
  each of its N parts as a chain that starts at another rank. `chains` lists the share for each order of the ranks.
"""

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.processes import process_groups
from megatron.lm.processes.environment import launch_from_environment
from megatron.lm.processes.grid import Grid
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from msamp.comm import exchange
from msamp.comm.bucket import Bucket, as_bytes
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.exchange import FP32SumWire, NCCLWire, Reduced
from msamp.comm.partition import Piece
from msamp.numerics.formats import E4M3, E5M2
from tools.bench import rows
from tools.reproduce import fig7
from tools.reproduce.sum_orders import ORDERS, chain

RANKS = (2, 4)  # with more, there are too many orders of a chain to try
RUN_LENGTH = 512  # elements in which two orders of more than two ranks differ somewhere
ALL_REDUCE, REDUCE_SCATTER = "all-reduce", "reduce-scatter"
EQUAL = (*ORDERS, "some_chain")
COLUMNS = ("model", "ranks", "backend", "collective", "format", "block", "strategy", *EQUAL, "chains", *fig7.MEASURES)
COLUMNS += ("mu_min", "mu_max", *fig7.RUN)


class RealSums:
    """The reduction of one weight's gradients over real ranks, and how many of its bits each simulated order reproduces.

    Args:
        peers: the ranks.
        shard: whether each rank receives its rows only, as under ZeRO.

    Attributes:
        shares: for each sum so far its elements, and the shares named by `EQUAL` and by the orders of a chain.
    """

    def __init__(self, peers: Peers, shard: bool) -> None:
        self.peers, self.shard = peers, shard
        self.shares: list[tuple[int, dict[str, float]]] = []

    def reduce(self, wire: FP32SumWire, gradients: Tensor, factor: Tensor) -> tuple[Reduced, list[Tensor]]:
        """Sum as `fig7.exchange` does, over the ranks; every rank gets the whole result."""
        peers, fmt, (ranks, count) = self.peers, wire.format, gradients.shape[:2]
        cuts = [count * rank // ranks for rank in range(ranks + 1)]
        pieces = [Piece(tensor=0, row=a, rows=b - a, owner=rank) for rank, (a, b) in enumerate(itertools.pairwise(cuts))]
        own = gradients[peers.rank].contiguous()
        bucket = Bucket([own], ["weight"], fmt, pieces, ranks, peers.rank)
        product = exchange.by_name("nccl" if isinstance(wire, NCCLWire) else "fp32-sum").wire(fmt)
        reduced = product.reduce(bucket, product.pack(bucket, [own], factor[None]), factor[None], peers, self.shard)
        flat = reduced.flat if reduced.flat is not None else peers.all_gather(reduced.own, bucket.sizes, "the sum")
        twin, payloads = fig7.exchange(wire, gradients, factor)
        stacked = torch.stack(payloads)
        if isinstance(wire, NCCLWire):
            simulated = {order: add(stacked, fmt) for order, add in ORDERS.items()}
            orders = [order for order in itertools.permutations(range(ranks)) if order[0] < order[1]]  # a + b is b + a
            chains = {"-".join(map(str, order)): chain(torch.stack([payloads[rank] for rank in order]), fmt) for order in orders}
        else:
            simulated, chains = dict.fromkeys(ORDERS, twin.own), {"FP32": twin.own}
        self.shares.append((flat.numel(), _shares(flat, simulated, chains)))
        return Reduced(flat, flat, reduced.scale_inv, reduced.before), payloads


def _shares(flat: Tensor, simulated: dict[str, Tensor], chains: dict[str, Tensor]) -> dict[str, float]:
    shares = {order: float((as_bytes(flat) == as_bytes(total)).double().mean()) for order, total in simulated.items()}
    runs = torch.stack([_runs(as_bytes(flat) == as_bytes(total)) for total in chains.values()])
    shares["some_chain"] = float(runs.any(0).double().mean())
    return shares | {order: float(equal.double().mean()) for order, equal in zip(chains, runs, strict=True)}


def _mean(shares: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the mean of each share, weighted by elements."""
    total = sum(elements for elements, _ in shares)
    return {name: sum(elements * named[name] for elements, named in shares) / total for name in shares[0][1]}


def _runs(equal: Tensor) -> Tensor:
    """Return for each run of `RUN_LENGTH` elements whether all are equal; the last may be shorter."""
    runs = -(-equal.numel() // RUN_LENGTH)
    return torch.nn.functional.pad(equal, (0, runs * RUN_LENGTH - equal.numel()), value=True).view(runs, -1).all(1)


def measure(peers: Peers, ranks: fig7.Ranks, common: dict[str, Any], mu_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each block, format, collective and strategy; every rank must iterate over all."""
    for block, (gradients, earlier) in enumerate(zip(ranks.blocks, ranks.earlier, strict=True)):
        for fmt, shard in itertools.product((E4M3, E5M2), (False, True)):
            sums = RealSums(peers, shard)
            with torch.no_grad():
                measured = fig7.measure_block(gradients, earlier, mu_steps, fmt=fmt, reduce=sums.reduce)
            weights = len(gradients)
            for number, row in enumerate(measured):
                shares = _mean(sums.shares[number * weights : (number + 1) * weights])
                chains = "; ".join(f"{order} {share:.4f}" for order, share in shares.items() if order not in EQUAL)
                place = {"collective": REDUCE_SCATTER if shard else ALL_REDUCE, "format": str(fmt), "block": block, "chains": chains}
                full = common | row | place | {name: shares[name] for name in EQUAL}
                yield {column: full[column] for column in COLUMNS}


def summary(table: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the printed table, means over the blocks."""
    names = (*EQUAL, *fig7.MEASURES)
    yield "  ".join(["ranks  backend      collective      format    strategy            ", *(f"{name[:15]:>15}" for name in names)])
    keys = ("ranks", "backend", "collective", "format", "strategy")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in table):
        there = [row for row in table if tuple(row[name] for name in keys) == key]
        means = (statistics.fmean(float(row[name]) for row in there) for name in names)
        ranks, backend, collective, fmt, strategy = key
        yield "  ".join([f"{ranks:>5}  {backend:<11}  {collective:<14}  {fmt}  {strategy:<20}", *(f"{mean:>15.6g}" for mean in means)])


def _backend(peers: Peers) -> str:
    if not peers.nccl:
        return dist.get_backend(peers.group)
    return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _measured(options: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Measure all rows on every rank; rank 0 writes them."""
    world = launch_from_environment().world_size
    if not RANKS[0] <= world <= RANKS[1]:
        raise ValueError(f"{world} process(es): start {RANKS[0]} to {RANKS[1]}, by torchrun --nproc-per-node")
    config = parse_args([*fig7.DEFAULTS.split(), "--grad-exchange", "nccl", "--global-batch-size", str(4 * world), *flags])
    check(config, world)
    process_groups.initialize(config)
    try:
        peers = Peers(Grid.current().batch.group, WireBytes())
        if peers.ranks != world:
            raise ValueError(f"{world} processes hold {peers.ranks} data-parallel rank(s): leave out flags that split the model")
        ranks = fig7.Ranks(config, world, peers)
        common: dict[str, Any] = {"model": f"gpt-{config.model.num_layers}x{config.model.hidden_size}", "opt_level": config.precision.name}
        common |= {"micro_batch": config.training.micro_batch_size, "train_iters": config.iterations(world), "ranks": world}
        common |= {"loss": f"{ranks.loss:.4f}", "seed": config.training.seed, "backend": _backend(peers)} | rows.machine(options.commit)
        table = list(measure(peers, ranks, common, options.mu_steps))
        if peers.rank == 0:
            rows.append(options.csv, table)
            print(*summary(table), sep="\n")
    finally:
        process_groups.shutdown()
    return table


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 with a message on stderr for invalid input."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    default = rows.ROOT / "tools/reproduce/results/fig7/fig7_nccl.csv"
    parser.add_argument("--csv", type=path, default=default, help="rows are appended to this file (default: %(default)s)")
    parser.add_argument("--mu-steps", type=count(0), default=1000, help="steps for which mu adapts on other batches; 0 keeps mu at 1")
    parser.add_argument("--rows", type=path, help="CSV of an earlier run to print without measuring")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options, flags = parser.parse_known_args(arguments)
    if not options.rows:
        _measured(options, flags)
        return 0
    if flags:
        raise ValueError(f"{' '.join(flags)}: --rows trains nothing, so it takes no flags of the trainer; remove one of the two")
    with options.rows.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        table = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS or not table:
        raise ValueError(f"--rows {options.rows} is not a table of fig7_nccl.py: give the fig7_nccl.csv of an earlier run")
    print(*summary(table), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

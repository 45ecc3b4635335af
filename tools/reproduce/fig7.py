"""FP8-LM Figure 7: SNR, underflow and overflow of FP8 gradient all-reduce over transformer blocks, on the gradients of a GPT trained here.

    python tools/reproduce/fig7.py --train-data-path data/enwik8/train_text_document --tokenizer-type GPT2BPETokenizer \\
        --vocab-file data/enwik8/encoder.json --merge-file data/enwik8/vocab.bpe
    ... --preset 1.3b --blocks 0 8 16 23           some blocks of a larger model: the gradients of all ranks are in memory at once
    python tools/reproduce/fig7.py --rows tools/reproduce/results/fig7/fig7.csv     table and figure once more, nothing measured

Flags that --help does not list are passed to the trainer (`python -m megatron.lm.pretrain --help`), after DEFAULTS. One process trains the
model, then simulates N ranks: each rank has the gradients of the linear weights on its own micro-batch, as the GEMM returns them.
Scales, payloads and sums come from `msamp.comm`. `fp32-sum` is our default gradient reduction. All other strategies sum in FP8 hop by hop,
as NCCL does, in rank order unless --orders names other orders (`sum_orders.py`); NCCL may use any of them. Orders other than the chain are
measured at the largest data-parallel size only.

Auto-scaling's mu adapts for --mu-steps steps on the gradients of N other micro-batches; all strategies are then evaluated on the same
gradients. `auto-paper` follows the paper, which sets mu to 1/2 when too many elements saturate. `auto-halve` is our rule: it halves mu
until few enough saturate. `auto-halve-in-sample` adapts on the gradients it is evaluated on, which no training run can do.

The reference is the FP64 mean of the gradients before quantization:

- snr_db: SNR of the reduced mean, over all linear weights of a block;
- underflow: share of the non-zero elements of the mean that the reduction returns as zero, also where payloads cancel out;
- underflow_local: share of the non-zero elements of the ranks' gradients that are zero in their payloads, the paper's definition of
  underflow ("when quantifying gradients from 32-bit to 8-bit");
- overflow, overflow_local: share of elements at the format's maximum in the payload of the sum, and in the ranks' payloads.

The paper measured a GPT-7B at DP 128 and reports its result in words and curves only.
"""

import argparse
import csv
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.data.batch import batches
from megatron.lm.data.datasets import build_datasets
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from megatron.lm.graphs import step_graph
from megatron.lm.model.loss import mean_loss
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from megatron.lm.step import train_step
from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.exchange import FP32SumWire, Reduced, pack_scaled
from msamp.comm.grad_scaling import GROWTH, MU_MAX, exceeds, next_mu, propose_scales, scales_of
from msamp.comm.partition import Piece
from msamp.kernels import ops
from msamp.numerics.formats import E4M3, Format
from msamp.numerics.metrics import sqnr_db, underflow_frac
from tools.bench import rows
from tools.reproduce.sum_orders import CHAIN, ORDERS, OrderedWire

DEFAULTS = (
    "--preset 125m --opt-level O2 --fp8-min-gain 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 500 --lr-warmup-iters 50 "
    "--eval-iters 0"
)
DATA_PARALLEL = (2, 4, 8, 16, 32, 64, 128)
PAPER = {
    "pre": "larger underflow rate",
    "post": "higher overflow rate",
    "auto-paper": "diminishes both, much better SNR",
    "auto-halve": "- (our rule)",
    "auto-halve-in-sample": "- (our rule, flattered)",
    "fp32-sum": "- (ours)",
}
RULES = {"auto-paper": "paper", "auto-halve": "halve", "auto-halve-in-sample": "halve"}
IN_SAMPLE = "auto-halve-in-sample"
COLORS = {
    "pre": "#2563eb",
    "post": "#ea580c",
    "auto-paper": "#059669",
    "auto-halve": "#84cc16",
    "auto-halve-in-sample": "#9a9a9a",
    "fp32-sum": "#7c3aed",
}
MEASURES = ("snr_db", "underflow", "underflow_local", "overflow", "overflow_local")
RUN = ("opt_level", "micro_batch", "train_iters", "loss", "seed", "gpu", "driver", "torch", "commit", "date")
COLUMNS = ("model", "dp", "block", "strategy", "order", *MEASURES, "mu_min", "mu_max", *RUN)
BISECTIONS = 14  # over at most 11 octaves: finer than one growth step of mu


# ------------------------------------------------------------------------------------------------------------------ gradients


class Ranks:
    """Train a model and take its gradients on N ranks, which `peers` share; by default one process simulates them all.

    Attributes:
        numbers: of the transformer blocks that are measured.
        blocks: for each of them, the gradients of its linear weights, one [N, rows, columns] per weight, in the GEMM's dtype.
        earlier: the same on N other micro-batches, on which mu adapts.
        loss: loss of the last training iteration, in nats per token.
    """

    def __init__(self, config: Config, ranks: int, peers: Peers | None = None, numbers: Sequence[int] = ()) -> None:
        peers = peers or Peers(None, WireBytes())
        self.numbers = list(numbers or range(config.model.num_layers))
        settings, iterations = config.training, config.iterations(peers.ranks)
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        samples = config.samples_read(peers.ranks) + 2 * ranks * settings.micro_batch_size
        data, _, _ = build_datasets(config, tokenizer, (samples, 0, 0))
        assert data is not None
        stream = batches(
            data,
            micro_batch_size=settings.micro_batch_size,
            data_parallel_rank=peers.rank,
            data_parallel_size=peers.ranks,
            num_workers=config.data.num_workers,
            device=process_groups.device(),
        )
        training = build_training(config, tokenizer.vocab_size)
        graphs = step_graph.build(training)
        for iteration in range(1, iterations + 1):
            result = train_step(training, stream, graphs)
            if iteration in (1, iterations) or iteration % config.logging.log_interval == 0:
                self.loss = float(result.loss_sum / result.tokens)
                print(f"iteration {iteration} | loss {self.loss:.4f}", flush=True)
        self.earlier, self.blocks = (_gradients(training.model, self.numbers, stream, ranks, peers) for _ in range(2))


def _gradients(
    model: nn.Module, numbers: Sequence[int], stream: Iterator[dict[str, Tensor]], ranks: int, peers: Peers
) -> list[list[Tensor]]:
    layers = [[p for p in model.decoder.layers[n].parameters() if p.dim() == 2] for n in numbers]  # type: ignore[union-attr, index]
    weights = [p for layer in layers for p in layer]
    stacks: list[Tensor] = []
    for rank in range(ranks // peers.ranks):
        batch = next(stream)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss, _ = mean_loss((losses * batch["loss_mask"]).sum(), batch["loss_mask"])
        gradients = torch.autograd.grad(loss, weights)  # not .backward(): the gradient synchronizer's hooks must not run
        stacks = stacks or [g.new_empty(ranks // peers.ranks, *g.shape) for g in gradients]
        for stack, g in zip(stacks, gradients, strict=True):
            stack[rank] = g
    every = [peers.all_gather(s.flatten(), [s.numel()] * peers.ranks, "gradients").view(ranks, *s.shape[1:]) for s in stacks]
    remaining = iter(every)
    return [[next(remaining) for _ in layer] for layer in layers]


# ------------------------------------------------------------------------------------------------------------------- exchange


class SimulatedPeers(Peers):
    """A process group simulated in one process: rank 0 owns every tensor and receives `payloads`, one from each rank."""

    def __init__(self, payloads: Sequence[Tensor]) -> None:
        super().__init__(None, WireBytes())
        self.ranks = len(payloads)
        self.payloads = list(payloads)

    def all_to_all(self, flat: Tensor, sizes: Sequence[int], what: str, kind: str = "weight") -> Tensor:
        return torch.stack(self.payloads)


def exchange(wire: FP32SumWire, gradients: Tensor, factor: Tensor) -> tuple[Reduced, list[Tensor]]:
    """Return the averaged gradient of a weight and each rank's flat payload; `gradients` [N, rows, columns], `factor` an FP32 scalar."""
    payloads = [pack_scaled(g, factor, wire.format).flatten() for g in gradients]
    ranks, count = gradients.shape[:2]
    bucket = Bucket([gradients[0]], ["weight"], wire.format, [Piece(tensor=0, row=0, rows=count, owner=0)], ranks, 0)
    return wire.reduce(bucket, payloads[0], factor[None], SimulatedPeers(payloads), shard=True), payloads


def mu_threshold(exceeded: Callable[[float], bool], ranks: int) -> float:
    """Return the largest mu, within 0.1 %, that does not exceed the saturation limit.

    Bisects between 1 / (4 N), which never exceeds it, and a value above MU_MAX.
    """
    low, high = 1 / (4 * ranks), MU_MAX * GROWTH
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if exceeded(middle):
            high = middle
        else:
            low = middle
    return low


def adapted_mu(thresholds: Tensor, ranks: int, steps: int, rule: str = "halve") -> Tensor:
    """Return each tensor's mu after `steps` steps with the same gradients, FP64 [n]; `rule` is one of `msamp.comm.grad_scaling.MU_RULES`.

    A step saturates if mu is above the tensor's threshold, so the reduction runs about 14 times for the threshold instead of in every
    step; mu takes 500 steps without saturation to grow from 1 to 2.
    """
    mu = torch.ones_like(thresholds)
    for _ in range(steps):
        mu = next_mu(mu, mu > thresholds, ranks, rule)
    return mu


def shared_scales(gradients: Sequence[Tensor], fmt: Format = E4M3) -> list[Tensor]:
    """Return s_g of each weight of a block: the smallest scale that any rank proposes."""
    return [scales_of(propose_scales(list(g), fmt, g.device).amin()) for g in gradients]


def counted(values: Tensor, payload: Tensor) -> Tensor:
    """Return the counts of `ops.count_`, int64 [3]: non-zero elements, elements at the maximum, elements rounded to zero."""
    row = torch.zeros(3, dtype=torch.int64, device=values.device)
    ops.count_(row, values, payload)
    return row


def mu_thresholds(gradients: Sequence[Tensor], order: str = CHAIN, fmt: Format = E4M3) -> Tensor:
    """Return, for each weight of a block, the mu above which too many elements saturate in a sum of this order, FP64 [n]."""
    ranks = len(gradients[0])

    def threshold(g: Tensor, scale: Tensor) -> float:
        def exceeded(mu: float) -> bool:
            reduced, payloads = exchange(OrderedWire(fmt, order), g, scale * mu)
            counts = torch.stack([torch.stack([counted(q, q)[1] for q in payloads]).amax(), counted(reduced.own, reduced.own)[1]])
            return bool(exceeds(counts, torch.tensor(g[0].numel(), device=counts.device)).any())

        return mu_threshold(exceeded, ranks)

    scales = shared_scales(gradients, fmt)
    return torch.tensor([threshold(g, scale) for g, scale in zip(gradients, scales, strict=True)], dtype=torch.float64)


def measure_block(
    gradients: Sequence[Tensor],
    earlier: Sequence[Tensor],
    mu_steps: int,
    order: str = CHAIN,
    fmt: Format = E4M3,
    reduce: Callable[[FP32SumWire, Tensor, Tensor], tuple[Reduced, list[Tensor]]] = exchange,
) -> list[dict[str, Any]]:
    """Return MEASURES of every strategy on one block; `fp32-sum`, which does not depend on the order, is measured with the chain only.

    Args:
        gradients: for each weight of the block, the gradients of N ranks, [N, rows, columns], that are reduced and evaluated.
        earlier: the same on other micro-batches, on which mu adapts.
        mu_steps: number of steps that mu adapts for.
        order: order of the additions, one of `sum_orders.ORDERS`.
        fmt: of the payloads.
        reduce: sums the gradients of a weight as `exchange` does; mu adapts on the sums of `exchange` in any case.
    """
    ranks = len(gradients[0])
    scales = shared_scales(gradients, fmt)
    mean = torch.cat([g.mean(0, dtype=torch.float64).flatten() for g in gradients])
    thresholds = {False: mu_thresholds(earlier, order, fmt), True: mu_thresholds(gradients, order, fmt)}
    mus = {name: adapted_mu(thresholds[name == IN_SAMPLE], ranks, mu_steps, rule).tolist() for name, rule in RULES.items()}
    factors = {"pre": [scale / ranks for scale in scales], "post": scales}
    factors |= {name: [scale * m for scale, m in zip(scales, mu, strict=True)] for name, mu in mus.items()}
    factors |= {"fp32-sum": scales} if order == CHAIN else {}
    measured = []
    for strategy, multipliers in factors.items():
        wire = FP32SumWire(fmt) if strategy == "fp32-sum" else OrderedWire(fmt, order)
        values, counts = [], torch.zeros(4, dtype=torch.int64, device=mean.device)
        for g, factor in zip(gradients, multipliers, strict=True):
            reduced, payloads = reduce(wire, g, factor)
            assert reduced.scale_inv is not None
            values.append(reduced.own.float() * reduced.scale_inv)
            for x, q in zip(g, payloads, strict=True):
                counts[:3] += counted(x, q)
            counts[3] += counted(reduced.own, reduced.own)[1]
        approx = torch.cat(values)
        nonzero, at_max_local, lost, at_max = counts.tolist()
        row = {"strategy": strategy, "order": order, "snr_db": sqnr_db(mean, approx), "underflow": underflow_frac(mean, approx)}
        row |= {"underflow_local": lost / max(1, nonzero), "overflow": at_max / mean.numel()}
        row |= {"overflow_local": at_max_local / (ranks * mean.numel())}
        mu = mus.get(strategy, [])
        measured.append(row | {"mu_min": min(mu, default=""), "mu_max": max(mu, default="")})
    return measured


def measure(
    config: Config, sizes: Sequence[int], orders: Sequence[str], mu_steps: int, tree: str | None, numbers: Sequence[int] = ()
) -> Iterator[list[dict[str, Any]]]:
    """Train the model, then yield the rows of one data-parallel size and order at a time; requires `process_groups.initialize`.

    Orders other than the chain are measured at the largest size only.
    """
    started = time.perf_counter()
    ranks = Ranks(config, max(sizes), numbers=numbers)
    print(f"trained and computed the gradients of {max(sizes)} ranks in {time.perf_counter() - started:.0f} s", flush=True)
    common: dict[str, Any] = {"model": f"gpt-{config.model.num_layers}x{config.model.hidden_size}", "opt_level": config.precision.name}
    common |= {"micro_batch": config.training.micro_batch_size, "train_iters": config.iterations(1)}
    common |= {"loss": f"{ranks.loss:.4f}", "seed": config.training.seed} | rows.machine(tree)
    for dp, order in ((dp, order) for dp in sizes for order in orders if order == CHAIN or dp == max(sizes)):
        table = []
        for block, *both in zip(ranks.numbers, ranks.blocks, ranks.earlier, strict=True):
            with torch.no_grad():
                gradients, earlier = ([g[:dp] for g in weights] for weights in both)
                measured = measure_block(gradients, earlier, mu_steps, order)
            table += [common | {"dp": dp, "block": block} | row for row in measured]
        print(f"measured DP {dp}, {order}, at {time.perf_counter() - started:.0f} s", flush=True)
        yield [{column: row[column] for column in COLUMNS} for row in table]


# --------------------------------------------------------------------------------------------------------------------- output


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows that an earlier run wrote; ValueError if `path` is not such a file."""
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        table: list[dict[str, Any]] = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS or not table:
        raise ValueError(f"--rows {path} is not a table of fig7.py: give the fig7.csv of an earlier run")
    for row in table:
        row |= {"dp": int(row["dp"]), "block": int(row["block"])} | {name: float(row[name]) for name in MEASURES}
    return table


def chosen(table: Sequence[dict[str, Any]], dp: int, strategy: str, order: str = CHAIN) -> list[dict[str, Any]]:
    """Return the rows of one data-parallel size, strategy and order, one per block."""
    return [row for row in table if (row["dp"], row["strategy"], row["order"]) == (dp, strategy, order)]


def block_mean(table: Sequence[dict[str, Any]], dp: int, strategy: str, name: str, order: str = CHAIN) -> float:
    """Return the mean of one of MEASURES over the blocks."""
    return statistics.fmean(row[name] for row in chosen(table, dp, strategy, order))


def summary(table: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the printed table, and whether the paper's three claims hold."""
    heads = f"{'DP':>4}  {'strategy':<20}  {'SNR dB':>7}  {'underflow':>9}  {'local':>9}  {'overflow':>9}  {'local':>9}  {'mu':<13}"
    yield f"{heads}  paper (section 3.3, at DP 128)"
    for dp in sorted({row["dp"] for row in table}):
        there = [
            strategy for strategy in PAPER if chosen(table, dp, strategy)
        ]  # older files contain a single auto strategy, adapted in sample
        mean = {s: {name: block_mean(table, dp, s, name) for name in MEASURES} for s in there}
        for strategy in there:
            snr, *shares = mean[strategy].values()
            mus = [float(row[end]) for row in chosen(table, dp, strategy) for end in ("mu_min", "mu_max") if row[end] != ""]
            span = f"{min(mus):.4f}-{max(mus):.4f}" if mus else ""
            cells = "  ".join(f"{share:>9.4%}" for share in shares)
            yield f"{dp:>4}  {strategy:<20}  {snr:>7.2f}  {cells}  {span:<13}  {PAPER[strategy]}"
        more_lost = mean["pre"]["underflow_local"] > mean["post"]["underflow_local"]
        more_at_max = mean["post"]["overflow"] > mean["pre"]["overflow"]
        best = max(mean["pre"]["snr_db"], mean["post"]["snr_db"])
        gains = {name: mean[name]["snr_db"] - best for name in RULES if name in mean}
        yield (
            f"{dp:>4}  pre underflows more than post (local): {_yes(more_lost)}; post overflows more than pre: {_yes(more_at_max)}; "
            + "; ".join(f"{name} has more SNR than both: {_yes(gain > 0)} ({gain:+.2f} dB)" for name, gain in gains.items())
        )
    for dp, order in dict.fromkeys((row["dp"], row["order"]) for row in table if row["order"] != CHAIN):
        snrs = (f"{s} {block_mean(table, dp, s, 'snr_db', order):.2f}" for s in PAPER if chosen(table, dp, s, order))
        yield f"{dp:>4}  SNR dB, summed as {order}: {', '.join(snrs)}"


def _yes(held: bool) -> str:
    return "yes" if held else "no"


def draw(table: Sequence[dict[str, Any]], dp: int, path: Path) -> None:
    """Draw three panels over the blocks at one data-parallel size (dashed: the ranks' payloads), and the SNR over all sizes."""
    from matplotlib.figure import Figure  # without pyplot: requires no display, keeps no state between figures

    figure = Figure(figsize=(10, 7), dpi=130, layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    sizes = sorted({row["dp"] for row in table})
    panels = (("snr_db", "SNR (dB)", 1), ("underflow", "underflow (%), dashed local", 100), ("overflow", "overflow (%), dashed local", 100))
    for strategy, color in COLORS.items():
        lines = chosen(table, dp, strategy)
        if not lines:
            continue
        width = 3.5 if strategy == "pre" else 1.5  # auto-halve often covers it
        for axis, (name, _, unit) in zip(axes, panels, strict=False):
            blocks = [x["block"] for x in lines]
            axis.plot(blocks, [unit * x[name] for x in lines], color=color, linewidth=width, marker="o", markersize=3, label=strategy)
            axis.set_xticks(blocks)
            if f"{name}_local" in MEASURES:
                axis.plot(blocks, [unit * x[f"{name}_local"] for x in lines], color=color, linestyle="dashed", linewidth=1)
        means = [block_mean(table, n, strategy, "snr_db") for n in sizes]
        axes[3].plot(sizes, means, color=color, linewidth=width, marker="o", markersize=3)
    for axis, (_, title, _) in zip(axes, panels, strict=False):
        axis.set_xlabel(f"transformer block, DP {dp}")
        axis.set_ylabel(title)
    axes[3].set_xscale("log", base=2)
    axes[3].set_xticks(sizes, [str(n) for n in sizes])
    axes[3].set_xlabel("data-parallel ranks")
    axes[3].set_ylabel("SNR (dB), mean over blocks")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    axes[0].legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0)
    figure.savefig(path)


def _measured(options: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Measure all rows; the rows of each size are written as soon as they are measured, so an interrupted run keeps them."""
    config = parse_args([*DEFAULTS.split(), *flags])
    if options.blocks and max(options.blocks) >= config.model.num_layers:
        raise ValueError(f"--blocks {max(options.blocks)}: the model has blocks 0 to {config.model.num_layers - 1}; give some of them")
    check(config, 1)
    process_groups.initialize(config)
    options.out.mkdir(parents=True, exist_ok=True)
    table: list[dict[str, Any]] = []
    try:
        for part in measure(config, sorted(set(options.dp)), options.orders, options.mu_steps, options.commit, options.blocks):
            table += part
            rows.write(options.out / "fig7.csv", COLUMNS, table)
    finally:
        process_groups.shutdown()
    return table


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 with a message on stderr for invalid input."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dp", nargs="+", type=count(2, 2**20), default=DATA_PARALLEL, metavar="N", help="data-parallel sizes")
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=[CHAIN], help="orders of the additions (default: %(default)s)")
    parser.add_argument("--blocks", nargs="+", type=count(0), default=[], metavar="N", help="blocks that are measured (default: all)")
    parser.add_argument("--plot-dp", type=count(2), metavar="N", help="data-parallel size drawn over the blocks (default: the largest)")
    parser.add_argument("--mu-steps", type=count(0), default=1000, help="steps for which mu adapts on other batches; 0 keeps mu at 1")
    parser.add_argument("--rows", type=path, help="CSV of an earlier run to draw without measuring")
    parser.add_argument("--out", type=path, default=rows.ROOT / "tools/reproduce/results/fig7", help="folder for fig7.csv and fig7.png")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options, flags = parser.parse_known_args(arguments)
    earlier = read_rows(options.rows) if options.rows else []
    sizes = {row["dp"] for row in earlier} or set(options.dp)
    if min(sizes) < 2:
        raise ValueError(f"--dp {min(sizes)}: one rank has nothing to reduce; give sizes of 2 or more")
    if options.plot_dp and options.plot_dp not in sizes:
        raise ValueError(f"--plot-dp {options.plot_dp} is not measured: choose one of {', '.join(map(str, sorted(sizes)))}")
    if options.rows and flags:
        raise ValueError(f"{' '.join(flags)}: --rows trains nothing, so it takes no flags of the trainer; remove one of the two")
    table = earlier or _measured(options, flags)
    options.out.mkdir(parents=True, exist_ok=True)
    print(*summary(table), sep="\n")
    if importlib.util.find_spec("matplotlib"):
        draw(table, options.plot_dp or max(sizes), options.out / "fig7.png")
    else:
        print(f"no figure: matplotlib is not installed; draw it on another machine with --rows {options.out / 'fig7.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

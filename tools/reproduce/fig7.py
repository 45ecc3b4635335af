"""FP8-LM Figure 7: SNR, underflow and overflow of FP8 gradient all-reduce over transformer blocks, on the gradients of a GPT trained here.

    python tools/reproduce/fig7.py --train-data-path data/enwik8/train_text_document --tokenizer-type GPT2BPETokenizer \\
        --vocab-file data/enwik8/encoder.json --merge-file data/enwik8/vocab.bpe
    ... --preset 1.3b --blocks 0 8 16 23           some blocks of a larger model: the gradients of all ranks are in memory at once

Flags that --help does not list are passed to the trainer (`msamp pretrain --help`), after DEFAULTS. One process trains the
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

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from megatron.lm.model.gpt import mean_loss
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
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import sqnr_db, underflow_frac
from tools.bench import rows
from tools.reproduce.sum_orders import CHAIN, ORDERS, OrderedWire

DEFAULTS = (
    "--preset 125m --opt-level O2 --fp8-min-gain 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 500 --lr-warmup-iters 50 "
    "--eval-iters 0"
)
DATA_PARALLEL = (2, 4, 8, 16, 32, 64, 128)
STRATEGIES = ("pre", "post", "auto-paper", "auto-halve", "auto-halve-in-sample", "fp32-sum")
RULES = {"auto-paper": "paper", "auto-halve": "halve", "auto-halve-in-sample": "halve"}
IN_SAMPLE = "auto-halve-in-sample"
MEASURES = ("snr_db", "underflow", "underflow_local", "overflow", "overflow_local")
RUN = ("opt_level", "micro_batch", "train_iters", "loss", "seed", "gpu", "driver", "torch", "commit", "date")
COLUMNS = ("model", "dp", "block", "strategy", "order", *MEASURES, "mu_min", "mu_max", *RUN)
BISECTIONS = 14  # over at most 11 octaves: finer than one growth step of mu


# ------------------------------------------------------------------------------------------------------------------ gradients


class Ranks:
    """Train a model and take its gradients on N ranks, which this process simulates.

    Attributes:
        numbers: of the transformer blocks that are measured.
        blocks: for each of them, the gradients of its linear weights, one [N, rows, columns] per weight, in the GEMM's dtype.
        earlier: the same on N other micro-batches, on which mu adapts.
        loss: loss of the last training iteration, in nats per token.
    """

    def __init__(self, config: Config, ranks: int, numbers: Sequence[int] = ()) -> None:
        self.numbers = list(numbers or range(config.model.num_layers))
        settings, iterations = config.training, config.iterations(1)
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        samples = config.samples_read(1) + 2 * ranks * settings.micro_batch_size
        data, _, _ = build_datasets(config.data, tokenizer, (samples, 0, 0), seq_length=config.model.seq_length, seed=settings.seed)
        assert data is not None
        stream = batches(
            data,
            micro_batch_size=settings.micro_batch_size,
            data_parallel_rank=0,
            data_parallel_size=1,
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
        self.earlier, self.blocks = (_gradients(training.model, self.numbers, stream, ranks) for _ in range(2))


def _gradients(model: nn.Module, numbers: Sequence[int], stream: Iterator[dict[str, Tensor]], ranks: int) -> list[list[Tensor]]:
    layers = [[p for p in model.decoder.layers[n].parameters() if p.dim() == 2] for n in numbers]  # type: ignore[union-attr, index]
    weights = [p for layer in layers for p in layer]
    stacks: list[Tensor] = []
    for rank in range(ranks):
        batch = next(stream)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss, _ = mean_loss((losses * batch["loss_mask"]).sum(), batch["loss_mask"])
        gradients = torch.autograd.grad(loss, weights)  # not .backward(): the gradient synchronizer's hooks must not run
        stacks = stacks or [g.new_empty(ranks, *g.shape) for g in gradients]
        for stack, g in zip(stacks, gradients, strict=True):
            stack[rank] = g
    remaining = iter(stacks)
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


def shared_scales(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return s_g of each weight of a block: the smallest scale that any rank proposes."""
    return [scales_of(propose_scales(list(g), E4M3, g.device).amin()) for g in gradients]


def counted(values: Tensor, payload: Tensor) -> Tensor:
    """Return the counts of `ops.count_`, int64 [3]: non-zero elements, elements at the maximum, elements rounded to zero."""
    row = torch.zeros(3, dtype=torch.int64, device=values.device)
    ops.count_(row, values, payload)
    return row


def mu_thresholds(gradients: Sequence[Tensor], order: str = CHAIN) -> Tensor:
    """Return, for each weight of a block, the mu above which too many elements saturate in a sum of this order, FP64 [n]."""
    ranks = len(gradients[0])

    def threshold(g: Tensor, scale: Tensor) -> float:
        def exceeded(mu: float) -> bool:
            reduced, payloads = exchange(OrderedWire(E4M3, order), g, scale * mu)
            counts = torch.stack([torch.stack([counted(q, q)[1] for q in payloads]).amax(), counted(reduced.own, reduced.own)[1]])
            return bool(exceeds(counts, torch.tensor(g[0].numel(), device=counts.device)).any())

        return mu_threshold(exceeded, ranks)

    scales = shared_scales(gradients)
    return torch.tensor([threshold(g, scale) for g, scale in zip(gradients, scales, strict=True)], dtype=torch.float64)


def measure_block(gradients: Sequence[Tensor], earlier: Sequence[Tensor], mu_steps: int, order: str = CHAIN) -> list[dict[str, Any]]:
    """Return MEASURES of every strategy on one block; `fp32-sum`, which does not depend on the order, is measured with the chain only.

    Args:
        gradients: for each weight of the block, the gradients of N ranks, [N, rows, columns], that are reduced and evaluated.
        earlier: the same on other micro-batches, on which mu adapts.
        mu_steps: number of steps that mu adapts for.
        order: order of the additions, one of `sum_orders.ORDERS`.
    """
    ranks = len(gradients[0])
    scales = shared_scales(gradients)
    mean = torch.cat([g.mean(0, dtype=torch.float64).flatten() for g in gradients])
    thresholds = {False: mu_thresholds(earlier, order), True: mu_thresholds(gradients, order)}
    mus = {name: adapted_mu(thresholds[name == IN_SAMPLE], ranks, mu_steps, rule).tolist() for name, rule in RULES.items()}
    factors = {"pre": [scale / ranks for scale in scales], "post": scales}
    factors |= {name: [scale * m for scale, m in zip(scales, mu, strict=True)] for name, mu in mus.items()}
    factors |= {"fp32-sum": scales} if order == CHAIN else {}
    measured = []
    for strategy, multipliers in factors.items():
        wire = FP32SumWire(E4M3) if strategy == "fp32-sum" else OrderedWire(E4M3, order)
        values, counts = [], torch.zeros(4, dtype=torch.int64, device=mean.device)
        for g, factor in zip(gradients, multipliers, strict=True):
            reduced, payloads = exchange(wire, g, factor)
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


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 with a message on stderr for invalid input."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dp", nargs="+", type=count(2, 2**20), default=DATA_PARALLEL, metavar="N", help="data-parallel sizes")
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=[CHAIN], help="orders of the additions (default: %(default)s)")
    parser.add_argument("--blocks", nargs="+", type=count(0), default=[], metavar="N", help="blocks that are measured (default: all)")
    parser.add_argument("--mu-steps", type=count(0), default=1000, help="steps for which mu adapts on other batches; 0 keeps mu at 1")
    parser.add_argument("--out", type=path, default=rows.ROOT / "tools/reproduce/results/fig7", help="folder for fig7.csv")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options, flags = parser.parse_known_args(arguments)
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
            rows.write(options.out / "fig7.csv", COLUMNS, table)  # as soon as a size is measured: an interrupted run keeps its rows
    finally:
        process_groups.shutdown()
    print(f"{options.out / 'fig7.csv'} has a row per size, block and strategy; python -m tools.reproduce fp8lm-figure7 makes its page")
    return 0


if __name__ == "__main__":
    sys.exit(main())

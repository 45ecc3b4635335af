"""Compare attention over sequences that are split between GPUs: our ring and our all-to-all, in BF16 and FP8, and PyTorch's own.

    torchrun --nproc-per-node 2 tools/bench/bench_context.py                                  32,768, 65,536 and 131,072 tokens
    torchrun --nproc-per-node 4 tools/bench/bench_context.py --shapes 1x32x32768x128/8        batch x heads x tokens x channels / groups
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 tools/bench/bench_context.py --cases "ring, FP8" torch

Attention is causal, and tokens are counted over all GPUs. Values have a mean of one deviation, the output's gradient of a quarter. A run
is eager, forward alone or forward and backward, without projections and rotary embedding; FP8 attention casts its operands and has delayed
scales. `torch` is `context_parallel` of `torch.distributed.tensor.experimental` with keys repeated for their queries, since its ring does
not share them, and splits sequences before the first run; it runs the kernel that PyTorch prefers, or cuDNN's, which one GPU's runs and
ours prefer. Times are rank 0's. MiB are what a rank sends per run, mean over the ranks, of ours. SQNR in dB and slope are relative to one
GPU's BF16 attention on the same inputs, the lowest of the ranks. Measurements are appended to --csv. A case that fails has a row too, with
its error in the column `error`. A case whose output or gradients are further from one GPU's than its precision explains (`least_sqnr`)
fails: it gets no time.
"""

import contextlib
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.comm.collectives import Peers
from msamp.comm.copies import links_disabled
from msamp.comm.counters import WireBytes
from msamp.nn.fp8_attention import AttentionScaling
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.recipe import O3
from msamp.parallel.fp8_head_exchange import FP8HeadExchange
from msamp.parallel.fp8_ring_attention import FP8RingAttention
from msamp.parallel.head_exchange import HeadExchange
from msamp.parallel.ring_attention import RingAttention
from tools.bench import rows
from tools.bench.bench_attention import MEANS, PASSES, Shape, attention, flops, shape, slope
from tools.bench.training_steps import synchronized_step_times

SHAPES = ("1x32x32768x128/8", "1x32x65536x128/8", "1x32x131072x128/8")
CASES = ("ring, BF16", "ring, FP8 wire", "ring, FP8", "heads, BF16", "heads, FP8 wire", "heads, FP8", "torch", "torch, cuDNN")
LEAST_SQNR = {"FP8": 12.0, "FP8 wire": 20.0}  # dB, by the precision of the case; own tokens alone have 9 dB at two ranks
LEAST_SQNR_BF16 = 30.0  # of all other cases
LOSSES = tuple(f"{what}_{name}" for what in ("sqnr", "slope") for name in ("o", "dq", "dk", "dv"))
WARM_UP, MIB = 3, 2**20
Run = Callable[..., list[Tensor]]


def inputs(size: Shape, device: torch.device) -> list[Tensor]:
    """Return query, key, value and the output's gradient of whole sequences, BF16 [s, b, n, d], the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (size.heads, size.groups, size.groups, size.heads)
    shapes = [(size.tokens, size.batch, n, size.channels) for n in heads]
    tensors = [torch.randn(s, generator=generator, device=device) for s in shapes]
    for x, mean in zip(tensors[2:], MEANS["mean"], strict=True):
        x += mean * torch.randn(x.shape[2:], generator=generator, device=device)
    return [x.bfloat16() for x in tensors]


def own(x: Tensor, peers: Peers) -> Tensor:
    """Return the tokens of this rank: two of 2 N chunks."""
    chunks = x.chunk(2 * peers.ranks)
    return torch.cat([chunks[peers.rank], chunks[-1 - peers.rank]])


def differentiated(function: Callable[..., Tensor], tensors: Sequence[Tensor], *, backward: bool) -> list[Tensor]:
    """Return the output of attention, and with `backward` the gradients of query, key and value."""
    *operands, grad = (x.detach() for x in tensors)
    operands = [x.requires_grad_(backward) for x in operands]
    with torch.set_grad_enabled(backward):
        o = function(*operands)
    return [o.detach(), *(torch.autograd.grad(o, operands, grad.flatten(2)) if backward else ())]


def ours(case: str, peers: Peers, size: Shape, tensors: Sequence[Tensor]) -> Run:
    """Return the function that runs one of our cases on the tokens of this rank; FP8 attention with the window of its scales full."""
    scale, parts = 1 / math.sqrt(size.channels), [own(x, peers) for x in tensors]
    way, _, precision = case.partition(", ")
    wire = "fp8" if precision == "FP8 wire" else "bf16"
    if precision != "FP8":
        exchange = HeadExchange(peers, attention, wire) if way == "heads" else RingAttention(peers, scale, True, wire=wire)
        return functools.partial(differentiated, exchange.__call__, parts)
    assert O3.gemm is not None
    scaling = AttentionScaling(O3.gemm, device=parts[0].device)
    state, shared = ScalingState(scaling), FP8HeadExchange if way == "heads" else FP8RingAttention
    fp8 = shared(scaling, scale, True, True, peers)
    while not scaling.delayed:
        differentiated(fp8, parts, backward=True)
        state.roll(peers.group)
    return functools.partial(differentiated, fp8, parts)


def theirs(case: str, peers: Peers, size: Shape, tensors: Sequence[Tensor], stack: contextlib.ExitStack) -> Run:
    """Return the function that runs PyTorch's context parallelism until `stack` is closed; until then all attention is its.

    PyTorch replaces `scaled_dot_product_attention` in the module `torch.nn.functional`. A name imported from there is still the attention
    of one process, here of the tokens of this rank alone: half of the work and another output, without an error.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh, repeated = init_device_mesh(tensors[0].device.type, (peers.ranks,)), size.heads // size.groups
    query, key, value, grad = (x.permute(1, 2, 0, 3) for x in tensors)
    wide = [query, key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1), grad]
    buffers = [x.clone(memory_format=torch.contiguous_format) for x in wide]

    before = functional.scaled_dot_product_attention
    stack.callback(setattr, functional, before.__name__, before)  # torch 2.11 leaves its own there after an error
    if case == "torch, cuDNN":
        stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4))  # the buffers are this rank's parts from here on
    if functional.scaled_dot_product_attention is before:
        raise RuntimeError(f"context_parallel of PyTorch {torch.__version__} did not replace scaled_dot_product_attention")

    def run(*, backward: bool) -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_(backward) for x in buffers[:3])
        with torch.set_grad_enabled(backward):
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs = [o.detach(), *(torch.autograd.grad(o, (q, k, v), buffers[3]) if backward else ())]
        by_token = [x.permute(2, 0, 1, 3) for x in outputs]
        for n in (2, 3) if backward else ():  # sums over the queries that share a key
            by_token[n] = by_token[n].unflatten(2, (size.groups, repeated)).sum(3)
        return [by_token[0].flatten(2), *by_token[1:]]

    return run


class WrongResult(RuntimeError):
    """A case does not compute the attention that it is compared with. `lost` is of `losses`, `least` of `least_sqnr`."""

    def __init__(self, lost: dict[str, float], least: dict[str, float]) -> None:
        low = ", ".join(f"{name[5:]} {lost[name]:g}, expected at least {db:.1f}" for name, db in least.items() if not lost[name] >= db)
        super().__init__(f"computes something else: SQNR in dB against one GPU is {low}; not timed")
        self.lost = lost


def least_sqnr(case: str, size: Shape, of_output: float) -> dict[str, float]:
    """Return the least SQNR in dB that the precision of the case explains, by column, when that of its output is `of_output`.

    dQ of a query is sum_j P_j (dO V_j - dO O) K_j, with the output O as it was rounded. An error of dO O multiplies sum_j P_j K_j, the mean
    key under attention, which does not fall with the number of tokens n: it is q / sqrt(d) for normal keys of d channels. dQ itself is the
    mean of about n / e keys with either sign, and falls with sqrt(n). So its SQNR is that of O less 10 log10(n / (2 e d)), for a rank whose
    tokens are in the middle of n; 3 dB more are allowed.
    """
    least = LEAST_SQNR.get(case.partition(", ")[2], LEAST_SQNR_BF16)
    of_dq = of_output - 10 * math.log10(size.tokens / (2 * math.e * size.channels)) - 3
    return dict.fromkeys(LOSSES[:4], least) | {"sqnr_dq": min(least, of_dq)}


def losses(case: str, size: Shape, run: Run, exact: Sequence[Tensor]) -> dict[str, float]:
    """Return SQNR in dB and slope of output and gradients against `exact`, this rank's part of the attention on one process.

    Returns:
        The lowest of all ranks; -inf if one has a non-finite value.

    Raises:
        WrongResult: on every rank, if one is below what the precision of the case explains.
    """
    got = run(backward=True)
    lost = [measure(wanted, x) for measure in (sqnr_db, slope) for wanted, x in zip(exact, got, strict=True)]
    lowest = torch.tensor(lost, device=exact[0].device).nan_to_num(-math.inf, math.inf, -math.inf)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    rounded = {name: round(value, 1 if name.startswith("sqnr") else 4) for name, value in zip(LOSSES, lowest.tolist(), strict=True)}
    least = least_sqnr(case, size, rounded["sqnr_o"])
    if any(rounded[name] < db for name, db in least.items()):
        raise WrongResult(rounded, least)
    return rounded


def measured(case: str, size: Shape, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Return the rows of a case, one per pass."""
    peers, tensors = Peers(dist.group.WORLD, WireBytes()), inputs(size, device)
    exact = [own(x, peers) for x in differentiated(attention, tensors, backward=True)]
    with contextlib.ExitStack() as stack:
        run = theirs(case, peers, size, tensors, stack) if case.startswith("torch") else ours(case, peers, size, tensors)
        lost, found = losses(case, size, run, exact), []
        for passes in PASSES:
            one, seconds = functools.partial(run, backward=passes == PASSES[1]), []
            peers.sent.take()
            one()
            sent = torch.tensor(float(sum(peers.sent.take().values())), device=device)
            dist.all_reduce(sent)
            for _ in range(WARM_UP + repeats):
                dist.barrier()  # all ranks start together
                seconds += synchronized_step_times(one, 1)[0]
            seconds = seconds[WARM_UP:]
            found.append(
                {"case": case, "pass": passes}
                | rows.percentile_columns("ms", seconds, 1e3, 3)
                | {"tflops": round(flops(size, passes) / peers.ranks / statistics.median(seconds) / 1e12)}
                | {"sent_mib": "" if case.startswith("torch") else round(float(sent) / peers.ranks / MIB, 4)}
                | (lost if passes == PASSES[1] else dict.fromkeys(lost, ""))
                | {"error": ""}
            )
    return found


def failed(case: str, error: Exception) -> dict[str, Any]:
    """Return the row of a case that failed."""
    numbers = ("pass", "ms_p20", "ms", "ms_p80", "tflops", "sent_mib", *LOSSES)
    lost = error.lost if isinstance(error, WrongResult) else {}
    return {"case": case} | dict.fromkeys(numbers, "") | lost | {"error": " ".join(str(error).split())[:200]}


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape, default=[shape(text) for text in SHAPES], metavar="SHAPE")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=count(2), default=5)
    rows.add_flags(parser, "context.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; attention is measured on GPUs")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    where = rows.machine(options.commit) | {"gpus": dist.get_world_size(), "p2p": "off" if links_disabled() else "on"}
    for size in options.shapes:
        for case in options.cases:
            try:
                measurements = measured(case, size, device, options.repeats)
            except (RuntimeError, ValueError, TypeError, ImportError) as error:  # the same on every rank: a kernel or PyTorch refuses
                measurements = [failed(case, error)]
            for row in measurements if dist.get_rank() == 0 else ():
                print(json.dumps(size._asdict() | row), flush=True)
                rows.append(options.csv, [where | size._asdict() | row])
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

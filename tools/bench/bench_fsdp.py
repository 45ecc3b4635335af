"""Measure time, memory and loss of training steps of a plain Llama-like torch model under FSDP2, over the GPUs of one host.

    torchrun --standalone --nproc-per-node 2 tools/bench/bench_fsdp.py                          1.3B: BF16, torchao and ours
    torchrun ... tools/bench/bench_fsdp.py --cases bf16 torchao "bf16 compile" "torchao compile" O1 O2 "O2 compile"
    NCCL_P2P_DISABLE=1 torchrun ...                                                             without NVLink: the wire counts

A case is `bf16` (plain torch), `torchao` (its FP8 linear layers with FP8 all-gather; pip install torchao), `O1`, `O2`, `O3` or `coat`
(ours; `coat` keeps inputs of norms and SwiGLU in FP8 groups), each also with `compile`: every block compiled by torch.compile, and
`graph`: the step as one CUDA graph (`msamp.capture`). Ours also with `fused`: the model's blocks are `msamp.TransformerBlock`, of the same
shapes. Parameters are FP32, gathered and reduced in BF16 unless they are in FP8; each block is sharded separately. Every rank has its own
random tokens, the same in every case and step, so that the loss of the last step shows how well each case has memorized them. Measurements
are appended to --csv.

Columns: `p2p`, whether NCCL may use the link between GPUs; `ms` of rank 0; `peak_gib` and `rest_gib` (between steps) of the fullest rank;
`loss` of the first and the last step, mean over ranks.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from megatron.lm.shell.arguments import Parser, count
from msamp.integrations import fsdp
from msamp.integrations.capture import CapturedStep, capture
from msamp.nn.saved_activations import AS_IT_IS, IN_GROUPS, Saved
from msamp.nn.transformer_block import TransformerBlock
from msamp.nn.unfused import Activation, RMSNorm
from msamp.numerics import recipe as recipes
from tools.bench import rows
from tools.bench.training_steps import link, memory_columns, step_times, time_columns, warm_up

CASES = ("bf16", "torchao", "O1", "O2", "O3", "coat")
OURS = ("O1", "O2", "O3", "coat")
WORDS, OUR_WORDS = ("compile", "graph"), ("fused",)
DEFAULT_CASES = ("bf16", "bf16 compile", "torchao", "torchao compile", "O2")
EAGER_BEFORE_GRAPH = 20  # further steps before those that are measured: 16 until the scales are delayed, 3 eager ones, the capture
EPS = torch.finfo(torch.bfloat16).eps  # of torch's RMSNorm without an eps, for input in BF16
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class FsdpBlock(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm; of plain torch unless `saved` is a format for the inputs of norms and SwiGLU."""

    def __init__(self, hidden: int, heads: int, ffn: int, saved: Saved = AS_IT_IS) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = norm(hidden, saved), norm(hidden, saved)
        self.activation = swiglu if saved == AS_IT_IS else Activation("swiglu", saved)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.gate_up(self.norm_2(x))))


def norm(hidden: int, saved: Saved) -> nn.RMSNorm:
    """Return torch's RMSNorm, or ours if `saved` is a format for its input."""
    return nn.RMSNorm(hidden) if saved == AS_IT_IS else RMSNorm(hidden, EPS, saved)


def swiglu(y: torch.Tensor) -> torch.Tensor:
    """SwiGLU in plain torch, [.., 2 F] -> [.., F]."""
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


class Transformer(nn.Module):
    """Tokens [b, s] -> mean cross entropy of the next tokens; learned positions. `fused` chooses the kind of its blocks, `saved` how they
    save the inputs of norms and SwiGLU."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        vocabulary: int,
        sequence: int,
        fused: bool = False,
        saved: Saved = AS_IT_IS,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.embedding, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList([(TransformerBlock if fused else FsdpBlock)(hidden, heads, ffn, saved=saved) for _ in range(layers)])
        self.norm, self.lm_head = norm(hidden, saved), nn.Linear(hidden, vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        x = x.transpose(0, 1).contiguous() if self.fused else x  # [s, b, h]
        for block in self.blocks:
            x = block(x)
        x = x.transpose(0, 1) if self.fused else x
        logits = self.lm_head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def case(text: str) -> str:
    """Parse a case; the error names it and the valid ones."""
    kind, *rest = text.split()
    words = {*WORDS, *(OUR_WORDS if kind in OURS else ())}
    if kind not in CASES or not set(rest) <= words or len(set(rest)) < len(rest):
        raise argparse.ArgumentTypeError(
            f"case {text!r} is unknown; choose one of {', '.join(CASES)}, alone or followed by {' or '.join(WORDS)}, and for "
            f"{' and '.join(OURS)} by {' or '.join(OUR_WORDS)}"
        )
    return text


def build(text: str, options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    """Return the sharded model of a case, its optimizer, and a function that runs the optimizer's step and what the case does after it.

    Raises:
        ImportError: for `torchao` if it is not installed.
    """
    kind, *words = text.split()
    torch.manual_seed(1234)
    with device:
        sizes = options.layers, options.hidden, options.heads, options.ffn, options.vocab_size, options.seq_length
        grouped = kind in OURS and recipes.by_name(kind).activations == "coat"
        model: nn.Module = Transformer(*sizes, fused="fused" in words, saved=IN_GROUPS if grouped else AS_IT_IS)
    if kind == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        wide = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=wide, module_filter_fn=lambda _, name: name != "lm_head")
    elif kind != "bf16":
        fsdp.prepare(model, kind)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        if "compile" in words:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    fused = device.type == "cuda" and kind in ("bf16", "torchao")  # our optimizer already uses one launch for all tensors
    graphed = "graph" in words and kind not in OURS
    lr = torch.tensor(options.lr, device=device) if graphed else options.lr
    betas = (0.9, 0.95)
    adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.1, fused=fused or None, capturable=graphed)
    if kind == "bf16":
        return model, adam, adam.step
    if kind != "torchao":
        low = fsdp.optimizer(model, adam, kind, fp8_min_gain=0)
        return model, low, low.step
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def step() -> None:
        adam.step()
        precompute_float8_dynamic_scale_for_fsdp(model)

    return model, adam, step


class Stepper(NamedTuple):
    """A training step, which returns the loss; its graph if it has one; and the number of parameters."""

    step: Callable[[], torch.Tensor]
    graphed: CapturedStep | None
    parameters: int


def stepper(text: str, options: argparse.Namespace, device: torch.device) -> Stepper:
    """Return the training step of a case on random tokens; collective."""
    model, optimizer, update = build(text, options, device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(options.vocab_size, (options.micro_batch_size, options.seq_length), generator=generator).to(device)

    def forward_backward(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        return loss

    graphed = capture(model, optimizer, forward_backward, update=update) if "graph" in text.split() else None

    def step() -> torch.Tensor:
        if graphed is not None:
            return graphed(tokens)
        loss = forward_backward(tokens)
        update()
        model.zero_grad()
        return loss.detach()

    return Stepper(step, graphed, sum(p.numel() for p in model.parameters()))


def measure(text: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure one row, without the columns common to all; collective."""
    step, graphed, parameters = stepper(text, options, device)
    first = step()
    warm_up(step, options.warm_up + (EAGER_BEFORE_GRAPH if graphed is not None else 0))
    times, last = step_times(step, options.steps)
    if graphed is not None:
        graphed.release()
    losses = torch.stack([first, last])
    dist.all_reduce(losses)
    first_loss, loss = (round(x, 4) for x in (losses / dist.get_world_size()).tolist())
    memory = memory_columns()
    return {
        "params_m": round(parameters / 1e6, 1),
        **time_columns(times, options.micro_batch_size * options.seq_length),
        "peak_gib": memory.get("peak_gib_max", ""),
        "rest_gib": memory.get("rest_gib_max", ""),
        "first_loss": first_loss,
        "loss": loss,
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--cases", nargs="*", type=case, default=list(DEFAULT_CASES))
    for name, value in {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 5504, "vocab-size": 32000, "seq-length": 2048}.items():
        flags.add_argument(f"--{name}", type=count(1), default=value)
    flags.add_argument("--micro-batch-size", type=count(1), default=4, help="sequences per rank and step")
    flags.add_argument("--lr", type=float, default=1e-4)
    flags.add_argument("--warm-up", type=count(0), default=10, help="steps that are not measured, after the first")
    flags.add_argument("--steps", type=count(2), default=30)
    rows.add_flags(flags, "fsdp.csv")
    return flags


def start() -> torch.device:
    """Initialize the process group, and return this rank's device."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    return device


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; rank 0 prints and appends a row per case."""
    options = parser().parse_args(argv)
    device = start()
    where = rows.machine(options.commit) if dist.get_rank() == 0 else {}
    common = {"micro_batch": options.micro_batch_size, "seq_length": options.seq_length, "gpus": dist.get_world_size(), "p2p": link()}
    for text in options.cases:
        row = {"case": text} | common | measure(text, options, device)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            rows.append(options.csv, [where | row])
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure training steps of a GPT or Llama in plain PyTorch, in BF16 and with torchao's FP8, eager, compiled and captured.

    python tools/bench/bench_step.py --levels O0 O3 --peer 'python tools/bench/baselines/bench_torchao.py'
    python tools/bench/baselines/bench_torchao.py --cases ao-tensorwise --builds whole --preset llama3-8b --layers 8 --micro-batch-size 1

The shapes are those of our presets, the arithmetic is that of our O0: FP32 weights under autocast to BF16, rotary embeddings, attention by
`scaled_dot_product_attention` (cuDNN's kernel first), an FP32 loss, clipping to a norm of 1, torch's fused AdamW. torchao (pip install
torchao) multiplies all linear layers but the LM head in FP8, with one scale per tensor or per row. One JSON object per line is printed for
a build, and another for the same build with its whole step, clipping and update included, in one CUDA graph (`captured`):

    eager              no compiler
    blocks             each layer, and the head with its loss, under torch.compile
    whole              model and loss under torch.compile as one
    reduce-overhead    the same, replayed in CUDA graphs by torch.compile; not captured again

A build that fails prints its error, under which `bench_step.py --peer` records it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.lm.shell import exit_codes
from tools.bench.bench_kernels import captured
from tools.bench.training_steps import baseline_parser, baseline_shape, memory, print_rows, synchronized_step_times, time_columns

CASES = {"bf16": None, "ao-tensorwise": "tensorwise", "ao-rowwise": "rowwise"}
BUILDS = ("eager", "blocks", "whole", "reduce-overhead")
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
WARM_UP = 5


class Layer(nn.Module):
    """A transformer layer by a preset's entries."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        self.gated, self.size = shape.get("swiglu", False), hidden // heads
        self.groups = shape.get("num_query_groups", heads)
        ffn, bias = shape.get("ffn_hidden_size", 4 * hidden), not shape.get("disable_bias_linear", False)
        self.norm1, self.norm2 = norm(shape), norm(shape)
        self.qkv, self.proj = nn.Linear(hidden, hidden + 2 * self.groups * self.size, bias), nn.Linear(hidden, hidden, bias)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn * (1 + self.gated), bias), nn.Linear(ffn, hidden, bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output [batch, sequence, hidden] in BF16; `cos`, `sin` [sequence, head size / 2]."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = heads.split([heads.shape[1] - 2 * self.groups, self.groups, self.groups], 1)
        query, key = (torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in (t.chunk(2, -1) for t in (query, key)))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != self.groups)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.fc1(self.norm2(x))
        if self.gated:
            gate, up = y.chunk(2, -1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.gelu(y, approximate="tanh"))


def norm(shape: dict[str, Any]) -> nn.Module:
    """Return the preset's norm."""
    return (nn.RMSNorm if shape.get("normalization") == "RMSNorm" else nn.LayerNorm)(shape["hidden_size"], eps=1e-5)


class Head(nn.Module):
    """The last norm, the LM head and the mean cross-entropy in FP32."""

    def __init__(self, shape: dict[str, Any], weight: Tensor) -> None:
        super().__init__()
        self.norm, self.weight = norm(shape), weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of x [batch, sequence, hidden]."""
        return F.cross_entropy(F.linear(self.norm(x), self.weight).float().flatten(0, 1), labels.flatten())


class GPT(nn.Module):
    """A GPT or Llama from random weights."""

    def __init__(self, shape: dict[str, Any], vocab_size: int) -> None:
        super().__init__()
        hidden, size = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["num_layers"]))
        untied = shape.get("untie_embeddings_and_output_weights", False)
        self.head = Head(shape, nn.Parameter(torch.empty(vocab_size, hidden)) if untied else self.embedding.weight)
        angles = torch.outer(torch.arange(shape["seq_length"]), shape.get("rotary_base", 10000) ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of tokens and labels [batch, sequence]."""
        x = self.embedding(tokens).bfloat16()
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        loss: Tensor = self.head(x, labels)
        return loss


def build(case: str, how: str, shape: dict[str, Any], vocab_size: int, device: torch.device) -> nn.Module:
    """Return a case's model, compiled as `how` says (of BUILDS).

    Raises:
        ImportError: torchao is not installed.
    """
    torch._dynamo.reset()
    torch.manual_seed(1)
    with device:
        model: nn.Module = GPT(shape, vocab_size)
    if CASES[case]:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(CASES[case]))
    if how == "blocks":
        for part in (*model.get_submodule("layers").children(), model.get_submodule("head")):
            part.compile(dynamic=False)
    elif how != "eager":
        model.compile(dynamic=False, mode="reduce-overhead" if how == "reduce-overhead" else None)
    return model


def training_step(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """Return a step of training on tokens [batch, sequence + 1]."""
    cuda = tokens.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda, capturable=cuda)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(tokens.device.type, torch.bfloat16), sdpa_kernel(ATTENTION, set_priority=True):
            loss: Tensor = model(inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measurements(case_and_build: str, shape: dict[str, Any], tokens: Tensor, vocab_size: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the row of a build, and on a GPU the one of its captured step."""
    case, how = case_and_build.split()
    model = build(case, how, shape, vocab_size, tokens.device)
    step = training_step(model, tokens)
    step()
    for name in (how, f"{how} captured") if tokens.is_cuda and how != "reduce-overhead" else (how,):
        if tokens.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = captured(step, 1) if name != how else step
        for _ in range(WARM_UP):
            step()
        times, loss = synchronized_step_times(step, steps)
        yield {
            "case": f"{case} {name}",
            "params_m": round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1),
            **time_columns(times, tokens.shape[0] * shape["seq_length"]),
            **memory(),
            "loss": round(float(loss), 4),
        }


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a row for each build of each case."""
    options = baseline_parser(__doc__, CASES, ["bf16", "ao-tensorwise"], BUILDS).parse_args(argv)
    shape, vocab_size = baseline_shape(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(0, vocab_size, (options.micro_batch_size, shape["seq_length"] + 1), device=device)
    names = [f"{case} {how}" for case in options.cases for how in options.builds]
    return print_rows(names, lambda name: measurements(name, shape, tokens, vocab_size, options.steps))


if __name__ == "__main__":
    sys.exit(main())

"""Measure training steps of OLMoE's shape in transformers on one GPU: the baselines of our mixtures of experts.

    python tools/bench/baselines/bench_moe_baselines.py          16 layers, 8 micro-batches of 1 x 4,096 tokens
    python tools/bench/baselines/bench_moe_baselines.py --cases bf16-master torchao --layers 8 --data-path enwik8/train_text_document

All cases train transformers' `OlmoeForCausalLM` from random weights, with attention by `scaled_dot_product_attention`, and every
layer and the loss under torch.compile. A step is forward and backward of all micro-batches, clipping to a norm of 1, and torch's fused
AdamW:

    bf16-master    weights in BF16 and experts by `grouped_mm`; gradients are summed in FP32 and update FP32 master weights: 18 bytes
                   per parameter, as in Megatron-LM and at our O0
    bf16           weights, gradients and moments in BF16: 8 bytes per parameter, but updates below the last bit of a weight are lost
    torchao        as bf16-master, with torchao's FP8 (pip install torchao): linear layers with a scale per tensor, experts with one per row

FP32 weights under autocast are no case: autocast does not reach `grouped_mm`, and transformers multiplies FP32 experts one by one in FP32.
The router's losses, which ours computes too, are left out. Tokens are random, or from --data-path. A row with a case's speed and its
peak memory, without the peak of building the model, is appended to --csv; a case that fails is printed, and has no row.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor, nn

from megatron.lm.config.presets import PRESETS, published_vocabulary
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.kernels import ops
from tools.bench import rows
from tools.bench.bench_kernels import BF16
from tools.bench.training_steps import print_rows, synchronized_step_times

CASES = {
    "bf16-master": "transformers BF16, FP32 master weights",
    "bf16": "transformers BF16, no master weights",
    "torchao": "transformers and torchao FP8, FP32 master weights",
}
PRESET = "olmoe-1b-7b"
WARM_UP = 3
FP8_ALIGNMENT = 16  # rows of 16 bytes, which torch's grouped weight gradient requires

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows sorted by expert [rows, inputs], weights [experts, inputs, outputs], end of each expert's rows) -> [rows, outputs]."""


class Work(NamedTuple):
    """The tokens of a step."""

    micro_batch: int
    micro_batches: int
    seq_length: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.micro_batch * self.micro_batches * self.seq_length


def olmoe(layers: int, **shape: Any) -> Any:
    """Return transformers' configuration of our preset with some layers; `shape` replaces entries of it."""
    from transformers import OlmoeConfig

    ours = PRESETS[PRESET]
    sizes = {
        "vocab_size": published_vocabulary(PRESET),
        "hidden_size": ours["hidden_size"],
        "intermediate_size": ours["ffn_hidden_size"],
        "num_attention_heads": ours["num_attention_heads"],
        "num_key_value_heads": ours["num_attention_heads"],
        "num_experts": ours["num_experts"],
        "num_experts_per_tok": ours["moe_router_topk"],
        "max_position_embeddings": ours["seq_length"],
    }
    return OlmoeConfig(num_hidden_layers=layers, norm_topk_prob=False, use_cache=False, **sizes | shape)


class MasterWeights:
    """FP32 copies of BF16 weights. A gradient is added to its copy's in FP32 as soon as backward has it; `write` rounds the copies into the
    model after an update."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: list[Tensor] = list(model.parameters())
        self.masters: list[Tensor] = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(functools.partial(self._add, master))

    @staticmethod
    def _add(master: Any, weight: Any) -> None:
        master.grad += weight.grad
        weight.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the model, and clear their gradients."""
        torch._foreach_copy_(self.weights, self.masters)
        torch._foreach_zero_([master.grad for master in self.masters if master.grad is not None])


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in FP32."""
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, -2), labels.flatten())


def torchao_fp8() -> GroupedMM:
    """Return torchao's FP8 product, which casts both operands with a scale per row.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.prototype import moe_training

    names = ("_to_fp8_rowwise_then_scaled_grouped_mm", "_quantize_then_scaled_grouped_mm")  # of torchao 0.18, of 0.16
    return next(getattr(moe_training, name) for name in names if hasattr(moe_training, name))  # type: ignore[no-any-return]


def grouped_layer(x: Tensor, probs: Tensor, experts: Tensor, fc1: Tensor, fc2: Tensor, alignment: int, multiply: GroupedMM) -> Tensor:
    """Run SwiGLU experts by two grouped products, in plain torch for torch.compile.

    Args:
        x: tokens [tokens, hidden]
        probs, experts: the weights and experts of each token, [tokens, top-k]
        fc1, fc2: [experts, 2 x width, hidden], gate above up, and [experts, hidden, width]
        alignment: each expert's rows are padded to a multiple of it
        multiply: the grouped product
    """
    offsets, source, places = ops.group_tokens(experts, fc1.shape[0], alignment)
    chosen = source.clamp(min=0)
    permuted = torch.where((source >= 0)[:, None], x[chosen // experts.shape[1]], 0)
    weights = torch.where(source >= 0, probs.flatten()[chosen], 0)
    gate, up = multiply(permuted, fc1.transpose(1, 2), offsets).chunk(2, 1)
    activated = (F.silu(gate.float()) * up.float() * weights[:, None]).to(BF16)
    out = multiply(activated, fc2.transpose(1, 2), offsets)
    return out[places.flatten()].view(*places.shape, -1).float().sum(1).to(BF16)


def build(case: str, config: Any, device: torch.device) -> nn.Module:
    """Return a case's model with random weights.

    Raises:
        ImportError: for `torchao` if it is not installed.
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    experts = "grouped_mm"
    if case == "torchao":
        experts, multiply = "torchao_fp8", torchao_fp8()

        def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            weights = module.gate_up_proj, module.down_proj
            return grouped_layer(hidden_states, top_k_weights, top_k_index, *weights, FP8_ALIGNMENT, multiply)

        ExpertsInterface.register(experts, forward)
    torch.manual_seed(0)
    with device:
        settings = {"dtype": BF16, "attn_implementation": "sdpa", "experts_implementation": experts}
        model: nn.Module = AutoModelForCausalLM.from_config(config, **settings)
    if case == "torchao":
        convert_linears(model.get_submodule("model"))
    return model.train()


def convert_linears(layers: nn.Module) -> None:
    """Convert the linear layers to torchao's FP8 ones, in place."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(layers)


def token_rows(data_path: str | None, vocab_size: int, work: Work, device: torch.device) -> Iterator[Tensor]:
    """Yield micro-batches [micro-batch, sequence + 1], from the start of an indexed dataset or random, each a new part of it.

    Raises:
        ValueError: the dataset contains a token outside the vocabulary.
    """
    size = work.micro_batch * (work.seq_length + 1)
    if data_path is None:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(0, vocab_size, (work.micro_batch, work.seq_length + 1), generator=generator).to(device)
    left = torch.empty(0, dtype=torch.int64)
    data = IndexedDataset(data_path)
    for document in itertools.cycle(range(len(data))):
        left = torch.cat([left, torch.from_numpy(data[document].astype("int64"))])
        if left.numel() and int(left.max()) >= vocab_size:
            raise ValueError(f"--data-path {data_path} contains token {int(left.max())}; the model has {vocab_size}: use another tokenizer")
        while left.numel() >= size:
            yield left[:size].view(work.micro_batch, -1).to(device)
            left = left[size:]


class BaselineTrainer:
    """The model of a case in transformers, its optimizer, and steps of it."""

    def __init__(self, case: str, config: Any, device: torch.device, lr: float = 1e-5) -> None:
        self.model = build(case, config, device)
        self.loss = next_token_loss
        if device.type == "cuda":
            for layer in self.model.get_submodule("model.layers").children():
                layer.compile(dynamic=False)
            self.loss = torch.compile(next_token_loss, dynamic=False)
        self.masters = None if case == "bf16" else MasterWeights(self.model)
        self.updated: list[Tensor] = list(self.model.parameters()) if self.masters is None else self.masters.masters
        self.optimizer = torch.optim.AdamW(self.updated, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        hidden = self.model.get_submodule("model")(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        return self.loss(hidden, self.model.get_parameter("lm_head.weight"), tokens[:, 1:])

    def step(self, batches: Sequence[Tensor]) -> Tensor:
        """Train on some micro-batches, and return their mean loss."""
        losses = []
        for tokens in batches:
            loss = self.forward(tokens) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.updated, 1.0)
        self.optimizer.step()
        if self.masters is None:
            self.optimizer.zero_grad()
        else:
            self.masters.write()
        return torch.stack(losses).sum()


def measure(case: str, config: Any, work: Work, steps: int, data_path: str | None, device: torch.device) -> dict[str, Any]:
    """Return the row of a case.

    Raises:
        ValueError: a loss is not finite.
    """
    cuda = device.type == "cuda"
    batches, losses, rates = token_rows(data_path, config.vocab_size, work, device), [], []
    trainer = BaselineTrainer(case, config, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + steps):
        batch = list(itertools.islice(batches, work.micro_batches))
        times, loss = synchronized_step_times(lambda batch=batch: trainer.step(batch).item(), 1)  # type: ignore[misc]
        losses.append(loss)
        rates.append(work.tokens / times[0])
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"losses {losses} of {CASES[case]} are not all finite: its speed says nothing")
    return {
        "model": "OLMoE",
        "layers": config.num_hidden_layers,
        **work._asdict(),
        "case": CASES[case] + ", random tokens" * (data_path is None),
        **rows.percentile_columns("tokens_s", rates[WARM_UP:]),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else "",
        "first_loss": losses[0],
        "loss": losses[-1],
    }


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--layers", type=count(1), default=PRESETS[PRESET]["num_layers"])
    parser.add_argument("--micro-batch-size", type=count(1), default=1)
    parser.add_argument("--micro-batches", type=count(1), default=8, help="per step")
    parser.add_argument("--steps", type=count(2), default=8, help=f"that are measured, after {WARM_UP}")
    parser.add_argument("--data-path", help="prefix of an indexed dataset (default: random tokens)")
    rows.add_flags(parser, "moe.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; training steps are measured on a GPU")
    where = rows.machine(options.commit)
    work = Work(options.micro_batch_size, options.micro_batches, PRESETS[PRESET]["seq_length"])

    def measurements(case: str) -> Iterator[dict[str, Any]]:
        row = measure(case, olmoe(options.layers), work, options.steps, options.data_path, torch.device("cuda"))
        rows.append(options.csv, [where | row])
        yield row

    return print_rows(options.cases, measurements)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the memory of a GPT that the dry run's formulas predict with measurements; exit code 1 if a difference exceeds 3 %.

    python tools/memory_report.py --preset 1.3b
    python tools/memory_report.py --preset 1.3b --levels O3 --recompute-granularity selective --recompute-modules mlp core_attn
    python tools/memory_report.py --preset 1.3b --levels O2 --save-activations coat

Other flags go to megatron.lm.pretrain. The report runs on one process, for any grid of the preset.

- States, bytes per parameter: the tensors themselves after a training step.
- Activations, MiB per layer: memory that forward allocates and leaves allocated, in a model of two layers minus one of a single layer. The
  norms' share is the reduction when the hidden size is halved and all other widths stay, the MLP's when its width is halved. Autograd is
  not queried, so that tensors that a fused block stores itself count too. On a GPU the allocator reports the memory. On a CPU every storage
  that an operation creates is tracked until it is freed, and the attention core, which a CPU computes and saves in FP32, is replaced by one
  that saves what the GPU's kernels save. (A CPU also saves more for dropout, and for RMSNorm and a GEMM at O0, where it emulates BF16.)
- On a GPU, GiB: the peak of a whole step, and the memory between steps.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.lm.build import build_training
from megatron.lm.config import OPT_LEVELS, Config, ParallelConfig
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import GPT2_VOCABULARY
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.graphs import step_graph
from megatron.lm.model import fp8_layers
from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.gpt import build_model
from megatron.lm.planning import memory
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser
from megatron.lm.step import train_step
from megatron.lm.training.state import Training
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.kept_states import kept_states
from msamp.optim.states import as_stored, stored_bytes
from tools.bench import rows
from tools.bench.bench_step import random_batches
from tools.precisions import legal_precision

LIMIT = 3.0  # percent
WARM_UP = 5  # steps before the measured one
MIB = 2**20


class Row(NamedTuple):
    """One number; without a prediction, the difference is relative to `whole`."""

    what: str
    unit: str
    predicted: float
    measured: float
    whole: float = 0.0

    @property
    def difference(self) -> float:
        """Percent of the prediction."""
        base = self.predicted or self.whole
        return 100 * (self.measured - self.predicted) / base if base else 100.0 * (self.measured != 0)


def configuration(level: str, flags: Sequence[str]) -> Config:
    """Return the configuration at one level on one process, with the FP8 linear layers chosen; needs no data."""
    named = "--opt-level" if level in OPT_LEVELS else "--precision"
    config = parse_args([*flags, named, level, "--train-iters", "10000", "--dry-run"])
    config = replace(config, parallel=ParallelConfig(), training=replace(config.training, global_batch_size=None))
    check(config, 1)
    return fp8_layers.decide(config, fp8_layers.default_measure())[0]


class Alive(TorchDispatchMode):
    """Track the storages of plain tensors that operations create inside the context; earlier ones do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), counts=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, counts=True)
        return result

    def _note(self, values: Any, counts: bool) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and not isinstance(x, ScalingTensor):
                storage = x.untyped_storage()
                known = self.storages.get(storage._cdata)
                if known is None or known[0].expired():  # an address may be reused
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() if counts else 0)

    def size(self) -> int:
        """Return the bytes that are still alive."""
        return sum(size for storage, size in self.storages.values() if not storage.expired())


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        output = query.clone()
        ctx.save_for_backward(query, key, value, output)
        return output


class KeepingAttention(nn.Module):
    """Replacement of the attention core: saves what the GPU's kernels save (query, key, value, output), and computes nothing."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _Keep.apply(query, key, value).flatten(2)


def forward_bytes(config: Config) -> int:
    """Return the bytes that the forward of one micro-batch saves for backward; needs `process_groups.initialize`."""
    vocab_size, device = 128, process_groups.device()
    batch = next(random_batches(config, vocab_size, device))
    with torch.random.fork_rng():
        model = build_model(config, build_recipe(config.precision), vocab_size).train()
    if device.type == "cpu":
        for parent in list(model.modules()):
            if isinstance(getattr(parent, "core_attention", None), SDPAttention):
                parent.core_attention = KeepingAttention()

    def forward() -> Tensor:
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])

    forward()  # allocates what is created once and stays
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        loss = forward()
        kept = torch.cuda.memory_allocated() - before
    else:
        with Alive() as alive:
            loss = forward()
        kept = alive.size()
    del loss
    return kept


def layer_bytes(config: Config, **widths: Any) -> int:
    """Return the bytes that one layer of the model saves for backward, with some widths of the model replaced."""
    two, one = (forward_bytes(replace(config, model=replace(config.model, num_layers=n, **widths))) for n in (2, 1))
    return two - one


def activations(config: Config) -> Iterator[Row]:
    """Yield the rows of one layer, by kind and in total."""
    model, predicted = config.model, memory.activation_parts(config)
    fixed = {"ffn_hidden_size": model.ffn_size, "kv_channels": model.head_size}
    layer = layer_bytes(config)
    norms = 2 * (layer - layer_bytes(config, **(fixed | {"hidden_size": model.hidden_size // 2})))
    mlp = 2 * (layer - layer_bytes(config, **(fixed | {"ffn_hidden_size": model.ffn_size // 2})))
    measured = {"norms": norms, "attention": layer - norms - mlp, "MLP": mlp}
    whole = sum(predicted.values())
    for name, size in measured.items():
        yield Row(f"activations, {name}", "MiB per layer", predicted[name] / MIB, size / MIB, whole / MIB)
    yield Row("activations, layer", "MiB per layer", whole / MIB, layer / MIB)


def state_bytes(training: Training) -> dict[str, int]:
    """Return the bytes of the model states after a step: weight, gradient, and the columns of the optimizer's states."""
    optimizer, sync = training.optimizer, training.grad_sync
    params = list(training.model.parameters())
    gradients = [getattr(p, "main_grad", None) for p in params] + [segment.grad for p in params for segment in sync.owned(p)]
    sizes = {"weight": sum(map(stored_bytes, params)), "gradient": sum(stored_bytes(g) for g in gradients if g is not None)}
    for holding in optimizer.holdings():
        for declared, _ in kept_states(holding.param, holding.formats):
            size = stored_bytes(as_stored(optimizer.state[holding.weight], declared.key))
            sizes[declared.column] = sizes.get(declared.column, 0) + size
    return sizes


def states(config: Config) -> Iterator[Row]:
    """Yield the rows of the model states, and on a GPU of the memory at the peak and between steps."""
    (rank,) = memory.plan(config, 1)
    vocab_size = config.model.vocab_size or GPT2_VOCABULARY
    training = build_training(config, vocab_size)
    device = process_groups.device()
    batches, graphs = random_batches(config, vocab_size, device), step_graph.build(training)
    cuda = device.type == "cuda"
    while train_step(
        training, batches, graphs
    ).skipped:  # the loss scale of FP16 may start too high; states exist only after a step that is not skipped
        pass
    if cuda:
        # Before the graphs are captured: a replayed one allocates nothing, and its peak is the peak of its capture.
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            train_step(training, batches, graphs)
    predicted, measured = {"weight": rank.weight, **rank.states, "gradient": rank.gradient}, state_bytes(training)
    for name in predicted | measured:
        expected, actual = predicted.get(name, 0), measured.get(name, 0)
        yield Row(name, "bytes per parameter", expected / rank.parameters, actual / rank.parameters, 1.0)
    if cuda:
        yield Row("peak", "GiB", rank.total / memory.GIB, torch.cuda.max_memory_allocated() / memory.GIB)
        yield Row("rest", "GiB", sum(predicted.values()) / memory.GIB, torch.cuda.memory_allocated() / memory.GIB)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table and append its rows."""
    parser = Parser(description=__doc__)
    parser.add_argument("--levels", nargs="+", default=OPT_LEVELS, type=legal_precision)
    rows.add_flags(parser, None, help="append the rows to this file, such as tools/bench/results/memory.csv")
    options, flags = parser.parse_known_args(argv)
    configs = {level: configuration(level, flags) for level in options.levels}
    where = rows.machine(options.commit)
    print(f"{'':<14}{'':<24}{'':<20}{'predicted':>12}{'measured':>12}{'difference':>12}")
    process_groups.initialize(configs[options.levels[0]])
    excess = False
    try:
        for level, config in configs.items():
            for measurement in (states, activations):
                for row in measurement(config):
                    excess |= abs(row.difference) > LIMIT
                    _report(options.csv, where, config, level, row)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    finally:
        process_groups.shutdown()
    return int(excess)


def _report(path: Path | None, where: dict[str, str], config: Config, level: str, row: Row) -> None:
    print(f"{level:<14}{row.what:<24}{row.unit:<20}{row.predicted:>12.3f}{row.measured:>12.3f}{row.difference:>10.2f} %", flush=True)
    if path is None:
        return
    model, training = config.model, config.training
    shape = {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "sequence": model.seq_length,
        "micro_batch": training.micro_batch_size,
        "recompute": " ".join([training.recompute_granularity or "", *training.recompute_modules]).strip(),
        "bf16_linears": " ".join(config.precision.bf16_linears or ()),
        "save_activations": config.precision.kept_activations,
    }
    figures = {"predicted": round(row.predicted, 4), "measured": round(row.measured, 4), "difference_percent": round(row.difference, 3)}
    rows.append(path, [where | {"case": level} | shape | {"what": row.what, "unit": row.unit} | figures])


if __name__ == "__main__":
    sys.exit(main())

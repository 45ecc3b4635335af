"""Which linear layers of an FP8 recipe run in FP8: those that gain by it on this GPU, by a table that is measured once a machine.

A layer's gain is the time of its BF16 forward and backward over that of its FP8 ones with all their casts, at its own shape and number of
tokens. Where a transformer layer is computed as two fused blocks its four linear layers are FP8 together or not at all, by the sum of
their times. Rank 0 decides for all, and what was decided stands in the configuration (`--bf16-linears`), hence in the checkpoint: a resume
on another machine computes what the run before it did. How operands are scaled is taken from the checkpoint in the same way (`decide`).
"""

import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from megatron.lm.config import LINEARS, Config, PrecisionConfig
from megatron.lm.config.baselines import PeerRecipe
from megatron.lm.config.precision import with_saved_rounding, with_saved_scaling
from megatron.lm.config.presets import linear_shapes
from megatron.lm.processes.agreement import rank_0_decides
from msamp.kernels.scaled_mm import fp8_hardware
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Recipe

REPEATS = 20
L2_BYTES = 256 * 2**20  # written before a launch, several times the L2: in a step operands come from memory


class Shape(NamedTuple):
    """Of a linear layer on one rank: rows of its input, and its two widths."""

    tokens: int
    inputs: int
    outputs: int


class Times(NamedTuple):
    """Seconds of forward and backward."""

    bf16: float
    fp8: float


Measure = Callable[[Shape, Recipe], Times]
SavedPrecision = Callable[[], PrecisionConfig | None]


@dataclass(frozen=True)
class Fp8LayerChoice:
    """Which linear layers of a transformer layer are BF16 (slots, in the order of `LINEARS`), why, and the gains that decided, by slot."""

    bf16: tuple[str, ...] = ()
    reason: str = ""
    gains: Mapping[str, float] = field(default_factory=dict)


def default_cache() -> Path:
    """Where the gains of this machine are kept without `--fp8-gain-cache`: in XDG's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "msamp" / "fp8_gain.json"


def read_table(path: Path) -> dict[str, Times]:
    """The times in a cache file by key; nothing of a file that is missing, torn or not a table, and of a table what is none in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: Times(*value) for key, value in found.items() if _is_times(value)} if isinstance(found, dict) else {}


def _is_times(value: object) -> bool:
    numbers = isinstance(value, list) and len(value) == 2 and all(type(x) is float for x in value)
    return numbers and all(0 < x < math.inf for x in value)  # type: ignore[attr-defined]


def write_table(path: Path, table: Mapping[str, Times]) -> None:
    """Put the table in the file's place at once, so that no process reads half of it; a warning where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as stream:
            json.dump(table, stream, indent=1, sort_keys=True)
        os.replace(stream.name, path)
    except OSError as error:
        warnings.warn(f"gains of FP8 are not kept and will be measured again: {error}; name a file by --fp8-gain-cache", stacklevel=2)


def layer_shapes(config: Config) -> dict[str, Shape]:
    """The linear layers of a transformer layer by slot, on one tensor-parallel rank and for one micro-batch."""
    tokens = config.model.seq_length * config.training.micro_batch_size
    return {slot: Shape(tokens, inputs, outputs) for slot, (outputs, inputs) in linear_shapes(config).items()}


def _has_fp8() -> bool:
    return fp8_hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def default_measure() -> Measure | None:
    """`measure` where the hardware has FP8; elsewhere FP8 is emulated and there is no gain to look for."""
    return measure if _has_fp8() else None


def times_by_slot(config: Config, measure: Measure | None) -> dict[str, Times] | None:
    """From the cache file, measured and added to it where they are missing; None where they are missing and `measure` is None."""
    recipe = config.precision.recipe
    assert recipe.gemm is not None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    operand = recipe.gemm.input
    scaling = f"{operand.scaling}" if operand.granularity == TENSORWISE else f"{operand.scaling} {operand.granularity}"
    # O1 and O2 cast the stored weight twice, O3 never.
    where = f"{gpu}, torch {torch.__version__}, weight {recipe.weight}, scaling {scaling}"
    keys = {slot: f"{where}, {s.tokens} x {s.inputs} x {s.outputs}" for slot, s in layer_shapes(config).items()}
    path = Path(config.precision.fp8_gain_cache or default_cache())
    table = read_table(path)
    missing = {keys[slot]: shape for slot, shape in layer_shapes(config).items() if keys[slot] not in table}
    if missing:
        if measure is None:
            return None
        new = {key: measure(shape, recipe) for key, shape in missing.items()}
        table = read_table(path) | new  # another run may have added its own in the meantime
        write_table(path, table)
    return {slot: table[key] for slot, key in keys.items()}


def choose(config: Config, measure: Measure | None, saved: PrecisionConfig | None = None) -> Fp8LayerChoice:
    """The choice for a run, on one process.

    Args:
        config: `--bf16-linears` decides, then `--fp8-min-gain` 0, then the checkpoint, then `--deterministic`, then the gains.
        measure: seconds of a linear layer of a shape; None where nothing may or can be measured.
        saved: of the run that is resumed; None without one.
    """
    precision = config.precision
    if not precision.named.fp8:
        return Fp8LayerChoice(reason=f"precision {precision.name}")
    if precision.bf16_linears is not None:
        return Fp8LayerChoice(tuple(slot for slot in LINEARS if slot in precision.bf16_linears), "by --bf16-linears")
    if not precision.fp8_min_gain:
        return Fp8LayerChoice(reason="--fp8-min-gain 0")
    if saved is not None and saved.named.fp8:
        return Fp8LayerChoice(saved.bf16_linears or (), "as in the checkpoint")
    if config.training.deterministic:
        return Fp8LayerChoice(reason="--deterministic: times are never the same")
    times = times_by_slot(config, measure)
    if times is None:
        return Fp8LayerChoice(
            reason="not measured on this GPU" if _has_fp8() else "not measured: FP8 is emulated, the hardware here has none"
        )
    groups = [LINEARS] if config.fuses_layers else [(slot,) for slot in LINEARS]
    gains = {slot: sum(times[s].bf16 for s in group) / sum(times[s].fp8 for s in group) for group in groups for slot in group}
    slow = tuple(slot for slot in LINEARS if gains[slot] < precision.fp8_min_gain)
    return Fp8LayerChoice(slow, f"measured, --fp8-min-gain {precision.fp8_min_gain:g}", gains)


def decide(config: Config, measure: Measure | None, saved: SavedPrecision = lambda: None) -> tuple[Config, Fp8LayerChoice]:
    """What a run leaves open, decided on one process: how operands are scaled and states rounded, as in the checkpoint, and which linear
    layers are FP8.

    Args:
        config: of the run.
        measure: as in `choose`.
        saved: gives the settings of the run that is resumed, None without one; asked where something is in FP8 or
            optimizer states are narrower than FP32.

    Raises:
        ValueError: the checkpoint scales operands otherwise than the flags ask.
    """
    named = config.precision.named
    before = saved() if named.fp8 or any(named.states.rounded().values()) else None
    config = replace(config, precision=with_saved_rounding(with_saved_scaling(config.precision, before), before))
    choice = choose(config, measure, before)
    return settled(config, choice), choice


def settle(config: Config, saved: SavedPrecision = lambda: None) -> tuple[Config, Fp8LayerChoice]:
    """What rank 0 decides, on every rank; collective.

    Raises:
        ValueError: on every rank, where rank 0 could not decide (`saved` raised, the flags contradict the checkpoint, or a measurement
            did not fit the GPU).
    """
    decided, choice = rank_0_decides(lambda: decide(config, default_measure(), saved))
    return replace(config, precision=decided.precision), choice


def settled(config: Config, choice: Fp8LayerChoice) -> Config:
    """The configuration with a choice in it."""
    return replace(config, precision=replace(config.precision, bf16_linears=choice.bf16)) if config.precision.named.fp8 else config


def describe(config: Config, choice: Fp8LayerChoice) -> str:
    """One line: how many linear layers of the whole model (the LM head apart) run in which precision, and why."""
    counts = []
    for name, slots in (("FP8", [s for s in LINEARS if s not in choice.bf16]), ("BF16", choice.bf16)):
        gains = {slot: f"{choice.gains[slot]:.2f}" for slot in slots if slot in choice.gains}
        alike = f"gain {next(iter(gains.values()))}" if len(set(gains.values())) == 1 else ""
        told = alike or ", ".join(f"{slot} {gain}" for slot, gain in gains.items()) or (", ".join(slots) if choice.bf16 and slots else "")
        counts.append(f"{config.model.num_layers * len(slots)} {name}" + (f" ({told})" if told else ""))
    if not config.precision.named.fp8:
        by = "of Transformer Engine" if isinstance(config.precision.named, PeerRecipe) else str(config.precision.named.compute)
        counts = [f"{config.model.num_layers * len(LINEARS)} {by}"]
    return f"linear layers: {', '.join(counts)}; {choice.reason}"


def measure(shape: Shape, recipe: Recipe) -> Times:
    """Seconds of a linear layer alone on this GPU, without the host: forward and backward with all casts, medians of CUDA graphs."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.random.fork_rng([device]):  # a run that measures and one that finds the table draw the same dropout
        x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(shape.tokens, shape.outputs, device=device, dtype=torch.bfloat16)
        plain = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device, dtype=torch.bfloat16)
    low = FP8Linear.from_linear(plain, recipe)
    state = ScalingState(low)

    def both(layer: nn.Module) -> None:
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)

    for _ in range(low.scaling.window + 1):  # delayed scaling is just in time until its window is full
        both(low)
        state.roll()
    times = Times(_seconds(lambda: both(plain)), _seconds(lambda: both(low)))
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that a GEMM has run on, some 64 MiB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return times


def _seconds(run: Callable[[], None]) -> float:
    """Median of `REPEATS` replays of a CUDA graph of `run`, each with a cold L2."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, cache = torch.cuda.CUDAGraph(), torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in marks:
        cache.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3

"""Whether linear layers gain from FP8 on this GPU: their times in BF16 and FP8, and the layers that therefore compute in BF16.

A layer's gain is its BF16 time for forward and backward divided by its FP8 time including all casts, at its own shape and token count.
Times are cached per machine. The trainer decides before it builds the model (`megatron.lm.model.fp8_layers`). In your own loop the token
counts are known after the first forward, so `decide` runs at the end of the first step. A layer that does not gain then computes in BF16,
fused as before; its weight stays stored in the recipe's format, so that optimizer states, wires and files do not change.
"""

import functools
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from msamp.kernels.cuda_graph import capturing
from msamp.kernels.scaled_mm import fp8_hardware
from msamp.nn.block import Norm
from msamp.nn.gemm import LayerGemm
from msamp.nn.linear import FP8Linear
from msamp.nn.mlp_block import MLPBlock, MLPSettings
from msamp.nn.projection_block import ProjectionBlock, ProjectionSettings
from msamp.nn.scaling_state import LinearScaling, ScalingState
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Recipe

MLP = "MLP"
IN_BF16 = "computed in BF16"  # how the reason of such a layer begins
REPEATS = 20
L2_BYTES = 256 * 2**20  # written before each launch to flush the L2 cache: in a training step operands come from HBM


class Shape(NamedTuple):
    """Shape of a linear layer on one rank: input rows, input features, output features."""

    tokens: int
    inputs: int
    outputs: int


class Half(NamedTuple):
    """Shape of the fused function of a half of a decoder layer: `ProjectionBlock` ("attention") or `MLPBlock` ("MLP"), rows, width of the
    stream, and outputs of its joined product."""

    kind: str
    tokens: int
    inputs: int
    outputs: int


class Times(NamedTuple):
    """Seconds of forward and backward."""

    bf16: float
    fp8: float


Measure = Callable[[Any, Recipe], Times]  # of a `Shape`, or of another one that the caller of `cached` knows to measure


def read_table(path: Path) -> dict[str, Times]:
    """Read cached times by key. A missing or corrupt file reads as empty; invalid entries are skipped."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = {key: value for key, value in table.items() if isinstance(value, list) and len(value) == 2} if isinstance(table, dict) else {}
    return {key: Times(*pair) for key, pair in pairs.items() if all(type(x) is float and 0 < x < math.inf for x in pair)}


def write_table(path: Path, table: Mapping[str, Times]) -> None:
    """Replace the file atomically, so that no process reads half of it; warn if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as stream:
            json.dump(table, stream, indent=1, sort_keys=True)
        os.replace(stream.name, path)
    except OSError as error:
        warnings.warn(
            f"FP8 gains could not be saved and will be measured again: {error}; choose a file with --fp8-gain-cache, or in your own loop a "
            "folder with XDG_CACHE_HOME",
            stacklevel=2,
        )


def cached(path: str | None, shapes: Mapping[str, Any], recipe: Recipe, measure: Measure | None) -> dict[str, Times] | None:
    """Return the times of shapes by key, from the cache file; measure and add missing ones. None if some are missing and `measure` is None.

    path: of the file; None: in the user's cache folder.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    file = Path(path or folder / "msamp" / "fp8_gain.json")
    table = read_table(file)
    missing = {key: shape for key, shape in shapes.items() if key not in table}
    if missing:
        if measure is None:
            return None
        new = {key: measure(shape, recipe) for key, shape in missing.items()}
        table = read_table(file) | new  # another run may have added entries in the meantime
        write_table(file, table)
    return {key: table[key] for key in shapes}


def key_of(shape: Shape | Half, recipe: Recipe, *, stored: bool = False) -> str:
    """Return the key of the times of a linear layer or a half: the machine, the recipe's casts, the shape, whether BF16 casts weights."""
    assert recipe.gemm is not None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    operand = recipe.gemm.input
    scaling = f"{operand.scaling}" if operand.granularity == TENSORWISE else f"{operand.scaling} {operand.granularity}"
    # O1 and O2 cast the stored weight twice, O3 does not cast it.
    return (
        f"{gpu}, torch {torch.__version__}, weight {recipe.weight}, scaling {scaling}, {' x '.join(map(str, shape))}{', stored' * stored}"
    )


def has_fp8() -> bool:
    return fp8_hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def measure_linear(shape: Shape, recipe: Recipe) -> Times:
    """Time one linear layer on this GPU, forward and backward with all casts, without host time: medians over CUDA graph replays."""
    with _random_numbers_of_its_own():
        x, grad = _random(shape.tokens, shape.inputs), _random(shape.tokens, shape.outputs)
        plain = nn.Linear(shape.inputs, shape.outputs, bias=False, device=x.device, dtype=x.dtype)
    low = FP8Linear.from_linear(plain, recipe)

    def both(layer: nn.Module) -> None:
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)

    _fill_windows(lambda: both(low), ScalingState(low))
    return Times(seconds(lambda: both(plain)), seconds(lambda: both(low)))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16, requires_grad=True)


def _random_numbers_of_its_own() -> AbstractContextManager[None]:
    """Context that keeps the state of the random generators: dropout must not depend on whether this run measures."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _fill_windows(run: Callable[[], None], state: ScalingState) -> None:
    """Run until casts have delayed scales; they are just-in-time until their windows are full."""
    for _ in range(1 + max((layer.window for layer in state.layers.values()), default=0)):
        run()
        state.roll()


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # one, since cuBLAS keeps a workspace for each stream that ran a GEMM


def seconds(run: Callable[[], None]) -> float:
    """Return the median time of `REPEATS` replays of a CUDA graph of `run`, each with a cold L2."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, cache = torch.cuda.CUDAGraph(), torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    with capturing(graph, stream=stream):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in marks:
        cache.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def _with_stored_weights(shape: Shape | Half, recipe: Recipe) -> tuple[Callable[[], None], ScalingState]:
    """Return a function that runs forward and backward of a linear layer or of a half of a decoder layer as `msamp.nn.decoder_layer` does,
    and the state of its layers, whose windows are full."""
    tokens, inputs, outputs = shape[-3:]
    mlp = isinstance(shape, Half) and shape.kind == MLP
    with _random_numbers_of_its_own():
        x, delta, grad = (_random(1, tokens, inputs) for _ in range(3))
        of_first = _random(1, tokens, outputs)
        sizes = ((inputs, outputs), (outputs // 2, inputs))[: 1 + mlp]
        plain = [nn.Linear(*size, bias=False, device=x.device, dtype=x.dtype) for size in sizes]
    layers: Any = nn.ModuleList(FP8Linear.from_linear(layer, recipe) for layer in plain)
    weights: list[Any] = [layer.weight for layer in layers]
    norm, vector = Norm(1e-6, rms=True), torch.ones_like(x[0, 0], requires_grad=True)
    channels = math.gcd(outputs, 16 if outputs < 192 else 64)  # of a head, of which there are at least 3; their shares do not matter here
    angles = torch.ones(tokens, channels, device=x.device, dtype=x.dtype)

    def run() -> None:
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            if not isinstance(shape, Half):
                torch.autograd.grad(layers[0](x), (x, *weights), of_first)
                return
            gemms = [LayerGemm.of(layer.scaling, layer.weight) for layer in layers]
            if mlp:
                settings = MLPSettings(norm, gemms[0], gemms[1], "swiglu", recompute=False)
                y = MLPBlock.apply(x, delta, vector, None, weights[0], None, weights[1], None, settings)
                torch.autograd.grad(y, (x, delta, vector, *weights), grad)
                return
            projected = ProjectionSettings(norm, gemms[0], outputs // channels - 2, 1, angles, angles, x.dtype)
            ys = ProjectionBlock.apply(x, vector, None, None, projected, weights[0])
            grads = of_first.view(1, tokens, -1, channels).split([y.shape[2] for y in ys[1:]], 2)
            torch.autograd.grad(ys, (x, vector, weights[0]), (grad, *grads))

    state = ScalingState(layers)
    _fill_windows(run, state)
    return run, state


def measure_stored(shape: Shape | Half, recipe: Recipe) -> Times:
    """Like `measure_linear`, also of a half, with the recipe's stored weights: in BF16 they are cast to BF16 in forward and in backward."""
    run, state = _with_stored_weights(shape, recipe)
    fp8 = seconds(run)
    state.compute_in_bf16(dict.fromkeys(state.linears, IN_BF16))
    return Times(seconds(run), fp8)


def host_seconds(shape: Shape | Half, recipe: Recipe) -> float:
    """Return the host's time to launch forward and backward in FP8."""
    run, _ = _with_stored_weights(shape, recipe)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        run()
    host = (time.perf_counter() - start) / 3
    torch.cuda.synchronize()
    return host


def default_measure() -> Measure | None:
    """Return `measure_stored` on hardware with FP8, else None: emulated FP8 has no gain."""
    return measure_stored if has_fp8() else None


def check_min_gain(gain: float) -> None:
    """Raise a ValueError unless `fp8_min_gain` is a finite number of at least 0."""
    if not 0 <= gain < math.inf:
        raise ValueError(f"fp8_min_gain is {gain!r}; it must be a finite number of at least 0; 0: all linear layers compute in FP8")


def check_layers(names: Any, layers: Mapping[str, LinearScaling]) -> None:
    """Raise a ValueError unless saved `names` of layers in BF16, with reasons, are of these layers; None are none."""
    known = names is None or (isinstance(names, Mapping) and all(name in layers and isinstance(why, str) for name, why in names.items()))
    if not known:
        raise ValueError(
            f"the state's layers in BF16 are {names!a:.200}; they must be this model's linear layers, with reasons: load this model's "
            "state, or pass fp8_min_gain=0 to msamp.initialize: all compute in FP8 then"
        )


def decide(
    state: ScalingState, recipe: Recipe, min_gain: float, measure: Measure | None, host: Callable[[Any, Recipe], float] = host_seconds
) -> tuple[dict[str, str], str]:
    """Decide which linear layers compute in BF16, from the shapes that their first forward noted (`LinearScaling.shape`).

    The layers of a half of a decoder layer are alike, by the times of its fused functions, and others are decided one by one. Experts, and
    layers that torch.compile traced, are not timed and compute in FP8.

    Args:
        state: of the model's layers.
        recipe: the model's.
        min_gain: smallest gain in FP8, above 0.
        measure: returns the times of a `Shape` or a `Half`; None on hardware without FP8.
        host: returns the host's seconds to launch one.

    Returns:
        The name of each layer in BF16 with the reason, and a line for the log.
    """
    together = {layer for _, groups in state.halves for group in groups for layer in group}
    units: list[tuple[str, list[tuple[LinearScaling, ...]]]] = [*state.halves]
    units += [("", [(layer,)]) for layer in state.linears.values() if layer not in together]
    timed = [(groups, _timed(kind, groups)) for kind, groups in units if all(group[0].shape is not None for group in groups)]
    count = sum(len(group) for groups, _ in timed for group in groups)
    because = ""
    if measure is None:
        because = "this hardware has no FP8, which is emulated"
    elif torch.are_deterministic_algorithms_enabled():
        because = "measured times are not reproducible, and torch.use_deterministic_algorithms is on"
    elif not count:
        because = "none ran outside of torch.compile in the first step"
    key = functools.partial(key_of, recipe=recipe, stored=True)
    shapes = {key(shape): shape for _, parts in timed for shape in parts}
    times, launches, kernels = None, 0.0, 0.0
    if not because:
        try:
            times = cached(None, shapes, recipe, measure)
            launched = {name: host(shape, recipe) for name, shape in shapes.items()}
            torch.cuda.empty_cache()  # the graphs' pools; without CUDA nothing
        except RuntimeError as error:  # such as too little memory, which must not end a run
            because = str(error).partition("\n")[0]
    if times is None:
        return {}, f"linear layers are in FP8, and their shapes were not timed: {because}"
    names = {layer: name for name, layer in state.linears.items()}
    bf16: dict[str, str] = {}
    for groups, parts in timed:
        keys = [key(shape) for shape in parts]
        wide, low = (sum(times[name][precision] for name in keys) for precision in (0, 1))
        if wide / low < min_gain:
            at = ", ".join(" x ".join(map(str, shape[-3:])) for shape in parts)
            reason = f"{IN_BF16}, since FP8 has a gain of {wide / low:.2f} at {at} (fp8_min_gain {min_gain:g})"
            bf16 |= {names[layer]: reason for group in groups for layer in group}
        launches, kernels = launches + sum(launched[name] for name in keys), kernels + min(wide, low)
    line = f"timed, {count - len(bf16)} linear layers compute in FP8 and {len(bf16)} in BF16 (fp8_min_gain {min_gain:g})"
    if launches > kernels:
        line += (
            f"; the host takes {launches / kernels:.1f} times as long to launch their kernels as the GPU to run them: capture the step "
            "(msamp.capture)"
        )
    return bf16, line


def _timed(kind: str, groups: Sequence[tuple[LinearScaling, ...]]) -> list[Shape | Half]:
    """Return what is timed for layers that compute alike: the fused function of a half, if all of its layers are there, and the rest."""
    shapes = [[layer.shape for layer in group if layer.shape is not None] for group in groups]
    joined = [Shape(of[0][0], of[0][1], sum(shape[2] for shape in of)) for of in shapes]
    if kind == MLP and len(joined) == 2:
        return [Half(MLP, *joined[0])]
    return [Half(kind, *joined[0]), *joined[1:]] if len(groups[0]) > 1 else [*joined]

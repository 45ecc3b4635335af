"""Save and restore the random generators of a rank as tensors."""

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import convert_cuda_rng_state, get_cuda_rng_tracker
from torch import Tensor

from megatron.lm.processes.grid import Grid


def own_number(grid: Grid) -> int:
    """Return this rank's index of random states; with more data-parallel ranks than in the checkpoint, the first ones keep theirs."""
    return (grid.copies.rank * grid.pipeline.size + grid.pipeline.rank) * grid.tensor.size + grid.tensor.rank


def state() -> dict[str, Tensor]:
    """Return the states of torch's, CUDA's, megatron-core's, numpy's and Python's generators by name."""
    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    _, python_keys, python_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy.keys": torch.from_numpy(keys.astype("int64")),  # type: ignore[union-attr]
        "numpy.rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python.keys": torch.tensor(python_keys, dtype=torch.int64),
        "python.gauss": torch.tensor(math.nan if python_gauss is None else python_gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, value in get_cuda_rng_tracker().get_states().items():  # used by dropout of core attention
        states[f"tensor_parallel.{name}"] = convert_cuda_rng_state(value)
    return states


def check(saved: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError if `saved` is not a result of `state`, by setting separate generators to it."""
    try:
        torch.Generator().set_state(saved["torch"])
        numpy.random.RandomState().set_state(_numpy_state(saved))
        random.Random().setstate(_python_state(saved))
        if torch.cuda.is_available() and "cuda" in saved:
            torch.Generator("cuda").set_state(saved["cuda"])
    except (LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"its random states are invalid ({str(error).splitlines()[0]})") from None
    wrong = [name for name, x in saved.items() if name.startswith("tensor_parallel.") and (x.dtype != torch.uint8 or x.dim() != 1)]
    if wrong:
        raise ValueError(f"its random states are invalid ({wrong[0]} is not bytes)")


def restore(saved: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to states from `state`."""
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])
    tracker = get_cuda_rng_tracker()
    tracked = {name.removeprefix("tensor_parallel."): value for name, value in saved.items() if name.startswith("tensor_parallel.")}
    graphable = tracker.use_cudagraphable_rng
    tracker.set_states({name: convert_cuda_rng_state(value, to_graphable=graphable) for name, value in tracked.items()})
    numpy.random.set_state(_numpy_state(saved))
    random.setstate(_python_state(saved))


def _numpy_state(saved: Mapping[str, torch.Tensor]) -> tuple[str, Any, int, int, float]:
    position, has_gauss, gauss = saved["numpy.rest"].tolist()
    if not 0 <= position <= 624:  # numpy would read beyond its keys
        raise ValueError(f"numpy's generator has position {position:g}, expected 0 to 624")
    return "MT19937", saved["numpy.keys"].numpy().astype("uint32"), int(position), int(has_gauss), gauss


def _python_state(saved: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    gauss, (version, *_) = float(saved["python.gauss"]), random.getstate()
    return version, tuple(saved["python.keys"].tolist()), None if math.isnan(gauss) else gauss

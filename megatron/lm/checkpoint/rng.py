"""The random generators of one rank, as tensors."""

import math
import random

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron.lm.grid import Grid


def own_number(grid: Grid) -> int:
    """This rank's number among the random states: with more data-parallel ranks than were saved, the first ones still find theirs."""
    return (grid.copies.rank * grid.pipeline.size + grid.pipeline.rank) * grid.tensor.size + grid.tensor.rank


def state() -> dict[str, Tensor]:
    """The states of torch's, CUDA's, megatron-core's, numpy's and Python's generators, by name."""
    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    _, python_keys, python_gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy.keys": torch.from_numpy(keys.astype("int64")),  # type: ignore[union-attr]
        "numpy.rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python.keys": torch.tensor(python_keys, dtype=torch.int64),
        "python.gauss": torch.tensor(math.nan if python_gauss is None else python_gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    for name, value in get_cuda_rng_tracker().get_states().items():  # what the attention core's dropout draws from
        found[f"tensor_parallel.{name}"] = value
    return found


def restore(saved: dict[str, Tensor]) -> None:
    """Set the generators to what `state` told."""
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])
    tracked = {name.removeprefix("tensor_parallel."): value for name, value in saved.items() if name.startswith("tensor_parallel.")}
    get_cuda_rng_tracker().set_states(tracked)
    position, has_gauss, gauss = saved["numpy.rest"].tolist()
    numpy.random.set_state(("MT19937", saved["numpy.keys"].numpy().astype("uint32"), int(position), int(has_gauss), gauss))
    python_gauss = float(saved["python.gauss"])
    version = random.getstate()[0]
    random.setstate((version, tuple(saved["python.keys"].tolist()), None if math.isnan(python_gauss) else python_gauss))

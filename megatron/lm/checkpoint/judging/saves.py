"""Judge what a run is about to save by the rules of a load, so that `--keep-last` never deletes a loadable checkpoint for one that is not.

The tensors are judged where they are, on the device: nothing is read back from the file, whose digests cover the judged tensors.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.checkpoint import rng
from megatron.lm.checkpoint.content import group_keys, scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.files.versions import check_info, upgraded
from megatron.lm.checkpoint.judging.tensors import extents, number_problem, tensor_problem
from megatron.lm.checkpoint.place import names_of, places
from megatron.lm.checkpoint.values import StoredTensor, check_agree
from megatron.lm.training.state import Training
from msamp.comm.grad_scaling import MU_MAX
from msamp.nn.scaling_state import TensorScales
from msamp.optim.states import group_numbers, payload, scale_inv
from msamp.optim.updates import MASTER, formats_of, update_of

_HERE = "here"  # in place of a checkpoint's folder in the rules' messages


def problems(training: Training, items: Sequence[Item], info: Mapping[str, Any]) -> list[str]:
    """Return why a load would refuse what all ranks are about to save, most important first; empty if it would not. Collective.

    Args:
        training: the training state.
        items: this rank's chunks (`content.items`).
        info: `checkpoint.json` (`content.info`), without `files`.
    """
    own = [
        *_of_counters(training, info),
        *_of_tensors(training, items),
        *_of_numbers(training, items),
        *_of_scaling(training),
        *_of_weights(training),
    ]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, [*own, *_of_rng(items)])
    return list(dict.fromkeys(problem for problems in everywhere for problem in problems))


def _of_counters(training: Training, info: Mapping[str, Any]) -> Iterator[str]:
    try:
        check_info(upgraded(dict(info)))
    except ValueError as problem:
        yield f"it {_without_frame(problem)}"
        return
    expected = training.config.batch_sizes(dist.get_world_size()).consumed(training.iteration)
    if training.consumed_samples != expected:
        yield f"consumed_samples is {training.consumed_samples}; iteration {training.iteration} must have read {expected}"
    scaler, saved = training.loss_scaler, info["loss_scale"]
    if scaler is not None and saved is not None:
        try:
            scaler.check_state(saved)
        except ValueError as problem:
            yield str(problem)


def _of_tensors(training: Training, items: Sequence[Item]) -> Iterator[str]:
    """Yield the problems of weights and states, with their scales and groups."""
    beside = {item.key: item.tensor for item in items if "@" in item.key}
    kinds = (kind for group in training.optimizer.param_groups for kind in formats_of(group))
    squares = {state.key for kind in kinds for state in update_of(kind).states if state.non_negative}
    judged = [item for item in items if _is_payload(item)]
    scales = [beside.get(scale_key(item.key, item.offset)) for item in judged]
    groups = [tuple(beside.get(key) for key in group_keys(item.key, item.offset)) for item in judged]
    ranges = _on_host(extents(item.tensor) for item in judged)
    numbers = iter(_on_host(x.reshape(1) for x in scales if x is not None))
    maxima = iter(_on_host(extents(largest) for largest, _ in groups if largest is not None))
    exponents = iter(_on_host(torch.stack(torch.aminmax(k)) for _, k in groups if k is not None))
    for item, extent, scale, (largest, _) in zip(judged, ranges, scales, groups, strict=True):
        own_scales = next(numbers) if scale is not None else []
        own_groups = (next(maxima), next(exponents)) if largest is not None else ()
        non_negative = item.key.partition("/")[0] in squares
        problem = tensor_problem(item.tensor, extent, own_scales, own_groups, non_negative=non_negative)
        if problem is not None:
            yield f"{item.key}{problem}"


def _is_payload(item: Item) -> bool:
    prefix, _, name = item.key.partition("/")
    return prefix not in ("rng", "step", "mu") and "@" not in name and ".scaling." not in name and item.tensor.is_floating_point()


def _of_numbers(training: Training, items: Sequence[Item]) -> Iterator[str]:
    """Yield the problems of step counts and of automatic gradient scaling's mu."""
    for prefix, low, high, dtype in (("step", 0, training.iteration, torch.float32), ("mu", 0, MU_MAX, torch.float64)):
        matching = [item for item in items if item.key.startswith(f"{prefix}/")]
        for item, (value,) in zip(matching, _on_host(item.tensor.reshape(1) for item in matching), strict=True):
            problem = number_problem(value, low, high, dtype, whole=prefix == "step")
            if problem is not None:
                yield f"{item.key}{problem}"


def _of_scaling(training: Training) -> Iterator[str]:
    """Yield the problems of the scales of casts in this rank's model, since ranks share the writing of one layer's."""
    for name, layer in training.model.named_modules():
        if isinstance(layer, TensorScales):
            try:
                layer.check_state({key: x.detach().cpu() for key, x in layer.state_dict().items()})
            except ValueError as problem:
                yield f"{name}.{problem}"


def _of_weights(training: Training) -> Iterator[str]:
    """Yield the weights that are not their masters rounded."""
    names, where = names_of(training.model), places(training.model)
    for holding in training.optimizer.holdings():
        master = training.optimizer.state.get(holding.weight, {}).get(MASTER.key)
        if master is None or MASTER not in update_of(holding.formats).states or holding.param not in names:
            continue
        name = where[names[holding.param]][0].name
        try:
            check_agree(_stored_tensor(f"model/{name}", holding.as_written()), _stored_tensor(f"{MASTER.key}/{name}", master), _HERE)
        except ValueError as problem:
            yield _without_frame(problem)


def _stored_tensor(key: str, x: Tensor) -> StoredTensor:
    assert group_numbers(x) is None
    scale, elements = scale_inv(x), payload(x)
    return StoredTensor(key, elements, [] if scale is None else [((slice(None),) * elements.dim(), scale)])


def _of_rng(items: Sequence[Item]) -> Iterator[str]:
    states = {item.key.split("/", 2)[2]: item.tensor for item in items if item.key.startswith("rng/")}
    try:
        if states:
            rng.check(states)
    except ValueError as problem:
        yield str(problem)


def _without_frame(problem: ValueError) -> str:
    """Return a rule's message without the folder before it and the advice to load an older checkpoint after it."""
    return str(problem).removeprefix(f"{_HERE}: ").removesuffix("; load an older checkpoint")


def _on_host(tensors: Iterable[Tensor]) -> list[list[float]]:
    """Return the values of small tensors of one length, waiting once for each device."""
    held, alike = list(tensors), defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for number, x in enumerate(held):
        alike[x.device, x.dtype].append(number)
    values: list[list[float]] = [[]] * len(held)
    for numbers in alike.values():
        for number, row in zip(numbers, torch.stack([held[number] for number in numbers]).tolist(), strict=True):
            values[number] = row
    return values

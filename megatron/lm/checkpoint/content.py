"""The content of a checkpoint: this rank's share of the tensors, with their names in the whole model, and plain values.

model/NAME                    weights (payloads) and the scaling state of linear layers and of FP8 attention
STATE/NAME                    optimizer states under the keys that the update declares (`msamp.optim.updates`), in their own formats:
                              master, exp_avg, exp_avg_sq; for Collage's pairs weight_remainder, exp_avg_sq_remainder; step
KEY.scale_inv@OFFSET          scale of the chunk of KEY at OFFSET, such as `@0,512`: each tensor-parallel shard has its own
KEY.max@OFFSET, KEY.k@OFFSET  for a chunk of a moment in COAT's format: maxima and exponents of its groups, one row per row of the chunk
mu/NAME@OFFSET                mu of automatic gradient scaling
rng/NUMBER/...                states of a rank's random generators
"""

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.lm.checkpoint import rng
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.files.versions import VERSION
from megatron.lm.checkpoint.place import Place, names_of, places
from megatron.lm.config import ParallelConfig, PrecisionConfig, flag
from megatron.lm.config.cli import config_to_dict
from megatron.lm.config.sections.parallel import AXES
from megatron.lm.processes.grid import Ranks
from megatron.lm.training.state import Training
from msamp.optim.states import Stored, as_stored, group_numbers, payload, scale_inv, weight_format
from msamp.optim.updates import MASTER, WEIGHT, remainders, update_of

FIRST_TOKEN_APART = "first token apart"  # how FP8 attention computes (`msamp.nn.fp8_attention`), as checkpoints name it
LONG = 4096  # tokens from which FP8 attention without it shrank its output noticeably


def at(key: str, offset: Sequence[int]) -> str:
    """Return the key of an entry that belongs to the chunk of `key` at `offset`."""
    return f"{key}@{','.join(map(str, offset))}"


def scale_key(key: str, offset: Sequence[int]) -> str:
    """Return the key of the `scale_inv` of a chunk."""
    return at(f"{key}.scale_inv", offset)


def description(settings: Mapping[str, Any], vocab_size: int, processes: int) -> dict[str, Any]:
    """Return the non-tensor values as JSON types, before the first step; `settings`: of the run, as `config_to_dict` returns them."""
    return {
        "version": VERSION,
        "torch": str(torch.__version__),
        "megatron_core": version("megatron-core"),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processes": processes,
        "config": settings,
        "fp8_attention": FIRST_TOKEN_APART,
        "vocab_size": vocab_size,
        "loss_scale": None,
        **dict.fromkeys(("iteration", "consumed_samples", "passed_over", "skipped_steps", "grad_sync_steps", "schedule_steps"), 0),
    }


def info(training: Training) -> dict[str, Any]:
    """Return the non-tensor values as JSON types; waits for the last step."""
    scaler, without_states = training.loss_scaler, training.config.checkpoint.no_save_optim
    return description(config_to_dict(training.config), training.vocab_size, dist.get_world_size()) | {
        "run": training.run.entry(),
        "loss_scale": scaler.state_dict() if scaler is not None and scaler.dynamic and not without_states else None,
        "iteration": training.iteration,
        "consumed_samples": training.consumed_samples,
        "passed_over": training.passed_over,
        "skipped_steps": training.optimizer.skipped_steps,
        "grad_sync_steps": training.grad_sync.steps,
        "schedule_steps": training.schedule.state_dict()["num_steps"],
        "data": training.data,
        "fp8_guard": None if training.guard is None else training.guard.state_dict(),
    }


def items(training: Training) -> list[Item]:
    """Return the chunks that this rank saves; one of several ranks with the same chunk saves it."""
    where, grid = places(training.model), training.grid
    chunks_of_rank = [Item.whole(f"rng/{rng.own_number(grid)}/{name}", x) for name, x in rng.state().items()]
    share, names, optimizer = _Share(), names_of(training.model), training.optimizer
    copies = {name: grid.gradients(p) for p, name in names.items()}
    for name, x in training.model.state_dict().items():
        if name in where:  # skips megatron-core's empty `_extra_state`
            chunks_of_rank += share.of_this_rank(list(_chunks("model", where[name], x)), copies.get(name, grid.copies))
    for holding in optimizer.holdings():
        state = optimizer.state.get(holding.weight)
        if not state:
            continue
        placed, keys = where[names[holding.param]], [declared.key for declared in update_of(holding.formats).states]
        chunks = [chunk for key in keys if key in state for chunk in _chunks(key, placed, as_stored(state, key), holding.rows)]
        pieces = ((place, place.within(holding.rows)) for place in placed if place.first)
        # The rank with a tensor's first element saves its number of steps.
        chunks += [Item.whole(f"step/{place.name}", state["step"]) for place, piece in pieces if piece is not None and not any(piece[1])]
        chunks_of_rank += chunks if training.grad_sync.shard else share.of_this_rank(chunks, grid.gradients(holding.param))
    for name, mu in training.grad_sync.state_dict()["mu"].items():
        marks = [Item.whole(at(f"mu/{place.name}", place.offset), mu) for place in where[name] if place.first]
        chunks_of_rank += share.of_this_rank(marks, copies.get(name, grid.copies))
    return chunks_of_rank


def left_in(training: Training, items: Sequence[Item]) -> list[Item]:
    """Return the `items` that `--no-save-optim` and `--no-save-rng` leave in a checkpoint.

    Without the optimizer these are the weights with their remainders, the scales of casts, and the masters of FP8 weights: such a weight is
    its rounded master, and a run that loads the checkpoint should start from the master.
    """
    settings, where = training.config.checkpoint, places(training.model)
    rounded = {place.name for name, p in training.model.named_parameters() if weight_format(p).scaled for place in where[name]}
    parts_of_weights = {key for key, first in remainders().items() if first == WEIGHT}

    def is_left(item: Item) -> bool:
        prefix, _, rest = item.key.partition("/")
        if prefix == "rng":
            return not settings.no_save_rng
        if prefix == MASTER.key:
            return not settings.no_save_optim or rest.partition("@")[0].removesuffix(".scale_inv") in rounded
        return not settings.no_save_optim or prefix == "model" or prefix in parts_of_weights

    return [item for item in items if is_left(item)]


class _Share:
    """Assigns chunks that several ranks have to the one with the fewest bytes to write; all these ranks compute the same assignment."""

    def __init__(self) -> None:
        self._loads: dict[Ranks, list[int]] = {}

    def of_this_rank(self, group: list[Item], copies: Ranks) -> list[Item]:
        """Return the `group` of chunks, which all `copies` have, if this rank writes it; else nothing."""
        loads = self._loads.setdefault(copies, [0] * copies.size)
        lightest = loads.index(min(loads))
        loads[lightest] += sum(item.tensor.nbytes for item in group)
        return group if lightest == copies.rank else []


def group_keys(key: str, offset: Sequence[int]) -> tuple[str, str]:
    """Return the keys of the groups' maxima and exponents for a chunk in COAT's format."""
    return at(f"{key}.max", offset), at(f"{key}.k", offset)


def _chunks(prefix: str, where: Sequence[Place], x: Stored, rows: slice | None = None) -> Iterator[Item]:
    """Yield the chunks of `x`, the local tensor or the `rows` of it in a holding."""
    for place in where:
        local_rows = place.within(rows) if place.first else None
        if local_rows is None:
            continue
        (local, offset), key = local_rows, f"{prefix}/{place.name}"
        elements, scale, groups = payload(x), scale_inv(x), group_numbers(x)
        yield Item(key, elements if local is None else elements[local], place.shape, offset)
        if scale is not None:
            yield Item.whole(scale_key(key, offset), scale)
        if groups is not None:
            for name, values in zip(group_keys(key, offset), groups, strict=True):
                yield Item.whole(name, values if local is None else values[local])


def shrinking_attention(info: dict[str, Any], folder: Path) -> str | None:
    """Return a line about a checkpoint, with this `info`, whose FP8 attention shrank its output with the sequence's length; else None."""
    config = info["config"]
    precision, tokens = config.get("precision", {}).get("attention_precision"), config.get("model", {}).get("seq_length") or 0
    if precision != "fp8" or tokens < LONG or info.get("fp8_attention") == FIRST_TOKEN_APART:
        return None
    return (
        f"warning: {folder} was trained on {tokens} tokens with an FP8 attention whose output was too small for long "
        "sequences (7 % at 8,192 tokens where values have a mean of half their deviation); today's keeps its size. To see whether the "
        f"weights depend on it, compare the validation loss of --load {folder} --attention-precision bf16"
    )


def print_changes(
    info: dict[str, Any],
    parallel: tuple[ParallelConfig, ParallelConfig],
    precision: tuple[PrecisionConfig, PrecisionConfig],
    requantised: Collection[str],
) -> None:
    """Print, on rank 0, in what a resumed run differs from the one that wrote the checkpoint.

    Args:
        info: contents of the checkpoint's `checkpoint.json`.
        parallel, precision: settings of the saved run, and of the resumed one.
        requantised: names of the tensors whose bits changed.
    """
    layers = info["config"]["model"]["num_layers"]
    described: dict[str, list[Any]] = {
        "precision": [one.name for one in precision],
        **{flag(name): [getattr(one, name) for one in parallel] for name in (*AXES.values(), "num_layers_per_virtual_pipeline_stage")},
        "linear layers in BF16": [" ".join(one.bf16_linears or ()) or "none" for one in precision],
        "layers in BF16": [", ".join(str(layer + 1) for layer in sorted(one.layers_in_bf16(layers))) or "none" for one in precision],
        "Smooth-SwiGLU": ["on" if one.smooth_swiglu else "off" for one in precision],
        "processes": [info["processes"], dist.get_world_size()],
    }
    changed = [f"{what} {before} -> {after}" for what, (before, after) in described.items() if before != after]
    if changed or requantised:
        some = f"{len(requantised)} tensors of this rank were requantised, such as {min(requantised, default='')}"
        kept = some if requantised else "all weights and states kept their bits"
        print(f"the checkpoint was converted: {', '.join(changed) or 'other formats'}; {kept}", flush=True)

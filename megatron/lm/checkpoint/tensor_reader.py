"""Read the tensors of a checkpoint in the formats of a run: each weight and optimizer state from its most precise stored form."""

import torch
from torch import Tensor, nn

from megatron.lm.checkpoint.files.storage import Stored
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.tensor_rules import number_problem
from megatron.lm.checkpoint.values import StoredTensor, check_remainder, find, find_whole, firsts
from msamp.nn.scaling_state import TensorScales
from msamp.numerics import mcf
from msamp.numerics.formats import BF16, FP32, Format
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.stochastic_rounding import off_ties
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.shard import Holding
from msamp.optim.states import by_key, is_own_master, weight_format
from msamp.optim.updates import MASTER, WEIGHT, State, kept_states


def check_number(stored: Stored, name: str, x: Tensor, low: float, high: float, dtype: torch.dtype, *, whole: bool = False) -> None:
    """Raise a ValueError if an entry of a checkpoint is not one number in [low, high], or not an integer although it must be `whole`."""
    if x.dim() or x.dtype != dtype:
        raise ValueError(f"{stored.folder}: {name} is {x.tolist()}; it must be one {dtype} in [{low}, {high}]; load an older checkpoint")
    problem = number_problem(float(x), low, high, dtype, whole=whole)
    if problem is not None:
        raise ValueError(f"{stored.folder}: {name}{problem}; load an older checkpoint")


class TensorReader:
    """Weights and optimizer states of one checkpoint in this run's formats.

    Args:
        stored: the checkpoint.
        vocab_size: of the tokenizer, not padded.
        requantised: set to which the keys of tensors that could not keep their bits are added.
        steps: iteration of the checkpoint, the maximum step count of an optimizer state.
    """

    def __init__(self, stored: Stored, vocab_size: int, requantised: set[str], steps: int = 0) -> None:
        self.stored, self.vocab_size, self.requantised, self.steps = stored, vocab_size, requantised, steps
        self.kinds = {name.partition("/")[0] for name in stored.tensors}  # once: a mixture of experts has thousands of tensors

    def find(self, prefix: str, where: list[Place], shape: torch.Size) -> StoredTensor:
        """Read and check a tensor of `shape` at these places."""
        tensor = find(self.stored, prefix, where, shape, self.vocab_size)
        tensor.check(self.stored.folder)
        return tensor

    def value(self, prefix: str, where: list[Place], shape: torch.Size, fmt: Format) -> StoredTensor:
        """Read the source of a tensor in `fmt`: the tensor with its remainder; for BF16 only the first component, to which the pair
        rounds."""
        if fmt == BF16:
            return self.find(prefix, where, shape)
        tensor = find_whole(self.stored, prefix, where, shape, self.vocab_size)
        tensor.check(self.stored.folder)
        return tensor

    def best(self, where: list[Place], shape: torch.Size, fmt: Format) -> StoredTensor:
        """Read the master if there is one, else the weight; see `value`."""
        return self.value(MASTER.key if f"{MASTER.key}/{where[0].name}" in self.stored.tensors else "model", where, shape, fmt)

    def remainder(self, key: str, where: list[Place], shape: torch.Size, fmt: Format) -> Tensor:
        """Read a remainder's payload in `fmt`: as stored, converted from another format, or the part of the stored weight or state that
        BF16 drops."""
        name, first_key = f"{key}/{where[0].name}", firsts()[key]
        if name in self.stored.tensors:
            check_remainder(self.stored, key, where)
            payload = self.find(key, where, shape).payload
            if payload.dtype == fmt.dtype:
                return payload
            pair = mcf.load_pair(self.find(first_key, where, shape).payload, payload)
        else:
            tensor = self.best(where, shape, FP32) if first_key == "model" else self.value(first_key, where, shape, FP32)
            first = tensor.values().bfloat16()
            pair = first, tensor.values() - first.float()
        self.requantised.add(name)
        return mcf.remainder_payload(pair, fmt.dtype)

    def weight(self, p: Tensor, master: Format, where: list[Place], gemm: Gemms | None, with_values: bool) -> tuple[Tensor, Tensor | None]:
        """Read the weight, and `with_values` the values for a separate master (None: the weight is its own); `off_ties` moves new ones."""
        fmt = weight_format(p)
        fp8 = Cast(fmt) if fmt.dtype.itemsize == 1 else gemm.weight if gemm is not None and fmt.scaled else None
        if is_own_master(p, master):
            own = self._to(self.best(where, p.shape, fmt), fmt, p.dtype)
            if with_values and fp8 is not None:
                moved = off_ties(before := own.float(), fp8, master)
                own = own if moved is before else ScalingTensor.quantize(moved, fmt, dtype=p.dtype)
            return own, None
        weight = self.find("model", where, p.shape)
        keeps = weight.keeps_bits(fmt)
        if keeps and not with_values:
            return weight.to(fmt, p.dtype), None
        values = self.best(where, p.shape, FP32).values()
        values = values if fp8 is None else off_ties(values, fp8, master)
        if keeps:
            return weight.to(fmt, p.dtype), values
        self.requantised.add(weight.key)
        return (ScalingTensor.quantize(values, fmt, dtype=p.dtype) if fmt.scaled else values.to(fmt.dtype)), values

    def state(self, holding: Holding, where: list[Place]) -> dict[str, Tensor]:
        """Read the optimizer states of a holding; empty if none were saved."""
        name = f"step/{where[0].name}"
        if name not in self.stored.tensors:
            return {}
        step = self.stored.tensor(name)
        check_number(self.stored, name, step, 0, self.steps, torch.float32, whole=True)
        state = {"step": step}
        for declared, fmt in kept_states(holding.param, holding.formats):
            state |= {key: holding.copy_of(x) for key, x in self._state(declared, fmt, where, holding.param.shape).items()}
        self.requantised |= {f"{key}/{where[0].name}" for key in firsts() if key not in state} & self.stored.tensors.keys()
        return state

    def _state(self, declared: State, fmt: Format, where: list[Place], shape: torch.Size) -> dict[str, Tensor]:
        """Read one state of a whole parameter in `fmt`, as entries of the optimizer's state."""
        key = declared.key
        if declared.copy:
            return {key: self._to(self.best(where, shape, fmt), fmt)}
        if declared.remainder_of is not None:
            return {key: self.remainder(key, where, shape, fmt)}
        if key not in self.kinds:
            raise ValueError(
                f"{self.stored.folder} has no {key}, which this run's optimizer requires: it was saved with another update; initialize the "
                "optimizer's states with --no-load-optim, or resume with the saved precision"
            )
        tensor = self.value(key, where, shape, fmt)
        tensor.check(self.stored.folder, non_negative=declared.non_negative)
        if not tensor.keeps_bits(fmt):
            self.requantised.add(tensor.key)
        return by_key(key, tensor.moment(fmt))

    def weight_remainder(self, holding: Holding, where: list[Place]) -> dict[str, Tensor]:
        """Read the second component of a holding's weight; empty if it has none."""
        kept = [(state, fmt) for state, fmt in kept_states(holding.param, holding.formats) if state.remainder_of == WEIGHT]
        return {state.key: holding.copy_of(self.remainder(state.key, where, holding.param.shape, fmt)) for state, fmt in kept}

    def _to(self, tensor: StoredTensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
        if not tensor.keeps_bits(fmt):
            self.requantised.add(tensor.key)
        return tensor.to(fmt, dtype)


def saved_scaling(model: nn.Module, stored: Stored, where: dict[str, list[Place]]) -> dict[str, Tensor]:
    """Return the saved scaling state of linear layers and attention cores if its shape matches; others start from their initial state, and
    so do the scales of channels that were saved without them."""
    state: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, TensorScales):
            continue
        places: dict[str, Place] = {}
        for of_channels in (False, True):
            buffers = [f"{name}.{key}" for key in layer.state_dict() if key.startswith("channels.") == of_channels]
            named = {local: where[local][0] for local in buffers}
            shapes = {
                local: stored.tensors[key].shape for local, place in named.items() if (key := f"model/{place.name}") in stored.tensors
            }
            if all(shapes.get(local) == place.shape for local, place in named.items()):
                places |= named
            elif not of_channels:
                break
        if places:
            saved = {}
            for local, place in places.items():  # this rank's part, where channels are split over tensor-parallel ranks
                part = tuple(slice(start, start + size) for start, size in zip(place.offset, place.sizes, strict=True))
                saved[local] = stored.tensor(f"model/{place.name}")[part]
            try:
                layer.check_state({local.removeprefix(f"{name}."): x for local, x in saved.items()})
            except ValueError as problem:
                raise ValueError(f"{stored.folder}: {name}.{problem}; load an older checkpoint") from None
            state |= saved
    return state

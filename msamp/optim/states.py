"""How an optimizer state is stored: the interface of every state format, queries of any stored state, and the place of a master weight.

A format says how a state begins. The update loads and stores it (`msamp.kernels.reference`). A stored state is one of three:

- a torch tensor, FP32 or BF16;
- a ScalingTensor, E4M3, E5M2 or FP16 with one scale a tensor, which follows from a bound of what is stored (FP8-LM section 2.2);
- `Expanded`, E4M3 or E5M2 with a maximum and an exponent for each group of 128 of a row [COAT, part 1].

`optimizer.state[p]` holds tensors alone. The maxima and exponents of an `Expanded` state stand there under keys of their own: `begun` and
`by_key` take a state apart, `as_stored` puts it together.

A master weight is the parameter itself where that is stored in the master's format, else a copy beside it in the optimizer's state.
"""

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from msamp.numerics.formats import FP32, PLAIN_FP16, Format, of_dtype
from msamp.numerics.range_expand import STATE_GROUP, Expanded
from msamp.numerics.stochastic_rounding import tensor_key
from msamp.numerics.tensor import ScalingTensor, fp32_values

# FP8-LM's Table 6, #3 and #4, which both came out so on a GPT of 125M (docs/reproduction/fp8lm-table6.md).
SEEN = {
    ("master", "fp8-e4m3"): "a master in fp8-e4m3 has lost most of a training's progress: give fp16, bf16 or fp32",
    ("v", "fp8-e4m3"): "v in fp8-e4m3 with one scale has made a training diverge when its smallest values became zero; they are now kept "
    "above zero, and their steps are too small: give fp16 or coat-e4m3",
}
MAX, EXPONENT = "_max", "_k"  # suffixes of the state's name in the keys of its groups' numbers
Stored = torch.Tensor | Expanded


def warn_of(formats: Mapping[str, str]) -> None:
    """Warn, once a process, of formats that a training has been seen to fail with.

    formats: by state, "master", "grad", "m" and "v".
    """
    for found in SEEN.keys() & formats.items():
        _warn_once(SEEN[found])


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"{message} (FP8-LM, Table 6)", stacklevel=5)


class StateFormat(Protocol):
    """The seam."""

    format: Format

    def init(self, like: torch.Tensor) -> torch.Tensor:
        """A state of zeros in the shape and on the device of `like`."""

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """The other tensors of such a state as it begins, by the suffix of the state's name in their key."""


class PlainFormat:
    """FP32 or BF16: a torch tensor without a scale. A remainder in E4M3 is one too (`mcf.remainder_payload`)."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class ScaledFormat:
    """ScalingTensors with scales that follow from the bounds of what is stored."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        payload = torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)
        return ScalingTensor(payload, torch.ones((), device=like.device, dtype=torch.float32), torch.float32)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class CoatFormat:
    """E4M3 or E5M2 with dynamic range expansion.

    The state `exp_avg` of a weight [.., n] is the payload in the weight's shape; `exp_avg_max` and `exp_avg_k`, FP32 [.., ceil(n / 128)],
    stand beside it. So rows of a weight have rows of all three.
    """

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        largest = torch.zeros(STATE_GROUP.groups(like.shape), device=like.device, dtype=torch.float32)
        return {MAX: largest, EXPONENT: torch.ones_like(largest)}


def state_format(fmt: Format) -> StateFormat:
    """The way to store a state in `fmt`."""
    if fmt.group:
        return CoatFormat(fmt)
    return ScaledFormat(fmt) if fmt.scaled else PlainFormat(fmt)


def begun(key: str, fmt: Format, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """A state of zeros as it stands in the optimizer's state, in the shape and on the device of `like`."""
    how = state_format(fmt)
    return {key: how.init(like)} | {key + name: x for name, x in how.beside(like).items()}


def by_key(key: str, x: Stored) -> dict[str, torch.Tensor]:
    """The inverse of `as_stored`: the entries of the optimizer's state."""
    return {key: x.payload, key + MAX: x.max, key + EXPONENT: x.k} if isinstance(x, Expanded) else {key: x}


def as_stored(state: Mapping[str, torch.Tensor], key: str) -> Stored:
    """A state together with the tensors beside it, as the update loads and stores it."""
    return Expanded(state[key], state[key + MAX], state[key + EXPONENT]) if key + MAX in state else state[key]


def local(x: Any) -> Any:
    """This process's part of a DTensor (FSDP2's sharded parameters and their gradients); any other tensor as it is."""
    return getattr(x, "_local_tensor", x)


def is_scaled(x: Stored) -> bool:
    """Whether a tensor is stored with one scale."""
    return isinstance(local(x), ScalingTensor)


def payload(x: Stored) -> torch.Tensor:
    """The stored elements of a tensor, in their memory."""
    x = local(x)
    return x.payload if isinstance(x, ScalingTensor | Expanded) else x.detach()


def scale_inv(x: Stored) -> torch.Tensor | None:
    """FP32 0-dim scale_inv, in its memory; None without one."""
    x = local(x)
    return x.scale_inv if isinstance(x, ScalingTensor) else None


def group_numbers(x: Stored) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FP32 [.., groups] maxima and exponents, in their memory; None where a state has no groups."""
    return (x.max, x.k) if isinstance(x, Expanded) else None


def stored_bytes(x: Stored) -> int:
    """Bytes of a tensor as it is stored, with its groups' numbers; the scale of a whole tensor is not counted."""
    return payload(x).nbytes + sum(numbers.nbytes for numbers in group_numbers(x) or ())


def copy_of_rows(x: Any, rows: slice) -> Any:
    """A copy of some rows along dim 0, with the whole scale; of a 0-dim tensor a copy of it."""

    def copy(part: torch.Tensor) -> torch.Tensor:
        return part[rows].clone() if part.dim() else part.clone()

    if isinstance(x, ScalingTensor):
        return ScalingTensor(copy(x.payload), x.scale_inv.clone(), x.dtype)
    return Expanded(copy(x.payload), copy(x.max), copy(x.k)) if isinstance(x, Expanded) else copy(x.detach())


def view_of_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Some rows of a parameter along dim 0, in its memory; a scale is a copy, since a store of the rows writes it too."""
    return ScalingTensor(x.payload[rows], x.scale_inv.clone(), x.dtype) if isinstance(x, ScalingTensor) else x.detach()[rows]


def decoded(x: Stored) -> torch.Tensor:
    """The state without groups: FP32 values of an `Expanded` one, any other as it is."""
    return x.dequantize() if isinstance(x, Expanded) else x


def own_values(x: Stored) -> torch.Tensor:
    """FP32 values in memory of their own."""
    return x.to(torch.float32, copy=True) if type(x) is torch.Tensor else fp32_values(decoded(x))


def weight_format(p: torch.Tensor) -> Format:
    """The format in which a parameter is stored."""
    p = local(p)
    if isinstance(p, ScalingTensor):
        return p.format
    return PLAIN_FP16 if p.dtype == torch.float16 else of_dtype(p.dtype)


def parameter_kind(p: torch.Tensor) -> str:
    """The kind of a parameter of a converted model, by which its optimizer formats are chosen (`Recipe.formats_of`)."""
    if is_scaled(p):
        return "linear"
    return "matrix" if p.dim() > 1 else "vector"


def is_own_master(p: torch.Tensor, master: Format) -> bool:
    """True where the parameter is stored in the master's format: no second copy is kept (O1 and O2: FP16 scaled)."""
    return weight_format(p) == master


def make_master(p: torch.Tensor, master: Format, values: torch.Tensor | None = None) -> torch.Tensor:
    """A master copy of `p`.

    Args:
        p: the parameter.
        master: the copy's format.
        values: the parameter before it was rounded to its own format (any float dtype); by default its present values.
    """
    p = local(p)
    values = fp32_values(p if values is None else values).to(p.device)
    if master.scaled:
        return ScalingTensor.quantize(values, master)
    copy = state_format(master).init(p)
    copy.copy_(values)
    return copy


@dataclass(frozen=True)
class Expected:
    """The requirements on a saved state.

    Attributes:
        like: a tensor of its shape and format, which may be on the meta device.
        least: the smallest value that it can hold.
    """

    like: torch.Tensor
    least: float = -math.inf


def expected_moment(key: str, fmt: Format, shape: torch.Size, *, non_negative: bool) -> dict[str, Expected]:
    """For a state in `fmt`: what `begun` would put under its keys."""
    least = {key: 0.0 if non_negative else -math.inf, key + MAX: 0.0, key + EXPONENT: FP32.tiny}
    return {name: Expected(x, least[name]) for name, x in begun(key, fmt, torch.empty(shape, device="meta", dtype=torch.float32)).items()}


def check_state(name: str, state: Mapping[str, Any], expected: Mapping[str, Expected], *, whole: bool = True) -> None:
    """ValueError naming a state that is lacking or unknown, or has another shape, format or granularity, or a value that it cannot hold.

    Args:
        name: the parameter's, for messages.
        state: as it stands in the optimizer's state; of any device.
        expected: the requirements, by key.
        whole: False where some of the expected states may be lacking.
    """
    remedy = "load what this model and this optimizer have saved, or start from the weights alone"
    missing, unknown = [key for key in expected if whole and key not in state], [key for key in state if key not in expected]
    if missing or unknown:
        lists = [f"{what} {', '.join(keys)}" for what, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise ValueError(f"the state of {name} {' and '.join(lists)}; {remedy}")
    for key, x in state.items():
        like, least = expected[key].like, expected[key].least
        described = _described(x)
        if key == "step" and isinstance(x, torch.Tensor) and x.numel() == 1:
            described = _described(like)  # torch's own loading keeps it in any dtype
        if described != _described(like):
            raise ValueError(f"{key} of {name} is {described}, and this optimizer keeps {_described(like)}; {remedy}")
        values = own_values(x)
        if isinstance(x, ScalingTensor) and not (x.scale_inv > 0 and x.scale_inv.isfinite()):
            raise ValueError(f"{key} of {name} has scale_inv {float(x.scale_inv):g}, which must be finite and above 0; {remedy}")
        bad = int((~values.isfinite()).sum())
        if bad:
            raise ValueError(f"{key} of {name} holds {bad} values that are NaN or infinite; {remedy}")
        if values.numel() and values.amin() < least:
            raise ValueError(f"{key} of {name} holds {float(values.amin()):g}, and cannot be less than {least:g}; {remedy}")


def _described(x: Any) -> str:
    """Format and shape; equal for two states that may replace each other."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{f'{x.payload.dtype} with a scale' if isinstance(x, ScalingTensor) else x.dtype} {tuple(x.shape)}"


def saved_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], option: str) -> dict[int, dict[str, torch.Tensor]]:
    """The saved states of each parameter in `state_dict`, in the precision in which they were saved. Changes nothing.

    Args:
        optimizer: which is to load it.
        state_dict: as torch's optimizers make them.
        option: the group option that says what the states are; it must equal the optimizer's own.

    Returns:
        Number of a parameter over all groups -> its states as saved; those without any left out.

    Raises:
        ValueError: for another number of groups or parameters, other names of parameters where both have names, and another option.
    """
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    remedy = "build the optimizer as the saved one was built, or start from the weights alone"
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"a different number of parameter groups: {len(saved_groups)} were saved, this optimizer has {len(groups)}; {remedy}"
        )
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if without_rounding(saved.get(option)) != without_rounding(group[option]):
            raise ValueError(
                f"parameter group {i} was saved with {option} {saved.get(option)!r}, this optimizer has {group[option]!r}; "
                f"build it with the saved {option}, or start from the weights alone"
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"parameter group {i} was saved with {len(saved['params'])} parameters, this optimizer has {len(group['params'])}; {remedy}"
            )
        named = zip(saved.get("param_names", ()), group.get("param_names", ()), strict=False)
        for theirs, mine in named:
            if theirs != mine:
                raise ValueError(f"parameter group {i} was saved with {theirs} where this optimizer has {mine}; {remedy}")
    numbers = [i for group in saved_groups for i in group["params"]]
    return {place: state_dict["state"][i] for place, i in enumerate(numbers) if state_dict["state"].get(i)}


def without_rounding(option: Any) -> Any:
    """An option of a parameter group without how states are rounded, which changes no format: what two groups must have alike."""
    if isinstance(option, list):
        return [without_rounding(each) for each in option]
    return {k: v for k, v in option.items() if not k.endswith("_rounding")} if isinstance(option, dict) else option


def take_groups(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take over the options of the parameter groups of a `state_dict` that has been checked, and drop the optimizer's states: torch's own
    loading would cast them to the parameter's dtype. The groups stay the objects that they are, which schedulers may hold."""
    groups = optimizer.param_groups
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups = groups


def parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each parameter in messages, over all groups: its own where its group has names, else its place."""
    return [name for number, group in enumerate(optimizer.param_groups) for name in _names_of(group, number)]


def _names_of(group: Mapping[str, Any], number: int) -> list[str]:
    return group.get("param_names", [f"parameter {i} of group {number}" for i in range(len(group["params"]))])  # type: ignore[no-any-return]


def give_keys(group: dict[str, Any], number: int, seed: int) -> None:
    """Give the parameters of a group the keys of their thresholds for stochastic rounding, from their names, unless it has `keys`.

    Args:
        number: of the group in its optimizer.
        seed: of the run.

    Raises:
        ValueError: for another number of keys than parameters.
    """
    keys = group.setdefault("keys", [tensor_key(seed, name) for name in _names_of(group, number)])
    if len(keys) != len(group["params"]):
        raise ValueError(
            f"{len(keys)} keys are given for {len(group['params'])} parameters; give each its own, or leave them to the optimizer's seed"
        )

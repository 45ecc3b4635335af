"""How an optimizer state is stored: the seam of every state format, what can be asked of any stored state, and where a master weight is.

A format says how a state begins. The update loads and stores it (`msamp.kernels.reference`). A stored state is one of three:

- a torch tensor, FP32 or BF16;
- a ScalingTensor, E4M3, E5M2 or FP16 with one scale a tensor, which follows from a bound of what is stored (FP8-LM section 2.2);
- `Expanded`, E4M3 or E5M2 with a maximum and an exponent for each group of 128 of a row [COAT, part 1].

`optimizer.state[p]` holds tensors alone. What an `Expanded` state has beside its payload stands there under keys of its own: `begun` and
`by_key` take a state apart, `as_stored` puts it together.

A master weight is the parameter itself where that is stored in the master's format, else a copy beside it in the optimizer's state.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from msamp.numerics.formats import PLAIN_FP16, Format, of_dtype
from msamp.numerics.range_expand import STATE_GROUP, Expanded
from msamp.numerics.tensor import ScalingTensor, fp32_values

MAX, EXPONENT = "_max", "_k"  # what follows the state's name in the keys of its groups' numbers
Stored = torch.Tensor | Expanded


class StateFormat(Protocol):
    """The seam."""

    format: Format

    def init(self, like: torch.Tensor) -> torch.Tensor:
        """A state of zeros in the shape and on the device of `like`."""

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """What else such a state takes, as it begins, by what follows the state's name in its key."""


class PlainFormat:
    """FP32 or BF16: a torch tensor without a scale. A remainder in E4M3 is one too (`mcf.remainder_payload`)."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)

    def beside(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class ScaledFormat:
    """ScalingTensors whose scales follow from the bounds of what is stored."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def init(self, like: torch.Tensor) -> torch.Tensor:
        payload = torch.zeros(like.shape, dtype=self.format.dtype, device=like.device)
        return ScalingTensor(payload, torch.ones((), device=like.device), torch.float32)

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
        largest = torch.zeros(STATE_GROUP.groups(like.shape), device=like.device)
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
    """The inverse of `as_stored`: what stands in the optimizer's state."""
    return {key: x.payload, key + MAX: x.max, key + EXPONENT: x.k} if isinstance(x, Expanded) else {key: x}


def as_stored(state: Mapping[str, torch.Tensor], key: str) -> Stored:
    """A state with what stands beside it: what the update loads and stores."""
    return Expanded(state[key], state[key + MAX], state[key + EXPONENT]) if key + MAX in state else state[key]


def is_scaled(x: Stored) -> bool:
    """Whether a tensor is stored with one scale."""
    return isinstance(x, ScalingTensor)


def payload(x: Stored) -> torch.Tensor:
    """What is stored of a tensor's elements, in their memory."""
    return x.payload if isinstance(x, ScalingTensor | Expanded) else x.detach()


def scale_inv(x: Stored) -> torch.Tensor | None:
    """FP32 0-dim scale_inv, in its memory; None without one."""
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
    """Some rows of a parameter along dim 0, in its memory; a scale is a copy, since who stores the rows stores it too."""
    return ScalingTensor(x.payload[rows], x.scale_inv.clone(), x.dtype) if isinstance(x, ScalingTensor) else x.detach()[rows]


def decoded(x: Stored) -> torch.Tensor:
    """The state without groups: FP32 values of an `Expanded` one, any other as it is."""
    return x.dequantize() if isinstance(x, Expanded) else x


def own_values(x: Stored) -> torch.Tensor:
    """FP32 values in memory of their own."""
    return x.to(torch.float32, copy=True) if type(x) is torch.Tensor else fp32_values(decoded(x))


def weight_format(p: torch.Tensor) -> Format:
    """The format in which a parameter is stored."""
    if isinstance(p, ScalingTensor):
        return p.format
    return PLAIN_FP16 if p.dtype == torch.float16 else of_dtype(p.dtype)


def is_own_master(p: torch.Tensor, master: Format) -> bool:
    """True where the parameter is stored in the master's format: no second copy is kept (O1 and O2: FP16 scaled)."""
    return weight_format(p) == master


def make_master(p: torch.Tensor, master: Format, values: torch.Tensor | None = None) -> torch.Tensor:
    """A master copy of `p`.

    Args:
        p: the parameter.
        master: the copy's format.
        values: what the parameter was before it was rounded to its own format (any float dtype); its values by default.
    """
    values = fp32_values(p if values is None else values).to(p.device)
    if master.scaled:
        return ScalingTensor.quantize(values, master)
    copy = state_format(master).init(p)
    copy.copy_(values)
    return copy


def load_groups(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], option: str) -> dict[int, dict[str, torch.Tensor]]:
    """Take over the parameter groups of `state_dict`, drop the optimizer's states, and return those of `state_dict` in the precision in
    which they were saved: torch's own loading casts states to the parameter's dtype.

    Args:
        option: of the groups' options, that which says what the states are; it must be the optimizer's own.

    Returns:
        Number of a parameter over all groups -> its states as saved; those without any left out.

    Raises:
        ValueError: where the saved option is another, naming both; nothing has changed then.
    """
    for i, (saved, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups, strict=False)):
        if saved.get(option) != group[option]:
            raise ValueError(
                f"parameter group {i} was saved with {option} {saved.get(option)!r}, this optimizer has {group[option]!r}; "
                f"build it with the saved {option}, or start from the weights alone"
            )
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    return {place: state_dict["state"][i] for place, i in enumerate(numbers) if state_dict["state"].get(i)}

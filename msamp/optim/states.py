"""Storage of optimizer states: how they begin, functions on stored states, and checks of saved ones.

The update loads and stores a state (`msamp.kernels.reference`). A stored state is one of:

- a torch tensor, FP32 or BF16;
- a ScalingTensor, E4M3, E5M2 or FP16 with one scale per tensor, which follows from a bound on its values (FP8-LM section 2.2);
- `Expanded`, E4M3 or E5M2 with a maximum and an exponent for each group of 128 elements of a row [COAT, part 1].

`optimizer.state[p]` contains only tensors, so the maxima and exponents of an `Expanded` state have separate keys: `begun` and `by_key`
split a state into its tensors, `as_stored` combines them.

The master weight is the parameter itself if that is stored in the master's format, otherwise a copy in the optimizer state.
"""

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from msamp.numerics.formats import FP32, PLAIN_FP16, Format, of_dtype
from msamp.numerics.range_expand import STATE_GROUP, Expanded
from msamp.numerics.recipe import Cast
from msamp.numerics.stochastic_rounding import off_ties, tensor_key, unwrapped
from msamp.numerics.tensor import PLAIN, ScalingTensor, fp32_values

# FP8-LM's Table 6, #3 and #4, both reproduced on a 125M GPT (docs/reproduction/fp8lm-table6.md).
SEEN = {
    ("master", "fp8-e4m3"): "a master in fp8-e4m3 loses most updates, and the loss stays high; use fp16, bf16 or fp32",
    ("v", "fp8-e4m3"): "training with v in fp8-e4m3 and one scale diverged because small values underflowed to zero; they are now clamped "
    "above zero, which makes their steps too small; use fp16 or coat-e4m3",
}
MAX, EXPONENT = "_max", "_k"  # key suffixes of a state's group maxima and exponents
Stored = torch.Tensor | Expanded


@functools.cache
def warn_once(message: str) -> None:
    """Warn once per process about formats with which training is known to fail (`SEEN`)."""
    warnings.warn(f"{message} (FP8-LM, Table 6)", stacklevel=4)


def begun(key: str, fmt: Format, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the entries of the optimizer state for a state of zeros in `fmt`, with the shape and device of `like`.

    COAT's formats have a maximum and an exponent for each group of a row: for a weight [.., n], `exp_avg` is the payload in the weight's
    shape, and `exp_avg_max` and `exp_avg_k` are FP32 [.., ceil(n / 128)]. So a slice of the weight's rows corresponds to the same rows of
    all three.
    """
    zeros = torch.zeros(like.shape, dtype=fmt.dtype, device=like.device)
    if fmt.group:
        largest = torch.zeros(STATE_GROUP.scales_shape(like.shape), device=like.device, dtype=torch.float32)
        return {key: zeros, key + MAX: largest, key + EXPONENT: torch.ones_like(largest)}
    return {key: ScalingTensor(zeros, torch.ones((), device=like.device, dtype=torch.float32), torch.float32) if fmt.scaled else zeros}


def by_key(key: str, x: Stored) -> dict[str, torch.Tensor]:
    """Return the entries of the optimizer state for a stored state: the inverse of `as_stored`."""
    return {key: x.payload, key + MAX: x.max, key + EXPONENT: x.k} if isinstance(x, Expanded) else {key: x}


def as_stored(state: Mapping[str, torch.Tensor], key: str) -> Stored:
    """Combine a state with its additional tensors, as the update loads and stores it."""
    return Expanded(state[key], state[key + MAX], state[key + EXPONENT]) if key + MAX in state else state[key]


def local(x: Any) -> Any:
    """Return this process's shard of a DTensor (FSDP2's parameters and gradients), and any other tensor unchanged."""
    return x if type(x) in PLAIN or type(x) is ScalingTensor else getattr(x, "_local_tensor", x)  # looking for what is missing is slow


def is_scaled(x: Stored) -> bool:
    """Whether a tensor is stored with one scale."""
    return isinstance(local(x), ScalingTensor)


def payload(x: Stored) -> torch.Tensor:
    """Return the stored elements of a tensor, without a copy."""
    x = local(x)
    return x.payload if isinstance(x, ScalingTensor | Expanded) else x.detach()


def scale_inv(x: Stored) -> torch.Tensor | None:
    """Return the scale_inv, FP32 0-dim, without a copy; None if the tensor has none."""
    x = local(x)
    return x.scale_inv if isinstance(x, ScalingTensor) else None


def group_numbers(x: Stored) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the group maxima and exponents, FP32 [.., groups], without a copy; None if the state has no groups."""
    return (x.max, x.k) if isinstance(x, Expanded) else None


def copy_of_rows(x: Any, rows: slice) -> Any:
    """Return a copy of some rows along dim 0, with the tensor's scale; for a 0-dim tensor a copy of all of it."""

    def copy(part: torch.Tensor) -> torch.Tensor:
        return part[rows].clone() if part.dim() else part.clone()

    if isinstance(x, ScalingTensor):
        return ScalingTensor(copy(x.payload), x.scale_inv.clone(), x.dtype)
    return Expanded(copy(x.payload), copy(x.max), copy(x.k)) if isinstance(x, Expanded) else copy(x.detach())


def view_of_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return a view of some rows of a parameter along dim 0. The scale is a copy, since storing the rows writes it too."""
    return ScalingTensor(x.payload[rows], x.scale_inv.clone(), x.dtype) if isinstance(x, ScalingTensor) else x.detach()[rows]


def decoded(x: Stored) -> torch.Tensor:
    """Return the FP32 values of an `Expanded` state, and any other state unchanged."""
    return x.dequantize() if isinstance(x, Expanded) else x


def own_values(x: Stored) -> torch.Tensor:
    """Return the FP32 values as a new tensor."""
    return x.to(torch.float32, copy=True) if type(x) is torch.Tensor else fp32_values(decoded(x))


def weight_format(p: torch.Tensor) -> Format:
    """Return the format in which a parameter is stored."""
    p = local(p)
    if isinstance(p, ScalingTensor):
        return p.format
    return PLAIN_FP16 if p.dtype == torch.float16 else of_dtype(p.dtype)


def parameter_kind(p: torch.Tensor) -> str:
    """Return the kind of a converted model's parameter, which selects its optimizer formats (`Recipe.formats_of`)."""
    if is_scaled(p):
        return "linear"
    return "matrix" if p.dim() > 1 else "vector"


def is_own_master(p: torch.Tensor, master: Format) -> bool:
    """Whether the parameter is stored in the master's format, so that it has no second copy (O1 and O2: scaled FP16)."""
    return weight_format(p) == master


def make_master(p: torch.Tensor, master: Format, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return a master copy of `p`.

    Args:
        p: the parameter.
        master: the copy's format.
        values: the parameter before it was rounded to its own format (any float dtype); by default its current values.
    """
    p = local(p)
    if values is not None and isinstance(p, ScalingTensor) and p.label and p.requires_grad:  # one that is just initialized has no name
        values = off_ties(values, Cast(p.format), master, beside=True)
    values = fp32_values(p if values is None else values).to(p.device)
    if master.scaled:
        return ScalingTensor.quantize(values, master)
    return torch.empty(p.shape, dtype=master.dtype, device=p.device).copy_(values)


@dataclass(frozen=True)
class Expected:
    """The requirements on a saved state.

    Attributes:
        like: a tensor of the same shape and format, which may be on the meta device.
        least: the smallest allowed value.
    """

    like: torch.Tensor
    least: float = -math.inf


def expected_moment(key: str, fmt: Format, shape: torch.Size, *, non_negative: bool) -> dict[str, Expected]:
    """Return the requirements on the entries that `begun` creates for a state in `fmt`."""
    least = {key: 0.0 if non_negative else -math.inf, key + MAX: 0.0, key + EXPONENT: FP32.tiny}
    return {name: Expected(x, least[name]) for name, x in begun(key, fmt, torch.empty(shape, device="meta", dtype=torch.float32)).items()}


def check_state(name: str, state: Mapping[str, Any], expected: Mapping[str, Expected], *, whole: bool = True) -> None:
    """Raise a ValueError naming a state that is missing, unknown, of another shape, format or granularity, or has an invalid value.

    Args:
        name: the parameter's, for messages.
        state: the entries of the optimizer state, on any device.
        expected: the requirements, by key.
        whole: False if some of the expected states may be missing.
    """
    fix = "load a state that was saved with this model and optimizer, or start from the weights alone"
    missing, unknown = [key for key in expected if whole and key not in state], [key for key in state if key not in expected]
    if missing or unknown:
        lists = [f"{what} {', '.join(keys)}" for what, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise ValueError(f"the state of {name} {' and '.join(lists)}; {fix}")
    for key, x in state.items():
        like, least = expected[key].like, expected[key].least
        described = _described(x)
        if key == "step" and isinstance(x, torch.Tensor) and x.numel() == 1:
            described = _described(like)  # torch's own loading keeps it in any dtype
        if described != _described(like):
            raise ValueError(f"{key} of {name} is {described}, but this optimizer stores {_described(like)}; {fix}")
        values = own_values(x)
        if isinstance(x, ScalingTensor) and not (x.scale_inv > 0 and x.scale_inv.isfinite()):
            raise ValueError(f"{key} of {name} has scale_inv {float(x.scale_inv):g}; it must be finite and above 0; {fix}")
        bad = int((~values.isfinite()).sum())
        if bad:
            raise ValueError(f"{key} of {name} holds {bad} values that are NaN or infinite; {fix}")
        if values.numel() and values.amin() < least:
            raise ValueError(f"{key} of {name} holds {float(values.amin()):g}; the minimum is {least:g}; {fix}")


def _described(x: Any) -> str:
    """Describe format and shape; two states with the same description are interchangeable."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{f'{x.payload.dtype} with a scale' if isinstance(x, ScalingTensor) else x.dtype} {tuple(x.shape)}"


def saved_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], option: str) -> dict[int, dict[str, torch.Tensor]]:
    """Return the saved states of each parameter in `state_dict`, in the precision in which they were saved, without loading them.

    Args:
        optimizer: the optimizer that will load it.
        state_dict: in the layout of torch's optimizers.
        option: the group option that defines the states; it must equal the optimizer's own.

    Returns:
        Index of a parameter over all groups -> its saved states; parameters without states are left out.

    Raises:
        ValueError: if the number of groups or parameters, the parameters' names (if both have names) or the option differ, or a state is
            of none of them.
    """
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    fix = "build the optimizer like the saved one, or start from the weights alone"
    if len(saved_groups) != len(groups):
        raise ValueError(f"the number of parameter groups differs: {len(saved_groups)} were saved, this optimizer has {len(groups)}; {fix}")
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if without_rounding(saved.get(option)) != without_rounding(group[option]):
            raise ValueError(
                f"parameter group {i} was saved with {option} {saved.get(option)!r}, this optimizer has {group[option]!r}; "
                f"build it with the saved {option}, or start from the weights alone"
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"parameter group {i} was saved with {len(saved['params'])} parameters, this optimizer has {len(group['params'])}; {fix}"
            )
        named = zip(saved.get("param_names", ()), group.get("param_names", ()), strict=False)
        for theirs, ours in named:
            if unwrapped(theirs) != unwrapped(ours) and not any(" of group " in name for name in (theirs, ours)):  # as `_names_of` makes
                raise ValueError(f"parameter group {i} was saved with {theirs}, but this optimizer has {ours}; {fix}")
    numbers = [i for group in saved_groups for i in group["params"]]
    unknown = state_dict["state"].keys() - set(numbers)
    if unknown:
        raise ValueError(f"there are states of {next(iter(unknown))!r}, which no parameter group has: they go by number, 0, 1, ..; {fix}")
    return {place: state_dict["state"][i] for place, i in enumerate(numbers) if state_dict["state"].get(i)}


def without_rounding(option: Any) -> Any:
    """Return an option of a parameter group without its rounding modes, which do not affect formats and may differ between groups."""
    if isinstance(option, list):
        return [without_rounding(formats) for formats in option]
    return {k: v for k, v in option.items() if not k.endswith("_rounding")} if isinstance(option, dict) else option


def parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a name for each parameter over all groups, for messages: its own if its group has names, otherwise its position."""
    return [name for number, group in enumerate(optimizer.param_groups) for name in _names_of(group, number)]


def _names_of(group: Mapping[str, Any], number: int) -> list[str]:
    return group.get("param_names", [f"parameter {i} of group {number}" for i in range(len(group["params"]))])  # type: ignore[no-any-return]


def give_keys(group: dict[str, Any], number: int, seed: int) -> None:
    """Set a group's `keys` for stochastic rounding, one per parameter and derived from its name, unless the group has them.

    Raises:
        ValueError: if the number of keys differs from the number of parameters.
    """
    keys = group.setdefault("keys", [tensor_key(seed, name) for name in _names_of(group, number)])
    if len(keys) != len(group["params"]):
        raise ValueError(
            f"{len(keys)} keys were passed for {len(group['params'])} parameters; pass one each, or none to use the optimizer's seed"
        )

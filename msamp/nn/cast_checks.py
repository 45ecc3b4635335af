"""Which casts a linear layer supports, and which scales a run can have saved: checks that raise before anything is built or loaded."""

from collections.abc import Mapping, Sequence

import torch

from msamp.kernels.scaled_mm import check_blockwise, warn_if_emulated
from msamp.numerics.formats import FP32, Format
from msamp.numerics.granularity import TENSORWISE, Block
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import MAX_EXPONENT, Current, Delayed, Scaling


def check_gemm(gemm: Gemms) -> None:
    """Raise a ValueError naming the tensor, its cast and a fix if a linear layer does not support it."""
    for what, cast in gemm.casts.items():
        if not isinstance(cast.scaling, Scaling):
            raise ValueError(
                f"{what} has scaling rule {cast.scaling!r}, which is not a Scaling; use Current() or Delayed(), or derive a class from "
                "msamp.numerics.scaling.Scaling"
            )
        lacking = [name for name in ("maxima", "spread", "scales_shape") if not callable(getattr(cast.granularity, name, None))]
        if lacking:
            raise ValueError(
                f"{what} has granularity {cast.granularity!r}, which does not define {', '.join(lacking)}; see msamp.numerics.granularity"
            )
        if not (cast.format.scaled and cast.format.bytes == 1):
            raise ValueError(f"{what} is cast to {cast.format}; an FP8 GEMM requires fp8-e4m3 or fp8-e5m2")
        if cast.scaling.window and (what == "weight" or cast.granularity != TENSORWISE):
            why = (
                "a weight's scale comes from its own amax, once per step"
                if what == "weight"
                else f"a history records one amax per tensor, not per {cast.granularity}"
            )
            raise ValueError(f"{what} has scaling {cast.scaling}, but {why}; use Current()")
    for what, first, again in (
        ("input", gemm.output.left, gemm.grad_weight.right),
        ("weight", gemm.output.right, gemm.grad_input.right),
        ("grad_output", gemm.grad_input.left, gemm.grad_weight.left),
    ):
        if first != again:
            raise ValueError(f"{what} is cast as {first} for one GEMM and as {again} for the other; use the same cast for both")


def check_smooth(gemm: Gemms) -> None:
    """Raise a ValueError naming a fix if the input of a linear layer with these casts cannot have channel scales."""
    if not gemm.tensorwise or not gemm.input.scaling.window:
        raise ValueError(
            f"Smooth-SwiGLU requires operands with one delayed scale per tensor, and the input is cast as {gemm.input}; use the casts "
            "'delayed', or leave it out"
        )


def check_device(gemm: Gemms, device: torch.device) -> None:
    """Raise a ValueError if this torch is too old for block-scaled GEMMs on `device`; warn once if they are emulated."""
    for cast in gemm.casts.values():
        if isinstance(cast.granularity, Block):
            check_blockwise(device)
            warn_if_emulated(device, cast.granularity.columns)


def wire_cast(wire: Format, operands: tuple[Cast, Cast]) -> Cast:
    """Return the cast of partial sums that are sent in `wire`: the cast of the operand with this format."""
    cast = next((cast for cast in operands if cast.format == wire), None)
    if cast is None:
        formats = " or ".join(str(cast.format) for cast in operands)
        raise ValueError(f"partial sums cannot be sent in {wire}; choose {formats}, the formats of the layer's casts")
    if cast.granularity != TENSORWISE:
        raise ValueError(
            f"partial sums are sent with one scale per tensor, but the recipe casts {wire} by {cast.granularity}; send them in the "
            "compute dtype: use a recipe with fp8_wire=False"
        )
    return cast


def check_buffers(state: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], casts: Sequence[Cast]) -> None:
    """Check the saved buffers of a layer's scales, which have these dtypes and a row for each of the casts.

    Raises:
        ValueError: naming the first buffer that no run can have written: a wrong dtype, a value out of range, a scale that is not a
            power of two although the rule requires it, or a scale_inv that is not the inverse of its scale.
    """
    for name, x in state.items():
        check_range(name, x, dtypes[name], *((2.0**-MAX_EXPONENT, 2.0**MAX_EXPONENT) if name.startswith("scale") else (0.0, FP32.max)))
    scale, by_powers = state["scale"], [isinstance(cast.scaling, Current | Delayed) for cast in casts]
    check_powers(scale[torch.tensor(by_powers, device=scale.device)])
    if ((state["scale_inv"] * scale - 1).abs() > 2.0**-20).any():
        raise ValueError(f"scale_inv is {state['scale_inv'].tolist()}; it must be the inverse of scale, {scale.tolist()}")


def check_range(name: str, x: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> None:
    """Raise a ValueError naming a saved buffer of another dtype, or with a value that is not in [low, high]."""
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}; it must be {dtype}")
    wrong = x[~((x >= low) & (x <= high))]
    if len(wrong):
        raise ValueError(f"{name} contains {float(wrong[0]):g}; it must be in [{low:g}, {high:g}]")


def check_powers(scale: torch.Tensor) -> None:
    """Raise a ValueError for a saved scale that is not a power of two."""
    odd = scale[torch.frexp(scale).mantissa != 0.5]
    if len(odd):
        raise ValueError(f"scale contains {float(odd[0]):g}; it must be a power of two")

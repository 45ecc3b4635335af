"""Read tensors that other packages saved with scales: MS-AMP's, and the quantized optimizer states of torchao and bitsandbytes.

A checkpoint of Microsoft's MS-AMP contains objects of MS-AMP's classes, whose module names are also below `msamp`. torch.load's restricted
unpickler (`weights_only=True`, the default) finds the classes of this file under their names, and builds a ScalingTensor from `value`,
`meta.qtype` and `meta.scale_inv`; amax histories and hooks are not read. Unrestricted unpickling imports the modules themselves,
`msamp.common` and `msamp.nn.parameter`, which refuse it.

torchao's states are tensor subclasses with `dequantize`. bitsandbytes' are bytes that index a table of values, with a maximum for each
block of 256 elements [Dettmers et al., 8-bit Optimizers via Block-wise Quantization].
"""

from collections.abc import Mapping
from typing import Any

import torch

from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor

_QTYPES = {3: FP16, 5: E4M3, 6: E5M2}  # MS-AMP's numbers of its scaled formats; an FP8 value is saved as uint8 or int8
_BITSANDBYTES = "__bnb_optimizer_quant_state__"  # the key under which its state_dict keeps each parameter's quantized states
_BLOCKS = (256, 2048)  # elements per maximum, of its current and its first versions


class _Fields:
    """The attributes of one of MS-AMP's objects, by name."""

    value: Any = None
    qtype: Any = None
    scale_inv: Any = None


class _SavedTensor(ScalingTensor):
    """Becomes a ScalingTensor once the unpickler passes the attributes of MS-AMP's ScalingTensor or ScalingParameter."""

    @staticmethod
    def __new__(cls) -> ScalingTensor:  # type: ignore[misc]
        return ScalingTensor.__new__(cls, torch.zeros(0, dtype=torch.float16, device="cpu"), torch.ones((), device="cpu"), torch.float32)

    def __setstate__(self, state: Any) -> None:
        value, meta = (state.get(key) for key in ("value", "meta")) if isinstance(state, dict) else (None, None)
        qtype, scale_inv = (meta.qtype, meta.scale_inv) if isinstance(meta, _Fields) else (None, None)
        number = qtype.value if isinstance(qtype, _Fields) else qtype
        fmt = _QTYPES.get(number) if isinstance(number, int) else None
        if (
            type(value) is not torch.Tensor
            or fmt is None
            or value.dtype not in ((fmt.dtype,) if fmt is FP16 else (torch.uint8, torch.int8))
        ):
            described = f"{value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            named = getattr(qtype, "name", qtype)
            raise ValueError(
                f"a tensor of MS-AMP has value {described} with meta.qtype {named}; expected torch.float16 with kFloat16 (3), or "
                "torch.uint8 with kFloat8E4M3 (5) or kFloat8E5M2 (6): save plain tensors under MS-AMP, such as x.float()"
            )
        if not isinstance(scale_inv, torch.Tensor) or scale_inv.numel() != 1 or not 0 < float(scale_inv) < float("inf"):
            raise ValueError(f"a tensor of MS-AMP has meta.scale_inv {scale_inv}; expected one finite value above 0: the file is damaged")
        read = ScalingTensor(value.contiguous().view(fmt.dtype), scale_inv.detach().float().reshape(()).clone(), torch.float32)
        torch.Tensor.data.__set__(self, read)  # type: ignore[attr-defined]  # takes the shape
        self.payload, self.scale_inv = read.payload, read.scale_inv
        self.__class__ = ScalingTensor  # type: ignore[assignment]


_CLASSES = {
    "tensor.tensor.ScalingTensor": _SavedTensor,
    "tensor.meta.ScalingMeta": _Fields,
    "tensor.hook.HookManager": _Fields,
    "dtype.dtypes.QType": _Fields,
}
torch.serialization.add_safe_globals(
    [(_SavedTensor, "msamp.nn.parameter.ScalingParameter"), *((own, f"msamp.common.{name}") for name, own in _CLASSES.items())]
)


def plain_states(name: str, saved: Mapping[str, Any], shape: torch.Size) -> Mapping[str, Any]:
    """Dequantize a parameter's optimizer states that torchao or bitsandbytes saved; other states are returned as they are.

    Returns:
        The states by torch's names, each quantized one as FP32 values.

    Raises:
        ValueError: for states of bitsandbytes that do not belong to a parameter of this shape, or another of its optimizers.
    """
    quantized = saved.get(_BITSANDBYTES)
    if isinstance(quantized, Mapping) or "state1" in saved:
        return _of_bitsandbytes(name, {**saved, **(quantized or {})}, shape)
    # A subclass with its own `dequantize`, as torchao's: torch.Tensor's is for torch.quantize_per_tensor.
    other = {
        key: x.dequantize().detach().float()
        for key, x in saved.items()
        if isinstance(x, torch.Tensor) and not isinstance(x, ScalingTensor) and type(x).dequantize is not torch.Tensor.dequantize
    }
    return {**saved, **other}


def _of_bitsandbytes(name: str, saved: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    states = {"step": saved.get("step", 1)}
    for key, number in (("exp_avg", "1"), ("exp_avg_sq", "2")):
        codes, table, largest = (saved.get(part + number) for part in ("state", "qmap", "absmax"))
        if not isinstance(codes, torch.Tensor) or codes.shape != shape:
            raise ValueError(
                f"state{number} that bitsandbytes saved for {name} is {'missing' if codes is None else f'of shape {tuple(codes.shape)}'}; "
                f"expected an Adam's state of shape {tuple(shape)}: load its own state, or start from the weights alone"
            )
        if codes.dtype != torch.uint8:
            states[key] = codes.float()  # small parameters have FP32 states
            continue
        maxima = largest if isinstance(largest, torch.Tensor) else torch.zeros(0, device="cpu")
        blocks = [n for n in _BLOCKS if maxima.numel() == -(-codes.numel() // n)]
        if not blocks or not isinstance(table, torch.Tensor) or table.numel() != 256:
            raise ValueError(f"state{number} that bitsandbytes saved for {name} lacks its table of 256 values or its blocks' maxima")
        scales = maxima.float().repeat_interleave(blocks[0])[: codes.numel()]
        states[key] = (table.float()[codes.flatten().long()] * scales).view(shape)
    return states

"""ScalingTensor: a low-precision payload and its scale as one torch.Tensor."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from msamp.numerics import tensor_ops
from msamp.numerics.formats import Format, of_dtype
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

PLAIN = (torch.Tensor, torch.nn.Parameter)  # by `type(x)`: neither a ScalingTensor nor another subclass
OWN_ATTRIBUTES = ("payload", "scale_inv", "_is_param", "_tally")  # a ScalingTensor's own attributes; any other was set by the user


class Tally:
    """Counts that a kernel took while it wrote a payload, valid until the payload changes; a deep copy is None.

    Args:
        tally: int64, as `ops.pack` returns it.
        payload: the payload. An inference tensor has no version counter to show changes, so its tally is never valid.
    """

    def __init__(self, tally: torch.Tensor, payload: torch.Tensor) -> None:
        self._tally, self._payload = tally, weakref.ref(payload)
        self._version = None if payload.is_inference() else payload._version

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def of(self, payload: torch.Tensor) -> torch.Tensor | None:
        """Return the tally if it belongs to this payload and the payload has not changed; else None."""
        same = self._version is not None and self._payload() is payload and payload._version == self._version
        return self._tally if same else None


def _conversion(dtype: torch.dtype) -> Any:
    return lambda self, **kwargs: self.to(dtype, **kwargs)


class ScalingTensor(torch.Tensor):
    """A tensor stored as `payload` (native FP8 or FP16) and `scale_inv`; its value is `payload * scale_inv` (FP8-LM 2.1).

    It looks like a tensor of `dtype` (the outer dtype, which its gradients have), works as a Parameter and in `.grad`, and is saved and
    loaded with its payload unchanged. A conversion to a dtype gives plain values; `clone` and `copy.deepcopy` keep the format, so that a
    copied state dict is loaded bit for bit. It supports the operations in `tensor_ops.TABLE`, elementwise ones and `torch._foreach_*`; any
    other raises an error that names the operation and suggests `dequantize`. Values assigned to `.data` are copied into the payload.

    Attributes:
        payload: FP8 or FP16, the shape of the tensor.
        scale_inv: FP32, 0-dim, one for the whole tensor. NaN marks a tensor quantized from values that were not finite; see `store_`.
        label: of a weight, its name in the model, for messages; "" without one.
    """

    payload: torch.Tensor
    scale_inv: torch.Tensor
    label: str = ""
    _tally: Tally | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # see __torch_dispatch__, below autograd

    @staticmethod
    def __new__(
        cls, payload: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, tally: torch.Tensor | None = None
    ) -> ScalingTensor:
        fmt = of_dtype(payload.dtype)
        if not fmt.scaled:
            raise ValueError(f"a payload of {payload.dtype} has no scale; use torch.float8_e4m3fn, torch.float8_e5m2 or torch.float16")
        if scale_inv.dtype != torch.float32 or scale_inv.numel() != 1:
            raise ValueError(f"scale_inv is {scale_inv.dtype} of shape {tuple(scale_inv.shape)}; it must be one torch.float32 value")
        tensor: ScalingTensor = torch.Tensor._make_wrapper_subclass(
            cls, payload.shape, strides=payload.stride(), dtype=dtype, device=payload.device, requires_grad=False
        )
        tensor.payload, tensor.scale_inv, tensor._tally = payload, scale_inv, None if tally is None else Tally(tally, payload)
        return tensor

    @classmethod
    def of(cls, payload: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> ScalingTensor:
        """Return what the constructor does for a contiguous payload in a scaled format, without its checks: for casts of many tensors."""
        tensor: ScalingTensor = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=dtype, device=payload.device)
        tensor.payload, tensor.scale_inv, tensor._tally = payload, scale_inv, None
        return tensor

    @classmethod
    def quantize(cls, x: torch.Tensor, fmt: Format, scale: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> ScalingTensor:
        """Quantize `x` with one scale; with its own just-in-time scale if `scale` is None.

        Args:
            x: FP32, BF16 or FP16, any shape.
            fmt: E4M3, E5M2 or FP16.
            scale: FP32, 0-dim power of two. If it is None and `x` contains non-finite values, the result is poisoned: its `scale_inv` is
                NaN, so that readers see them although the payload saturates.
            dtype: the outer dtype; default: the dtype of `x`.
        """
        x = x.detach()
        if scale is not None:
            return cls(quantize(x, scale, fmt), inverse(scale), dtype or x.dtype)
        amax = TENSORWISE.amax(x)
        scale = scale_from_amax(amax, fmt.max)
        return cls(quantize(x, scale, fmt), inverse(scale).masked_fill(~amax.isfinite(), float("nan")), dtype or x.dtype)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without its history; see the setter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Torch's setter would swap the storage of the wrapper, which has none, and leave payload and scale unchanged.
        if value.shape != self.shape:
            raise ValueError(f"values of shape {tuple(value.shape)} for a weight of shape {tuple(self.shape)}; create a new Parameter")
        with torch.no_grad():
            self.detach().copy_(value)

    @property
    def format(self) -> Format:
        """The format of the payload."""
        return of_dtype(self.payload.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor of `dtype` (the outer dtype by default), `payload * scale_inv` rounded once."""
        return dequantize(self.payload, self.scale_inv, dtype or self.dtype)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like torch's; a dtype that is named gives plain values of it, a copy also where it is the tensor's own."""
        named = next((getattr(x, "dtype", x) for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype | torch.Tensor)), None)
        if named != self.dtype or tensor_ops.KEEPING.get():
            return super().to(*args, **kwargs)
        return (self * 1).to(*args, **kwargs)  # plain, and differentiable

    float, double = _conversion(torch.float32), _conversion(torch.float64)
    half, bfloat16 = _conversion(torch.float16), _conversion(torch.bfloat16)

    @property
    def tally(self) -> torch.Tensor | None:
        """int64 [3]: what a kernel such as `ops.pack` counted when it wrote the payload; None without counts, or once the payload has
        changed. Deep copies, results of operations and saved tensors have none."""
        return None if self._tally is None else self._tally.of(self.payload)

    def store_(self, value: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Overwrite the values in place with `value` (FP32, same shape), quantized with `scale` or just in time. What is not finite becomes
        NaN, and the other values stay what they are."""
        value = value.where(value.isfinite(), torch.nan)
        scale = scale_from_amax(TENSORWISE.amax(value.nan_to_num()), self.format.max) if scale is None else scale
        new = type(self).quantize(value, self.format, scale)
        self.payload.copy_(new.payload)
        self.scale_inv.copy_(new.scale_inv)

    def __get_tensor_shard__(self, index: Any) -> ScalingTensor:
        """What torch.distributed.checkpoint loads into: an alias that nothing watches, since it loads the scales too, before or after."""
        return type(self)(self.payload.detach(), self.scale_inv, self.dtype)

    def share_memory_(self) -> ScalingTensor:
        """Raise a ValueError: the wrapper has no storage to share, and torch would crash. Share `payload` and `scale_inv`."""
        raise ValueError("a ScalingTensor cannot be moved to shared memory; share its payload and its scale_inv instead")

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as a NumPy array, as a plain tensor of the outer dtype returns them (NumPy has no BF16)."""
        x = self.detach() if force else self
        return x.dequantize().requires_grad_(x.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists of numbers."""
        return self.dequantize().tolist()

    def storage(self) -> Any:
        """Raise a ValueError: the wrapper has no storage, which safetensors and accelerate would write to a file."""
        raise ValueError(
            "a low-precision weight has no storage that could be written to a file; call msamp.save_plain(model, optimizer) once after "
            "msamp.initialize, so that the model saves plain weights, or save msamp.fp8_state_dict(model), which contains plain tensors, "
            "or save with torch.save (accelerate: safe_serialization=False)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # On the meta device, and while torch.compile traces, which logs them, the inner tensors have no values.
        scale_inv = "unknown" if self.scale_inv.is_meta or type(self.scale_inv) is not torch.Tensor else f"{self.scale_inv.item():g}"
        return f"ScalingTensor({self.format}, shape={tuple(self.shape)}, scale_inv={scale_inv}, as {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["payload", "scale_inv"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any) -> ScalingTensor:
        return cls(inner["payload"], inner["scale_inv"], dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingTensor:
        """A copy that shares no memory with this tensor. A parameter's has no gradient, as the copy of any torch.nn.Parameter: otherwise
        the copy of a model would have the gradients of its FP8 weights but not of its biases."""
        if not isinstance(self, torch.nn.Parameter):
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call, no-any-return]
        g, self.grad = self.grad, None
        try:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call, no-any-return]
        finally:
            self.grad = g

    def __reduce_ex__(self, protocol: Any) -> Any:
        # An FP8 payload is pickled as bytes: plain pickle does not support float8 storage.
        # A slice of a larger payload, as an expert's, is copied first: pickle would write all of that payload for each slice.
        alone = self.payload.untyped_storage().nbytes() == self.payload.nbytes
        payload = self.payload if alone else self.payload.clone()
        payload = payload.view(torch.uint8) if payload.itemsize == 1 else payload
        flags = (self.requires_grad, isinstance(self, torch.nn.Parameter))
        attributes = {name: value for name, value in vars(self).items() if name not in OWN_ATTRIBUTES}
        return _rebuild, (payload, self.payload.dtype, self.scale_inv, self.dtype, *flags, *([attributes] if attributes else []))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op, kwargs = tensor_ops.TABLE.get(func) or tensor_ops.by_schema(func), kwargs or {}
        if op is None:
            parts = func.decompose(*args, **kwargs)  # in inference mode torch dispatches composite operations as a whole
            if parts is not NotImplemented:
                return parts
            raise tensor_ops.undefined(func, (args, kwargs))
        return op(func, *args, **kwargs)


def fp32_values(x: torch.Tensor) -> torch.Tensor:
    """Return the values of a ScalingTensor or a plain float tensor, detached, as FP32; `x` itself if it is plain FP32."""
    return x.dequantize(torch.float32) if isinstance(x, ScalingTensor) else x.detach().float()


def not_exportable(what: str) -> ValueError:
    """Return the error for an export whose format has no low-precision weights with a scale."""
    return ValueError(
        f"{what}: it has no form for low-precision weights with a scale; build the model without msamp.initialize, load "
        "msamp.plain_state_dict(model, optimizer) into it, and export that"
    )


def _rebuild(
    payload: torch.Tensor,
    payload_dtype: torch.dtype,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    attributes: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    tensor: torch.Tensor = ScalingTensor(payload.view(payload_dtype), scale_inv, dtype)
    tensor = torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)
    vars(tensor).update(attributes or {})
    return tensor


torch.serialization.add_safe_globals([ScalingTensor, _rebuild])


def contiguous(g: torch.Tensor) -> torch.Tensor:
    """Return `g` contiguous and detached, without a copy if it is contiguous."""
    if isinstance(g, ScalingTensor):
        return g if g.payload.is_contiguous() else ScalingTensor(g.payload.contiguous(), g.scale_inv, g.dtype)
    if type(g) is not torch.Tensor or g.requires_grad:
        g = g.detach()
    return g if g.is_contiguous() else g.contiguous()

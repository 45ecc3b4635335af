"""FP8Gradient: what `p.grad` is after a backward whose gradient was cast to FP8, or is still to be averaged over several processes.

A gradient in FP8 takes half the bytes of a BF16 one. A loop may do anything to `p.grad`: read it, clip it, slice it, overwrite it through
a view, accumulate a second backward into it. So this tensor has the dtype of its parameter and is stored in one of two forms:

- narrow, a ScalingTensor: an FP8 payload and one scale. Multiplying by one number (clipping, GradScaler) changes the scale, and no element
  is rounded. Zeroing keeps this form too.
- wide, a plain tensor of the parameter's dtype, from the first other write on. Summing in E4M3 would lose most of each small gradient.

On several processes the values are fetched when they are first used, and nothing is computed if they are not
(`msamp.comm.visible_gradients`).

All aliases of one gradient (`p.grad.detach()`, `p.grad.data`, views) share one `_Cell`, so a write through any of them reaches `p.grad`. A
view remembers how it was taken: a read takes the view of the dequantized values, a write takes it of the wide form. Operations return plain
tensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from msamp.numerics.tensor import ScalingTensor

aten = torch.ops.aten
View = Callable[[torch.Tensor], torch.Tensor]

_ALIASES = (aten.detach.default, aten.alias.default)
_ZEROING = (aten.zero_.default, aten._foreach_zero_.default)
_UNSCALING = (aten._amp_foreach_non_finite_check_and_unscale_.default,)
_BY_NUMBER = (
    *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar),
    *(aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar),
)
_NORMS = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)


class _Cell:
    """The state that all aliases of one gradient share.

    Attributes:
        held: the values, a ScalingTensor (narrow) or a plain tensor (wide); fetched when they are first used.
        fetched: whether `held` exists.
        narrow_dtype: of the payload of the narrow form, which zeroing restores; None leaves a wide gradient wide.
        zeroed: whether nothing but zeros has been stored since the last cast, apart from what one backward may have added.
        edited: whether the gradient was written to.
    """

    __slots__ = ("_held", "edited", "fetch", "narrow_dtype", "zeroed")

    def __init__(self, held: ScalingTensor | None, fetch: Callable[[], torch.Tensor] | None = None) -> None:
        self._held: torch.Tensor | None = held
        self.fetch = fetch
        self.narrow_dtype = None if held is None else held.payload.dtype
        self.zeroed = self.edited = False

    @property
    def fetched(self) -> bool:
        return self._held is not None

    @property
    def held(self) -> torch.Tensor:
        if self._held is None:
            assert self.fetch is not None
            self._held = self.fetch()
        return self._held

    @held.setter
    def held(self, held: torch.Tensor) -> None:
        self._held = held

    def widen(self) -> None:
        if isinstance(self.held, ScalingTensor):
            self.held = self.held.dequantize()

    def written(self) -> None:
        """Increment the version of a wide form, which torch does not do below autograd. A ScalingTensor increments its own."""
        self.edited = True
        if not isinstance(self.held, ScalingTensor):
            torch.autograd.graph.increment_version([self.held])

    def zero_(self) -> None:
        if not isinstance(self.held, ScalingTensor) and self.narrow_dtype is not None:
            payload = torch.empty(self.held.shape, dtype=self.narrow_dtype, device=self.held.device)
            self.held = ScalingTensor(payload, payload.new_ones((), dtype=torch.float32), self.held.dtype)
        self.held.zero_()
        self.zeroed = self.edited = True


class FP8Gradient(torch.Tensor):
    """A gradient of the dtype of its parameter that is stored in FP8 until something adds to it or overwrites it.

    If any value of the gradient was not finite, all of it reads as NaN.

    Args:
        narrow: the gradient in FP8, contiguous, in the parameter's dtype.
    """

    _cell: _Cell
    _views: tuple[View, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # see __torch_dispatch__, below autograd

    @staticmethod
    def __new__(cls, narrow: ScalingTensor) -> FP8Gradient:
        payload = narrow.payload
        gradient = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=narrow.dtype, device=payload.device)
        gradient._cell, gradient._views = _Cell(narrow), ()
        return gradient  # type: ignore[no-any-return]

    @classmethod
    def awaited(cls, p: torch.Tensor, fetch: Callable[[], torch.Tensor]) -> FP8Gradient:
        """A gradient of `p` whose values `fetch` returns when they are first used: contiguous, a ScalingTensor or plain, in p's dtype."""
        gradient = torch.Tensor._make_wrapper_subclass(cls, p.shape, dtype=p.dtype, device=p.device)
        gradient._cell, gradient._views = _Cell(None, fetch), ()
        return gradient  # type: ignore[no-any-return]

    @classmethod
    def _alias(cls, cell: _Cell, like: torch.Tensor, views: tuple[View, ...]) -> FP8Gradient:
        """An alias of a cell in the shape, strides and dtype of `like`."""
        alias = torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=cell.held.device)
        alias._cell, alias._views = cell, views
        return alias  # type: ignore[no-any-return]

    @property
    def held(self) -> torch.Tensor:
        """The gradient as it is stored, a ScalingTensor or a plain tensor, which the optimizer reads. Do not call it on a view."""
        return self._cell.held

    @property
    def fetched(self) -> bool:
        """Whether the values have been used; always, but for `awaited` gradients."""
        return self._cell.fetched

    @property
    def edited(self) -> bool:
        """Whether the gradient, or an alias of it, was written to."""
        return self._cell.edited

    def expire(self, error: Callable[[], torch.Tensor]) -> None:
        """Call `error` instead of fetching values, from now on."""
        self._cell.fetch = error

    @property
    def was_zeroed(self) -> bool:
        """Whether a wide form is the sum of zeros and one backward, so that it can become narrow again."""
        return self._cell.zeroed

    def narrow_to(self, held: ScalingTensor) -> None:
        """Replace the stored gradient by `held`, in all aliases."""
        self._cell.held, self._cell.zeroed = held, False

    def applied(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The gradient after a conversion `fn` of `nn.Module._apply`, such as `.to(device)`; FP8 stays FP8."""
        moved = fn(self._cell.held)
        return FP8Gradient(moved) if isinstance(moved, ScalingTensor) else moved

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """The values as a plain tensor; a write to it may not reach the gradient."""
        held = self._cell.held
        return self._viewed(held.dequantize() if isinstance(held, ScalingTensor) else held)

    def _viewed(self, values: torch.Tensor) -> torch.Tensor:
        for view in self._views:
            values = view(values)
        return values

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The gradient without its history; see the setter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Torch's setter would swap the storage of the wrapper, which has none.
        if value.shape != self.shape:
            raise ValueError(f"values of shape {tuple(value.shape)} for a gradient of shape {tuple(self.shape)}; assign to p.grad instead")
        with torch.no_grad():
            self.detach().copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a NumPy array, as a plain tensor returns them (NumPy has no BF16)."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists of numbers."""
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not self.fetched:
            return f"FP8Gradient(awaited, shape={tuple(self.shape)}, as {self.dtype})"
        return f"FP8Gradient({self._cell.held!r})" if not self._views else f"FP8Gradient({self.dequantize()!r})"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A gradient of the same form that shares no memory with this one; for a view, a copy of its values."""
        if id(self) not in memo:
            memo[id(self)] = self.dequantize().clone() if self._views else _rebuild(_own(self._cell.held))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._views:
            return self.dequantize().clone().__reduce_ex__(protocol)
        return _rebuild, (_own(self._cell.held),)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:
            return cls._alias(args[0]._cell, args[0], args[0]._views)
        written = _written(func, args, kwargs)
        if written:
            return _write(func, written, args, kwargs)
        if func.is_view:
            parts = func.decompose(*args, **kwargs)  # in inference mode torch dispatches composite operations as a whole
            return cls._views_of(func, args, kwargs) if parts is NotImplemented else parts
        if func is aten._foreach_norm.Scalar:  # one by one, so that the dequantized values of one gradient at a time are in memory
            return [func([_values(x, torch.float32)], *args[1:], **kwargs)[0] for x in args[0]]
        dtype = torch.float32 if func in _NORMS else None
        return func(*tree_map(lambda x: _values(x, dtype), args), **tree_map(lambda x: _values(x, dtype), kwargs))

    @classmethod
    def _views_of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        like = func(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *args[1:], **kwargs)
        if isinstance(like, torch.Tensor):
            return cls._alias(x._cell, like, (*x._views, lambda values: func(values, *args[1:], **kwargs)))
        return [
            cls._alias(x._cell, view, (*x._views, lambda values, i=i: func(values, *args[1:], **kwargs)[i]))  # type: ignore[misc]
            for i, view in enumerate(like)
        ]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[FP8Gradient]:
    """The gradients among the arguments that an operation writes to."""
    gradients: list[FP8Gradient] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            gradients += [x for x in tree_leaves(value) if isinstance(x, FP8Gradient)]
    return gradients


def _write(func: Any, written: Sequence[FP8Gradient], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that writes to gradients, and return what torch returns."""
    whole = not any(x._views for x in written)
    if func in _ZEROING and whole:
        for x in tree_leaves(args[0]):
            x._cell.zero_() if isinstance(x, FP8Gradient) else x.zero_()
        return None if isinstance(args[0], list | tuple) else args[0]
    by_number = func in _BY_NUMBER and not isinstance(args[1], FP8Gradient | ScalingTensor)
    on_stored = whole and (func in _UNSCALING or (by_number and (not isinstance(args[1], torch.Tensor) or args[1].numel() == 1)))
    for x in () if on_stored else written:
        x._cell.widen()
    own = {id(x): x._cell.held if on_stored else x._viewed(x._cell.held) for x in written}
    back = {id(own[id(x)]): x for x in written}

    def stored(x: Any) -> Any:
        return own[id(x)] if id(x) in own else _values(x)

    result = func(*tree_map(stored, args), **tree_map(stored, kwargs))
    for cell in {id(x._cell): x._cell for x in written}.values():
        cell.written()
    return tree_map(lambda x: back.get(id(x), x), result)


def _values(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Return an argument with each gradient replaced by its plain values, in `dtype` or, if None, in the gradient's own dtype."""
    if not isinstance(x, FP8Gradient):
        return x
    held = x._cell.held
    if dtype is not None and isinstance(held, ScalingTensor):
        return x._viewed(held.dequantize(dtype))
    return x.dequantize()


def _own(held: torch.Tensor) -> torch.Tensor:
    """Return a copy in separate memory, since the payloads of several gradients share one buffer."""
    if isinstance(held, ScalingTensor):
        return ScalingTensor(held.payload.clone(), held.scale_inv.clone(), held.dtype)
    return held.detach().clone()


def _rebuild(held: torch.Tensor) -> torch.Tensor:
    return FP8Gradient(held) if isinstance(held, ScalingTensor) else held


torch.serialization.add_safe_globals([FP8Gradient, _rebuild])


def while_alive(method: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """Return a hook that calls a bound method with `given` and its own arguments while the method's object lives, and then does nothing:
    hooks live in autograd's graph, where the collector does not find a cycle back to the object."""
    return functools.partial(_call, weakref.ref(method.__self__), method.__func__, given)  # type: ignore[attr-defined]


def _call(of: weakref.ref[Any], function: Callable[..., Any], given: tuple[Any, ...], *args: Any) -> Any:
    owner = of()
    return None if owner is None else function(owner, *given, *args)

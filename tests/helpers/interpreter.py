"""Leave out what Triton's interpreter does again and again: half of a kernel's time under it. No result changes.

A kernel under the interpreter spends its time in Python, not in NumPy: each operation makes the types of its operands and of its result
anew, checks their shapes and compares them dimension by dimension.
"""

import functools
from typing import Any

import pytest


def interpret_faster(patch: pytest.MonkeyPatch) -> None:
    """Keep what the interpreter computes anew at each call or operation: where it put its functions, NumPy's dtypes, types of blocks."""
    _functions_once(patch)
    _dtypes_once(patch)
    _types_once(patch)


def _functions_once(patch: pytest.MonkeyPatch) -> None:
    """It puts its functions into `triton.language` at each call of a function within a kernel, where they are since the kernel started."""
    import triton.language as tl
    from triton.runtime import interpreter

    put_in = interpreter._patch_lang

    def put_in_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        there = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return None if there else put_in(fn)  # a call within a kernel takes nothing back

    patch.setattr(interpreter, "_patch_lang", put_in_once)


def _dtypes_once(patch: pytest.MonkeyPatch) -> None:
    """It makes a table of dtypes for each look into it."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtype_of = interpreter._get_np_dtype
    of_scalar = functools.cache(dtype_of)

    def known_dtype_of(dtype: Any) -> Any:
        scalar = dtype.scalar
        return dtype_of(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    patch.setattr(interpreter, "_get_np_dtype", known_dtype_of)


def _types_once(patch: pytest.MonkeyPatch) -> None:
    """It checks and wraps the shape of a block for each type and each value, and compares shapes that are the same object."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    check, wrap, broadcast = tl.block_type.__init__, tl.tensor.__init__, TritonSemantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if type(element_ty) is not tl.dtype or any(type(size) is not int for size in sizes):
            check(self, element_ty, shape)  # blocks of pointers, and what is refused
            return
        if (element_ty.name, sizes) not in blocks:
            check(self, element_ty, shape)
            blocks[element_ty.name, sizes] = dict(self.__dict__)
        self.__dict__.update(blocks[element_ty.name, sizes])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors or isinstance(type.scalar, tl.pointer_type):
            wrap(self, handle, type)
            tensors[type.name] = {"shape": self.shape, "numel": self.numel, "dtype": self.dtype}
            return
        self.handle, self.type = handle, type
        self.__dict__.update(tensors[type.name])

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(tl.block_type, "__init__", block_type)
    patch.setattr(tl.tensor, "__init__", tensor)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_impl_value)
    # It computes each sum, difference and product of integers again in INT64 for an assertion, which it leaves out: a third of its time.
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)

"""`differentiable_once`: a decorator for backwards that must not be differentiated again.

torch's `once_differentiable` raises only if the incoming gradient requires a gradient. If an FP8 layer is last, that gradient does not, but
the input's gradient still depends on the weight, so a gradient penalty or a Hessian product would silently be None or zero. A
gradient that raises when it is differentiated would not help either, since `torch.autograd.grad` ignores gradients without a path to its
inputs. So this decorator raises as soon as a backward with `create_graph=True` reaches the layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad


def check_transforms(label: str, *xs: torch.Tensor | None) -> None:
    """Raise a RuntimeError naming the layer if it is called or differentiated under a torch.func transform (vmap, jvp, jacrev, ..), or in
    forward mode. Call it only where torch.compile does not trace.

    Args:
        label: of the layer's weight; may be "".
        xs: the inputs of its forward, or the gradients of its backward.
    """
    # Every layer runs this check twice per step, so the usual case takes few calls.
    batched = torch._C._are_functorch_transforms_active()
    for x in xs:
        if x is not None and is_legacy_batchedtensor(x):
            batched = True
    forward_mode = forward_ad._current_level >= 0 and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in xs)
    if forward_mode or batched:
        derivative = "a forward-mode derivative" if forward_mode else "a torch.func transform"
        raise RuntimeError(
            f"{label or 'a low-precision layer'} was called under {derivative} (vmap, jvp, jacrev, vectorize=True, is_grads_batched=True), "
            "which FP8 layers do not support; use backward() and a loop, or do not convert the layer: msamp.initialize(..., "
            "accept=msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r'...')))"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function that only has a first derivative. Put it under `@staticmethod`.

    The error message names the layer if `ctx.label` does.

    Raises:
        RuntimeError: in a backward with `create_graph=True`.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code refuses second derivatives itself
            with torch.no_grad():
                return backward(ctx, *grads)
        label = getattr(ctx, "label", "")
        check_transforms(label, *grads)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward with create_graph=True reached {label or 'a low-precision layer'}, which has no second "
                "derivative (gradient penalties and Hessian products require one); do not convert the layers that it reaches: "
                "msamp.initialize(..., accept=msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r'...')))"
            )
        return backward(ctx, *grads)

    return once

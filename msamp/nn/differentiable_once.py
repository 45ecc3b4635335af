"""`differentiable_once`: a backward that refuses to be differentiated again, always.

Torch's `once_differentiable` refuses only where the gradient that comes in requires one itself. With an FP8 layer last it does not: the
gradient of the input depends on the weight, which is a saved tensor, and a gradient penalty or a Hessian product would come out as None or
zero without an error. A gradient that raises where it is differentiated would not help either, since `torch.autograd.grad` never asks a
gradient that has no path to its inputs. So a backward under `create_graph=True` is refused when it reaches the layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


def check_transforms(label: str, *xs: torch.Tensor | None) -> None:
    """RuntimeError naming a layer that is called or differentiated within a transform of torch.func (vmap, jvp, jacrev, ..), or with a
    forward-mode derivative.

    Args:
        label: of the layer's weight; may be "".
        xs: the inputs of its forward, or the gradients of its backward.
    """
    if torch.compiler.is_compiling():
        return
    given = [x for x in xs if x is not None]
    forward_mode = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in given)
    batched = torch._C._are_functorch_transforms_active() or any(map(torch._C._functorch.is_legacy_batchedtensor, given))
    if forward_mode or batched:
        how = "a forward-mode derivative" if forward_mode else "a torch.func transform"
        raise RuntimeError(
            f"{label or 'a low-precision layer'} was called with {how} (vmap, jvp, jacrev, vectorize=True, is_grads_batched=True), for "
            "which FP8 layers have no rule; use backward() and a loop, or keep the layer as it is: msamp.initialize(..., "
            "accept=msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r'...')))"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function that has a first derivative alone. Put it under `@staticmethod`.

    A name of the layer in `ctx.label` is part of the message.

    Raises:
        RuntimeError: in a backward with `create_graph=True`.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        check_transforms(getattr(ctx, "label", ""), *grads)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled code refuses second derivatives itself
            raise RuntimeError(
                f"a backward with create_graph=True has reached {getattr(ctx, 'label', '') or 'a low-precision layer'}, whose gradients "
                "cannot be differentiated twice (gradient penalties, Hessian products); keep the layers that it reaches as they are: "
                "msamp.initialize(..., accept=msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r'...')))"
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return once

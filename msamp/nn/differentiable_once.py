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


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function that has a first derivative alone. Put it under `@staticmethod`.

    A name of the layer in `ctx.label` is part of the message.

    Raises:
        RuntimeError: in a backward with `create_graph=True`.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled code refuses second derivatives itself
            raise RuntimeError(
                f"a backward with create_graph=True has reached {getattr(ctx, 'label', '') or 'a low-precision layer'}, whose gradients "
                "cannot be differentiated twice (gradient penalties, Hessian products); keep the layers that it reaches as they are: "
                "msamp.initialize(..., accept=msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r'...')))"
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return once

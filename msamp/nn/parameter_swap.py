"""Replace the contents of a Parameter and keep the Python object.

A training loop may collect parameters before it converts the model: to clip, average or freeze them, or for a second optimizer. Conversion
changes the class, format and memory of a weight. If it created a new Parameter, all these lists would hold a weight that nothing reads. So
conversion swaps the contents of two tensors and keeps the objects, as `torch.utils.swap_tensors` does. That function alone is not enough:

- Python attributes move with the contents, so this module first copies them to the new contents.
- Hooks (`register_hook`, `register_post_accumulate_grad_hook`) stay listed but never fire; assigning the list again registers them.
- A gradient moves with the contents, so this module puts it back.
- It rejects weak references, which stay valid here, and graphs of an earlier forward. Such a graph keeps the former contents, and its
  backward raises.

A view (`p.view(-1)`, `p[0]`) and an autograd node with its own hooks cannot follow the swap. `check_swappable` finds both before
anything changes. A detached copy (`p.detach()`, `p.data`, `model.state_dict()`) cannot be found: it keeps the
former values.
"""

import gc
from collections.abc import Callable, Container, Mapping
from types import FrameType
from typing import Any

import torch

from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import OWN_ATTRIBUTES, ScalingTensor
from msamp.numerics.tensor_ops import keeping_format

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_swappable(params: Mapping[str, torch.Tensor]) -> None:
    """Check that `swap_contents_` can replace the contents of each parameter, by name in the model.

    Raises:
        ValueError: if a view or the autograd node of a parameter is alive; names the first one.
    """
    if not any(map(_is_referenced, params.values())):
        return
    gc.collect()  # references from garbage cycles do not count
    held = {id(p): name for name, p in params.items() if _is_referenced(p)}
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        # Not isinstance, which would instantiate lazy proxies.
        bases = [id(x._base) for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x._base is not None]
    what, name = "a view of it", next((held[base] for base in bases if base in held), None)
    if name is None:
        what, name = "its autograd node, which may have hooks,", next((name for name, p in params.items() if _holds_node(p, held)), None)
    if name is not None:
        raise ValueError(
            f"{name} cannot be replaced in place: {what} is alive and would keep the former weight; delete it before msamp.initialize or "
            "model.to and recreate it afterwards (a copy by p.detach().clone() may stay)"
        )


def _holds_node(p: torch.Tensor, held: Container[int]) -> bool:
    """Whether an object or container holds a parameter's autograd node, as for a hook on it. A graph of an earlier forward has none."""
    if id(p) not in held or not p.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(p).node
    return any(not isinstance(holder, FrameType) for holder in gc.get_referrers(node))


def _is_referenced(p: torch.Tensor) -> bool:
    """Whether a view or a graph references the contents of `p`, besides the Python object."""
    return bool(p._use_count() > 1)  # type: ignore[attr-defined]


def swap_contents_(p: torch.Tensor, new: torch.Tensor, *, transposed: bool = False) -> None:
    """Swap the contents of `p` and `new`. `p` remains the same object, with its Python attributes, hooks and gradient.

    Args:
        p: a leaf that `check_swappable` accepts.
        new: a Parameter that nothing else holds; its own attributes override the attributes of `p`.
        transposed: whether `new` is the transpose of `p`; then the gradient is transposed too.
    """
    gradient, p.grad = p.grad, None
    if p.requires_grad and _is_referenced(p):
        torch.autograd.graph.get_gradient_edge(p).node.register_prehook(_refuse_backward)
    kept = {name: value for name, value in vars(p).items() if name not in OWN_ATTRIBUTES}
    vars(new).update(kept | vars(new))
    p.__class__, new.__class__ = new.__class__, p.__class__
    p.__dict__, new.__dict__ = new.__dict__, p.__dict__
    torch._C._swap_tensor_impl(p, new)  # type: ignore[attr-defined]
    if gradient is not None:
        p.grad = gradient.t() if transposed else gradient
    for name in _HOOKS:  # listed hooks fire again, and their handles stay valid
        if getattr(p, name) is not None:
            setattr(p, name, getattr(p, name))


def apply_(p: ScalingTensor, function: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    """Apply the function of a `Module._apply`, such as a cast or a move to another device, to a low-precision parameter and its gradient.

    Torch swaps in a new tensor even if the function changes nothing, without the hooks and attributes of `p`.

    Args:
        p: a leaf.
        function: returns the new contents of `p`, and its new gradient.
        name: of `p`, for the message.

    Raises:
        ValueError: if the contents change while a view or the autograd node of `p` is alive.
    """
    with torch.no_grad(), keeping_format():
        new = function(p)
    if isinstance(new, ScalingTensor) and new.payload is p.payload and new.dtype == p.dtype:
        return
    if p._use_count() > 2:  # type: ignore[attr-defined]  # more than the object and the graph of the last backward
        check_swappable({p.label or name: p})
    gradient, p.grad = p.grad, None
    swap_contents_(p, torch.nn.Parameter(new, requires_grad=p.requires_grad))
    if gradient is not None:
        with torch.no_grad(), keeping_format():
            p.grad = gradient.applied(function) if isinstance(gradient, FP8Gradient) else function(gradient)


def _refuse_backward(*_: Any) -> None:
    raise RuntimeError(
        "this graph is from a forward before msamp converted the model, or before model.to changed its weights, and its gradients would "
        "reach no parameter; run the forward again"
    )

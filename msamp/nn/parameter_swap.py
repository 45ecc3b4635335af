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
anything changes, and names who holds them. A detached copy (`p.detach()`, `p.data`, `model.state_dict()`) cannot be found: it keeps the
former values.
"""

import gc
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import OWN_ATTRIBUTES, ScalingTensor

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_swappable(params: Mapping[str, torch.Tensor]) -> None:
    """Check that `swap_contents_` can replace the contents of each parameter.

    Args:
        params: by name in the model, for the message.

    Raises:
        ValueError: if a view or the autograd node of a parameter is alive; names the first one, and who holds it.
    """
    if not any(map(_is_referenced, params.values())):
        return
    gc.collect()  # references from garbage cycles do not count
    held = {id(p): name for name, p in params.items() if _is_referenced(p)}
    described = (_held_view(held) or _held_node(held, params)) if held else None
    if described is not None:
        name, what, holder = described
        raise ValueError(
            f"{name} cannot be replaced in place: {what} is alive, held by {holder}, and would keep the former weight; delete it "
            "before msamp.initialize or model.to and recreate it afterwards (a copy by p.detach().clone() may stay)"
        )


def _held_view(held: Mapping[int, str]) -> tuple[str, str, str] | None:
    """Find a live view of a parameter; return the parameter's name, a description and the holder. It does not return the view itself, since
    an exception keeps the variables of the functions that it passes through."""
    view = _live_view(held)
    return None if view is None else (held[id(view._base)], "a view of it", _holder(view) or "an object that Python does not list")


def _live_view(ids: Container[int]) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        # Not isinstance, which would instantiate lazy proxies.
        alive = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
        return next((x for x in alive if x._base is not None and id(x._base) in ids), None)


def _held_node(held: Mapping[int, str], params: Mapping[str, torch.Tensor]) -> tuple[str, str, str] | None:
    """Like `_held_view`, for a parameter's autograd node that some Python object holds."""
    for name, p in params.items():
        holder = _holder(torch.autograd.graph.get_gradient_edge(p).node) if id(p) in held and p.requires_grad else None
        if holder is not None:
            return name, "its autograd node, which may have hooks,", holder
    return None


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
    _register_hooks_again(p)


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
    with torch.no_grad():
        new = function(p)
    if isinstance(new, ScalingTensor) and new.payload is p.payload and new.dtype == p.dtype:
        return
    if p._use_count() > 2:  # type: ignore[attr-defined]  # more than the object and the graph of the last backward
        check_swappable({p.label or name: p})
    gradient, p.grad = p.grad, None
    swap_contents_(p, torch.nn.Parameter(new, requires_grad=p.requires_grad))
    if gradient is not None:
        with torch.no_grad():
            p.grad = gradient.applied(function) if isinstance(gradient, FP8Gradient) else function(gradient)


def _register_hooks_again(p: torch.Tensor) -> None:
    """Register the hooks of a parameter again after a swap. Their handles stay valid."""
    for name in _HOOKS:
        listed = getattr(p, name)
        if listed is not None:
            setattr(p, name, listed)


def _refuse_backward(*_: Any) -> None:
    raise RuntimeError(
        "this graph is from a forward before msamp converted the model, or before model.to changed its weights, and its gradients would "
        "reach no parameter; run the forward again"
    )


def _holder(x: Any) -> str | None:
    """Describe who holds an object: a variable, an attribute or a container; None if no Python object does."""
    frame = sys._getframe(1)
    while frame is not None:
        variable = None
        if frame.f_globals.get("__name__") != __name__:
            variables = frame.f_locals
            variable = _key(variables, x) or _key(frame.f_globals, x)
            if frame.f_code.co_flags & inspect.CO_NEWLOCALS and type(variables) is dict:
                variables.clear()  # before Python 3.13 a copy that the frame keeps, and `x` with it
        if variable is not None:
            return f"the variable {variable!r} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    for container in gc.get_referrers(x):
        if isinstance(container, list | tuple | set | dict):
            return _described(container, x)
        name = _key(getattr(container, "__dict__", {}), x)
        if name is not None:
            return f"the attribute {name!r} of a {type(container).__name__}"
    return None


def _described(container: Any, x: Any) -> str:
    """Describe a container that holds `x`, by its attribute or variable if there is one."""
    key = _key(container, x) if isinstance(container, dict) else None
    for owner in gc.get_referrers(container):
        names = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if names is container:
            return f"the attribute {key!r} of a {type(owner).__name__}"
        name = _key(names, container)
        if name is not None:
            return f"the {type(container).__name__} {name!r}" + ("" if isinstance(owner, dict) else f" of a {type(owner).__name__}")
    return f"a {type(container).__name__}" + ("" if key is None else f" under {key!r}")


def _key(names: Mapping[Any, Any], x: Any) -> Any:
    return next((name for name, value in list(names.items()) if value is x), None)

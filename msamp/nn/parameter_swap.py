"""Give a Parameter new contents and keep the Python object.

A loop takes lists of parameters before it converts the model: to clip, to average, to freeze, for a second optimizer. Conversion changes
the class, the format and the memory of a weight. If it made a new Parameter, all these lists would hold a weight that nothing reads. So
the contents of two tensors are exchanged and the objects stay, as `torch.utils.swap_tensors` does it. That function alone is not enough:

- Python attributes move with the contents: they are copied to the new contents first.
- Hooks (`register_hook`, `register_post_accumulate_grad_hook`) stay listed and never fire: setting the list again registers it.
- A gradient belongs to the contents: it is put back.
- It refuses weak references, which stay valid here, and graphs that an earlier forward has left. Such a graph keeps the former contents,
  and its backward raises.

What cannot follow is a view (`p.view(-1)`, `p[0]`) and an autograd node with hooks of its own. `check_swappable` finds both before
anything has changed, and names who holds them. A detached copy (`p.detach()`, `p.data`, `model.state_dict()`) cannot be found: it keeps
the former values.
"""

import gc
import inspect
import sys
from collections.abc import Container, Mapping
from typing import Any

import torch

from msamp.numerics.tensor import OWN_ATTRIBUTES

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_swappable(params: Mapping[str, torch.Tensor]) -> None:
    """Check that `swap_contents_` can replace the contents of each parameter.

    Args:
        params: by name in the model, for the message.

    Raises:
        ValueError: naming the first parameter of which a view or the autograd node is alive, and who holds that.
    """
    if not any(map(_is_referenced, params.values())):
        return
    gc.collect()  # what is only held by a cycle of garbage is nobody's
    held = {id(p): name for name, p in params.items() if _is_referenced(p)}
    found = (_held_view(held) or _held_node(held, params)) if held else None
    if found is not None:
        name, what, holder = found
        raise ValueError(
            f"{name} cannot be converted in place: {what} is alive, held by {holder}, and would keep the unconverted weight; delete it "
            "before the conversion and make it again afterwards (a copy by p.detach().clone() may stay)"
        )


def _held_view(held: Mapping[int, str]) -> tuple[str, str, str] | None:
    """A live view of a parameter: the parameter's name, what it is, its holder. Nothing that would hold the view stays behind: an exception
    keeps the variables of the functions that it has passed."""
    view = _live_view(held)
    return None if view is None else (held[id(view._base)], "a view of it", _holder(view) or "an object that Python does not list")


def _live_view(ids: Container[int]) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        # By type: isinstance would wake lazy proxies.
        alive = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
        return next((x for x in alive if x._base is not None and id(x._base) in ids), None)


def _held_node(held: Mapping[int, str], params: Mapping[str, torch.Tensor]) -> tuple[str, str, str] | None:
    """As `_held_view`, for the autograd node of a parameter where something in Python holds it."""
    for name, p in params.items():
        holder = _holder(torch.autograd.graph.get_gradient_edge(p).node) if id(p) in held and p.requires_grad else None
        if holder is not None:
            return name, "its autograd node, which may have hooks,", holder
    return None


def _is_referenced(p: torch.Tensor) -> bool:
    """Whether a view or a graph, and not only Python's object, points to the contents of `p`."""
    return bool(p._use_count() > 1)  # type: ignore[attr-defined]


def swap_contents_(p: torch.Tensor, new: torch.Tensor, *, transposed: bool = False) -> None:
    """Give `p` the contents of `new`. The object, its Python attributes, its hooks and its gradient stay; `new` takes the former contents.

    Args:
        p: a leaf that `check_swappable` accepts.
        new: a Parameter that nobody else holds; its own attributes win over those of `p`.
        transposed: whether the rows of `new` are the columns of `p`: the gradient is turned with it.
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
    register_hooks_again(p)


def register_hooks_again(p: torch.Tensor) -> None:
    """Let the hooks of a parameter fire that was swapped, here or by torch in `model.to`. Their handles stay valid."""
    for name in _HOOKS:
        listed = getattr(p, name)
        if listed is not None:
            setattr(p, name, listed)


def _refuse_backward(*_: Any) -> None:
    raise RuntimeError(
        "this graph is of a forward before msamp converted the model, and its gradients would reach no parameter; run the forward again"
    )


def _holder(x: Any) -> str | None:
    """Who holds an object, in words: a variable, an attribute or an entry of a container; None where it is nobody in Python."""
    frame = sys._getframe(1)
    while frame is not None:
        found = None
        if frame.f_globals.get("__name__") != __name__:
            variables = frame.f_locals
            found = _key(variables, x) or _key(frame.f_globals, x)
            if frame.f_code.co_flags & inspect.CO_NEWLOCALS and type(variables) is dict:
                variables.clear()  # before Python 3.13 a copy that the frame keeps, and `x` with it
        if found is not None:
            return f"the variable {found!r} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    for container in gc.get_referrers(x):
        if isinstance(container, list | tuple | set | dict):
            return _described(container, x)
        name = _key(getattr(container, "__dict__", {}), x)
        if name is not None:
            return f"the attribute {name!r} of a {type(container).__name__}"
    return None


def _described(container: Any, x: Any) -> str:
    """A container that holds `x`, with the attribute or variable that it is where one is found."""
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

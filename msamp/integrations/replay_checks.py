"""What would make the replay of a captured training step wrong, for `msamp.capture`.

A replay launches the kernels of one step again, with the same addresses, and runs no Python. So it is wrong once modules, parameters or
states are others than those of the capture (`Probe`), if the step changes Python's state (`changed_flags`), or if other code has hooks
in the step (`foreign_hook`). What the host reads during the step is found by `msamp.kernels.cuda_graph.HostReads`.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.nn.decoder_families import CACHES
from msamp.nn.scaling_state import TensorScales
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.states import local

CONSTANTS = {bool, int, float, str, type(None), torch.dtype, torch.device}
WINDOWS = "the windows of delayed scaling"
_OTHERS = (
    WINDOWS,
    "the memory of parameters, buffers or optimizer states",
    "requires_grad of a parameter",
    "the optimizer's groups",
    "clip_grad",
)
_SENT = ("lr", "weight_decay", "betas", "momentum", "dampening")  # a replay reads our optimizers' from the device, but not whether it is 0
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Probe:
    """What a graph depends on, as it was when this object was made: modules, flags, the memory of tensors, the optimizer's groups. It is
    compared before each replay, so it is quick.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, own: LoopOptimizer | None) -> None:
        self._optimizer, self._own = optimizer, own
        modules = dict(model.named_modules())
        self._scales = [vars(module) for module in modules.values() if isinstance(module, TensorScales)]
        self._names = [f"module {name or type(module).__name__!r}" for name, module in modules.items()]
        self._picks = [(operator.itemgetter("_modules", *_HOOKS, *flags(module)), vars(module)) for module in modules.values()]
        # Not the buffers of scales: whatever replaces them replaces the layer's weight too.
        plain = [module._buffers for module in modules.values() if not isinstance(module, TensorScales)]
        self._holders = [held for held in (*(module._parameters for module in modules.values()), *plain) if held]
        self._params = list(model.parameters())
        held = [x for own in self._holders for x in own.values() if x is not None]
        tensors = [*held, *self._states()]
        shards = [*map(local, tensors)]
        self._sharded = [x for x, shard in zip(tensors, shards, strict=True) if shard is not x]
        self._scaled = [x for x in shards if type(x) is ScalingTensor]
        self._parts = [x.payload if type(x) is ScalingTensor else x for x in shards]
        self._kept = [*modules.values(), *tensors, *shards, *self._parts]  # alive, so that nothing else gets their identity
        self._seen = [[tuple(dict(x) if isinstance(x, dict) else x for x in own) for own in self._of_modules()], *self._of_tensors()]
        self._versions = self._written()

    def _states(self) -> list[torch.Tensor]:
        return [x for state in self._optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]

    def _of_modules(self) -> list[tuple[Any, ...]]:
        """Return each module's children, hooks and flags. They are compared in C: a large model has thousands."""
        return [pick(own) for pick, own in self._picks]

    def _of_tensors(self) -> list[Any]:
        """Return what `_OTHERS` names."""
        sent = _SENT if self._own else ()
        return [
            [own["_filled"] for own in self._scales],
            [
                [id(x) for own in self._holders for x in own.values()],
                [id(x) for x in self._states()],
                [id(local(x)) for x in self._sharded],
                [id(x.payload) for x in self._scaled],
                [x.data_ptr() for x in self._parts],
            ],
            [p.requires_grad for p in self._params],
            [
                [*map(id, group["params"]), *(bool(x) if key in sent else x for key, x in group.items() if type(x) in {*CONSTANTS, tuple})]
                for group in self._optimizer.param_groups
            ],
            None if self._own is None else self._own.clip_grad,
        ]

    def _written(self) -> list[int]:
        return [x._version for x in self._parts]

    def changed(self) -> str | None:
        """Return the name of something that is no longer what it was, apart from values of tensors; None if nothing has changed."""
        try:
            now = [self._of_modules(), *self._of_tensors()]
        except KeyError:  # a flag is gone
            return "a flag of a module"
        if now == self._seen:
            return None
        names, values, before = [*self._names, *_OTHERS], [*now[0], *now[1:]], [*self._seen[0], *self._seen[1:]]
        return next(name for name, value, old in zip(names, values, before, strict=True) if value != old)

    def has_gradient(self) -> bool:
        """Return whether a parameter has a gradient."""
        return any(p.grad is not None for p in self._params)

    def measured(self) -> bool:
        """Return whether a precision guard or a recorder measures this step."""
        return any(own["watches"] or own["checks"] for own in self._scales)

    def wrote(self) -> bool:
        """Return whether something wrote a weight or a state since `launched`."""
        return self._written() != self._versions

    def launched(self) -> None:
        """Note the versions of weights and states after a replay."""
        self._versions = self._written()


def check_no_gradients(model: nn.Module) -> None:
    """Raise a ValueError that names the first parameter with a gradient."""
    name = next((name for name, p in model.named_parameters() if p.grad is not None), None)
    if name is not None:
        raise ValueError(
            f"parameter {name} has a gradient from outside the captured step, which a replay would not add to; call "
            "optimizer.zero_grad() first, or run every micro-batch inside forward_backward"
        )


def flags(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, strings and flags of a module, without the counts of `TensorScales`, which follow the device's."""
    own = vars(module)
    if isinstance(module, TensorScales):
        return {"training": own["training"], "raised": own.get("raised")}
    return {name: value for name, value in own.items() if type(value) in CONSTANTS}


def changed_flags(model: nn.Module, before: dict[nn.Module, dict[str, Any]]) -> str | None:
    """Return the name of a flag of a module that is not what it was; None if there is none."""
    for name, module in model.named_modules():
        known = before.get(module, {})
        for flag, value in flags(module).items():
            if flag not in known or (known[flag] != value and value == value):
                return f"{flag!r} of module {name or type(module).__name__!r}"
    return None


def foreign_hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name and place of a hook that is neither torch's nor this library's; None if there is none."""
    places: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        places += [(f"module {name or type(module).__name__!r}", hook) for kind in _HOOKS for hook in vars(module)[kind].values()]
    for name, p in model.named_parameters():
        hooks = (p._backward_hooks or {}, getattr(p, "_post_accumulate_grad_hooks", None) or {})
        places += [(f"parameter {name}", hook) for kind in hooks for hook in kind.values()]
    steps = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    places += [("the optimizer", hook) for kind in steps for hook in kind.values()]
    for place, hook in places:
        function = getattr(hook, "func", hook)  # of functools.partial
        function = getattr(function, "user_hook", function)  # what `unserializable_hook` and full backward hooks wrap
        where = getattr(function, "__module__", None) or type(function).__module__
        if where.partition(".")[0] not in ("torch", "msamp"):
            return f"{getattr(function, '__qualname__', type(function).__name__)} of {place}"
    return None


class NoCache:
    """A key-value cache of transformers that is empty and stays empty, see `masks_as_in_eager_steps`."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_query_offset(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, queries: Any, *args: Any) -> tuple[int, int]:
        return (queries if isinstance(queries, int) else len(queries)), 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


@contextlib.contextmanager
def masks_as_in_eager_steps(model: nn.Module) -> Iterator[None]:
    """Context in which decoders of transformers build no attention mask in a capture where they build none in an eager step.

    Without a mask and packed positions, transformers computes causal attention by a flag, and PyTorch by its fastest kernel. While CUDA
    captures, transformers cannot look whether positions are packed, and builds a mask of [queries, keys]. It does not look if there is a
    cache. So a model that is called without positions, which are never packed then, gets a cache that stays empty, and masks of its own for
    SDPA (`_causal_by_flag`).
    """

    def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config: Any = module.config
        caches = kwargs.get("use_cache", config.use_cache) and not (module.training and getattr(module, "gradient_checkpointing", False))
        given = any(kwargs.get(name) is not None for name in (*CACHES, "attention_mask", "position_ids"))
        return None if given or caches or len(args) > 1 else (args, {**kwargs, _cache_of(module): NoCache()})

    decoders: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "save_pretrained")
        and hasattr(getattr(module, "config", None), "use_cache")
        and not getattr(module.config, "is_encoder_decoder", False)
        and _cache_of(module)
    ]
    by_flag = [module.config for module in decoders if getattr(module.config, "_attn_implementation", None) == "sdpa"]
    handles = [module.register_forward_pre_hook(give, with_kwargs=True) for module in decoders]
    for config in by_flag:
        config._attn_implementation = _causal_by_flag()
    try:
        yield
    finally:
        for config in by_flag:
            config._attn_implementation = "sdpa"
        for handle in handles:
            handle.remove()


def _cache_of(module: nn.Module) -> str:
    """Return the name of the cache among the arguments of `forward`; "" without."""
    return next((name for name in CACHES if name in inspect.signature(module.forward).parameters), "")


@functools.cache
def _causal_by_flag() -> str:
    """Register transformers' SDPA with masks that do not depend on whether CUDA captures, and return its name: up to transformers 5.17 at
    least, every mask is built then."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def mask(**given: Any) -> torch.Tensor | None:
        window, keys = given.get("local_size"), given["kv_length"]
        plain = given["allow_is_causal_skip"] and given["attention_mask"] is None and given["q_length"] == keys
        return None if plain and (window is None or keys < window) else sdpa_mask(**given)

    name = "sdpa_as_in_eager_steps"
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, mask)
    return name

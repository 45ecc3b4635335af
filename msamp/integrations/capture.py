"""`msamp.capture`: a training step of your own loop as one CUDA graph.

    def forward_backward(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    step = msamp.capture(model, optimizer, forward_backward)    # after msamp.initialize
    for x, y in batches:
        loss = step(x, y)                                       # forward, backward, optimizer.step() and zero_grad()
        scheduler.step()

Why: the host issues the thousands of kernels of a step one by one. In narrow models, and under FSDP2, which runs Python around every block,
that takes longer than the kernels themselves (`tools/bench/LOG.md`), so faster GEMMs alone gain nothing. A graph contains the kernels, the
collectives of NCCL, and the dependencies between streams, and is launched at once.

The first three steps are eager: they compile kernels, create optimizer states and communicators. The fourth is captured, and later ones
are replayed. Captured and eager steps have the same bits. While the windows of delayed scaling fill, casts have just-in-time scales, in a
graph as in eager steps; once they are full, a second graph is captured. On a CPU every step runs eagerly, through the same checks.

A replay runs none of the loop's Python: whatever the loop decides on the host would be decided once. `CapturedStep` lists what is looked
for, and then runs eagerly. Learning rates, weight decays and betas of the optimizer reach the graph. Whatever reads or writes weights
between steps, such as evaluation, an average of the weights (EMA), or saving and loading, works as with eager steps.
"""

import gc
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from msamp.integrations import replay_checks
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.kernels.cuda_graph import HostReads, capturing, unregistrable
from msamp.numerics.tensor import PLAIN

WARM_UP = 3  # eager steps before the first capture: kernels are compiled and chosen, tables and communicators exist
_EAGER, _CAPTURE, _REPLAY = range(3)
_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream")
_LOG = logging.getLogger("msamp")


class _Graph(NamedTuple):
    """A captured step: its graph, the memory of its inputs and of its result, and the bytes that it sends by kind and collective."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    result: Any
    sent: dict[tuple[str, str], int]


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_backward: Callable[..., Any],
    *,
    update: Callable[[], Any] | None = None,
    graphs: int = 4,
) -> "CapturedStep":
    """Return a function that runs a training step, from its fourth call on as one CUDA graph.

    Args:
        model: of `msamp.initialize`, or after `fully_shard`, on its device; also a plain model of torch.
        optimizer: of `msamp.initialize` or `msamp.integrations.fsdp.optimizer`, also if accelerate has prepared it; or one of torch with
            `capturable=True` and learning rates in tensors.
        forward_backward: called with a step's inputs; runs forward and backward of all micro-batches, all but the last one under
            `optimizer.no_sync()`, and returns the loss, or any tensors in tuples and dicts. Clip here, after the last backward, or by
            `clip_grad` of `msamp.initialize`.
        update: runs instead of `optimizer.step` between the backward and `zero_grad`.
        graphs: how many shapes of inputs get a graph; steps of others are eager. A graph keeps the memory of its step.

    Raises:
        ValueError: if the optimizer has other parameters or cannot be captured, or on several GPUs NCCL's collectives cannot.
    """
    return CapturedStep(model, optimizer, forward_backward, update, graphs)


class CapturedStep:
    """The function that `msamp.capture` returns.

    A call runs forward, backward, update and `zero_grad`, and returns what `forward_backward` returned, detached. Inputs are positional or
    by name: tensors, which are copied to the model's device, and constants such as numbers and strings, in tuples, lists and dicts. Every
    combination of shapes, dtypes and constants is captured in its second step. On several processes all must call it together, and a step
    is replayed if all can replay it: pad batches to a few lengths.

    Steps are eager, and one line in the log of `msamp` says why, if

    - `forward_backward` reads values of tensors on the host (`item`, `print`, `if tensor`, masks as indices, copies from or to the CPU),
      returns something other than tensors, or changes numbers, strings or flags that a module holds;
    - modules, parameters or the optimizer have hooks that are neither torch's nor this library's;
    - the model is on several devices, its collectives run on the host (gloo), or the capture fails.

    After modules, their hooks, `training` or other flags, `requires_grad`, the optimizer's groups, `clip_grad`, or the memory of weights
    and states have changed, a step is eager and the next one is captured. No check can see other state of Python: a counter in a closure,
    or a batch that `forward_backward` fetches itself.

    If `forward_backward` raises, the error reaches the caller and, on one process, the step's gradients are dropped.

    Attributes:
        captured: how often a step was captured.
        obstacle: why steps are eager, as in the log; None if nothing is in the way.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        forward_backward: Callable[..., Any],
        update: Callable[[], Any] | None = None,
        graphs: int = 4,
    ) -> None:
        inner = optimizer if isinstance(optimizer, LoopOptimizer) else getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        if (reason := unregistrable()) is not None:
            raise ValueError(f"a step cannot be captured in a CUDA graph: {reason}")
        if graphs < 1:
            raise ValueError(f"graphs is {graphs}; it must be at least 1, the number of input shapes that get a graph")
        self._own = inner if isinstance(inner, LoopOptimizer) else None
        for group in inner.param_groups if self._own is None else ():
            if not (group.get("capturable") and isinstance(group["lr"], torch.Tensor)):
                raise ValueError(
                    f"{type(inner).__name__} reads its learning rate {group['lr']} on the host; pass lr=torch.tensor(...) and "
                    "capturable=True, or the optimizer of msamp.initialize or msamp.integrations.fsdp.optimizer"
                )
        self.model, self.optimizer, self.forward_backward, self.graphs = model, inner, forward_backward, graphs
        self.update = update
        self.captured = 0
        self.obstacle: str | None = None
        self._check_parameters()
        self._logged: set[str] = set()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        everyone = dist.group.WORLD if dist.is_initialized() else None
        self._collective = everyone if self._own is None else self._own.group
        self._group = _host_group(self._collective)
        self._graphs: dict[Hashable, _Graph] = {}
        self._eager_steps: dict[Hashable, int] = {}  # by shape of inputs, with the current state
        self._probe: replay_checks.Probe | None = None
        self._shards = _sharded(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Collective.

        Raises:
            ValueError: for inputs without a tensor, or of types that a graph cannot read; or if the optimizer does not hold the model's
                parameters, or a parameter already has a gradient.
        """
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        inputs, key, filled = self._flat((args, kwargs), device)
        for module in self._shards:
            module.reshard()  # an evaluation leaves gathered weights, which a replay would not update
        self._note_changes()
        if self._probe is not None and self._probe.has_gradient():
            replay_checks.check_no_gradients(self.model)
        plan = self._agreed(self._plan(key, device))
        if plan == _EAGER:
            return self._eagerly(inputs, filled, key, device)
        if self._own is not None:  # before a capture too: a learning rate sent inside it would be used in every replay
            self._own.refresh(weights=self._probe is None or self._probe.wrote())
        first = key not in self._graphs
        if plan == _CAPTURE:
            torch.cuda.synchronize()
            if self._group is not None:
                dist.barrier(self._group)  # no rank may still be running an eager collective
            reason = self._capture(inputs, filled, key) if first else None
            if self._agreed(_REPLAY if reason is None else _EAGER) == _EAGER:
                self._give_up(reason or "another process could not capture its step")
                return self._eagerly(inputs, filled, key, device)
        return self._replay(self._graphs[key], inputs, first)

    def release(self) -> None:
        """Destroy the graphs and free their memory; the second step after that is captured again.

        Call it before `destroy_process_group`: NCCL cannot destroy a communicator while a graph contains its collectives.
        """
        if self._graphs:
            torch.cuda.synchronize()
        for done in self._graphs.values():
            done.graph.reset()
        self._graphs, self._eager_steps, self._pool = {}, {}, None

    def __deepcopy__(self, memo: Any) -> "CapturedStep":
        raise ValueError("a captured step cannot be copied or pickled, since forward_backward runs the original model; capture the copy's")

    def __reduce__(self) -> str:
        return self.__deepcopy__(None)  # type: ignore[return-value]

    def _flat(self, given: Any, device: torch.device) -> tuple[list[torch.Tensor], Hashable, Callable[[list[torch.Tensor]], Any]]:
        """Return the tensors of a step's inputs on the device, the key of their graph, and a function from such tensors to the inputs."""
        leaves, spec = tree_flatten(given)
        tensors = [x for x in leaves if type(x) in PLAIN]
        odd = [type(x).__name__ for x in leaves if type(x) not in PLAIN and type(x) not in replay_checks.CONSTANTS]
        if odd or not tensors:
            raise ValueError(
                f"inputs are {', '.join(odd) or 'no tensors'}; pass the batch as tensors, also in tuples, lists and dicts: they are copied "
                "to where the graph reads, and what forward_backward fetches itself would be the same in every replay"
            )
        if any(x.requires_grad for x in tensors):
            raise ValueError("an input requires a gradient, which a captured step does not return; detach it")
        tensors = [x.to(device, non_blocking=True) for x in tensors]
        constants = tuple((type(x), x) if type(x) not in PLAIN else None for x in leaves)
        shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors)
        places = [i for i, x in enumerate(leaves) if type(x) in PLAIN]

        def filled(held: list[torch.Tensor]) -> Any:
            values = list(leaves)
            for place, x in zip(places, held, strict=True):
                values[place] = x
            return tree_unflatten(values, spec)

        kind = device.type
        mode = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_grad_enabled()
        return tensors, (shapes, constants, str(spec), mode), filled

    def _check_parameters(self) -> None:
        """ValueError if the optimizer updates other parameters than the model's."""
        known = {id(p) for p in self.model.parameters()}
        odd = next((p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in known), None)
        if odd is not None:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(odd.shape)} that is not in this model; build it from model.parameters(), "
                "after fully_shard, and load weights by load_state_dict without assign=True, which replaces parameters"
            )

    def _note_changes(self, *, own: bool = False) -> None:
        """Drop the graphs if the model or the optimizer is no longer what they were captured from; `own`: by an eager step of this object,
        so that nothing new speaks for a capture."""
        changed = None if self._probe is None else self._probe.changed()
        if changed is not None and (self._graphs or not own):  # without graphs too: an eager step measures loaded states, a capture cannot
            if changed is not replay_checks.WINDOWS:
                self._say(f"{changed} changed since the last step; a step is eager, then one is captured")
            self.release()
        if changed is not None and changed is not replay_checks.WINDOWS and not own:
            self._check_parameters()
            self.obstacle = None
        if changed is not None or self._probe is None:
            self._probe, self._shards = replay_checks.Probe(self.model, self.optimizer, self._own), _sharded(self.model)

    def _plan(self, key: Hashable, device: torch.device) -> int:
        """Return what this process can do in this step."""
        assert self._probe is not None
        if not _graphs_on(device) or self.obstacle is not None or self._probe.measured():
            return _EAGER
        if self._own is not None and self._own.shard.stale:
            return _EAGER
        if key in self._graphs:
            return _REPLAY
        enough = self._eager_steps.get(key, 0) >= (1 if self.captured else WARM_UP)
        if not enough or not any(self.optimizer.state.values()):
            return _EAGER
        if (reason := self._refusal(device)) is not None:
            self._give_up(reason)
            return _EAGER
        if len(self._graphs) >= self.graphs:
            self._say(f"inputs have more than {self.graphs} shapes; steps of further ones are eager (pad batches, or raise graphs=)")
            return _EAGER
        return _CAPTURE

    def _refusal(self, device: torch.device) -> str | None:
        """Return why this model cannot be captured, if something outside `forward_backward` is the reason."""
        others = {str(p.device) for p in self.model.parameters()} - {str(device)}
        if others:
            return f"the model is on several devices, {device} and {', '.join(sorted(others))}"
        if _graphs_on(device) and self._group is not None and "nccl" not in str(dist.get_backend_config(self._collective)):
            return "gloo's collectives run on the host"
        hook = replay_checks.foreign_hook(self.model, self.optimizer)
        return None if hook is None else f"a replay would not run the hook {hook}"

    def _unrepeated(self, before: dict[nn.Module, dict[str, Any]], result: Any) -> str | None:
        """Return what a replay of the step that has just run would not repeat in Python."""
        changed = replay_checks.changed_flags(self.model, before)
        if changed is not None:
            return f"forward_backward changes {changed}, and a replay runs no Python"
        odd = [type(x).__name__ for x in tree_flatten(result)[0] if not isinstance(x, torch.Tensor) and x is not None]
        return f"forward_backward returns a {odd[0]}, which a replay does not compute; return tensors" if odd else None

    def _agreed(self, plan: int) -> int:
        """Return the least that any process plans. On the host: waiting for the GPU in every step would cost what the graph gains."""
        if self._group is None:
            return plan
        least = torch.tensor(plan, device="cpu")
        dist.all_reduce(least, dist.ReduceOp.MIN, self._group)
        return int(least)

    def _eagerly(self, inputs: list[torch.Tensor], filled: Callable[..., Any], key: Hashable, device: torch.device) -> Any:
        number = self._eager_steps[key] = self._eager_steps.get(key, 0) + 1
        if self.obstacle is not None or (not _graphs_on(device) and number != WARM_UP + 1):
            result = self._step(inputs, filled)
        elif not _graphs_on(device):
            watch, before = HostReads(), {module: replay_checks.flags(module) for module in self.model.modules()}
            with watch, replay_checks.masks_as_in_eager_steps(self.model):
                result = self._step(inputs, filled)
            reason = watch.found or self._unrepeated(before, result) or self._refusal(device)
            if reason is not None:
                self._give_up(reason)
        else:  # on the stream of the captures, for which tables, workspaces and autograd's nodes then exist
            self._stream = self._stream or torch.cuda.Stream(device)
            current = torch.cuda.current_stream(device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = self._step(inputs, filled)
            current.wait_stream(self._stream)
            result = tree_map(_copied, result)
        self._note_changes(own=True)
        return result

    def _step(self, inputs: list[torch.Tensor], filled: Callable[..., Any]) -> Any:
        args, kwargs = filled(inputs)
        try:
            result = self.forward_backward(*args, **kwargs)
            (self.update or self.optimizer.step)()  # looked up now, since schedulers replace it
        except BaseException:
            if self._group is None:
                self.optimizer.zero_grad()
                self.model.zero_grad()
            raise
        if self._own is not None:
            self._own.wait()  # for weights that ZeRO gathers: a graph ends with all of its streams joined
        self.optimizer.zero_grad()
        self.model.zero_grad()  # of parameters that the optimizer does not have
        return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)

    def _capture(self, inputs: list[torch.Tensor], filled: Callable[..., Any], key: Hashable) -> str | None:
        """Capture a step; return why that is impossible, or None."""
        held = [torch.empty_like(x).copy_(x) for x in inputs]
        gc.collect()  # an eager step's autograd graph that waits for it would bring its stream into the capture
        torch.cuda.empty_cache()  # the graph's pool cannot use what the allocator has cached
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        sync = None if self._own is None else self._own.grad_sync
        sent, before = {} if sync is None else sync.sent.rows(), {module: replay_checks.flags(module) for module in self.model.modules()}
        graph, watch = torch.cuda.CUDAGraph(), HostReads()
        torch.clear_autocast_cache()
        try:
            with replay_checks.masks_as_in_eager_steps(self.model), capturing(graph, pool=self._pool, stream=self._stream, watch=watch):
                result = self._step(held, filled)
                for stream in _streams(self.model):
                    torch.cuda.current_stream().wait_stream(stream)  # FSDP2's streams end with a wait, which a capture must join
            reason = self._unrepeated(before, result)
        except Exception as error:  # the step runs eagerly, and raises there if it is no fault of the capture
            reason = watch.found or f"its capture failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        torch.clear_autocast_cache()
        if reason is not None:
            graph.reset()
            if sync is not None:
                sync.clear()
            self.optimizer.zero_grad()
            return reason
        new = {} if sync is None else {what: size - sent.get(what, 0) for what, size in sync.sent.rows().items()}
        self._graphs[key] = _Graph(graph, held, result, new)
        self._probe = replay_checks.Probe(self.model, self.optimizer, self._own)
        self.captured += 1
        return None

    def _replay(self, done: _Graph, inputs: list[torch.Tensor], first: bool) -> Any:
        for place, x in zip(done.inputs, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        done.graph.replay()
        if self._own is not None:
            self._own.replayed()
            self._own.scaling.count()
            if self._own.grad_sync is not None and not first:  # the capture has counted once
                self._own.grad_sync.restore(())
                for (kind, collective), size in done.sent.items():
                    self._own.grad_sync.sent.add(kind, collective, size)
        if self._probe is not None:
            self._probe.launched()
        return tree_map(_copied, done.result)

    def _give_up(self, reason: str) -> None:
        self.release()
        self.obstacle = reason
        self._say(f"{reason}; steps are eager")

    def _say(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            _LOG.warning("msamp.capture: %s", line)


def _graphs_on(device: torch.device) -> bool:
    return device.type == "cuda"


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group of the same processes whose collectives run on the host; None for one process. Collective."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def _sharded(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 shards."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _streams(model: nn.Module) -> list[torch.cuda.Stream]:
    """Return the streams of FSDP2's collectives, which it has no public name for; none for other models."""
    for module in _sharded(model)[:1]:
        context = getattr(module._get_fsdp_state(), "_comm_ctx", None)
        streams = [getattr(context, name, None) for name in _STREAMS]
        if None in streams:
            raise ValueError(f"FSDP2 of torch {torch.__version__} has no streams {', '.join(_STREAMS)}")
        return streams  # type: ignore[return-value]
    return []

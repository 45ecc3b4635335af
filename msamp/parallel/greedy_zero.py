"""ZeRO that distributes tensors whole, scale and all (FP8-LM section 2.3, Algorithm 1, Figure 3).

What: N data-parallel ranks share the optimizer. Each tensor has one owner, which keeps master, m and v, takes the averaged gradient,
updates, and sends the new weight to all. Memory of states falls by N; a step sends one byte of gradient and one of weight a parameter
at O3.

Why whole tensors: an FP8 tensor has one scale. ZeRO that cuts the flat parameters at equal lengths would give many tensors two owners, with
a scale each or a collective for it. Algorithm 1 sorts tensors by size, largest first, and gives each to the rank with the least load:

    for tensor in sorted(tensors, largest first):
        owner = argmin over ranks of load
        load[owner] += elements of tensor

What was tried: with few large tensors and many ranks this balances badly, so what is too large is cut along its rows
(`msamp.comm.partition`). Owners agree on the amax of each tensor, so that its pieces keep one scale. `tools/reproduce/results/table8.csv`
compares the loads.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.bucket import Bucket, Segment, as_bytes
from msamp.comm.grad_sync import GradSync
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.kept_states import kept_states, update_of
from msamp.optim.shard import Holding
from msamp.optim.states import begun, is_scaled, payload, scale_inv, view_of_rows
from msamp.optim.updates import formats_of


class ZeRO:
    """The part of an FP8AdamW that spreads its states over the data-parallel ranks: each updates the tensors, or rows of tensors, it owns.

        optimizer = FP8AdamW(groups, clip_grad=1.0, shard=ZeRO(sync))

    A step: the owner takes the averaged gradient of its pieces, all agree on the norm and on each tensor's amax (two small
    all-reduces), owners update, and the new weights are gathered bucket by bucket in the order in which forward needs
    them: FP8 weights in FP8, with a scale that every rank computes for itself. On a GPU the gathering goes on while the
    next forward runs, and a module waits for its own weights only; a CUDA graph of the forward needs all of them first
    (`wait`). Pieces of a cut tensor share its scales, and the norm is exact whatever the cut, so weights and states do not
    depend on the number of ranks for the same gradients.

    Args:
        sync: a GradSync built with `shard=True`, which knows every parameter of the optimizer that wants a gradient; call its `finish`
            before the optimizer's `step` and its `clear` after.
        overlap: let the gathering go on after `step`, on a GPU.

    Attributes:
        gathers: False leaves new weights with their owners: a benchmark sets it to measure the cost of gathering.

    Raises:
        ValueError: a `sync` that does not shard. The optimizer refuses a parameter that `sync` does not know (also one added later) or
            averages in another format, a vector with COAT's moments that it cuts, and a matrix of Muon's that it cuts.
    """

    def __init__(self, sync: GradSync, overlap: bool = True) -> None:
        if not sync.shard:
            raise ValueError("the synchroniser gives every rank all gradients; build it with shard=True, or leave out shard=ZeRO(...)")
        self.sync = sync
        self.gathers = True
        self._views: dict[Segment, tuple[torch.Tensor, slice | None]] = {}
        self._device = next(iter(sync.names)).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" and sync.peers.ranks > 1 and overlap else None
        self._pending: dict[Bucket, torch.cuda.Event] = {}
        if self._stream is not None:
            self.watch_forward()

    @property
    def ranks(self) -> int:
        """The ranks of the data-parallel group."""
        return self.sync.peers.ranks

    def check(self, group: Mapping[str, Any]) -> None:
        """ValueError for parameters that the synchroniser does not know, or averages in another format."""
        for p, formats in zip(group["params"], formats_of(group), strict=True):
            if not p.requires_grad:
                continue
            problem, gradient = None, formats["grad"]
            if p not in self.sync.names:
                problem = "is not known to the gradient synchroniser; build both anew after adding parameters to the model"
            elif self.sync.bucket_of(p).format.name != gradient:
                problem = (
                    f"is averaged in {self.sync.bucket_of(p).format} by the synchroniser, and its group has gradient format {gradient}; "
                    "give both the same"
                )
            elif p.dim() == 1 and any(fmt.group for _, fmt in kept_states(p, formats)) and self._is_cut(p):
                problem = "is a vector cut over several ranks, through groups of COAT's moments; give its group other formats"
            elif update_of(formats).whole and self._is_cut(p):
                problem = (
                    f"is cut over several ranks, and update {formats['update']!r} takes whole parameters; build the synchroniser with "
                    "whole=[the parameters of that update]"
                )
            if problem is not None:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} {problem}")

    def _is_cut(self, p: torch.Tensor) -> bool:
        bucket = self.sync.bucket_of(p)
        return any(segment.rows != p.shape[0] for segment in bucket.segments if bucket.params[segment.index] is p)

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        """The holdings that this rank owns, in parameter order."""
        return [holding for holding, _ in self._owned(wholes)]

    def _owned(self, wholes: Sequence[Holding]) -> list[tuple[Holding, Segment]]:
        owned: list[tuple[Holding, Segment]] = []
        for whole in wholes:
            for segment in self.sync.owned(whole.param):
                if segment not in self._views:
                    self._views[segment] = _view(whole.param, segment)
                weight, rows = self._views[segment]
                mine = Holding(whole.param, whole.group, whole.formats, whole.index, weight, rows, len(owned), key=whole.key)
                owned.append((mine, segment))
        return owned

    def ready(self, wholes: Sequence[Holding]) -> list[Holding]:
        """The holdings with an averaged gradient of `sync` on this rank."""
        found = []
        for holding, segment in self._owned(wholes):
            holding.grad = segment.grad
            if segment.grad is not None:
                mine, whole = scale_inv(holding.weight), scale_inv(holding.param)
                if holding.rows is not None and mine is not None and whole is not None:
                    mine.copy_(whole)  # loading a model changes only the parameter's own
                found.append(holding)
        return found

    def largest(self, table: torch.Tensor) -> torch.Tensor:
        return self.sync.peers.all_reduce(table, dist.ReduceOp.MAX, "the amaxes of gradients and optimizer states")

    def total(self, table: torch.Tensor) -> torch.Tensor:
        return self.sync.peers.all_reduce(table, dist.ReduceOp.SUM, "the gradient norm")

    def send_weights(self, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Send this rank's new weights and take the others', bucket by bucket."""
        if self.ranks == 1 or not self.gathers:
            return
        for bucket in reversed(self.sync.buckets):
            self._send_bucket(bucket, scale_invs)

    def _send_bucket(self, bucket: Bucket, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        if self._stream is None:
            self._exchange(bucket, scale_invs)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._exchange(bucket, scale_invs)
            self._pending[bucket] = self._stream.record_event()
            for p in bucket.params:
                if p in scale_invs:
                    scale_invs[p].record_stream(self._stream)

    def _exchange(self, bucket: Bucket, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        stored = [payload(p) for p in bucket.params]
        sizes = [0] * self.ranks
        for segment in bucket.segments:
            sizes[segment.owner] += segment.elements * stored[segment.index].element_size()
        parts = [as_bytes(_rows(stored[segment.index], segment).reshape(-1)) for segment in bucket.owned]
        own = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=stored[0].device)
        flat = self.sync.peers.all_gather(own, sizes, f"the weights of {bucket}")
        start = 0
        for segment in bucket.segments:
            target = _rows(stored[segment.index], segment)
            if segment.owner != self.sync.peers.rank:
                target.copy_(flat[start : start + target.nbytes].view(target.dtype).view(target.shape))
            start += target.nbytes
        scaled = ((p, scale_inv(p)) for i, p in enumerate(bucket.params) if i not in bucket.absent and p in scale_invs)
        here = [(mine, scale_invs[p]) for p, mine in scaled if mine is not None]
        if here:
            torch._foreach_copy_([mine for mine, _ in here], [new for _, new in here])

    def wait(self) -> None:
        """Let the compute stream wait for all weights that are still on their way."""
        for bucket in list(self._pending):
            self.wait_for(bucket)
        self._pending.clear()

    def wait_for(self, bucket: Bucket) -> None:
        """Let the compute stream wait for the weights of one bucket."""
        if bucket in self._pending:
            torch.cuda.current_stream(self._device).wait_event(self._pending[bucket])

    def watch_forward(self) -> None:
        """Before a module's forward, and before anything is saved or loaded, wait for weights that are still on their way.

        A module that computes with the weights of others, past their forward, yields these from `weight_holders()`.
        """
        model = self.sync.model()
        assert model is not None
        alive = weakref.ref(self)
        for module in model.modules():
            module.register_state_dict_pre_hook(functools.partial(_wait_for_all, alive))
            module.register_load_state_dict_pre_hook(functools.partial(_wait_for_all, alive))
            weight_holders = getattr(module, "weight_holders", None)
            holders = [] if weight_holders is None else list(weight_holders())
            if any(True for _ in module.parameters(recurse=False)):
                # Its children's too: nn.MultiheadAttention computes with the weight of its out_proj, past that one's forward.
                holders.append(module)
            if holders:
                buckets = {self.sync.bucket_of(p) for holder in holders for p in holder.parameters() if p in self.sync.names}
                module.register_forward_pre_hook(functools.partial(_wait_for, alive, buckets))

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """The states of whole parameters, gathered tensor by tensor, on the CPU of the group's first rank; collective."""
        owned, device = self._owned(wholes), wholes[0].param.device
        steps = torch.full((len(wholes),), -1.0, dtype=torch.float32)
        for holding, _ in owned:
            if state.get(holding.weight):
                steps[holding.index] = state[holding.weight]["step"]
        steps = self.sync.peers.all_reduce(steps.to(device), dist.ReduceOp.MAX, "the optimizer's step counts", None).cpu()
        found: dict[int, dict[str, torch.Tensor]] = {}
        for whole, step in zip(wholes, steps, strict=True):
            if step >= 0:
                mine = [(state[holding.weight], segment) for holding, segment in owned if holding.param is whole.param]
                gathered = self._gather_states(whole, mine)
                if self.sync.peers.rank == 0:
                    found[whole.index] = {"step": step.clone(), **gathered}
        return found

    def _gather_states(self, whole: Holding, owned: Sequence[tuple[Mapping[str, torch.Tensor], Segment]]) -> dict[str, torch.Tensor]:
        """The states of a parameter from those of its pieces, on the group's first rank; collective."""
        name, found = self.sync.names[whole.param], {}
        for declared, fmt in kept_states(whole.param, whole.formats):
            for key, like in begun(declared.key, fmt, whole.param).items():
                x, scale = torch.zeros_like(payload(like)), torch.zeros((), device=whole.param.device, dtype=torch.float32)
                for state, segment in owned:
                    _rows(x, segment).copy_(payload(state[key]))
                    own_scale = scale_inv(state[key])
                    scale = scale if own_scale is None else own_scale.clone()
                # Each byte is zero on every rank but its owner.
                self.sync.peers.all_reduce(as_bytes(x.reshape(-1)), dist.ReduceOp.SUM, f"{key} of {name}", None)
                self.sync.peers.all_reduce(scale, dist.ReduceOp.MAX, f"the scale of {key} of {name}", None)
                if self.sync.peers.rank == 0:
                    found[key] = ScalingTensor(x.cpu(), scale.cpu(), torch.float32) if is_scaled(like) else x.cpu()
        return found


def _view(p: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, slice | None]:
    """The rows of a parameter that an owner updates, in its memory. A piece of a cut parameter has its own copy of the scale, since each
    piece stores it."""
    if p.dim() == 0 or segment.rows == p.shape[0]:
        return p, None
    rows = slice(segment.row, segment.row + segment.rows)
    return view_of_rows(p, rows), rows


def _rows(x: torch.Tensor, segment: Segment) -> torch.Tensor:
    """A view of the rows of a segment."""
    return x[segment.row : segment.row + segment.rows] if x.dim() else x


def _wait_for(alive: "weakref.ref[ZeRO]", buckets: set[Bucket], *_: Any) -> None:
    shard = alive()
    if shard is not None:
        for bucket in buckets:
            shard.wait_for(bucket)


def _wait_for_all(alive: "weakref.ref[ZeRO]", *_: Any) -> None:
    shard = alive()
    if shard is not None:
        shard.wait()

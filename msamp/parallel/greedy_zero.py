"""ZeRO that assigns whole tensors to ranks, so that each FP8 tensor keeps its one scale (FP8-LM section 2.3, Algorithm 1, Figure 3).

N data-parallel ranks share the optimizer. Each tensor has one owner: it keeps master, m and v, receives the averaged gradient, updates the
weight and sends it to all ranks. The optimizer states per rank shrink by a factor of N, and at O3 a step communicates one byte of gradient
and one byte of weight per parameter.

Why whole tensors? Common ZeRO flattens all parameters and cuts the result into equal parts. Many tensors would then have two owners, and an
FP8 tensor would need either two scales or a collective to agree on one. Algorithm 1 sorts the tensors by size and gives each to the rank
with the smallest load:

    for tensor in sorted(tensors, largest first):
        owner = argmin over ranks of load
        load[owner] += elements of tensor

With few large tensors and many ranks this balances badly, so `msamp.comm.partition` cuts tensors that are too large along their rows. The
owners of such a tensor agree on its amax, and its pieces keep one scale. `tools/reproduce/results/table8.csv` compares the loads.

A step of a rank:

    averaged gradients of its pieces        from `GradSync(shard=True)`, which uses the same partition
    -> norm and amaxes                      two small all-reduces, so that all ranks clip and scale equally
    -> update of its pieces                 `msamp.optim.optimizer`; this class is its `Shard`
    -> all-gather of the new weights        bucket by bucket, in the order in which the next forward reads them, on a separate stream;
                                            with CUDA graphs at the start of the next step (`ZeRO.deferring`)

Next: `msamp.optim.shard` defines the interface, `msamp.comm.partition` the cut, and `msamp.parallel.data_parallel` builds both objects.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.bucket import Bucket, BucketPiece, as_bytes
from msamp.comm.collectives import Peers
from msamp.comm.grad_sync import GradSync
from msamp.nn.block import Wait
from msamp.numerics.fp8_gradient import while_alive
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.shard import Holding, Shard
from msamp.optim.states import begun, is_scaled, payload, scale_inv, view_of_rows
from msamp.optim.updates import formats_of, kept_states, update_of


class ZeRO(Shard):
    """The `Shard` of an optimizer that distributes its states over the data-parallel ranks: each rank updates the tensors, or rows of
    tensors, that it owns.

        optimizer = LowPrecisionOptimizer(groups, clip_grad=1.0, shard=ZeRO(sync))

    FP8 weights are gathered in FP8, and every rank computes their scales itself. On a GPU the all-gather overlaps with the next forward,
    where each module waits only for its own weights. Pieces of a cut tensor share its scales, and the norm is exact however tensors are
    cut, so for the same gradients weights and states do not depend on the number of ranks.

    A CUDA graph cannot wait for work outside it, so an all-gather in the graph of the update does not overlap with the graph of the next
    forward. Capture the update inside `deferring`, and call `start_gather` at the start of the forward's graph and `wait` at its end; set
    `deferred` after each replay, to True after the update's and to False after the forward's. In between only the owners have the new
    weights: `wait`, on every rank, before anything else reads them. A forward, `state_dict` or `load_state_dict` of the model raises until
    then.

    Args:
        sync: a GradSync built with `shard=True` that knows every parameter of the optimizer that requires a gradient; call its `finish`
            before the optimizer's `step` and its `clear` after.
        overlap: let the all-gather continue after `step`, on a GPU.

    Attributes:
        overlaps: whether all-gathers may overlap with the next forward.
        deferred: whether only the owners have the newest weights (`deferring`).

    Raises:
        ValueError: if `sync` does not shard. The optimizer rejects a parameter that `sync` does not know (also one added later) or averages
            in another format, a vector with COAT's moments that is cut, and a matrix of Muon's that is cut.
    """

    def __init__(self, sync: GradSync, overlap: bool = True) -> None:
        if not sync.shard:
            raise ValueError("the gradient synchronizer was built without sharding; build it with shard=True, or leave out shard=ZeRO(...)")
        super().__init__()
        self.sync = sync
        self.ranks = max(peers.ranks for peers in self._groups())  # the larger number, if other ranks share some parameters
        self._views: dict[BucketPiece, tuple[torch.Tensor, slice | None]] = {}
        self._columns: list[tuple[Peers, torch.Tensor]] | None = None
        self._device = next(iter(sync.names)).device
        self.overlaps = overlap and self.ranks > 1
        self.deferred = self._defers = self._watches = False
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" and self.overlaps else None
        self._pending: dict[Bucket, torch.cuda.Event] = {}
        # The buckets whose weights several ranks have, in the order in which a forward reads them; how many have been started; `ahead`.
        self._order = {bucket: i for i, bucket in enumerate(b for b in reversed(sync.buckets) if sync.peers_of(b).ranks > 1)}
        self._started, self._ahead = len(self._order), 0
        if self.overlaps:
            self.watch_forward()

    def _groups(self) -> list[Peers]:
        """Return the groups that shard the parameters of this rank."""
        return [self.sync.peers] if self.sync.others is None else [self.sync.peers, self.sync.others.peers]

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for a parameter that the synchronizer does not know, averages in another format, or must not cut."""
        for p, formats in zip(group["params"], formats_of(group), strict=True):
            if not p.requires_grad:
                continue
            problem, gradient = None, formats["grad"]
            if p not in self.sync.names:
                problem = "is unknown to the gradient synchronizer; rebuild synchronizer and optimizer after adding parameters to the model"
            elif self.sync.bucket_of(p).format.name != gradient:
                problem = (
                    f"is averaged in {self.sync.bucket_of(p).format} by the gradient synchronizer, but its group has gradient format "
                    f"{gradient}; use the same for both"
                )
            elif p.dim() == 1 and any(fmt.group for _, fmt in kept_states(p, formats)) and self._is_cut(p):
                problem = "is a vector cut over several ranks, across groups of COAT's moments; use other formats for its group"
            elif update_of(formats).whole and self._is_cut(p):
                problem = (
                    f"is cut over several ranks, but update {formats['update']!r} requires whole parameters; build the synchronizer with "
                    "whole=[the parameters of that update]"
                )
            if problem is not None:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} {problem}")

    def _is_cut(self, p: torch.Tensor) -> bool:
        bucket = self.sync.bucket_of(p)
        return any(piece.rows != p.shape[0] for piece in bucket.pieces if bucket.params[piece.index] is p)

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        """Return the holdings that this rank owns, in parameter order."""
        return [holding for holding, _ in self._owned(wholes)]

    def _owned(self, wholes: Sequence[Holding]) -> list[tuple[Holding, BucketPiece]]:
        owned: list[tuple[Holding, BucketPiece]] = []
        for whole in wholes:
            for piece in self.sync.owned(whole.param):
                if piece not in self._views:
                    p, own = whole.param, slice(piece.row, piece.row + piece.rows)
                    # A piece of a cut parameter has its own copy of the scale, since the update of each piece writes it.
                    self._views[piece] = (p, None) if p.dim() == 0 or piece.rows == p.shape[0] else (view_of_rows(p, own), own)
                weight, rows = self._views[piece]
                part = Holding(whole.param, whole.group, whole.formats, whole.index, weight, rows, len(owned), key=whole.key)
                owned.append((part, piece))
        return owned

    def ready(self, wholes: Sequence[Holding]) -> list[Holding]:
        """Return the holdings for which `sync` has an averaged gradient on this rank."""
        self._sort(wholes)
        holdings = []
        for holding, piece in self._owned(wholes):
            holding.grad = piece.grad
            if piece.grad is not None:
                own_inv, whole = scale_inv(holding.weight), scale_inv(holding.param)
                if holding.rows is not None and own_inv is not None and whole is not None:
                    own_inv.copy_(whole)  # loading a model changes only the parameter's own
                holdings.append(holding)
        return holdings

    def _sort(self, wholes: Sequence[Holding]) -> None:
        """Find which ranks share which parameters, unless all are shared by the same."""
        if self.sync.others is None or (self._columns is not None and sum(len(index) for _, index in self._columns) == len(wholes)):
            return
        apart = [whole.param in self.sync.others.params for whole in wholes]
        groups = [[i for i, other in enumerate(apart) if other == here] for here in (False, True)]
        self._columns = [
            (peers, torch.tensor(index, dtype=torch.int64, device=self._device))
            for peers, index in zip(self._groups(), groups, strict=True)
        ]

    def _combine(self, table: torch.Tensor, dim: int, op: dist.ReduceOp.RedOpType, what: str) -> torch.Tensor:
        """Combine a table in place; its `dim` counts the parameters, each of which only the ranks that share it combine."""
        if self._columns is None:
            return self.sync.peers.all_reduce(table, op, what)
        for peers, index in self._columns:
            if peers.ranks > 1:
                table.index_copy_(dim, index, peers.all_reduce(table.index_select(dim, index), op, what))
        return table

    def largest(self, table: torch.Tensor) -> torch.Tensor:
        return self._combine(table, 1, dist.ReduceOp.MAX, "the amaxes of gradients and optimizer states")

    def total(self, table: torch.Tensor) -> torch.Tensor:
        return self._combine(table, 0, dist.ReduceOp.SUM, "the gradient norm")

    def gather_averages(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the averaged gradients of whole parameters, in the formats in which they are sent, for code that uses `p.grad`;
        collective."""
        averages: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in self.sync.buckets:
            peers, scaled = self.sync.peers_of(bucket), bucket.format.scaled
            own = torch.zeros(bucket.sizes[peers.rank], dtype=bucket.format.dtype, device=self._device)
            scale_invs = torch.zeros(len(bucket.params), dtype=torch.float32, device=self._device)
            for piece in bucket.owned:
                if piece.grad is not None:
                    bucket.part(piece, own).copy_(payload(piece.grad).reshape(-1))
                    inv = scale_inv(piece.grad)
                    if inv is not None and piece.row == 0:
                        scale_invs[piece.index] = inv
            if scaled:
                peers.all_reduce(scale_invs, dist.ReduceOp.SUM, f"the scales of the averages of {bucket}")
            wholes = bucket.unflatten(peers.all_gather(own, bucket.sizes, f"the averages of {bucket}"))
            for i, (p, whole) in enumerate(zip(bucket.params, wholes, strict=True)):
                if i not in bucket.absent:
                    averages[p] = ScalingTensor(whole, scale_invs[i], p.dtype) if scaled else whole
        return averages

    def replace_average(self, p: torch.Tensor, average: torch.Tensor | None) -> None:
        """Let this whole gradient, the same on all ranks, be the parameter's average in this step; None drops it."""
        fmt = self.sync.bucket_of(p).format
        if average is not None and not (isinstance(average, ScalingTensor) and average.format == fmt):
            (average,) = self._grad_cast([average.detach()], fmt)
        for piece in self.sync.owned(p):
            cut = p.dim() > 0 and piece.rows != p.shape[0]
            piece.grad = view_of_rows(average, slice(piece.row, piece.row + piece.rows)) if cut and average is not None else average

    def send_weights(self, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Set the scales of the new weights, and all-gather the weights, bucket by bucket, unless inside `deferring`."""
        if self.ranks == 1:
            return
        scaled = [(scale_inv(p), scale_invs[p]) for bucket in self._order for p in bucket.present() if p in scale_invs]
        pairs = [(kept, new) for kept, new in scaled if kept is not None]
        if pairs:
            torch._foreach_copy_([kept for kept, _ in pairs], [new for _, new in pairs])
        if self._defers:
            self.deferred = True
        else:
            self.start_gather()

    def start_gather(self, ahead: int | None = None) -> None:
        """Start to all-gather the weights, bucket by bucket, in the order in which the next forward reads them. Collective; running it
        again without an update in between changes nothing.

        Args:
            ahead: start only this many buckets now, and each later one when a module of the bucket so many places before it is about to
                run, or in `wait`. Every rank must run the same forward and then `wait`. None starts all. For CUDA graphs, whose branches
                seem to share few hardware queues in the order of capture: a forward that is captured after all gathers waits for most
                of them (20 ms of a step of 524, Llama-3-8B on four H200s).
        """
        self.deferred, self._started, self._ahead = False, 0, len(self._order) if ahead is None else ahead
        self._start(self._ahead)

    def _start(self, count: int) -> None:
        """Start the all-gathers of those of the first `count` buckets that have not been started."""
        for bucket in itertools.islice(self._order, self._started, count):
            self._started += 1
            if self._stream is None:
                self._exchange(bucket)
                continue
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._exchange(bucket)
                self._pending[bucket] = self._stream.record_event()

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Context in which `send_weights` leaves the all-gather to the next `start_gather` or `wait`."""
        if not self._watches:
            self.watch_forward()
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def _exchange(self, bucket: Bucket) -> None:
        # `data` keeps the weights' versions, by which the optimizer recognizes weights that were written from outside: it has counted this
        # write after the update.
        stored = [payload(p).data for p in bucket.params]
        peers = self.sync.peers_of(bucket)
        sizes = [0] * peers.ranks
        for piece in bucket.pieces:
            sizes[piece.owner] += piece.elements * stored[piece.index].element_size()
        parts = [as_bytes(_rows(stored[piece.index], piece).reshape(-1)) for piece in bucket.owned]
        own = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=stored[0].device)
        flat = peers.all_gather(own, sizes, f"the weights of {bucket}")
        start = 0
        for piece in bucket.pieces:
            target = _rows(stored[piece.index], piece)
            if piece.owner != peers.rank:
                target.copy_(flat[start : start + target.nbytes].view(target.dtype).view(target.shape))
            start += target.nbytes

    def wait(self) -> None:
        """Make the compute stream wait for all weights that are still being gathered. If they are `deferred`, gather them first: then
        collective, and not counted in `sync.sent`, which counts one all-gather per step."""
        if self.deferred:
            with self.sync.sent.uncounted():
                self.start_gather()
        self._start(len(self._order))
        for bucket in list(self._pending):
            self.wait_for(bucket)
        self._pending.clear()

    def wait_for(self, bucket: Bucket) -> None:
        """Make the compute stream wait for the weights of one bucket.

        Raises:
            RuntimeError: if the weights are `deferred`.
        """
        self._check_not_deferred()
        if bucket in self._pending:
            torch.cuda.current_stream(self._device).wait_event(self._pending[bucket])

    def _check_not_deferred(self) -> None:
        if self.deferred:
            raise RuntimeError(
                "the weights of the last step have not been gathered: its CUDA graphs leave that to the next step's. Call the optimizer's "
                "wait() on every rank before the model computes outside the graphs, or is saved or loaded"
            )

    def watch_forward(self) -> None:
        """Register hooks that wait for weights before each module's forward, and for all weights before the model is saved or loaded.

        A module that computes with the weights of other modules without calling them must yield these from `weight_holders()`.
        """
        self._watches = True
        model = self.sync.model()
        assert model is not None
        for module in model.modules():
            module.register_state_dict_pre_hook(Wait(while_alive(self._before_a_state)))
            module.register_load_state_dict_pre_hook(Wait(while_alive(self._before_a_state)))
            weight_holders = getattr(module, "weight_holders", None)
            holders = [] if weight_holders is None else list(weight_holders())
            if any(True for _ in module.parameters(recurse=False)):
                # Its children's too: nn.MultiheadAttention reads the weight of its out_proj without calling it.
                holders.append(module)
            if holders:
                read = [p for holder in holders for p in holder.parameters() if p in self.sync.names]
                buckets = list(dict.fromkeys(self.sync.bucket_of(p) for p in read))
                module.register_forward_pre_hook(Wait(while_alive(self._before_a_forward, buckets)))

    def _before_a_forward(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._start(self._order.get(bucket, -1) + 1 + self._ahead)
            self.wait_for(bucket)

    def _before_a_state(self) -> None:
        self._check_not_deferred()  # not gathered here, since one rank alone may save a state dict
        self.wait()

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]], *, everywhere: bool = False
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Gather the states of whole parameters, tensor by tensor, to the CPU of the group's first rank; collective.

        Raises:
            ValueError: if other ranks share some parameters, since the first rank's state would lack the experts of the other ranks.
        """
        if self.sync.others is not None:
            raise ValueError(
                "the optimizer's state dict would lack the experts of other ranks: save the states of each rank, as the trainer does"
            )
        owned, device = self._owned(wholes), wholes[0].param.device
        steps = torch.full((len(wholes),), -1.0, dtype=torch.float32, device="cpu")
        for holding, _ in owned:
            if state.get(holding.weight):
                steps[holding.index] = state[holding.weight]["step"]
        steps = self.sync.peers.all_reduce(steps.to(device), dist.ReduceOp.MAX, "the optimizer's step counts", None).cpu()
        states: dict[int, dict[str, torch.Tensor]] = {}
        for whole, step in zip(wholes, steps, strict=True):
            if step >= 0:
                own_states = [(state[holding.weight], piece) for holding, piece in owned if holding.param is whole.param]
                gathered = self._gather_states(whole, own_states, everywhere)
                if everywhere or self.sync.peers.rank == 0:
                    states[whole.index] = {"step": step.clone(), **gathered}
        return states

    def _gather_states(
        self, whole: Holding, owned: Sequence[tuple[Mapping[str, torch.Tensor], BucketPiece]], everywhere: bool
    ) -> dict[str, torch.Tensor]:
        """Assemble the states of a parameter from its pieces on the group's first rank, or on all; collective."""
        name, gathered = self.sync.names[whole.param], {}
        for declared, fmt in kept_states(whole.param, whole.formats):
            for key, like in begun(declared.key, fmt, whole.param).items():
                x, scale = torch.zeros_like(payload(like)), torch.zeros((), device=whole.param.device, dtype=torch.float32)
                for state, piece in owned:
                    _rows(x, piece).copy_(payload(state[key]))
                    own_scale = scale_inv(state[key])
                    scale = scale if own_scale is None else own_scale.clone()
                # Each byte is zero on every rank but its owner.
                self.sync.peers.all_reduce(as_bytes(x.reshape(-1)), dist.ReduceOp.SUM, f"{key} of {name}", None)
                self.sync.peers.all_reduce(scale, dist.ReduceOp.MAX, f"the scale of {key} of {name}", None)
                if everywhere or self.sync.peers.rank == 0:
                    gathered[key] = ScalingTensor(x.cpu(), scale.cpu(), torch.float32) if is_scaled(like) else x.cpu()
        return gathered


def _rows(x: torch.Tensor, piece: BucketPiece) -> torch.Tensor:
    """Return a view of the rows of a piece."""
    return x[piece.row : piece.row + piece.rows] if x.dim() else x

"""ZeRO that distributes tensors whole, scale and all (FP8-LM section 2.3, Algorithm 1, Figure 3)."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.bucket import Bucket, Segment, as_bytes
from msamp.comm.grad_sync import GradSync
from msamp.kernels.reference.adamw import MASTER
from msamp.numerics.formats import Format, by_name
from msamp.numerics.recipe import O2, REMAINDERS, StateFormats
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import FP8AdamW, LossScale, Piece
from msamp.optim.master import is_own_master
from msamp.optim.state_fp8 import state_format


class GreedyZeRO(FP8AdamW):
    """FP8AdamW whose states are spread over the data-parallel ranks: each updates the tensors, or rows of tensors, it owns.

    A step: the owner takes the averaged gradient of its pieces, all agree on the norm and on each tensor's amax (two small
    all-reduces), owners update, and the new weights are gathered bucket by bucket in the order in which forward needs
    them: FP8 weights in FP8, with a scale that every rank computes for itself. On a GPU the gathering goes on while the
    next forward runs, and a module waits for its own weights only; a CUDA graph of the forward needs all of them first
    (`wait`). Pieces of a cut tensor share its scales, and the norm is exact whatever the cut, so weights and states do not
    depend on the number of ranks for the same gradients.

    Args:
        params: as FP8AdamW; every parameter that wants a gradient must be known to `sync`.
        sync: a GradSync built with `shard=True`; call its `finish` before `step` and its `clear` after.
        overlap: let the gathering go on after `step`, on a GPU.
        The others: as FP8AdamW.

    Raises:
        ValueError: a parameter that `sync` does not know (also one added later), or a `sync` that does not shard; a vector with COAT's
            moments that the synchroniser cuts.
    """

    def __init__(
        self,
        params: Iterable[Any],
        sync: GradSync,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        formats: StateFormats = O2.states,
        decoupled: bool = True,
        clip_grad: float | None = None,
        combine_norms: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm,
        loss_scale: LossScale | None = None,
        overlap: bool = True,
    ) -> None:
        if not sync.shard:
            raise ValueError("the synchroniser gives every rank all gradients; build it with shard=True, or use FP8AdamW")
        self.sync = sync
        self._views: dict[Segment, tuple[torch.Tensor, slice | None]] = {}
        settings: dict[str, Any] = {"formats": formats, "decoupled": decoupled, "clip_grad": clip_grad}
        settings |= {"combine_norms": combine_norms, "loss_scale": loss_scale}
        super().__init__(params, lr, betas, eps, weight_decay, **settings)
        self._device = next(iter(sync.names)).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" and sync.peers.ranks > 1 and overlap else None
        self._pending: dict[Bucket, torch.cuda.Event] = {}
        if self._stream is not None:
            self._watch_forward()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As FP8AdamW; refuses parameters that the synchroniser does not know, or averages in another format."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for p in added["params"]:
            problem = None
            if p.requires_grad and p not in self.sync.names:
                problem = "is not known to the gradient synchroniser; build both anew after adding parameters to the model"
            elif p.requires_grad and self.sync.bucket_of(p).format.name != added["formats"]["grad"]:
                problem = (
                    f"is averaged in {self.sync.bucket_of(p).format} by the synchroniser, and its group has gradient format "
                    f"{added['formats']['grad']}; give both the same"
                )
            elif p.requires_grad and p.dim() == 1 and any(by_name(added["formats"][key]).group for key in "mv") and self._is_cut(p):
                problem = "is a vector cut over several ranks, through groups of COAT's moments; give its group other formats"
            if problem is not None:
                self.param_groups.pop()
                raise ValueError(f"a parameter of shape {tuple(p.shape)} {problem}")

    def _is_cut(self, p: torch.Tensor) -> bool:
        bucket = self.sync.bucket_of(p)
        return any(segment.rows != p.shape[0] for segment in bucket.segments if bucket.params[segment.index] is p)

    def pieces(self) -> list[Piece]:
        return [piece for piece, _ in self._owned()]

    def _owned(self) -> list[tuple[Piece, Segment]]:
        """What this rank owns, in parameter order."""
        owned: list[tuple[Piece, Segment]] = []
        for whole in super().pieces():
            for segment in self.sync.owned(whole.param):
                if segment not in self._views:
                    self._views[segment] = _view(whole.param, segment)
                weight, rows = self._views[segment]
                owned.append((Piece(whole.param, whole.group, whole.index, weight, rows, len(owned)), segment))
        return owned

    def _ready(self) -> list[Piece]:
        self.wait()
        pieces = []
        for piece, segment in self._owned():
            piece.grad = segment.grad
            if segment.grad is not None:
                if piece.rows is not None and isinstance(piece.param, ScalingTensor) and isinstance(piece.weight, ScalingTensor):
                    piece.weight.scale_inv.copy_(piece.param.scale_inv)  # loading a model changes only the parameter's own
                pieces.append(piece)
        return pieces

    def _combine_max(self, table: torch.Tensor) -> torch.Tensor:
        return self.sync.peers.all_reduce(table, dist.ReduceOp.MAX, "the amaxes of gradients and optimizer states")

    def _combine_sum(self, table: torch.Tensor) -> torch.Tensor:
        return self.sync.peers.all_reduce(table, dist.ReduceOp.SUM, "the gradient norm")

    def _update(self, pieces: list[Piece], amaxes: torch.Tensor, coefficient: torch.Tensor | None) -> None:
        scale_invs = self._new_scale_invs(amaxes[MASTER]) if self.sync.peers.ranks > 1 else {}
        super()._update(pieces, amaxes, coefficient)
        if self.sync.peers.ranks > 1:
            for bucket in reversed(self.sync.buckets):
                self._gather(bucket, scale_invs)

    def _new_scale_invs(self, master_amaxes: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
        """The scale_inv that each scaled weight has after this step, as its owner computes it (`store_`)."""
        by_format: dict[Format, list[tuple[int, ScalingTensor]]] = {}
        for i, p in enumerate(self._params()):
            if isinstance(p, ScalingTensor):
                by_format.setdefault(p.format, []).append((i, p))
        found: dict[torch.Tensor, torch.Tensor] = {}
        for fmt, members in by_format.items():
            last = torch.stack([p.scale_inv for _, p in members])
            index = self._table().send(("weights", fmt), [i for i, _ in members])
            new = inverse(scale_from_amax(2.0 * master_amaxes[index], fmt.max, inverse(last)))
            found |= zip((p for _, p in members), torch.where(self._usable, new, last).unbind(), strict=True)
        return found

    def _gather(self, bucket: Bucket, scale_invs: dict[torch.Tensor, torch.Tensor]) -> None:
        """Send this rank's new weights of a bucket and take the others'."""
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

    def _exchange(self, bucket: Bucket, scale_invs: dict[torch.Tensor, torch.Tensor]) -> None:
        stored = [p.payload if isinstance(p, ScalingTensor) else p.detach() for p in bucket.params]
        sizes = [0] * self.sync.peers.ranks
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
        here = [p for i, p in enumerate(bucket.params) if isinstance(p, ScalingTensor) and i not in bucket.absent and p in scale_invs]
        if here:
            torch._foreach_copy_([p.scale_inv for p in here], [scale_invs[p] for p in here])

    def wait(self) -> None:
        """Let the compute stream wait for all weights that are still on their way."""
        for bucket in list(self._pending):
            self.wait_for(bucket)
        self._pending.clear()

    def wait_for(self, bucket: Bucket) -> None:
        """Let the compute stream wait for the weights of one bucket."""
        if bucket in self._pending:
            torch.cuda.current_stream(self._device).wait_event(self._pending[bucket])

    def _watch_forward(self) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole optimizer, as FP8AdamW's, gathered tensor by tensor; collective.

        The group's first rank has all of it, on the CPU; on the others "state" is empty. Load the first rank's on every rank.
        """
        self.wait()
        if self.sync.peers.ranks == 1:
            return super().state_dict()
        mine, self.state = self.state, defaultdict(dict)
        try:
            packed = super().state_dict()
        finally:
            self.state = mine
        params = self._params()
        steps = torch.full((len(params),), -1.0)
        for piece in self.pieces():
            if self.state.get(piece.weight):
                steps[piece.index] = self.state[piece.weight]["step"]
        device = params[0].device
        steps = self.sync.peers.all_reduce(steps.to(device), dist.ReduceOp.MAX, "the optimizer's step counts", None).cpu()
        for i, step in enumerate(steps):
            if step >= 0:
                state = self._whole_state(i)
                if self.sync.peers.rank == 0:
                    packed["state"][i] = {"step": step.clone(), **state}
        return packed

    def _whole_state(self, index: int) -> dict[str, torch.Tensor]:
        """The states of a parameter from those of its pieces, on the group's first rank; collective."""
        everything = super().pieces()[index]
        p, group = everything.param, everything.group
        owned = [(piece, segment) for piece, segment in self._owned() if piece.param is p]
        formats = {"exp_avg": by_name(group["formats"]["m"]), "exp_avg_sq": by_name(group["formats"]["v"])}
        master = by_name(group["formats"]["master"])
        if not is_own_master(p, master):
            formats["master"] = master
        formats |= REMAINDERS[group["formats"]["update"]]
        name = self.sync.names[p]
        whole: dict[str, torch.Tensor] = {}
        blank: dict[str, torch.Tensor] = {}
        for key, fmt in formats.items():
            how = state_format(fmt)
            blank |= {key: how.init(p)} | {key + name: x for name, x in how.beside(p).items()}
        for key, like in blank.items():
            payload = torch.zeros_like(like.payload if isinstance(like, ScalingTensor) else like)
            scale_inv = torch.zeros((), device=p.device)
            for piece, segment in owned:
                stored = self.state[piece.weight][key]
                _rows(payload, segment).copy_(stored.payload if isinstance(stored, ScalingTensor) else stored)
                if isinstance(stored, ScalingTensor):
                    scale_inv = stored.scale_inv.clone()
            # Each byte is zero on every rank but its owner.
            self.sync.peers.all_reduce(as_bytes(payload.reshape(-1)), dist.ReduceOp.SUM, f"{key} of {name}", None)
            self.sync.peers.all_reduce(scale_inv, dist.ReduceOp.MAX, f"the scale of {key} of {name}", None)
            if self.sync.peers.rank == 0:
                whole[key] = (
                    ScalingTensor(payload.cpu(), scale_inv.cpu(), torch.float32) if isinstance(like, ScalingTensor) else payload.cpu()
                )
        return whole


def _view(p: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, slice | None]:
    """What an owner updates of a parameter, in its memory; the scale of a cut one is its own copy, since each piece stores it."""
    if p.dim() == 0 or segment.rows == p.shape[0]:
        return p, None
    rows = slice(segment.row, segment.row + segment.rows)
    if isinstance(p, ScalingTensor):
        return ScalingTensor(p.payload[rows], p.scale_inv.clone(), p.dtype), rows
    return p.detach()[rows], rows


def _rows(x: torch.Tensor, segment: Segment) -> torch.Tensor:
    """A view of the rows of a segment."""
    return x[segment.row : segment.row + segment.rows] if x.dim() else x


def _wait_for(alive: "weakref.ref[GreedyZeRO]", buckets: set[Bucket], *_: Any) -> None:
    optimizer = alive()
    if optimizer is not None:
        for bucket in buckets:
            optimizer.wait_for(bucket)


def _wait_for_all(alive: "weakref.ref[GreedyZeRO]", *_: Any) -> None:
    optimizer = alive()
    if optimizer is not None:
        optimizer.wait()

"""Data-parallel gradient averaging in FP8, overlapped with backward (FP8-LM section 2.1).

Each of N ranks has a gradient g_i for every parameter. `GradSync` returns the average, sum_i g_i / N, in the format that the optimizer
expects. A parameter in E4M3 with one scale per tensor costs 1 byte per element on the wire, against 2 for BF16 and 4 for FP32.

Gradients are collected in buckets, each a flat buffer of whole tensors. For one bucket:

    s_i = scale of g_i by its amax          [tensors]     on each rank
    s_g = min_i s_i                         [tensors]     one MIN all-reduce (equation 4)
    q_i = cast(f s_g g_i)                   [elements]    f makes room for the sum, such as mu of equation 3 (`grad_scaling`)
    average = sum_i q_i / (f s_g N)         [elements]    summed by an `Exchange`: in FP32 by the owner, or in FP8 by NCCL

Three choices need a reason:

- Buckets. One collective per tensor would be bound by latency, and one for the whole model could not start before backward ends.
- One scale for all ranks. Payloads with different scales cannot be summed.
- Hooks during backward, instead of a pass after it. `p.grad` is freed as soon as it is quantized, so 16- or 32-bit gradients of the whole
  model never exist at the same time.

Next: `bucket_sender` does the four steps above for one bucket, `exchange` defines the two exchanges (`tools/reproduce/results/fig7`
compares their errors on real gradients), `accumulate` adds up micro-batches, and `partition` decides which rank owns what.
"""

import contextlib
import enum
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from msamp.comm.accumulate import OWNER, Accumulator, Draws, accumulator, squares_are_finite
from msamp.comm.bucket import Bucket, BucketPiece
from msamp.comm.bucket_sender import BucketSender
from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.counters import WireBytes
from msamp.comm.exchange import Exchange, by_name
from msamp.comm.partition import BucketPlan
from msamp.comm.sync_checks import check_formats, check_same_on_all_ranks, check_sums, check_sums_in_fp32
from msamp.comm.visible_gradients import VisibleGradients, second_gradient
from msamp.numerics.formats import Format
from msamp.numerics.fp8_gradient import while_alive
from msamp.numerics.stochastic_rounding import tensor_key


class Phase(enum.Enum):
    """What happens to a gradient that autograd delivers; `no_sync` and the way to accumulate decide."""

    LAST = "its bucket is sent once complete, and the average is delivered"
    EARLIER = "its bucket is sent once complete, and the owner adds it to the sum of the step's micro-batches"
    HELD = "it is added to the sum on this rank, and nothing is sent"


class GradSync:
    """Averages gradients over a data-parallel group.

    A post-accumulate hook takes each gradient and frees `p.grad`. When a bucket has all of its gradients, the ranks agree on one scale per
    tensor (one small MIN all-reduce per bucket), each gradient is quantized once into the bucket's flat payload, and the bucket is sent: on
    a GPU on a separate stream, while backward continues. Every rank sends the buckets in the same order. The host never waits.

    A parameter that is unused on some ranks counts as zero there; one that is unused on all ranks has no gradient. If a gradient is not
    finite on one rank, it is not finite on any (its `scale_inv` is NaN), so that all ranks skip the same step.

    After `finish`, every `p.main_grad` is the average; with `shard`, each owner finds the average of its rows in `owned(p)[i].grad`
    instead, with the same bits. An FP8 or FP16 gradient is a ScalingTensor in the parameter's outer dtype.

    Args:
        model: its parameters are synchronized, except those with `requires_grad=False`.
        formats: gradient format of every parameter that requires a gradient.
        plan: buckets of pieces, over those parameters in reverse order (built by `msamp.parallel.data_parallel`).
        group: the data-parallel ranks; None for one process.
        shard: only the owner of a piece needs its average (ZeRO).
        exchange: how gradients are sent: an `Exchange` or the name of a registered one, see `msamp.comm.exchange`.
        scaling: how a sum that can overflow gets headroom, one of the exchange's scalings; None is its default.
        mu_rule: "halve" (the default) or "paper", for a scaling with an adaptive mu, see `msamp.comm.grad_scaling`.
        accumulate: how gradients accumulate over micro-batches on this rank, see `msamp.comm.accumulate`; or "owner": each micro-batch is
            sent at once and the owner accumulates, see `msamp.comm.bucket_sender.OwnerSums`. Every rank must then run the same number of
            micro-batches.
        overlap: send buckets during backward, else in `finish`.
        seed: of stochastic rounding.
        sums: parameters with unscaled gradients that are also summed over ranks outside the group, in `finish` and before the average:
            copies of a weight on other pipeline stages, norms under sequence parallelism. All ranks of such a group must pass the same
            shapes in the same order. Their buckets are sent last.
        others: the parameters that other ranks average, see `msamp.comm.collectives.OtherRanks`; None if all have the same replicas.
        sent: the counter of sent bytes; None creates one.
        heed_zero_grad: show sums under `no_sync` in `p.grad` (`msamp.comm.visible_gradients`), and notice when they were edited, or
            cleared by `module.zero_grad()` or `p.grad = None`. False saves that host time in a loop that leaves `p.grad` alone.

    Attributes:
        model: a weak reference to the model.
        visible: what `p.grad` is before `finish`; None without `heed_zero_grad`.
        sender: averages and delivers one bucket, see `msamp.comm.bucket_sender`.
        sent: bytes this rank has sent, by kind and collective.
        statistics: saturation and underflow before and after the exchange, while `statistics.active`.
        exchange, scaling: those in use; POST where the sum needs no headroom.
        params: in the order in which their gradients are sent.
        own_proposals: FP32 [params], with several ranks: what `propose_scales` returned for this rank's own gradients in the last step;
            always in the same memory.

    Raises:
        ValueError: an unknown exchange; a scaling or mu rule that it does not support, or mu where the averages cannot show an overflow;
            sums at the owner with an exchange that does not sum in FP32; a parameter without a format; ranks with different models, naming
            the first difference.
    """

    def __init__(
        self,
        model: nn.Module,
        formats: Mapping[Tensor, Format],
        plan: Sequence[BucketPlan],
        group: dist.ProcessGroup | None = None,
        *,
        shard: bool = False,
        exchange: str | Exchange = "fp32-sum",
        scaling: str | None = None,
        mu_rule: str | None = None,
        accumulate: str = "bf16",
        overlap: bool = True,
        seed: int = 0,
        sums: Sequence[tuple[Peers, Sequence[Tensor]]] = (),
        others: OtherRanks | None = None,
        sent: WireBytes | None = None,
        heed_zero_grad: bool = True,
    ) -> None:
        self.exchange = by_name(exchange) if isinstance(exchange, str) else exchange
        self.scaling = self.exchange.scaling(scaling, mu_rule)
        self.sent = WireBytes() if sent is None else sent
        self.others, peers = others, Peers(group, self.sent)
        self.shard, self.overlap, self.seed = shard, overlap, seed
        self.model = weakref.ref(model)
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        check_same_on_all_ranks(self.names, formats, peers, others)
        check_formats(self.names, formats)
        self.sums = [(others, list(params)) for others, params in sums]
        check_sums(self.sums, self.names, formats)
        summed = {p for _, params in self.sums for p in params}
        buckets = _build(plan, self.names, formats, peers, others)
        self._held_back = {bucket for bucket in buckets if summed & set(bucket.params)}
        self.buckets = sorted(buckets, key=lambda bucket: bucket in self._held_back)
        self._place = {p: (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.params)}
        self._owned = _owned(self.buckets)
        device = next((p.device for p in self.names), torch.device("cpu"))
        self.sender = BucketSender(
            self.buckets, peers, self.exchange, self.scaling, mu_rule=mu_rule, shard=shard, device=device, others=others
        )
        self.autoscale, self.statistics, self.own_proposals = self.sender.autoscale, self.sender.statistics, self.sender.own_proposals
        at_owner = accumulate == OWNER
        if at_owner:
            check_sums_in_fp32(self.exchange, self.sender.wires)
        self._under_no_sync = {b: Phase.EARLIER if at_owner and b not in self._held_back else Phase.HELD for b in self.buckets}
        self._draws = Draws(tensor_key(seed, "gradient sums", peers.rank), device) if accumulate == "fp8-sr" else None
        local = "fp32" if at_owner else accumulate  # for the buckets that are held back
        self._accumulators: dict[Format, Accumulator] = {fmt: accumulator(local, fmt, self._draws) for fmt in self.sender.wires}
        self.params = [p for bucket in self.buckets for p in bucket.params]
        self._totals: dict[Tensor, Tensor] = {}
        formed = {p: self._accumulators[bucket.format] for p, (bucket, _) in self._place.items()}
        self.visible = VisibleGradients(self.params, self.names, self._totals, formed) if heed_zero_grad else None
        hook = while_alive(self.take)
        for number, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(hook)
            if self.visible is not None:  # runs before a gradient is added; by number: `model.to` cannot swap a tensor with weak references
                p.register_hook(unserializable_hook(while_alive(self.visible.make_way, number)))
        self.steps = 0
        self.clear()

    def __str__(self) -> str:
        scaled = sorted({str(bucket.format) for bucket in self.buckets if bucket.format.scaled}) or ["no FP8 gradients"]
        reduction = f"{self.exchange} with auto-scaling" if self.scaling.adapts else str(self.exchange)
        return f"gradients in {len(self.buckets)} buckets ({', '.join(scaled)}, {reduction})"

    @property
    def peers(self) -> Peers:
        """The data-parallel ranks."""
        return self.sender.peers

    @property
    def idle(self) -> bool:
        """Whether no gradient has arrived since the last step."""
        return not self._totals and not any(bucket.sent or bucket.waiting < len(bucket.params) for bucket in self.buckets)

    def bucket_of(self, p: Tensor) -> Bucket:
        """Return the bucket that contains a parameter's gradient."""
        return self._place[p][0]

    def peers_of(self, bucket: Bucket) -> Peers:
        """Return the ranks that average a bucket's gradients."""
        return self.sender.peers_of(bucket)

    def owned(self, p: Tensor) -> list[BucketPiece]:
        """Return the pieces of a parameter that this rank owns."""
        return self._owned.get(p, [])

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        for bucket in self.buckets:
            bucket.clear()
            for p in bucket.params:
                p.main_grad = None  # type: ignore[attr-defined]
        self._totals.clear()
        if self.visible is not None:
            self.visible.clear()
        self._no_sync: object | None = None  # a token while the context of that name is open
        self._next, self._filling = 0, Phase.LAST  # the next bucket to send, and the phase of the gradients in the buckets
        self.sender.clear()

    @torch.no_grad()
    def discard(self) -> Tensor | None:
        """Drop the gradients since the last step on all ranks: the equivalent of `zero_grad` when gradients are sent during backward.
        Buckets that one rank has already sent are sent by the others too. Collective if a backward has run outside `no_sync`.

        Returns:
            Bool 0-dim, whether the dropped gradients and their squares were finite, the same on all ranks if they were sent; None if there
            were none.
        """
        left = any(bucket.sent or bucket.waiting < len(bucket.params) for bucket in self.buckets)
        if left:
            self._send_rest()
        dropped = [*self._totals.values(), *(average for *_, average in self.averages() if average is not None)]
        finite = squares_are_finite(dropped, self.params[0].device, self.peers if left else None) if dropped or left else None
        no_sync = self._no_sync
        self.clear()
        self._no_sync = no_sync
        return finite

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for all micro-batches of a step but the last: gradients accumulate on this rank and none are sent."""
        # A token, because megatron-core's pipeline leaves the exit of an evaluation's context to the garbage collector, at any later time.
        self._no_sync = token = object()
        try:
            yield
        finally:
            if self._no_sync is token:
                self._no_sync = None

    def wait(self) -> None:
        """Make the compute stream wait for the buckets that this micro-batch has sent to other ranks, if any: a captured stream cannot wait
        for one on which the capture launched nothing."""
        if any(bucket.sent and self.peers_of(bucket).ranks > 1 for bucket in self.buckets):
            self.sender.wait()

    def take(self, p: Tensor) -> None:
        """Take a gradient from autograd: accumulate it, or send its bucket if it was the last one missing."""
        g, p.grad = p.grad, None
        assert g is not None
        bucket, i = self._place[p]
        if p.device != bucket.tables.device:
            raise ValueError(
                f"{self.names[p]} is on {p.device}, and the gradient synchronizer was built for {bucket.tables.device}; move the model "
                "first, then call msamp.initialize"
            )
        phase = Phase.LAST if self._no_sync is None else self._under_no_sync[bucket]
        if self._filling is Phase.EARLIER and bucket not in self._held_back and (bucket.gradients[i] is not None or bucket.sent):
            self._next_micro_batch()
        if bucket.gradients[i] is not None or bucket.sent:
            raise second_gradient(self.names[p])
        total = self._totals.pop(p, None)
        if phase is Phase.HELD:
            self._totals[p] = self._accumulators[bucket.format].add(total, g)
            if self.visible is not None:
                self.visible.put(p)
            return
        if bucket not in self._held_back:
            self._filling = phase
        bucket.gradients[i] = g if total is None else self._accumulators[bucket.format].last(total, g)
        bucket.waiting -= 1
        if self.visible is not None:
            self.visible.put_average(p)
        while self.overlap and self._next < len(self.buckets):
            following = self.buckets[self._next]
            if following.waiting or following in self._held_back:
                break
            self._send_next()

    def _next_micro_batch(self) -> None:
        """Send the rest of this micro-batch, and prepare the buckets for the next one."""
        coming = [bucket for bucket in self.buckets if bucket not in self._held_back]
        while self._next < len(coming):  # buckets that are held back come last
            self._send_next()
        for bucket in coming:
            bucket.clear()
        self._next, self._filling = 0, Phase.LAST

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets and deliver every average. The compute stream waits for them; the host does not.

        Raises:
            ValueError: if the model has a parameter that this synchronizer does not know; names it.
            RuntimeError: if a collective fails; names the ranks that do not answer and the tensors.
        """
        if self.visible is not None:
            self.visible.take_sums()
        self._check_model()
        for p, total in self._totals.items():  # used by an earlier micro-batch only
            bucket, i = self._place[p]
            bucket.gradients[i] = total
            if self.visible is not None:
                self.visible.put_average(p)
        self._totals.clear()
        if self._filling is Phase.EARLIER:  # every micro-batch ran under `no_sync`
            self._next_micro_batch()
        for others, params in self.sums:
            self._add_up(others, params)
        self._send_rest()
        self.sender.finish_step()
        if self._draws is not None:
            self._draws.end_step()
        self.steps += 1

    def decided(self, usable: Tensor) -> None:
        """Undo the step's change of mu if the optimizer skipped it. `usable`: bool 0-dim on the device, whether the step was taken."""
        if self.autoscale is not None:
            self.autoscale.take_back_unless(usable)

    def _add_up(self, others: Peers, params: Sequence[Tensor]) -> None:
        """Replace the gradients of some parameters by their sums over `others`."""
        places = [self._place[p] for p in params]
        dtype = places[0][0].format.dtype
        gradients = [bucket.gradients[i] for bucket, i in places]
        parts = [(torch.zeros_like(p) if g is None else g).to(dtype).flatten() for p, g in zip(params, gradients, strict=True)]
        total = torch.cat(parts)
        name = self.names[params[0]]
        others.all_reduce(
            total, dist.ReduceOp.SUM, f"the gradients of {name} and {len(params) - 1} more", label="model-parallel all-reduce"
        )
        for (bucket, i), p, part in zip(places, params, total.split([p.numel() for p in params]), strict=True):
            bucket.gradients[i] = part.view(p.shape)

    def _check_model(self) -> None:
        model = self.model()
        for name, p in model.named_parameters() if model is not None else ():
            if p.requires_grad and p not in self._place:
                raise ValueError(
                    f"{name} was not in the model when the gradient synchronizer was built, or did not require a gradient; call "
                    "renew_grad_sync() of the optimizer of msamp.initialize on every rank, after zero_grad() and before the next backward "
                    "(its add_param_group does so itself), or build a new synchronizer after changing the model"
                )
        for param, name in self.names.items():  # set by hand, or model.to() of a plain module dropped the hooks
            if param.grad is None or (self.visible is not None and param in self.visible):
                continue
            bucket, i = self._place[param]
            if bucket.sent or bucket.gradients[i] is not None:
                raise second_gradient(name)
            bucket.gradients[i], param.grad = param.grad, None
            if self.visible is not None:
                self.visible.put_average(param)

    def _send_rest(self) -> None:
        while self._next < len(self.buckets):
            self._send_next()
        self.wait()

    @torch._disable_dynamo  # of a compiled training step: a hook runs as it is
    def _send_next(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.sent = True
        self.sender.send(bucket, last=self._filling is Phase.LAST or bucket in self._held_back)

    def averages(self) -> list[tuple[Any, str, Any]]:
        """Return where this step's averages are stored, for `restore`: a CUDA graph writes later ones to the same memory."""
        held: list[tuple[Any, str, Any]] = [(piece, "grad", piece.grad) for bucket in self.buckets for piece in bucket.owned]
        return held + [(p, "main_grad", p.main_grad) for p in self.names]  # type: ignore[attr-defined]

    def restore(self, averages: Sequence[tuple[Any, str, Any]]) -> None:
        """Restore the state that `finish` left when it produced these `averages` (or some of them), one step later."""
        for holder, name, average in averages:
            setattr(holder, name, average)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return mu by parameter name, and the number of steps; the same on every rank."""
        mu = {} if self.autoscale is None else dict(zip(self._scaled_names(), self.autoscale.mu.cpu().unbind(), strict=True))
        return {"steps": self.steps, "mu": {name: value.clone() for name, value in mu.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, from any number of ranks; a tensor without a saved mu starts at 1."""
        self.steps = int(state["steps"])
        if self.autoscale is not None:
            mu = [float(state["mu"].get(name, 1.0)) for name in self._scaled_names()]
            self.autoscale.mu.copy_(torch.tensor(mu, dtype=torch.float64, device="cpu"))
        if self._draws is not None:
            self._draws.begin(self.steps)
        self.clear()

    def scaled_params(self) -> list[Tensor]:
        """Return the parameters with scaled gradients, in the order of `statistics` and of mu."""
        return [p for bucket in self.buckets if bucket.format.scaled for p in bucket.params]

    def _scaled_names(self) -> list[str]:
        return [name for bucket in self.buckets if bucket.format.scaled for name in bucket.names]


def _owned(buckets: Sequence[Bucket]) -> dict[Tensor, list[BucketPiece]]:
    """Map each parameter to its pieces that this rank owns."""
    owned: dict[Tensor, list[BucketPiece]] = {}
    for bucket in buckets:
        for piece in bucket.owned:
            owned.setdefault(bucket.params[piece.index], []).append(piece)
    return owned


def _build(
    plan: Sequence[BucketPlan], names: Mapping[Tensor, str], formats: Mapping[Tensor, Format], peers: Peers, others: OtherRanks | None
) -> list[Bucket]:
    params = list(reversed(list(names)))  # backward reaches the last layer first
    buckets = []
    for planned in plan:
        place = {index: i for i, index in enumerate(planned.tensors)}
        members = [params[index] for index in planned.tensors]
        pieces = [piece._replace(tensor=place[piece.tensor]) for piece in planned.pieces]
        ranks = others.peers if others is not None and members[0] in others.params else peers
        buckets.append(Bucket(members, [names[p] for p in members], formats[members[0]], pieces, ranks.ranks, ranks.rank))
    return buckets

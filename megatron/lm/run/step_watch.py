"""Reactions to bad steps and signals, decided by all ranks together one step later, so that no rank waits for the device.

Each step starts an asynchronous copy of a few numbers to the host. They are read after the next step was launched, or at once before a save
or an evaluation.
"""

import math
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.config import FaultConfig
from megatron.lm.errors import RunStopped
from megatron.lm.model.initial import parameter_names
from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.run.signals import Requests
from megatron.lm.training.state import StepResult, Training
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.grad_scaling import NOT_FINITE
from msamp.comm.replicas import faults
from msamp.optim.device_copy import DeviceCopy

NAMED = 3  # maximum of tensors per rank, and of ranks, in a message
FAULTS = 8  # maximum of faults of copies in a message
LAUNCHER_GONE = "torchrun, which started this, is gone"


class LossSpikes:
    """Detects a loss of more than `threshold` times the mean of the last `window` losses, once there are that many."""

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold = threshold
        self._losses: deque[float] = deque(maxlen=window)

    def mean_before(self, loss: float) -> float | None:
        """Return the mean before this loss (nats per token) if it is a spike, else None; the loss then counts for the mean."""
        losses = self._losses
        mean = math.fsum(losses) / len(losses) if len(losses) == losses.maxlen else None
        losses.append(loss)
        return mean if self.threshold and mean is not None and loss > self.threshold * mean else None

    def forget(self) -> None:
        """Drop the last loss, because its step is undone."""
        self._losses.pop()


class StepVerdict(NamedTuple):
    """What all ranks do now. `leave`: the reason to leave, or None."""

    roll_back: bool = False
    save: bool = False
    leave: str | None = None


class _StepReport(NamedTuple):
    """A pending step: all ranks' sums of loss, tokens and requests, and the non-finite ones of this rank's loss and gradients."""

    iteration: int
    skipped: bool | DeviceCopy
    grad_norm: Tensor
    loss_scale: DeviceCopy | None
    sums: DeviceCopy
    spoiled: DeviceCopy


class StepWatch:
    """Checks every step after it is done.

    After a skipped step, rank 0 prints the ranks and tensors that were non-finite, in the order of backward, so that the first is the
    origin. Under tensor and pipeline parallelism, non-finite values also reach the ranks that compute with the first one. After
    `--max-skipped-steps` in a row all ranks raise RunStopped. Steps that overflow under FP16's dynamic loss scale do not count: they halve
    it, and the run stops if it falls below `--min-loss-scale`.

    Attributes:
        everyone: all ranks, for collectives outside a step.

    Args:
        config: `--max-skipped-steps` and the flags of loss spikes.
        training: the training state.
        metrics: receives skipped steps and spikes, as rows of kind "skipped" and "spike".
        requests: of this process; with several processes, a small collective per step sums them.
        least_loss_scale: `--min-loss-scale`, below which a dynamic loss scale ends the run.
    """

    def __init__(self, config: FaultConfig, training: Training, metrics: Metrics, requests: Requests, least_loss_scale: float) -> None:
        self.config, self.training, self.metrics, self.requests = config, training, metrics, requests
        self.spikes = LossSpikes(self.config.loss_spike_threshold, self.config.loss_spike_window)
        self.in_a_row = 0
        scaler = training.loss_scaler
        self._least = least_loss_scale if scaler is not None and scaler.dynamic else None
        self.everyone = Peers(dist.group.WORLD, WireBytes())
        sync = training.grad_sync
        # With one rank, the averaged gradients; with several, what the synchronizer saw before averaging.
        self._alone = sync.peers.ranks == 1
        params = [p for group in training.optimizer.param_groups for p in group["params"]] if self._alone else sync.params
        names = parameter_names(training.model)
        backward = {p: place for place, p in enumerate(reversed(list(sync.names)))}
        self._names = ["the loss", *(f"the gradient of {names[p]}" for p in params)]
        self._order = [0, *(1 + place for place in sorted(range(len(params)), key=lambda place: backward[params[place]]))]
        self._steps: deque[_StepReport] = deque()

    def look(self, result: StepResult, iteration: int, now: bool) -> StepVerdict:
        """Add a step, and decide about the previous one; with `now` also about this one, which waits for it. Collective.

        Raises:
            RunStopped: on every rank, after `--max-skipped-steps` skipped steps in a row, or if the loss scale is below `--min-loss-scale`.
        """
        self._steps.append(self._send(result, iteration))
        verdicts: list[StepVerdict] = []
        while len(self._steps) > (not now):
            verdicts.append(self._decide(self._steps.popleft()))
            now = now or verdicts[-1].save or verdicts[-1].leave is not None  # a step must be checked before it is saved
        leaving = next((verdict.leave for verdict in verdicts if verdict.leave), None)
        return StepVerdict(any(d.roll_back for d in verdicts), any(d.save for d in verdicts), leaving)

    def undone(self) -> None:
        """Reset after a rollback of the spike and the steps after it."""
        self._steps.clear()
        self.spikes.forget()

    def _send(self, result: StepResult, iteration: int) -> _StepReport:
        sums = torch.stack([result.loss_sum, result.tokens]).double()
        asked = torch.tensor(self.requests.take(), dtype=torch.float64, pin_memory=sums.is_cuda)
        sums = torch.cat([sums, asked.to(sums.device, non_blocking=True)])
        self.everyone.all_reduce(sums, dist.ReduceOp.SUM, "the loss and the requests to save or to leave", None)
        sync, optimizer = self.training.grad_sync, self.training.optimizer
        gradients = ~optimizer.grad_amaxes.isfinite() if self._alone else sync.own_proposals == NOT_FINITE
        spoiled = torch.cat([~result.loss_sum.isfinite().view(1), gradients])
        return _StepReport(iteration, result.skipped, result.grad_norm, result.loss_scale, DeviceCopy(sums), DeviceCopy(spoiled))

    def _decide(self, step: _StepReport) -> StepVerdict:
        loss_sum, tokens, terminate, save, over, orphaned = step.sums.values().tolist()
        clock = f"--exit-duration-in-mins {self.requests.minutes:g}" if over else None
        leave = "SIGTERM" if terminate else LAUNCHER_GONE if orphaned else clock
        if step.skipped or not tokens:
            problem: str | None = f"iteration {step.iteration} has no token that counts in the loss"
            if step.skipped:
                searches_scale = self._least is not None and math.isfinite(loss_sum)  # a smaller loss scale may fix it
                problem = None if searches_scale else f"iteration {step.iteration} was skipped: its loss or gradient was non-finite"
            self.training.problem = problem
            (self._skipped if step.skipped else self._empty)(step)
            return StepVerdict(save=bool(save), leave=leave)
        self.in_a_row = 0
        loss = loss_sum / tokens
        self.training.problem = None if math.isfinite(loss) else f"the loss of iteration {step.iteration} is {loss}"
        mean = self.spikes.mean_before(loss) if math.isfinite(loss) else None
        if mean is not None:
            self._say(
                f"loss spike at iteration {step.iteration}: {loss:.4f} is {loss / mean:.2f} times the mean {mean:.4f} of the last "
                f"{self.config.loss_spike_window} steps (--loss-spike-threshold {self.config.loss_spike_threshold:g})",
                {"kind": "spike", "iteration": step.iteration, "loss": loss, "mean": mean},
            )
        return StepVerdict(mean is not None and self.config.loss_spike_action == "rollback", bool(save), leave)

    def _skipped(self, step: _StepReport) -> None:
        spoiled = step.spoiled.values().tolist()
        own_names = [self._names[place] for place in self._order if spoiled[place]]
        everywhere: list[list[str]] = [[] for _ in range(self.everyone.ranks)]
        dist.all_gather_object(everywhere, own_names)
        non_finite = {rank: names for rank, names in enumerate(everywhere) if names}
        what = _described(non_finite) if non_finite else f"no tensor by itself, but the gradient norm is {float(step.grad_norm):g}"
        row = {"kind": "skipped", "iteration": step.iteration, "tensors": {str(rank): names for rank, names in non_finite.items()}}
        if self._least is not None:
            self._overflowed(step, what, row)
            return
        self.in_a_row += 1
        limit = self.config.max_skipped_steps
        self._say(f"skipped iteration {step.iteration} ({self.in_a_row} in a row, the run stops at {limit}); not finite: {what}", row)
        if self.in_a_row >= limit:
            raise RunStopped(
                f"{limit} steps in a row were skipped, the last one at iteration {step.iteration}; not finite: {what}. Nothing was saved "
                "at the end. If it is always the same rank, remove its machine. If it is all ranks, resume from an older checkpoint with a "
                "lower --lr, or check the data there. To continue longer, raise --max-skipped-steps"
            )

    def _empty(self, step: _StepReport) -> None:
        """Report a step in which no token counted, so that the weights learned nothing."""
        self.in_a_row += 1
        limit = self.config.max_skipped_steps
        why = "all its tokens are masked, for example end-of-document tokens by --eod-mask-loss"
        self._say(
            f"iteration {step.iteration} has no token that counts in the loss ({self.in_a_row} in a row, the run stops at {limit}): {why}",
            {"kind": "empty", "iteration": step.iteration},
        )
        if self.in_a_row >= limit or step.iteration >= self.metrics.iterations:
            raise RunStopped(
                f"{self.in_a_row} steps in a row, the last one at iteration {step.iteration}, had no token that counts in the loss: {why}. "
                "Nothing was saved at the end. Check the data, or train without --eod-mask-loss"
            )

    def _overflowed(self, step: _StepReport, what: str, row: dict[str, Any]) -> None:
        """Report a step that was skipped under a dynamic loss scale."""
        assert step.loss_scale is not None
        assert self._least is not None
        scale = float(step.loss_scale.values())
        self._say(f"skipped iteration {step.iteration} (the loss scale is {scale:g} now); not finite: {what}", row | {"loss_scale": scale})
        if scale < self._least:
            raise RunStopped(
                f"the loss scale fell to {scale:g} at iteration {step.iteration}, below --min-loss-scale {self._least:g}, and gradients "
                f"still overflow; not finite: {what}. Nothing was saved at the end. Resume from an older checkpoint with a lower --lr, "
                "check the data there, or train in BF16 (--bf16), which has FP32's range"
            )

    def _say(self, line: str, row: dict[str, Any]) -> None:
        self.metrics.write(row)
        if self.metrics.main:
            print(line, flush=True)


def _described(non_finite: dict[int, list[str]]) -> str:
    """Return a text with the first few ranks and tensors."""
    parts = []
    for rank, names in list(non_finite.items())[:NAMED]:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        parts.append(f"rank {rank}: {', '.join(names[:NAMED])}{more}")
    if len(non_finite) > NAMED:
        parts.append(f"and {len(non_finite) - NAMED} more ranks")
    return "; ".join(parts)


def check_replicas(training: Training, iteration: int, *, finite: bool = True) -> None:
    """Compare the data-parallel copies of every part of the model: before every save, and every
    `--check-weight-hash-across-dp-replicas-interval` iterations. Collective; waits for the device.

    Args:
        training: the training state, whose weights are compared.
        iteration: the last iteration, for the message.
        finite: whether a NaN or infinite weight is a fault too; a save writes such weights, as an unhealthy checkpoint.

    Raises:
        RunStopped: on every rank, with tensors and ranks, if copies differ or a weight is NaN or infinite on any rank.
    """
    training.optimizer.wait()
    sync, names = training.grad_sync, parameter_names(training.model)
    apart = frozenset() if sync.others is None else sync.others.params
    own_faults = faults({name: p for p, name in names.items() if p not in apart}, sync.peers, finite=finite)
    if sync.others is not None:  # experts that other ranks do not have
        own_faults += faults({name: p for p, name in names.items() if p in apart}, sync.others.peers, finite=finite)
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own_faults)
    damage = list(dict.fromkeys(line for lines in everywhere for line in lines))  # every rank with a copy reports the same
    if damage:
        more = f"; and {len(damage) - FAULTS} more" if len(damage) > FAULTS else ""
        raise RunStopped(
            f"the weights are damaged after iteration {iteration}: {'; '.join(damage[:FAULTS])}{more}. No checkpoint was saved after it."
            " If it is always the same rank, remove its machine and check its memory. Resume from the previous checkpoint with --ckpt-step"
        )

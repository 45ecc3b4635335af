"""Warn once per run if its master weights lose most of the updates, measured every 50 steps for each layer.

A learning rate can be so low that rounding a master to FP16, BF16 or FP8 loses most of each update (`msamp.optim.update_error` measures
it), which the loss curve alone does not show. A check runs the next update on copies of a few rows of each parameter. The host does not
wait for it: a table of two numbers per layer is copied to the host during the step and read before the next update.

Checks are counted per process. A resumed run starts from 0, so its warning may come 100 steps later.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.lm.model.initial import parameter_names
from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.training.state import Training
from msamp.comm.collectives import Peers
from msamp.numerics.metrics import undelivered_share
from msamp.optim import updates
from msamp.optim.device_copy import DeviceCopy
from msamp.optim.update_error import SUMS, update_distances

EVERY = 50  # steps from check to check
STEPS = 100  # the run is warned once a layer has lost more than `LIMIT` of its updates at every check for so many steps
LIMIT = 0.5
NAMED = 3  # layers that the warning names


class _Storage(NamedTuple):
    """Formats of a layer's states, on which the fix depends."""

    update: str
    master: str
    rounding: str

    @property
    def fix(self) -> str:
        """Return the fix that keeps small updates."""
        if updates.by_name(self.update).in_fp32 is not None:
            return "the update is computed in BF16: use --precision collage-plus, which keeps 2^-17 of a weight, or one with FP32 masters"
        if self.master == "fp32":
            return "the masters are already FP32: raise --lr"
        if self.rounding == "stochastic":
            return "masters are already rounded stochastically: use --master-format fp32, or a --precision with FP32 masters"
        return "add --master-rounding stochastic, or use FP32 masters (--master-format fp32 at O1 to O3)"


class LostUpdates:
    """Measures every `EVERY` steps on every rank. Rank 0 prints one line per run and writes a row of kind "lost_updates" when a layer has
    lost more than half of its update at every check for `STEPS` steps. A check at which a layer has no update (frozen, learning rate 0, a
    skipped step) does not count for it.

    Args:
        training: the training state.
        metrics: receives the row.
        everyone: all ranks. The constructor and `before_update` are collective.
    """

    def __init__(self, training: Training, metrics: Metrics, everyone: Peers) -> None:
        self.training, self.metrics, self.everyone = training, metrics, everyone
        names, optimizer = parameter_names(training.model), training.optimizer
        own = {
            names[p].removesuffix(".weight"): _Storage(formats["update"], formats["master"], formats.get("master_rounding", "nearest"))
            for group in optimizer.param_groups
            for p, formats in zip(group["params"], updates.formats_of(group), strict=True)
        }
        gathered = [own] * everyone.ranks
        if everyone.ranks > 1:
            dist.all_gather_object(gathered, own)
        self._storage = {name: storage for layers in gathered for name, storage in layers.items()}
        numbers = {name: number for number, name in enumerate(self._storage)}
        device = next(iter(names)).device
        self._rows = torch.tensor([numbers[name] for name in own], device=device)  # this rank's rows in the table of all layers
        self._check: tuple[int, float, DeviceCopy] | None = None  # iteration and learning rate of the last check, and its sums
        self._in_a_row: dict[str, int] = {}
        self._warned = False

    def due(self) -> bool:
        """Return whether the current step is measured."""
        return (self.training.iteration + 1) % EVERY == 0

    def before_update(self) -> None:
        """Evaluate the last check, and measure this step's update if it is due; called after gradient averaging. Collective."""
        self.judge()
        if self.due():
            self.measure()

    def measure(self) -> None:
        """Measure the next update on copies, and send the result to the host of rank 0. Collective."""
        optimizer = self.training.optimizer
        table = torch.zeros(len(self._storage), SUMS, dtype=torch.float64, device=self._rows.device)
        with self.training.grad_sync.sent.uncounted():
            table.index_add_(0, self._rows, update_distances(optimizer))
        self.everyone.all_reduce(table, dist.ReduceOp.SUM, "the lost updates", None)
        if self.metrics.main:
            self._check = (self.training.iteration + 1, float(optimizer.param_groups[0]["lr"]), DeviceCopy(table))

    def judge(self) -> None:
        """Evaluate the last check on rank 0 once, and warn if necessary."""
        check, self._check = self._check, None
        if check is None:
            return
        iteration, rate, distances = check
        lost: dict[str, float] = {}
        for name, (wanted, arrived) in zip(self._storage, distances.values().tolist(), strict=True):
            if not wanted:
                continue
            share = undelivered_share(wanted, arrived)
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if share > LIMIT else 0
            if EVERY * (self._in_a_row[name] - 1) >= STEPS:
                lost[name] = share
        if lost and not self._warned:
            self._warned = True
            self._warn(iteration, rate, lost)

    def undone(self) -> None:
        """Reset the counts after a rollback."""
        self._check = None
        self._in_a_row.clear()

    def _warn(self, iteration: int, rate: float, lost: dict[str, float]) -> None:
        worst = sorted(lost, key=lambda name: -lost[name])
        shares = ", ".join(f"{name} {100 * lost[name]:.0f} %" for name in worst[:NAMED])
        more = f" and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
        fix = self._storage[worst[0]].fix
        layers = {name: lost[name] for name in worst}
        self.metrics.write({"kind": "lost_updates", "iteration": iteration, "lr": rate, "layers": layers})
        print(
            f"updates are lost at iteration {iteration}: for {STEPS} iterations, the stored master weights of {len(worst)} of "
            f"{len(self._storage)} parameters have lost more than half of each update (learning rate {rate:g}), now "
            f"{shares}{more}; {fix}",
            flush=True,
        )

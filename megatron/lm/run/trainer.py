"""The training loop: train, evaluate, log, save."""

import contextlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from megatron.lm import checkpoint
from megatron.lm.build import build_training
from megatron.lm.config import CheckpointConfig, Config, TrainingConfig
from megatron.lm.config.blend_file import describe
from megatron.lm.config.cli import settings_by_name
from megatron.lm.config.presets import flops_per_token
from megatron.lm.config.saved_schedule import take_schedule
from megatron.lm.data.reading import order
from megatron.lm.errors import RunStopped
from megatron.lm.graphs import step_graph
from megatron.lm.processes.agreement import all_or_none, rank_0_decides
from megatron.lm.run.announce import announce
from megatron.lm.run.data import RunData
from megatron.lm.run.reports import norms
from megatron.lm.run.reports.log_line import wrapped
from megatron.lm.run.reports.lost_updates import LostUpdates
from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.run.reports.profiles import Profiles
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.run.reports.weights_and_biases import check_installed
from megatron.lm.run.rollback import Rollback
from megatron.lm.run.signals import Requests
from megatron.lm.run.start import with_checkpoint
from megatron.lm.run.step_watch import LAUNCHER_GONE, StepVerdict, StepWatch, check_replicas
from megatron.lm.run.watchdog import IN_STEP, READING, Watchdog, leave_if_alone
from megatron.lm.shell.exit_codes import lost_connection
from megatron.lm.shell.files import not_a_link
from megatron.lm.shell.logs import cut_after
from megatron.lm.step import RareStepObserver, evaluate, train_step
from megatron.lm.training.fp8_guard import check_guard, guarded
from megatron.lm.training.state import Batches, StepResult


class Due(NamedTuple):
    """Actions that are due after the step of an iteration.

    Attributes:
        iteration: its number, from 1.
        last: the end of training; then none of the following is due.
        evaluation: an evaluation (`--eval-interval`).
        save: a checkpoint (`--save-interval`).
        save_non_persistent: a non-persistent checkpoint (`--non-persistent-save-interval`), if no other is due.
        leave: stop the run (`--exit-interval`).
        comparison: compare data-parallel copies of the weights (`--check-weight-hash-across-dp-replicas-interval`).
    """

    iteration: int
    last: bool
    evaluation: bool
    save: bool
    save_non_persistent: bool
    leave: bool
    comparison: bool

    @classmethod
    def after(cls, iteration: int, iterations: int, training: TrainingConfig, checkpoint: CheckpointConfig) -> "Due":
        """Return what is due after the step of `iteration`; `iterations`: of the whole run (`Config.iterations`)."""
        intervals = (
            training.eval_interval,
            checkpoint.save_interval,
            checkpoint.non_persistent_save_interval,
            training.exit_interval,
            training.check_weight_hash_across_dp_replicas_interval,
        )
        evaluation, save, passing, leave, comparison = (interval is not None and iteration % interval == 0 for interval in intervals)
        return cls(iteration, iteration == iterations, evaluation, save, passing and not save, leave, comparison)

    @property
    def verdict(self) -> bool:
        """Return whether the step must be checked now, because its result is about to be used, instead of after the next launch."""
        return self.last or self.evaluation or self.save or self.save_non_persistent or self.leave


class Trainer:
    """One run from its configuration to its last checkpoint.

    Raises:
        ValueError: if data, tokenizer or checkpoint are invalid, before the first step.
    """

    def __init__(self, config: Config) -> None:
        self.requests = Requests(config.training.exit_duration_in_mins)
        all_or_none(partial(check_installed, config.logging))
        settings, line = with_checkpoint(config.checkpoint)
        if line is not None and torch.distributed.get_rank() == 0:
            print(line, flush=True)
        config = replace(config, checkpoint=settings)
        if settings.use_checkpoint_opt_param_scheduler:
            saved = rank_0_decides(partial(checkpoint.saved_schedule, settings, config.optimizer, config.training))
            config = take_schedule(config, saved)
        ranks = torch.distributed.get_world_size()
        batch_sizes, iterations = config.batch_sizes(ranks), config.iterations(ranks)
        self.data = RunData(config.data, config.model, config.training, batch_sizes, iterations)
        self.training = build_training(config, self.data.vocab_size)
        if self.data.train is not None:
            self.training.data = order.description(self.data.train, config.training.seed)
        self.graphs = step_graph.build(self.training)
        self.config = config = self.training.config
        self.rollback = Rollback()
        self.watchdog = Watchdog(60 * config.parallel.distributed_timeout_minutes)
        if settings.load:
            checkpoint.load(self.training)
            if settings.resumes_itself:
                self.rollback.saved(self.training.iteration)
        self.saver = checkpoint.Saver(self.training) if settings.save else None
        flops = flops_per_token(config.model, config.padded_vocab_size(self.data.vocab_size))
        sizes = {"iterations": iterations, "seq_length": config.model.seq_length, "flops_per_token": flops}
        self.metrics = Metrics(config.logging, self.training, batch_sizes, **sizes)
        self.recorder: Recorder | None = None
        if config.logging.record_precision:
            recorded = (config.logging.record_precision, config.logging.record_interval)
            opened = partial(Recorder, self.training, *recorded, self.metrics.scalars_from_rank_0, self.metrics.unwritten)
            self.recorder = all_or_none(opened, "{}: choose another --record-precision")
        self.step_watch = StepWatch(config.faults, self.training, self.metrics, self.requests, config.precision.min_loss_scale)
        self.lost_updates = LostUpdates(self.training, self.metrics, self.step_watch.everyone)
        zeros = norms.ZerosInGradients(self.training, self.metrics.reports) if config.logging.log_num_zeros_in_grad else None
        self.metrics.measurements += [norms.ParametersNorm(self.training).values] if config.logging.log_params_norm else []
        self.metrics.measurements += [zeros.values] if zeros is not None else []
        self.metrics.measurements += [self.training.experts.values] if config.model.num_experts is not None else []
        self.rare_observers: list[RareStepObserver] = [one for one in (self.lost_updates, zeros) if one is not None]
        traces = Path(config.logging.tensorboard_dir or ".")
        self.profiles = all_or_none(partial(Profiles, config.profiling, traces, iterations, self.metrics.unwritten))

    def _open_logs(self) -> None:
        """Open the log files, after `--save` is locked, because another job might be writing them.

        If the run resumes from its own checkpoint, entries of later iterations are removed, because the run repeats them.
        """
        logging, save = self.config.logging, self.config.checkpoint.save
        again = self.training.iteration if self.config.checkpoint.resumes_itself else 0
        all_or_none(partial(self.metrics.open, again), "{}: choose another --metrics-file or --tensorboard-dir")
        if logging.wandb_project is not None:
            folder = logging.wandb_save_dir or str(not_a_link(Path(str(save), "wandb")))
            all_or_none(
                partial(self.metrics.open_wandb, folder, settings_by_name(self.config), rank_0_decides(lambda: self.training.run.id))
            )
        if again and self.metrics.main and logging.record_precision:
            cut_after(Path(logging.record_precision), again)

    def _watched(self, batches: Batches) -> Batches:
        """Yield `batches`, and report each to the watchdog."""
        while True:
            before = self.watchdog.phase
            self.watchdog.at(READING)
            batch = next(batches, None)
            self.watchdog.at(before)
            if batch is None:
                return
            yield batch

    def run(self) -> str | None:
        """Train to the end, with evaluations and checkpoints, and evaluate at the end; if stopped early, return the reason.

        Raises:
            RunStopped: on every rank, if continuing makes no sense, or if the torchrun of one rank is gone.
        """
        if self.data.train is None:
            raise ValueError("there is no training data; set --train-data-path, or a --split with a first share greater than 0")
        saving = self.saver or contextlib.nullcontext()
        with self.requests.listening(), self.watchdog.watching(), contextlib.closing(self.metrics), saving:
            try:
                why = self._run()
                self.metrics.end(self.training.iteration, "completed" if why is None else "stopped", why)
            except KeyboardInterrupt:
                self.metrics.end(self.training.iteration, "stopped", "interrupted by SIGINT")
                raise
            except Exception as error:
                self.metrics.failed = True
                reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
                self.metrics.end(self.training.iteration, "failed", reason)
                self.profiles.close(failed=True)
                if isinstance(error, RuntimeError) and lost_connection(error):
                    raise RunStopped(self._lost(error)) from error
                leave_if_alone(error)  # before code that waits for the device, and so for the other ranks
                raise
            finally:
                self._release()
        if why == LAUNCHER_GONE:
            raise RunStopped(self._leaving(why))
        return why

    def _run(self) -> str | None:
        self._open_logs()
        config, data = self.config, self.config.data
        if self.metrics.main:
            if self.training.iteration:
                print(f"resumed from {config.checkpoint.load} at iteration {self.training.iteration} of {self.metrics.iterations}")
            if config.logging.log_level == "debug":
                print(self.training.model)
            if (blend := describe(data.data_path or data.train_data_path)) is not None:
                print(wrapped(blend))
        announce(config.model, config.parallel, config.precision, self.training, self.metrics)
        self.profiles.begin(self.training.iteration)
        why = self._train()
        self.training.optimizer.wait()  # the weights of the last step, of which the graphs leave each to its owner
        self.profiles.close()
        self.lost_updates.judge()
        self._release()
        if why is None:
            self._save()
            self._evaluate("valid", self.data.valid)
            self._evaluate("test", self.data.test)
        elif self.metrics.main:
            print(self._leaving(why), flush=True)
        return why

    def _release(self) -> None:
        """Release what only training needs: the graphs' memory, and the recorder's file. May be called twice."""
        if self.graphs is not None:
            self.graphs.release()
        if self.recorder is not None:
            self.recorder.close()

    def _leaving(self, why: str) -> str:
        saved = "saved" if self.config.checkpoint.save else "nothing saved, since there is no --save"
        return f"leaving after iteration {self.training.iteration}, {saved}: {why}"

    def _lost(self, error: RuntimeError) -> str:
        """Return which rank is gone after a failed collective; every remaining rank reports it."""
        if "does not answer" in str(error):
            return str(error)
        lost = self.step_watch.everyone.missing()
        named = f"rank {', '.join(map(str, lost))} does not answer" if lost else "every rank still answers"
        return (
            f"{self.watchdog.phase} at iteration {self.training.iteration}, a connection to another rank failed: {named} (see its own "
            f"error message, if there is one); resume from the last checkpoint ({str(error).strip().partition(chr(10))[0]})"
        )

    def _train(self) -> str | None:
        """Train to the end, or leave early and return the reason."""
        iterations = self.metrics.iterations
        stream, micro_batches = self._watched(self.data.training_batches(self.training)), self.training.micro_batches
        while self.training.iteration < iterations:
            if self.training.micro_batches != micro_batches:
                self._rebuild_graphs()  # graphs depend on the number of micro-batches
                micro_batches = self.training.micro_batches
            due = Due.after(self.training.iteration + 1, iterations, self.config.training, self.config.checkpoint)
            result = self._step(stream, due.iteration)
            started = time.perf_counter()
            self.watchdog.at("writing a profile", due.iteration)
            self.profiles.after(due.iteration)
            if self.metrics.reports(due.iteration):
                self.profiles.report(due.iteration)
            if due.comparison:
                self.watchdog.at("comparing weights", due.iteration)
                check_replicas(self.training, due.iteration)
            self.watchdog.at(IN_STEP, due.iteration)  # the host waits here for the device
            verdict = self.step_watch.look(result, due.iteration, now=due.verdict)
            if verdict.roll_back and self._roll_back():
                stream = self._watched(self.data.training_batches(self.training))
                continue
            if due.last:
                return None
            why = self._after_step(due, verdict)
            if why is not None:
                return why
            self.metrics.paused += time.perf_counter() - started
        return None

    def _step(self, stream: Batches, iteration: int) -> StepResult:
        """Run the training step of an iteration, with recording and metrics."""
        self.watchdog.at(IN_STEP, iteration)
        self.training.grad_sync.statistics.watch(self.metrics.reports(iteration))
        self.profiles.before(iteration)
        due = self.recorder is not None and self.recorder.due(iteration)
        recording = self.recorder.step(iteration) if self.recorder is not None and due else contextlib.nullcontext()
        with recording, guarded(self.training, iteration):
            result = train_step(self.training, stream, self.graphs, self.recorder, self.rare_observers)
        self.metrics.record(result, iteration)
        changes = check_guard(self.training, iteration)
        self.metrics.guard_changes(self.training.guard, changes)
        if changes:
            self._rebuild_graphs()  # they contain what the layers computed before
        return result

    def _after_step(self, due: Due, verdict: StepVerdict) -> str | None:
        """Save and evaluate if due; return why the run stops here, or None."""
        why = verdict.leave or (f"--exit-interval {self.config.training.exit_interval}" if due.leave else None)
        if due.save or verdict.save or why:
            self._save()  # before the evaluation, which may fail
        elif due.save_non_persistent:
            self._save(persistent=False)
        if due.evaluation:
            self._evaluate("valid", self.data.valid)
        if verdict.save and self.metrics.main and not self.config.checkpoint.save:
            print("a signal requested a checkpoint: nothing is saved, since there is no --save", flush=True)
        if why:
            self.metrics.report(due.iteration)
        return why

    def _roll_back(self) -> bool:
        """Restore the newest checkpoint except for the position in the data; return whether there is one. Collective."""
        self.metrics.report(self.training.iteration)
        self.watchdog.at("rolling back")
        if self.saver is not None:
            self.saver.finish()
        was = self.training.iteration
        line = self.rollback.go(self.training)
        if self.metrics.main:
            print(line, flush=True)
        if self.training.iteration == was:
            return False
        if self.saver is not None:
            self.saver.forget_undone()
        self.step_watch.undone()
        self.lost_updates.undone()
        self.metrics.write({"kind": "rollback", "iteration": was, "to": self.training.iteration, "passed_over": self.training.passed_over})
        self._rebuild_graphs()  # states have new addresses
        return True

    def _rebuild_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = step_graph.build(self.training)

    def _evaluate(self, kind: str, dataset: Dataset | None) -> None:
        if dataset is None or not self.config.training.eval_iters:
            return
        self.watchdog.at("evaluating")
        batches = self._watched(self.data.batches(self.training, dataset, 0))
        loss = evaluate(self.training, batches, self.config.training.eval_iters)
        self.metrics.evaluation(kind, self.training.iteration, loss, self.data.bits_per_byte(kind, loss))

    def _save(self, *, persistent: bool = True) -> None:
        if self.saver is not None:
            self.watchdog.at("comparing weights")
            check_replicas(self.training, self.training.iteration, finite=False)  # a checkpoint of copies that differ cannot be resumed
            self.watchdog.at("saving")
            if self.saver.save(persistent=persistent) and persistent:
                self.rollback.saved(self.training.iteration)

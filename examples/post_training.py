"""What fine-tuning, DPO and PPO share: a model in training, and a run that the same command resumes."""

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import msamp
from megatron.lm.errors import RunStopped
from megatron.lm.post import flags, memory, saved
from megatron.lm.post.schedule import learning_rate
from tools.bench import rows


class Trained:
    """A model of `msamp.initialize` with its optimizer and the peak of its learning rate."""

    def __init__(self, model: Any, recipe: msamp.recipes.Recipe, peak: float, args: argparse.Namespace) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=peak, weight_decay=args.weight_decay)
        settings = flags.roundings(args) | {"clip_grad": args.clip_grad or None, "fp8_min_gain": 0}  # the levels' losses, not their times
        self.model, self.optimizer = msamp.initialize(model, optimizer, recipe, **settings)
        self.model.train()
        self.peak, self.args, self.gradients = peak, args, 0

    def rate(self, step: int) -> None:
        """Set the learning rate of a step, counted from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=self.args.train_iters, warmup=self.args.lr_warmup_iters, peak=self.peak)

    def update(self) -> None:
        """Update the weights with the gradients of one or several backwards, and count the gradients' bytes."""
        self.gradients = self.gradients or memory.stored(self.model).gradients
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": msamp.exact_state_dict(self.model), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def stored(self) -> memory.Stored:
        return replace(memory.stored(self.model, self.optimizer), gradients=self.gradients)


class Run:
    """The steps of a run, and the measurements of each in `metrics`, which its newest checkpoint in --save brings along."""

    def __init__(self, args: argparse.Namespace) -> None:
        digest = hashlib.sha256(args.data.read_bytes()).hexdigest() if args.data else None
        self.args, self.settings = args, flags.settings(args, data=digest)
        self.resumed = saved.load(args.save, self.settings, args.device)
        self.metrics: list[dict[str, Any]] = [] if self.resumed is None else self.resumed["metrics"]

    def resume(self, load: Callable[[Mapping[str, Any]], None]) -> None:
        """Give the content of the checkpoint, if there is one, to `load`."""
        if self.resumed is not None:
            with saved.restoring(self.args.save):
                load(self.resumed["content"])
            print(f"resuming at step {len(self.metrics)} of {self.args.train_iters}")

    def train(self, step: Callable[[int], dict[str, Any]], state: Callable[[], Any], line: str, at_end: Callable[[], Any] = dict) -> None:
        """Run the remaining steps.

        `step` takes the number of a step, from 0, and returns its measurements, from which `line` formats a log line. `state` returns the
        content of a checkpoint, and `at_end` further measurements after the last step.
        """
        args = self.args
        memory.reset_peak([args.device])
        while (number := len(self.metrics)) < args.train_iters:
            began = time.perf_counter()
            row = step(number)
            for name, value in row.items():
                if name != "grad_norm" and isinstance(value, float) and not math.isfinite(value):  # a step that overflows is skipped
                    raise RunStopped(
                        f"the {name} of step {number + 1} is {value}: give a lower --lr; the same command resumes from the last checkpoint"
                    )
            last = number + 1 == args.train_iters
            self.metrics.append({"step": number + 1} | row | {"seconds": time.perf_counter() - began})
            if last or (number + 1) % args.log_interval == 0:
                print(f"step {number + 1:5}  {line.format(**row)}", flush=True)
            self.metrics[-1] |= at_end() if last else {}
            if saved.due(args, number + 1):
                saved.save(args.save, number + 1, state(), self.settings, self.metrics)

    def timed(self) -> Sequence[Mapping[str, Any]]:
        """Return the measurements of the steps after the first three, which warm up."""
        return self.metrics[min(3, len(self.metrics) - 1) :]

    def record(self, row: Mapping[str, Any]) -> None:
        """Append the machine and a row of results to --rows, if it is given."""
        if self.args.rows is not None:
            rows.append(self.args.rows, [rows.machine(self.args.commit) | row])


def mib(size: int | None) -> str:
    """Return bytes in MiB; an empty string for None."""
    return "" if size is None else f"{size / 2**20:.3f}"

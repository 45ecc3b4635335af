"""Sets a run up, and drives it: train, evaluate, log, save."""

import contextlib
import json
import math
import time
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import nn
from torch.utils.data import Dataset

from megatron.lm import checkpoint, gain, graph, process_groups
from megatron.lm.config import Config
from megatron.lm.data.batch import batches
from megatron.lm.data.datasets import build_datasets, split_blends
from megatron.lm.data.tokenizer import build_tokenizer
from megatron.lm.distributed import build_grad_sync
from megatron.lm.metrics import Metrics, least_and_most
from megatron.lm.model.gpt import build_model
from megatron.lm.optim import build_optimizer, build_schedule, bytes_per_parameter
from megatron.lm.precision_probe import probing
from megatron.lm.presets import parameter_count
from megatron.lm.recipe import build_recipe
from megatron.lm.step import Batches, Training, evaluate, micro_batch_loss, train_step
from msamp.comm.counters import WireBytes
from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.scaling_state import ScalingState


def build_training(config: Config, vocab_size: int) -> Training:
    """Model, optimizer, schedule and gradient synchroniser for this rank; needs `process_groups.initialize`. Collective.

    Args:
        config: which linear layers are FP8 may be open in it; it is decided here, and `Training.config` tells.
        vocab_size: the tokenizer's (the model pads it).

    Raises:
        ValueError: on every rank, where the checkpoint to resume from is none, or a linear layer cannot be measured.
    """
    config, linears = gain.settle(config, lambda: checkpoint.saved_bf16_linears(config))
    mode, _ = graph.choose(config)
    recipe = build_recipe(config.precision)
    if recipe.fp8:
        warn_if_emulated(process_groups.device())
    sent = WireBytes()
    stages = process_groups.virtual_pipeline_size(config)
    model: nn.Module
    if stages is None:
        model = build_model(config, recipe, vocab_size, sent=sent)
    else:
        model = nn.ModuleList([build_model(config, recipe, vocab_size, vp_stage, sent) for vp_stage in range(stages)])
    grad_sync = build_grad_sync(model, config, recipe, sent)
    optimizer = build_optimizer(model, config, recipe, grad_sync)
    training = Training(
        config=config,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config),
        grad_sync=grad_sync,
        scaling=ScalingState(model),
        micro_batches=config.num_micro_batches(torch.distributed.get_world_size()),
        vocab_size=vocab_size,
        linears=linears,
    )
    if mode != "none":
        training.graphs = graph.StepGraphs(training, mode, micro_batch_loss)
    return training


class Trainer:
    """One run from its configuration to its last checkpoint.

    Raises:
        ValueError: bad data, tokenizer or checkpoint, before the first step.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        self.train_data, self.valid_data, self.test_data = build_datasets(config, self.tokenizer, self._sample_counts())
        self.training = build_training(config, self.tokenizer.vocab_size)
        self.config = config = self.training.config
        if config.checkpoint.load:
            checkpoint.load(self.training)
        self.metrics = Metrics(config, config.padded_vocab_size(self.tokenizer.vocab_size), self.training)
        self._announce()

    def _sample_counts(self) -> tuple[int, int, int]:
        """Sequences of training, validation and test data that the whole run reads."""
        training = self.config.training
        batch = self.config.global_batch_size(torch.distributed.get_world_size())
        evaluation = training.eval_iters * batch
        return training.train_iters * batch, evaluation, evaluation

    def _announce(self) -> None:
        training, processes = self.training, torch.distributed.get_world_size()
        sizes = bytes_per_parameter(training.optimizer)
        low, high = least_and_most(sum(p.numel() for p in training.model.parameters()) * sum(sizes.values()) / 2**30)
        parameters = parameter_count(self.config.model, self.config.padded_vocab_size(training.vocab_size))
        state = {"state_gib_min": low, "state_gib_max": high}
        layers, linears = 4 * self.config.model.num_layers, training.linears
        counts = {"layers": layers, "bf16": linears.bf16, "gain": linears.gains, "reason": linears.reason}
        self.metrics.write({"kind": "precision", "parameters": parameters, "bytes_per_parameter": sizes, "linears": counts} | state)
        if self.metrics.main:
            if training.iteration:
                print(f"resumed from {self.config.checkpoint.load} at iteration {training.iteration}")
            listed = ", ".join(f"{key} {size:.2f}" for key, size in sizes.items())
            zero = ", ZeRO" if training.grad_sync.shard else ""
            print(training.model)
            print(gain.describe(self.config, linears))
            print("CUDA graphs: {} ({})".format(*graph.choose(self.config)))
            print(
                f"{parameters / 1e6:.1f}M parameters | precision {self.config.precision.name} | "
                f"bytes a parameter {sum(sizes.values()):.2f} ({listed}) | model state {low:.2f} to {high:.2f} GiB a process | "
                f"{processes} processes{self._grid()}{zero}, {training.grad_sync} | micro-batches a step {training.micro_batches}",
                flush=True,
            )

    def _grid(self) -> str:
        """` (tensor 2 with sequence, pipeline 2 x 2 virtual, data 1)`; nothing where every process has the whole model."""
        parallel, copies = self.config.parallel, parallel_state.get_data_parallel_world_size()
        tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        if tensor * pipeline == 1:
            return ""
        stages = process_groups.virtual_pipeline_size(self.config)
        sequence = " with sequence" if parallel.sequence_parallel else ""
        return f" (tensor {tensor}{sequence}, pipeline {pipeline}{f' x {stages} virtual' if stages else ''}, data {copies})"

    def _batches(self, dataset: Dataset, consumed_samples: int) -> Batches:
        return batches(
            dataset,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            consumed_samples=consumed_samples,
            num_workers=self.config.data.num_workers,
            device=process_groups.device(),
        )

    def run(self) -> None:
        """Train to `--train-iters` (or to `--exit-interval`), with evaluations and checkpoints between, and evaluate at the end."""
        training, settings = self.training, self.config.training
        if self.train_data is None:
            raise ValueError("there is no training data; give --train-data-path, or a --split whose first share is not 0")
        stream = self._batches(self.train_data, training.consumed_samples)
        for iteration in range(training.iteration + 1, settings.train_iters + 1):
            training.grad_sync.statistics.watch(self.metrics.reports(iteration))
            with self._probe(iteration):
                result = train_step(training, stream)
            self.metrics.record(result, iteration)
            started = time.perf_counter()
            if iteration % settings.eval_interval == 0 and iteration < settings.train_iters:
                self._evaluate("valid", self.valid_data)
            leaving = settings.exit_interval is not None and iteration % settings.exit_interval == 0 and iteration < settings.train_iters
            interval = self.config.checkpoint.save_interval
            if leaving or (interval is not None and iteration % interval == 0 and iteration < settings.train_iters):
                self._save()
            if leaving:
                self.metrics.report(iteration)
                break
            self.metrics.pause(time.perf_counter() - started)
        else:
            self._evaluate("valid", self.valid_data)
            self._evaluate("test", self.test_data)
            self._save()
        self.metrics.close()

    def _probe(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        interval = self.config.logging.log_underflow_interval
        if not interval or (iteration - 1) % interval:
            return contextlib.nullcontext()
        return probing(self.training.model, iteration, self.metrics.write)

    def _evaluate(self, kind: str, dataset: Dataset | None) -> None:
        if dataset is None or not self.config.training.eval_iters:
            return
        loss = evaluate(self.training, self._batches(dataset, 0), self.config.training.eval_iters)
        self.metrics.evaluation(kind, self.training.iteration, loss, self._bits_per_byte(kind, loss))

    def _bits_per_byte(self, kind: str, loss: float) -> float | None:
        """Loss in bits for each byte of text, where preprocessing has left the counts of a split's one dataset beside it."""
        blend = split_blends(self.config.data)[("train", "valid", "test").index(kind)]
        if blend is None or len(blend.prefixes) != 1:
            return None
        counts = Path(f"{blend.prefixes[0]}.json")
        if not counts.is_file():
            return None
        found = json.loads(counts.read_text(encoding="utf-8"))
        return loss / math.log(2) * found["tokens"] / found["text_bytes"]

    def _save(self) -> None:
        if self.config.checkpoint.save:
            folder = checkpoint.save(self.training, Path(self.config.checkpoint.save))
            if self.metrics.main:
                print(f"saved {folder}", flush=True)

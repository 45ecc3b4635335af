"""Measure time and memory of whole training steps of a GPT at O0 to O3, or any precision, on one GPU, and of baselines in the same run.

    python tools/bench/bench_step.py                                  GPT-1.3B, micro-batch 4, sequence 2048, tied 50,304 tokens
    python tools/bench/bench_step.py --levels O0 O2 --preset 345m --micro-batch-size 8
    python tools/bench/bench_step.py --levels O3 "O3 --output-layer-precision fp8"    a level with its own flags
    python tools/bench/bench_step.py --preset llama3-8b --flags '--num-layers 8'       flags for every case
    python tools/bench/bench_step.py --levels O3 --flags '--record-precision r.jsonl --record-interval 1'    recorded steps
    python tools/bench/bench_step.py --levels O3 'O3 --fp8-guard --fp8-guard-interval 1'    steps that the guard measures
    python tools/bench/bench_step.py --levels O0 O3 --peer 'python tools/bench/baselines/bench_torchao.py'    also bench_megatron.py

A baseline (--peer) is any command that prints one JSON object per case with the keys case, ms, tokens_s_gpu, peak_gib (and others of
COLUMNS). Measurements are appended to --csv: `case` is the level with its flags, `preset` the preset with the flags of all cases.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
from collections.abc import Sequence

from megatron.lm.build import build_training
from megatron.lm.config import OPT_LEVELS
from megatron.lm.config.presets import flops_per_token
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.metrics import mfu, peak_tflops
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import count
from megatron.lm.step import train_step
from megatron.lm.training.fp8_guard import check_guard, guarded
from megatron.lm.training.state import StepResult
from tools.bench import training_steps
from tools.bench.training_steps import TIMES, VOCABULARY, WARM_UP, Row, configuration, random_batches
from tools.precisions import legal_case

COLUMNS = (
    *("case", "preset", "micro_batch", "gpus", "params_m", *TIMES, "tflops", "mfu_bf16_peak", "mfu_fp8_peak"),
    *("peak_gib", "rest_gib", "loss"),
)


def measure(level: str, options: argparse.Namespace) -> Row:
    """Measure one row; needs `process_groups.initialize`."""
    config = configuration(level, options)
    training = build_training(config, options.vocab_size)
    batches = random_batches(config, options.vocab_size, process_groups.device())
    graphs = step_graph.build(training)
    recorded = config.logging.record_precision
    recorder = Recorder(training, recorded, config.logging.record_interval, lambda *_: None) if recorded else None
    numbers = itertools.count(1)

    def step() -> StepResult:
        number = next(numbers)
        recording = recorder.step(number) if recorder is not None and recorder.due(number) else contextlib.nullcontext()
        with recording, guarded(training, number):
            result = train_step(training, batches, graphs, recorder)
        if changes := check_guard(training, number):
            raise ValueError(f"{level}: {changes[0]}; with wider bounds the guard measures only")
        return result

    training_steps.warm_up(step, options.warm_up)
    times, result = training_steps.synchronized_step_times(step, options.steps)
    if recorder is not None:
        recorder.close()
    tokens = training.micro_batches * config.training.micro_batch_size * config.model.seq_length
    flops = flops_per_token(config.model, config.padded_vocab_size(options.vocab_size)) * tokens
    tflops = flops / statistics.median(times) / 1e12
    return {
        "case": level + f" recorded every {config.logging.record_interval}" * bool(recorded),
        "params_m": round(sum(p.numel() for p in training.model.parameters()) / 1e6, 1),
        **training_steps.time_columns(times, tokens),
        "tflops": round(tflops, 1),
        **{key: round(share, 3) for key, share in mfu(tflops, peak_tflops(config.logging)).items()},
        **training_steps.memory(),
        "loss": round(float(result.loss_sum / result.tokens), 4),
    }


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = training_steps.parser(__doc__, "step.csv")
    parser.add_argument(
        "--levels",
        nargs="*",
        default=list(OPT_LEVELS),
        type=legal_case,
        help="levels and precisions, such as O2, O2+blockwise or 'O3 --deterministic'",
    )
    parser.add_argument("--warm-up", type=count(0), default=WARM_UP, help="steps that are not measured")
    options = parser.parse_args(argv)
    vocabulary = f"--vocab-size {options.vocab_size}" if options.vocab_size != VOCABULARY else ""
    preset = " ".join(f"{options.preset} {options.flags} {vocabulary}".split())
    common = {"preset": preset, "micro_batch": options.micro_batch_size, "gpus": 1}
    cases = [(level, configuration(level, options)) for level in options.levels]
    return training_steps.run(cases, lambda level, _: measure(level, options), COLUMNS, options, common)


if __name__ == "__main__":
    sys.exit(main())

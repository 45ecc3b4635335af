"""Measure tokens/s of generation at O0 to O3, and of transformers' `generate` on the same weights, on this machine.

    python tools/bench/bench_generate.py                                   Llama-shaped 1.3B, 8 prompts of 512 tokens, 128 appended
    python tools/bench/bench_generate.py --levels O0 O3 --batch-size 32 --prompt 128 --tokens 256

On a GPU a level is measured with CUDA graphs. --eager adds a row without, named "LEVEL eager". The weights are random, since speed does not
depend on them. Every case appends the most likely token, and none ends early. transformers runs the model converted by `to-hf` in BF16,
with its cache and PyTorch's attention, the defaults of `generate`. `prefill_tokens_s`: tokens of the prompts. `tokens_s`: appended tokens
of all sequences together. `ms_token`: one step. `same`: share of tokens equal to transformers'; rounding decides between likely tokens, and
after a different token all others may differ. Measurements are appended to --csv.
"""

import argparse
import gc
import itertools
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.lm.config import OPT_LEVELS, Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.evaluation.decoding import Decoder
from megatron.lm.evaluation.generation import Sampling, generate
from megatron.lm.hugging_face.folder import write_json, write_tensors
from megatron.lm.hugging_face.models import load_model
from megatron.lm.model.gpt import build_model
from megatron.lm.model.initial import take_initial_weights
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.tools.convert.hugging_face import hf_config, hf_rules, hf_tensors
from tools.bench import rows
from tools.precisions import legal_precision, precision_flags

COLUMNS = ("case", "preset", "batch", "prompt", "tokens", "prefill_tokens_s", "tokens_s", "ms_token", "peak_gib", "same")
LLAMA = ("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear")
PEER = "transformers"


def configuration(level: str, options: argparse.Namespace) -> Config:
    """Return the preset with Llama's layers, on one process."""
    flags = ["--preset", options.preset, *LLAMA, *precision_flags(level), "--micro-batch-size", "1", "--global-batch-size", "1"]
    flags += ["--train-iters", "10000", "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    flags += ["--no-sequence-parallel"] if PRESETS[options.preset]["sequence_parallel"] else []
    config = parse_args([*flags, *shlex.split(options.flags)])
    if options.prompt + options.tokens > config.model.seq_length:
        raise ValueError(
            f"--prompt {options.prompt} and --tokens {options.tokens} are more than the model's sequence of {config.model.seq_length}: "
            "give fewer, or --flags '--seq-length N'"
        )
    return config


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Return random prompts of one length, because padding would slow transformers down."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, options.vocab_size, (options.batch_size, options.prompt), generator=draw).tolist()


def measure(level: str, options: argparse.Namespace, *, graph: bool = True) -> tuple[dict[str, Any], list[list[int]]]:
    """Measure one row, with or without CUDA graphs (if possible); also return the appended tokens. Needs `process_groups.initialize`."""
    config = configuration(level, options)
    model = build_model(config, build_recipe(config.precision), options.vocab_size).eval()
    take_initial_weights(model)
    decoder = Decoder(model, options.prompt + options.tokens, graph=graph)
    _start_peak()
    for _ in range(1 + options.repeats):  # the first run includes one-time setup
        generated = generate(
            decoder,
            prompts(options),
            options.tokens,
            Sampling(temperature=0),
            seq_length=options.prompt + options.tokens,
            vocab_size=options.vocab_size,
        )
    case = level if graph else f"{level} eager"
    return _row(case, options, generated.prompt_seconds, generated.new_seconds, generated.tokens), generated.tokens


def measure_peer(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[int]]]:
    """Measure the same for transformers; needs `process_groups.initialize`."""
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder), options)
        model = load_model(Path(folder), "AutoModelForCausalLM", dtype=torch.bfloat16)
    model = model.to(process_groups.device()).eval()
    given = torch.tensor(prompts(options), device=process_groups.device())
    asked = {"attention_mask": torch.ones_like(given), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    _start_peak()
    for _ in range(1 + options.repeats):
        seen: list[float] = []

        def watch(_: torch.Tensor, scores: torch.Tensor, seen: list[float] = seen) -> torch.Tensor:
            if not seen:  # the prompts have been processed
                _synchronize()
                seen.append(time.perf_counter())
            return scores

        start = time.perf_counter()
        out = model.generate(given, max_new_tokens=options.tokens, logits_processor=[watch], **asked)
        _synchronize()
        read, generating = seen[0] - start, time.perf_counter() - seen[0]
    tokens = out[:, options.prompt :].tolist()
    return _row(PEER, options, read, generating, tokens), tokens


def export(folder: Path, options: argparse.Namespace) -> None:
    """Write the model that O0 initializes as a Hugging Face folder."""
    config = configuration("O0", options)
    weights = dict(build_model(config, build_recipe(config.precision), options.vocab_size).named_parameters())
    rules = hf_rules(config, options.vocab_size, list(weights))
    write_json(folder / "config.json", hf_config(config, options.vocab_size, torch.bfloat16, 0))
    write_tensors(folder, hf_tensors(rules, {name: x.detach().float().cpu() for name, x in weights.items()}, torch.bfloat16))


def _row(case: str, options: argparse.Namespace, read: float, generating: float, tokens: list[list[int]]) -> dict[str, Any]:
    appended = sum(map(len, tokens))
    return {
        "case": case,
        "preset": options.preset,
        "batch": options.batch_size,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "prefill_tokens_s": round(options.batch_size * options.prompt / read),
        "tokens_s": round(appended / generating, 1),
        "ms_token": round(generating / options.tokens * 1e3, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else "",
    }


def _same(tokens: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [pair for one, other in zip(tokens, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return round(sum(a == b for a, b in pairs) / len(pairs), 3)


def _start_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--levels", nargs="*", default=list(OPT_LEVELS), type=legal_precision, help="levels or precisions; none: only transformers"
    )
    parser.add_argument("--eager", action="store_true", help="also measure each level without CUDA graphs")
    parser.add_argument("--preset", choices=PRESETS, default="1.3b", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=count(1), default=8, help="sequences per batch (default: %(default)s)")
    parser.add_argument("--prompt", type=count(1), default=512, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=count(1), default=128, help="tokens to append (default: %(default)s)")
    parser.add_argument("--vocab-size", type=count(2), default=50257, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=count(1), default=3, help="of which the last is recorded (default: %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of the trainer")
    rows.add_flags(parser, "generate.csv")
    options = parser.parse_args(argv)
    process_groups.initialize(configuration("O0", options))
    try:
        with torch.no_grad():
            peer, theirs = measure_peer(options)
            _report(peer | {"same": 1.0}, options)
            for level, graph in itertools.product(options.levels, (True, False) if options.eager else (True,)):
                row, tokens = measure(level, options, graph=graph)
                _report(row | {"same": _same(tokens, theirs)}, options)
    finally:
        process_groups.shutdown()


def _report(row: dict[str, Any], options: argparse.Namespace) -> None:
    print(" | ".join(f"{name} {row[name]}" for name in COLUMNS), flush=True)
    rows.append(options.csv, [rows.machine(options.commit) | row])


if __name__ == "__main__":
    sys.exit(main())

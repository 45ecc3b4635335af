"""Collect results of fine-tuning, RLHF, encoders and evaluation from a folder of their runs.

    python -m tools.bench.post_rows --runs runs/post --out tools/bench/results [--commit HASH]

reads below --runs whichever of these exist

    KIND/RECIPE/metrics.jsonl      of examples/sft and examples/rlhf, KIND being sft, dpo or ppo   -> post_curves.csv
    encoders/RECIPE/PHASE.jsonl    of examples/bert/pretrain_bert_base.sh                          -> encoders.csv
    boolq/RECIPE.json              of examples/bert/finetune_boolq.py --output                     -> boolq.csv
    evaluation/**/NAME.json        of megatron.lm.tools.evaluate --output and lm_eval --output_path         -> evaluation.csv

and appends to files of these names in --out. The --rows files of the loops contain the rest. Run it on the machine of the runs: each row
names its GPU.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, name, path
from megatron.lm.tools.report import read_run
from tools.bench import rows

LOOPS = ("sft", "dpo", "ppo")
QUANTITIES = ("loss", "valid_loss", "margin", "accuracy", "reward", "kl", "value_loss")  # of a step, plotted as curves
Row = dict[str, Any]


def curves(runs: Path) -> Iterator[Row]:
    """Yield a row for each step and quantity of the loops."""
    for kind in LOOPS:
        for file in sorted((runs / kind).glob("*/metrics.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                step = json.loads(line)
                quantities = {name: step[name] for name in QUANTITIES if step.get(name) is not None}
                for quantity, value in quantities.items():
                    yield {"run": kind, "recipe": file.parent.name, "step": step["step"], "quantity": quantity, "value": f"{value:.6g}"}


def encoders(runs: Path) -> Iterator[Row]:
    """Yield a row for each precision and phase of the pre-training, with its final losses."""
    for file in sorted((runs / "encoders").glob("*/phase*.jsonl")):
        run = read_run(str(file), file)
        if not run.valid:
            raise ValueError(f"{file} has no evaluation: train to the end of the phase, with --eval-iters above 0")
        last, valid = run.train[-1], run.valid[-1]
        yield {
            "precision": file.parent.name, "phase": file.stem, "steps": last["iteration"], "tokens": last.get("tokens", ""),
            "train_loss": f"{last['loss']:.4f}", "valid_loss": f"{valid['loss']:.4f}", "ppl": f"{valid['ppl']:.3f}",
            "peak_gib": f"{peak:.3f}" if (peak := max(line.get("memory_gib") or 0 for line in run.train)) else "",
        }  # fmt: skip


def boolq(runs: Path) -> Iterator[Row]:
    """Yield a row for each precision and seed of the fine-tuning."""
    for file in sorted((runs / "boolq").glob("*.json")):
        result = _json(file)
        for seed in result["seeds"]:
            yield {
                "precision": file.stem, "tuned_at": result["precision"], "seed": seed["seed"], "steps": result["steps"],
                "accuracy": f"{seed['accuracy']:.4f}", "majority": f"{result['majority']:.4f}",
                "answered_yes": f"{seed['answered_yes']:.4f}", "loss_first": f"{seed['loss_first']:.4f}",
                "loss_last": f"{seed['loss_last']:.4f}", "dev_rows": result["rows"]["dev"],
            }  # fmt: skip


def evaluation(runs: Path) -> Iterator[Row]:
    """Yield a row for each model, task and metric."""
    for file in sorted((runs / "evaluation").rglob("*.json")):
        for model, evaluated in _by_model(_json(file)).items():
            about = evaluated["about"]
            for task, values in evaluated["results"].items():
                samples = values.get("samples", values.get("documents", ""))
                for metric in (key for key in values if not key.endswith("_stderr") and key not in ("samples", "documents")):
                    error = values.get(f"{metric}_stderr")
                    yield {
                        "model": model, "kind": about["kind"], "precision": about["precision"], "task": task, "metric": metric,
                        "value": f"{values[metric]:.6g}", "stderr": f"{error:.4g}" if isinstance(error, int | float) else "",
                        "samples": samples,
                    }  # fmt: skip


def _by_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return results that lm-eval wrote, which have a model per file, in the form of `evaluate --output`."""
    if "n-samples" not in content:
        return content
    config, results = content["config"], {}
    for task, values in content["results"].items():
        numbers = {key.removesuffix(",none"): x for key, x in values.items() if isinstance(x, int | float) and key != "sample_len"}
        results[task] = numbers | {"samples": content["n-samples"][task]["effective"]}
    about = {"kind": config["model"], "precision": str(config.get("model_dtype", "")).removeprefix("torch.")}
    return {content["model_name"]: {"about": about, "results": results}}


def _json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): run the command that writes it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} contains no JSON object: give the file that --output wrote")
    return content


FILES = {"post_curves": curves, "encoders": encoders, "boolq": boolq, "evaluation": evaluation}


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--runs", required=True, type=path, help="folder of the runs")
    parser.add_argument("--out", required=True, type=path, help="folder of the CSV files to append to")
    parser.add_argument("--commit", type=name, help="hash to record if the tree is not a git checkout")
    options = parser.parse_args(argv)
    if not options.runs.is_dir():
        raise ValueError(f"--runs {options.runs} is not a folder: give the one that contains sft, ppo, encoders or evaluation")
    results = {file: list(make(options.runs)) for file, make in FILES.items()}
    if not any(results.values()):
        raise ValueError(f"--runs {options.runs} contains none of these runs: --help lists the expected folders")
    where = rows.machine(options.commit)
    for file, fresh in results.items():
        if fresh:
            rows.append(options.out / f"{file}.csv", [where | row for row in fresh])
            print(f"{options.out / file}.csv: {len(fresh)} rows added")
    return 0


if __name__ == "__main__":
    sys.exit(main())

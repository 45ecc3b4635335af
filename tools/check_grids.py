"""Train every grid of two GPUs to the end in the real trainer and print one table of results; run it before a release.

    python tools/check_grids.py --data out/enwik8/train_text_document
    python tools/check_grids.py --data ... --cases "O3 DP" "O3 TP" --at-once 2
    python tools/check_grids.py --data ... --gpus 0 --cases "O3 DP"                 on CPUs, with gloo

A case is a grid with its precision. It trains a small GPT four times, each time by torchrun in two fresh processes:

    straight   --iters steps of several micro-batches, with evaluations and saves between and at the end
    resumed    from the save in the middle, on the same grid: every later loss must be the same, bit for bit
    moved      from the same save on one process: the later losses must agree within MOVED
    failed     an exception on the last rank in backward: both processes must end within FAILED_SECONDS and report its error

A run that does not end within --seconds is killed with its whole process group, after its processes have printed their stacks, and counts
as failed. All cases start from the same weights and data; the table's loss is the last validation loss, so that grids of the same precision
can be compared by eye. Exit code 1 if anything failed.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.lm.shell.arguments import count
from megatron.lm.shell.exit_codes import command

ROOT = Path(__file__).parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --tokenizer-type NullTokenizer --vocab-size 50257 "
    "--global-batch-size 16 --lr 3e-4 --lr-warmup-iters 4 --lr-decay-style cosine --split 90,8,2 --eval-iters 2 --log-interval 1 "
    "--fp8-min-gain 0 --seed 7 --distributed-timeout-minutes 1"
)
TP, PP = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
ALL = "--attention-precision fp8 --output-layer-precision fp8-all"
CASES = {
    "O0 DP": "--opt-level O0",
    "O0 ZeRO": "--opt-level O0 --use-distributed-optimizer",
    "O1 DP": "--opt-level O1",
    "O2 DP": "--opt-level O2",
    "O3 DP": "--opt-level O3",
    "O3 DP nccl": "--opt-level O3 --grad-exchange nccl",
    "O3 DP fp8 sums": "--opt-level O3 --grad-accum-dtype fp8-sr",
    "O3 DP owner": "--opt-level O3 --grad-accum-on owner",
    "O3 DP graphs": "--opt-level O3 --cuda-graph step",
    "O0 TP": f"--opt-level O0 {TP}",
    "O1 TP": f"--opt-level O1 {TP} --tp-transport copies",
    "O2 TP": f"--opt-level O2 {TP}",
    "O3 TP copies": f"--opt-level O3 {TP} --tp-transport copies --cuda-graph none",
    "O3 TP copies graphs": f"--opt-level O3 {TP} --tp-transport copies --cuda-graph step",
    "O3 TP nccl": f"--opt-level O3 {TP} --tp-transport nccl",
    "O3 TP all": f"--opt-level O3 {TP} {ALL}",
    "O0 PP": f"--opt-level O0 {PP}",
    "O3 PP": f"--opt-level O3 {PP} --cuda-graph none",
    "O3 PP graphs": f"--opt-level O3 {PP} --cuda-graph step",
    "O2 PP interleaved": f"--opt-level O2 {INTERLEAVED}",
    "O3 PP interleaved graphs": f"--opt-level O3 {INTERLEAVED} --cuda-graph micro-batch",
}
COLUMNS = ("case", "straight", "valid", "resumed", "moved", "failed", "s")
GPU_ONLY = ("graph", "copies", ALL)
MOVED = 0.02  # relative: other grids accumulate in another order, and round other tensors
FAILED_SECONDS = 30.0
FAULT = "check_grids: injected fault"


@dataclass(frozen=True)
class Run:
    """One start of the trainer.

    Attributes:
        seconds: until all of its processes had ended.
        ended: when they had, seconds since 1970.
        code: exit code of torchrun; None if it was killed.
        lines: what it printed.
        rows: of its metrics file.
    """

    seconds: float
    ended: float
    code: int | None
    lines: list[str]
    rows: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        return {row["iteration"]: row["loss"] for row in self.rows if row["kind"] == "train"}

    @property
    def valid(self) -> float:
        """The last validation loss."""
        return next((row["loss"] for row in reversed(self.rows) if row["kind"] == "valid"), float("nan"))

    @property
    def why(self) -> str:
        """Empty if it succeeded, else the exit code and the last error that it printed."""
        if self.code == 0:
            return ""
        errors = [line for line in self.lines if line.startswith("error:")] or self.lines[-1:] or ["nothing was printed"]
        return f"{'killed' if self.code is None else self.code} after {self.seconds:.0f} s: {errors[-1][:160]}"


def launch(flags: str, folder: Path, *, processes: int, gpus: int, limit: float, fault: bool = False) -> Run:
    """Train in new processes, for at most `limit` seconds; their log and metrics stay in `folder`.

    Args:
        flags: of the trainer, after `MODEL`'s.
        gpus: 0 trains on the CPU.
        fault: whether it starts by `put_in`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, log = folder / "metrics.jsonl", folder / "log.txt"
    metrics.unlink(missing_ok=True)
    module = [__file__, "--fault"] if fault else ["-m", "megatron.lm.pretrain"]
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*starter, *module, *shlex.split(f"{MODEL} {flags}"), "--metrics-file", str(metrics)]
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"} | hidden
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGABRT)  # each process prints the stacks of its threads
            time.sleep(2)
        seconds, ended = time.monotonic() - started, time.time()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    return Run(seconds, ended, code, log.read_text(encoding="utf-8", errors="replace").splitlines(), rows)


def check_case(name: str, options: argparse.Namespace) -> dict[str, str]:
    """Run a case and return its row."""
    folder, half = options.out / name.replace(" ", "_"), options.iters // 2
    base = f"--train-iters {options.iters} --eval-interval {half} --data-path {shlex.quote(str(options.data))}"
    window = "" if CASES[name].startswith("--opt-level O0") else " --fp8-amax-history-len 4"  # graphs are captured once it is full
    own = f"{CASES[name]} --micro-batch-size 2{window}"
    shared = {"gpus": options.gpus, "limit": options.seconds}

    def start(part: str, flags: str, *, processes: int = 2, fault: bool = False) -> Run:
        return launch(f"{base} {flags} {options.flags}", folder / part, processes=processes, fault=fault, **shared)

    straight = start("straight", f"{own} --save {shlex.quote(f'{folder}/saved')} --save-interval {half}")
    row = {"case": name, "straight": straight.why or "ends", "valid": f"{straight.valid:.4f}", "s": f"{straight.seconds:.0f}"}
    if straight.why:
        return row | {"resumed": "", "moved": "", "failed": ""}
    load = f"--load {shlex.quote(f'{folder}/saved')} --ckpt-step {half}"
    expected = {step: loss for step, loss in straight.losses.items() if step > half}
    resumed = start("resumed", f"{own} {load}")
    row["resumed"] = resumed.why or _difference(resumed.losses, expected, 0.0)
    precision = " ".join(words for words in shlex.split(CASES[name])[:2])
    moved = start("moved", f"{precision} --micro-batch-size 2{window} {load}", processes=1)
    row["moved"] = moved.why or _difference(moved.losses, expected, MOVED)
    failed = start("failed", f"{own} --cuda-graph none" if "--cuda-graph" not in own else own, fault=True)
    row["failed"] = fault_verdict(failed)
    return row


def fault_verdict(run: Run) -> str:
    """Return "ends" if an exception on one rank ended all ranks in time and its message was printed; else what went wrong."""
    reports = [line for line in run.lines if FAULT in line]
    if run.code is None:
        return f"hangs: {(run.lines or ['nothing was printed'])[-1][:120]}"
    if run.code == 0 or not reports:
        return f"exit code {run.code}, and the error is not reported"
    at = next((float(line.rpartition(" ")[2]) for line in reports if line.startswith(FAULT)), run.ended - run.seconds)
    return "ends" if run.ended - at <= FAILED_SECONDS else f"ends {run.ended - at:.0f} s after the fault"


def _difference(losses: dict[int, float], expected: dict[int, float], limit: float) -> str:
    """Return "same" if every loss agrees within `limit` (relative), else the largest difference."""
    if losses.keys() != expected.keys():
        return f"steps {sorted(losses)[:1]} to {sorted(losses)[-1:]}, not {min(expected)} to {max(expected)}"
    worst = max(expected, key=lambda step: abs(losses[step] - expected[step]))
    if abs(losses[worst] - expected[worst]) > limit * abs(expected[worst]):
        return f"step {worst}: {losses[worst]:.6f}, not {expected[worst]:.6f}"
    return "same" if limit == 0 else f"within {abs(losses[worst] / expected[worst] - 1):.2%}"


def put_in(flags: Sequence[str], iteration: int = 3) -> int:
    """Train with `flags`, and raise an exception on the last rank in the backward of an iteration."""
    from megatron.lm.pretrain import main as pretrain
    from megatron.lm.run import trainer as module

    trainer: Any = module  # its function is replaced
    step = trainer.train_step

    def fault(*_: Any) -> None:
        print(f"{FAULT} in backward {time.time():.3f}", flush=True)
        raise RuntimeError(f"{FAULT} in backward")

    def spoiled(training: Any, *rest: Any) -> Any:
        if training.iteration + 1 == iteration:
            next(p for p in training.model.parameters() if p.requires_grad).register_hook(fault)
        return step(training, *rest)

    if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        trainer.train_step = spoiled
    return pretrain(list(flags))


@command
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--fault"]:
        return put_in(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="PREFIX", help="indexed dataset with token ids below 50257")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument(
        "--gpus", type=int, choices=(0, 2), default=2, help="0: on the CPU with gloo, without graphs and copies (default: 2)"
    )
    parser.add_argument("--iters", type=count(2), default=16, help="steps of the straight run (default: 16)")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of a run, after which it is killed (default: 240)")
    parser.add_argument("--at-once", type=count(1), default=4, help="cases that share the GPUs (default: 4)")
    parser.add_argument(
        "--out", type=Path, default=Path("check_grids"), help="folder of logs, metrics and checkpoints (default: check_grids)"
    )
    parser.add_argument("--flags", default="", help="flags of the trainer for every run, such as a smaller model")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases or () if name not in CASES]
    if unknown:
        raise ValueError(f"--cases {unknown[0]!r} is unknown; choose from {', '.join(CASES)}")
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"--out {options.out} already contains files: remove it, or give another folder")
    options.out = options.out.resolve()
    options.data = options.data.resolve()
    names = options.cases or [name for name in CASES if options.gpus or not any(word in CASES[name] for word in GPU_ONLY)]
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in as_completed([pool.submit(check_case, name, options) for name in names]):
            rows.append(done.result())
            print(json.dumps(rows[-1]), flush=True)
    rows.sort(key=lambda row: names.index(row["case"]))
    print(
        "\n".join(
            f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *([row[key] for key in COLUMNS] for row in rows))
        )
    )
    return int(any(not held(row) for row in rows))


def held(row: dict[str, str]) -> bool:
    """Return whether everything in a case is as expected."""
    return (row["straight"], row["resumed"], row["failed"]) == ("ends", "same", "ends") and row["moved"].startswith("within")


if __name__ == "__main__":
    sys.exit(main())

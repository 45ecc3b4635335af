"""The command line from end to end: exit codes, messages, and nothing written when something is refused."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import dist, tiny
from megatron.lm import pretrain
from megatron.lm.checkpoint.files.storage import Stored
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home

ROOT = Path(__file__).parents[3]
FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --eval-iters 1 --split 80,15,5 --log-interval 2 --fp8-min-gain 0"
)
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    with cpu_home():
        yield
        process_groups.shutdown()


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in this process."""
    try:
        code = pretrain.main(argv)
    except SystemExit as leaving:  # argparse
        code = int(leaving.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def outputs(folder: Path) -> list[str]:
    """Everything a run may write, inside `folder`."""
    return [
        *("--save", str(folder / "save"), "--metrics-file", str(folder / "out" / "metrics.jsonl")),
        *("--tensorboard-dir", str(folder / "events"), "--data-cache-path", str(folder / "cache")),
    ]


# One run that works, and every way in which it may be refused


@pytest.mark.promise("Clusters", "A run stopped early can exit with its own code.")
@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--exit-code-unfinished", "75"], 75)])
def test_a_run_that_leaves_early_may_say_so(flags: list[str], code: int, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    again = [*FLAGS, "--data-path", str(prefix), "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), *flags]
    found, out, _ = run([*again, "--exit-interval", "2"], capsys)
    assert found == code
    assert "leaving after iteration 2, saved: --exit-interval 2" in out
    process_groups.shutdown()
    assert run(again, capsys)[0] == 0  # the end


def test_a_run_trains_evaluates_and_saves(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run([*FLAGS, "--data-path", str(prefix), "--opt-level", "O2", *outputs(tmp_path)], capsys)
    assert code == 0
    assert "precision O2" in out
    for part in ("iter 4/4  loss", "valid at iteration 4", "test at iteration 4", f"saved {tmp_path / 'save' / 'iter_0000004'}"):
        assert part in out
    assert not torch.distributed.is_initialized()
    assert {row["kind"] for row in tiny.read(tmp_path / "out" / "metrics.jsonl")} == {"precision", "train", "valid", "test"}
    assert list((tmp_path / "events").iterdir())
    code, out, _ = run(
        [
            *FLAGS,
            *["--train-iters", "6", "--lr-decay-iters", "4", "--opt-level", "O2", "--data-path"],
            str(prefix),
            "--load",
            str(tmp_path / "save"),
        ],
        capsys,
    )
    assert code == 0
    assert "at iteration 4" in out
    assert "iter 6/6  loss" in out


# flags beside (and over) FLAGS; what stderr must name
BAD_SETTINGS = {
    "heads": ("--num-attention-heads 3", ["--hidden-size 32", "--num-attention-heads 3"]),
    "load": ("--load nowhere", ["--load nowhere"]),
    "two levels": ("--opt-level O2 --bf16", ["--opt-level O2", "--bf16"]),
    "TP": ("--tensor-model-parallel-size 2", ["--tensor-model-parallel-size 2"]),
    "no data": ("--data-path", ["--data-path PREFIX"]),
    "misspelt flag": ("--num-layer 2", ["--num-layer", "--num-layers"]),
    "save is a file": ("--save {prefix}.bin", ["--save"]),
    "an index alone": ("--data-path {prefix}_alone", ["error: ", "corpus_alone.bin"]),
}


@pytest.mark.parametrize("case", list(BAD_SETTINGS))
def test_bad_settings(case: str, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    flags, wanted = BAD_SETTINGS[case]
    monkeypatch.chdir(tmp_path)
    shutil.copy(f"{prefix}.idx", f"{prefix}_alone.idx")
    before = contents(prefix.parent)
    code, _, said = run([*FLAGS, "--data-path", str(prefix), *outputs(tmp_path), *flags.format(prefix=prefix).split()], capsys)
    assert code == 2
    for part in wanted:
        assert part in said, said
    assert "Traceback" not in said
    assert len(said) < 1000
    assert list(tmp_path.iterdir()) == []
    assert contents(prefix.parent) == before
    assert not torch.distributed.is_initialized()


def test_a_dry_run_prints_the_plan_of_a_rank_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [*outputs(tmp_path), "--preset", "13b", "--opt-level", "O3", "--dry-run", "--device-memory-gib"]
    code, out, said = run([*flags, "100"], capsys)
    assert (code, said) == (0, "")
    for part in (
        "grid: 4 processes = TP 2 x PP 1 x DP 2",
        "parameters: ",
        "fullest: stage 0",
        "linear layers: 160 FP8, 0 BF16; not measured",
        "fits into 100.0 GiB",
    ):
        assert part in out
    code, out, said = run([*flags, "40"], capsys)
    assert code == 2
    assert "fullest: stage 0" in out
    assert "fits" not in out
    assert "the device has 40.0 (--device-memory-gib)" in said
    monkeypatch.setenv("RANK", "1")  # one rank speaks
    assert run([*flags, "100"], capsys)[1] == ""
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()


# As a user starts it


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}


def command(arguments: list[str], **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment() | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(("flags", "torch_too"), [(["--num-attention-head", "2"], False), (["--num-attention-heads", "3"], True)])
def test_a_typo_is_told_before_torch_is_imported_and_a_refusal_before_megatron_core(
    prefix: Path, tmp_path: Path, flags: list[str], torch_too: bool
):
    """A recipe, which rules ask for its facts, has dtypes of torch's."""
    program = (
        "import sys; from megatron.lm import pretrain\n"
        "try: code = pretrain.main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, 'megatron.core' in sys.modules)\n"
        "sys.exit(code)"
    )
    code, out, err = ended(command(["-c", program, *FLAGS, "--data-path", str(prefix), *outputs(tmp_path), *flags]))
    assert (code, out.split()) == (2, [str(torch_too), "False"])
    assert " ".join(flags[:1]) in err


INTERRUPTS = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == awaited:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell, which has it ignored
awaited, script = sys.argv[1:3]
sys.argv[1:] = sys.argv[3:]
if script == "module":  # as python -m does
    import runpy
    runpy.run_module("megatron.lm.pretrain", run_name="__main__", alter_sys=True)
from megatron.lm.pretrain import main  # as the console script does
sys.exit(main())
"""


@pytest.mark.promise("Starting and ending", "SIGINT during imports is one line and exit code 130.")
@pytest.mark.parametrize(
    ("script", "name"),
    [("module", "megatron.lm.config"), ("console", "megatron.lm.config"), ("console", "torch._C"), ("module", "megatron.core")],
)
def test_sigint_while_the_trainer_is_imported_is_one_line(prefix: Path, tmp_path: Path, script: str, name: str):
    """The signal comes while `name` is looked for, deep in the imports of others."""
    flags = [*FLAGS, "--data-path", str(prefix), *outputs(tmp_path)]
    code, out, err = ended(command(["-c", INTERRUPTS, name, script, *flags]))
    assert (code, err) == (130, "error: interrupted by SIGINT\n")
    start = ("defaults that differ, Megatron-LM ", "    ")  # before torch
    assert [line for line in out.splitlines() if not line.startswith(start)] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly(20)  # the quick start does it every time
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_two_processes_by_torchrun(prefix: Path, tmp_path: Path):
    flags = [*FLAGS, "--data-path", str(prefix), "--opt-level", "O2", "--global-batch-size", "8", *outputs(tmp_path)]
    launch = [
        "-m",
        "megatron.lm.shell.torchrun",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(dist.free_port()),
    ]
    code, out, err = ended(command([*launch, "-m", "megatron.lm.pretrain", *flags]))
    assert code == 0, err
    assert err == ""  # no warning of another package, no banner of torchrun
    assert [line for line in out.splitlines() if len(line) > 120] == []
    assert out.count("iter 4/4") == 1  # one rank speaks
    assert "2 processes" in out
    assert any(key.startswith("rng/1/") for key in Stored(tmp_path / "save" / "iter_0000004").tensors)
    assert len(tiny.losses(tiny.read(tmp_path / "out" / "metrics.jsonl"))) == 2

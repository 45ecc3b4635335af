"""Megatron-LM's flags about saving and loading, through the command: what stands on the disk, and that a resume keeps every bit."""

import shlex
from pathlib import Path

import pytest

from helpers import tiny
from helpers.checkpoints import tensors
from megatron.lm import pretrain
from megatron.lm.checkpoint import latest

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-3 --split 80,15,5 --log-interval 1 --fp8-min-gain 0 --opt-level O3 "
    "--eval-interval 4 --eval-iters 1 --hidden-dropout 0.1 --make-vocab-size-divisible-by 32 --deterministic "
)


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def start(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process: `start(flags)` returns the training losses, stdout and stderr."""

    def run(flags: str, code: int = 0, model: str = MODEL) -> tuple[list[float], str, str]:
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        try:
            left = pretrain.main(shlex.split(f"{model} {RUN} {flags} --data-path {prefix} --metrics-file {metrics}"))
        except SystemExit as leaving:  # argparse
            left = int(leaving.code or 0)
        said = capsys.readouterr()
        assert left == code, said.err
        return (tiny.losses(tiny.read(metrics)) if metrics.exists() else []), said.out, said.err

    return run


@pytest.fixture(scope="module")
def straight(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the run that nothing interrupts."""
    return tiny.losses(tiny.command(tmp_path_factory.mktemp("straight"), *shlex.split(f"{MODEL} {RUN} --data-path {prefix}")))


def iterations(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


@pytest.mark.promise(
    "Checkpoints", "A run killed after a non-persistent checkpoint resumes from it bit for bit; only the newest of them is kept."
)
@pytest.mark.parametrize("async_save", ["", pytest.param("--async-save", marks=pytest.mark.nightly(2))])
def test_a_run_resumes_from_the_newer_of_both_folders(start, straight: list[float], tmp_path: Path, async_save: str):
    run, fast = tmp_path / "run", tmp_path / "fast"
    saving = f"--save {run} --load {run} --save-interval 3 --non-persistent-save-interval 2 --non-persistent-global-ckpt-dir {fast}"
    start(f"{saving} --exit-interval 5 {async_save}")
    assert (iterations(run), iterations(fast)) == ([3, 5], [4])
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    for path in (run / "iter_0000005").iterdir():  # as if the last save had not come to be
        path.unlink()
    (run / "iter_0000005").rmdir()
    resumed, said, _ = start(f"{saving} {async_save}")
    assert f"resumed from {run} at iteration 4" in said
    assert resumed == straight[4:]
    assert iterations(fast) == [4]


def test_what_a_run_went_back_behind_is_not_resumed(start, tmp_path: Path):
    saving = f"--save {tmp_path}/run --load {tmp_path}/run --save-interval 3 --non-persistent-save-interval 4"
    beside = tmp_path / "run" / "non_persistent"
    first, _, _ = start(f"{saving} --exit-interval 5")
    assert (iterations(tmp_path / "run"), iterations(beside)) == ([3, 5], [4])
    again, said, _ = start(f"{saving} --ckpt-step 3 --exit-interval 5")
    assert f"deleted {beside}/iter_0000004: the run went back to iteration 3" in said
    assert again == first[3:]
    assert iterations(beside) == [4]


@pytest.mark.parametrize("flag", ["--no-save-optim", "--no-save-rng"])
def test_what_is_left_out_starts_anew_and_the_log_says_so(start, straight: list[float], tmp_path: Path, flag: str):
    run = tmp_path / "run"
    start(f"--save {run} --exit-interval 4 {flag}")
    held = {key.partition("/")[0] for key in tensors(latest(run))}
    assert held == ({"model", "master", "rng"} if flag == "--no-save-optim" else {"model", "master", "exp_avg", "exp_avg_sq", "step"})
    resumed, said, _ = start(f"--load {run} {flag.replace('no-save', 'no-load')}")
    again, told, _ = start(f"--load {run}")
    assert again == resumed
    assert again != straight[4:]
    assert (
        f"{run}/iter_0000004 was saved with --no-save-optim: the optimizer's state is initialized"
        if flag == "--no-save-optim"
        else f"{run} has no random states for 1 of 1 places in the grid: dropout there starts from --seed"
    ) in told
    assert f"resumed from {run} at iteration 4" in said


@pytest.mark.promise("Megatron flags", "`--use-checkpoint-args` resumes a run without the flags of its model, bit for bit.")
def test_the_model_of_the_checkpoint(start, straight: list[float], tmp_path: Path):
    run = tmp_path / "run"
    start(f"--save {run} --exit-interval 3")
    resumed, said, _ = start(f"--load {run} --use-checkpoint-args", model="")
    assert resumed == straight[3:]
    assert f"from the checkpoint in --load {run}: --num-layers 2, --hidden-size 32, " in " ".join(said.split())
    _, _, error = start(f"--load {run} --use-checkpoint-args --num-layers 4", code=2, model="")
    assert "--num-layers 4 (saved: 2)" in error

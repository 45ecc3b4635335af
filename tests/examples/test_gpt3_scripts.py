"""The launch scripts of examples/gpt3, llama and moe: their numbers, how they start processes, and runs of them at a toy size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "gpt3"
SCRIPTS = {"125m": "125m", "345m": "345m", "1p3b": "1.3b", "7b": "7b", "13b": "13b", "175b": "175b"}  # name in the file's -> preset
MIXTURES = {"olmoe_1b_7b": "olmoe-1b-7b", "qwen3_30b_a3b": "qwen3-30b-a3b", "mixtral_8x7b": "mixtral-8x7b"}
LLAMAS = MIXTURES | {"llama2_7b": "llama2-7b", "llama3_8b": "llama3-8b", "llama3_70b": "llama3-70b", "qwen3_8b": "qwen3-8b"}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A dataset by name, with GPT-2's tokenizer beside it."""
    for name in ("corpus.bin", "corpus.idx", "encoder.json", "vocab.bpe"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path / "corpus"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Stands where the interpreter would: tells how it was called."""
    file = tmp_path / "python"
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
    file.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@"\nfor name in {names}; do echo "$name=${{!name:-}}"; done\n', encoding="utf-8")
    file.chmod(0o755)
    return file


def start(size: str, *arguments: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a clean environment with `environment`; from the root folder, which none of them may rely on."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    env = kept | {"OMP_NUM_THREADS": "1", "ON_CPU": "1", "PYTHONWARNINGS": "ignore", "PYTHON": sys.executable}
    env |= {name: str(value) for name, value in environment.items()}
    folder = FOLDER.parent / ("moe" if size in MIXTURES else "llama")
    file = folder / f"pretrain_{size}.sh" if size in LLAMAS else FOLDER / f"pretrain_gpt_{size}.sh"
    script = ["bash", str(file), *arguments]
    return subprocess.run(script, env=env, cwd="/", capture_output=True, text=True, timeout=600, check=False)  # a machine may be busy


def called(done: subprocess.CompletedProcess[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """What stands before the trainer's module, the flags after it, and the environment."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    words = [line for line in lines if not re.match(r"[A-Z_]+=", line)]
    at = words.index("megatron.lm.pretrain")
    return words[: at - 1], words[at + 1 :], dict(line.split("=", 1) for line in lines[len(words) :])


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("size", SCRIPTS | LLAMAS)
def test_the_numbers_are_those_of_the_preset_and_so_of_table_1(size, prefix, python):
    _, flags, _ = called(start(size, PYTHON=python, DATA=prefix, OPT_LEVEL="O2", NNODES=1))
    files = ["--vocab-file", str(prefix.parent / "encoder.json"), "--merge-file", str(prefix.parent / "vocab.bpe")]
    data = ["--data-path", str(prefix), "--tokenizer-type", "GPT2BPETokenizer", *files]
    assert parse_args(flags) == parse_args(
        ["--preset", (SCRIPTS | LLAMAS)[size], "--opt-level", "O2", "--use-distributed-optimizer", *data]
    )


DRY = [
    ("125m", 8),
    ("345m", 8),
    ("1p3b", 8),
    ("7b", 32),
    ("13b", 32),
    ("175b", 128),
    ("llama2_7b", 32),
    ("llama3_8b", 64),
    ("llama3_70b", 64),
    ("qwen3_8b", 64),
    ("olmoe_1b_7b", 8),
    ("qwen3_30b_a3b", 64),
    ("mixtral_8x7b", 64),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "gpus"), DRY)
def test_a_dry_run_fits_on_the_gpus_of_the_script(size, gpus):
    done = start(size, DRY_RUN=1, GPU_MEMORY_GIB=80)
    assert done.returncode == 0, done.stderr
    assert f"grid: {gpus} processes = TP" in done.stdout
    assert re.search(r"fullest: stage 0, data-parallel \d+ ", done.stdout)
    assert "fits into 80.0 GiB; nothing was started" in done.stdout


def test_a_prepared_folder_brings_validation_data_and_its_tokenizer(tmp_path, python):
    for name in ("train_text_document.bin", "valid_text_document.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    _, flags, _ = called(start("125m", PYTHON=python, DATA=tmp_path))
    data = parse_args(flags).data
    assert (data.train_data_path, data.valid_data_path) == ((f"{tmp_path}/train_text_document",), (f"{tmp_path}/valid_text_document",))
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", f"{tmp_path}/tokenizer.json")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, ["DATA is not set", "msamp prepare-text", "msamp preprocess", "DRY_RUN=1"]),
        ({"DATA": "/nowhere"}, ["DATA=/nowhere", "/nowhere.bin", "/nowhere/train_text_document.bin", "msamp preprocess"]),
        ({"DATA": "corpus"}, ["NNODES=4, but MASTER_ADDR or NODE_RANK is not set", "srun", "MASTER_ADDR=HOST", "NODE_RANK=0 to 3"]),
    ],
)
def test_what_is_missing_is_said(environment, wanted, prefix):
    if environment.get("DATA") == "corpus":
        environment = {"DATA": prefix}
    said = refused(start("7b", **environment))
    for part in wanted:
        assert part in said


@pytest.mark.parametrize("script", ["gpt3_125m_enwik8.sh", "bert/pretrain_bert_base.sh", "gpt3/pretrain_gpt_125m.sh"])
def test_a_training_of_full_size_is_refused_without_a_gpu(script, prefix, python):
    """Before, hours of emulation began without a word."""
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "PYTHON": str(python), "DATA": str(prefix)}
    command = ["bash", str(FOLDER.parent / script)]

    def run(**more):
        return subprocess.run(command, env=environment | more, cwd=prefix.parent, capture_output=True, text=True, timeout=60, check=False)

    said = refused(run())
    assert said.startswith("error: no GPU is visible")
    assert "TOY=1" in said
    assert said.count("\n") == 1
    if not script.startswith("bert"):
        (prefix.parent / "meta.json").touch()
        assert "megatron.lm.pretrain" in run(ON_CPU="1", DATA=str(prefix.parent if "enwik8" in script else prefix)).stdout


# How processes are started


def test_several_machines_by_hand(prefix, python):
    launch, _, _ = called(start("7b", PYTHON=python, DATA=prefix, NODE_RANK=3, MASTER_ADDR="first"))
    assert " ".join(launch[2:]) == "--nnodes 4 --node-rank 3 --nproc-per-node 8 --master-addr first --master-port 29500"


def test_under_srun_a_task_is_a_rank_or_a_machine_and_flags_that_follow_override(prefix, python, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/bash\nprintf "gpu1\\ngpu2\\n"\n', encoding="utf-8")
    scontrol.chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_STEP_ID": 0, "SLURM_JOB_ID": 20007, "SLURM_NNODES": 4, "SLURM_NODEID": 2}
    more = {"PYTHON": python, "DATA": prefix, **job}
    launch, flags, environment = called(start("7b", "--lr", "1e-3", SLURM_NTASKS=32, SLURM_PROCID=17, SLURM_LOCALID="01", **more))
    assert launch == []
    assert (
        environment.items() >= {"RANK": "17", "WORLD_SIZE": "32", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu1", "MASTER_PORT": "28007"}.items()
    )
    assert parse_args(flags).optimizer.lr == 1e-3
    launch, _, environment = called(start("7b", SLURM_NTASKS=4, SLURM_PROCID=2, SLURM_LOCALID=0, **more))
    assert " ".join(launch[2:]) == "--nnodes 4 --node-rank 2 --nproc-per-node 8 --master-addr gpu1 --master-port 28007"
    assert environment["RANK"] == ""


# At a toy size


def test_the_toy_has_the_grid_and_the_flags(python):
    assert "TP 8 x PP 4 is 32: use DRY_RUN=1" in refused(start("175b", TOY=1, PYTHON=python))
    assert "TP 8 x PP 4 is 32: use DRY_RUN=1" in refused(start("llama3_70b", TOY=1, PYTHON=python))
    done = start("13b", TOY=1, DRY_RUN=1, GPU_MEMORY_GIB=80)
    assert done.returncode == 0, done.stderr
    assert "grid: 2 processes = TP 2 x PP 1 x DP 1, sequence parallel, ZeRO" in done.stdout
    assert "fits into 80.0 GiB; nothing was started" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("size", "level"),
    [
        *((size, "O3") for size in ("125m", "345m", "1p3b", "7b", "llama2_7b", "llama3_8b", "qwen3_8b")),
        *(("13b", level) for level in ("O0", "O1", "O2", "O3")),
    ],
)
def test_the_toy_trains(size, level, tmp_path):
    done = start(size, TOY=1, OPT_LEVEL=level, TMPDIR=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"iter +\d/3 .*loss (\S+)", done.stdout)]
    assert len(losses) == 3
    assert all(3 < loss < 5 for loss in losses)  # log 64 is 4.2
    assert ("(tensor 2 with sequence, pipeline 1, data 1)" in done.stdout) == (size == "13b")
    assert list(tmp_path.rglob("toy*")) == []  # the generated data is gone

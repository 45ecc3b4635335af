"""Checkpoints that earlier versions wrote (`tests/checkpoints_of`, by `tests/helpers/make_checkpoints.py`): loaded bit for bit and resumed.

Losses of the steps after loading are compared to `LOSS`, because products add up in another order on another CPU. On the machine that made
them they are equal to the bit, with the kernels for AVX2 and for AVX-512 without BF16 too; those for SSE move them by at most 6e-6.
"""

import json
import math
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints, tiny
from helpers.make_checkpoints import STEPS_AFTER, digests
from megatron.lm.checkpoint import latest, save
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.checkpoint.files.versions import _STEPS, VERSION, check_info, files_of, upgraded
from megatron.lm.config import CheckpointConfig, Config, LoggingConfig, ParallelConfig
from megatron.lm.config.cli import config_from_dict

ROOT = Path(__file__).parents[4] / "checkpoints_of"
RUNS = sorted(str(file.relative_to(ROOT)).removesuffix(".tar.xz") for file in ROOT.glob("*_*/*.tar.xz"))
LOSS = {"rel": 1e-4}
TOO_OLD = r"resume with the version of msamp that wrote it; to convert it, .* save again with one that reads \d and writes 5 or newer"


@pytest.fixture(autouse=True)
def beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations of then name corpus and checkpoint in the working directory."""
    monkeypatch.chdir(tmp_path)


def unpacked(run: str) -> Config:
    """Fetch a run's checkpoint and corpus; the configuration of a run that resumes from it with its flags, but for scaling, rounding and
    the transport, whose default was another."""
    archive = ROOT / f"{run}.tar.xz"
    shutil.unpack_archive(archive)
    for file in archive.parent.glob("corpus.*"):
        shutil.copy(file, file.name)
    name = archive.name.removesuffix(".tar.xz")
    config = config_from_dict(read_info(latest(Path(name)))["config"])
    return replace(
        config,
        training=replace(config.training, exit_interval=None),
        parallel=replace(config.parallel, tp_transport=ParallelConfig.tp_transport),
        precision=replace(config.precision, fp8_recipe=None, master_rounding=None, moment_rounding=None),
        logging=LoggingConfig(log_interval=1),
        checkpoint=CheckpointConfig(load=name),
    )


def then(run: str) -> dict[str, Any]:
    """What the code that wrote the checkpoint made of it."""
    return json.loads((ROOT / f"{run}.json").read_text(encoding="utf-8"))


def test_every_version_that_is_read_and_every_release_has_its_checkpoints():
    assert list(_STEPS) == list(range(min(_STEPS), VERSION))
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    written = {f"version_{version}" for version in _STEPS} | {f"release_{version}" for version in releases}
    assert {run.partition("/")[0] for run in RUNS} == written
    assert len(RUNS) >= 3


@pytest.mark.parametrize("run", RUNS)
def test_a_checkpoint_of_then_has_the_bits_of_then_and_goes_on(run: str, tmp_path: Path):
    config, expected, rows = unpacked(run), then(run), []
    before = checkpoints.tensors(latest(Path(config.checkpoint.load)))
    with tiny.trainer(config) as made:
        training = made.training
        assert digests(training) == expected["digests"]
        assert (training.iteration, training.consumed_samples) == (expected["iteration"], expected["consumed_samples"])
        assert (training.loss_scaler.state_dict() if training.loss_scaler is not None else None) == expected["loss_scale"]
        again = save(training, tmp_path / "again")
        assert checkpoints.same(checkpoints.tensors(again), before)
        assert json.loads((again / "checkpoint.json").read_text())["version"] == VERSION
        made.metrics.write = rows.append
        made.run()
    assert len(expected["losses"]) == STEPS_AFTER
    assert tiny.losses(rows) == pytest.approx(expected["losses"], **LOSS)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            VERSION + 1,
            rf"has checkpoint version {VERSION + 1}, but this code reads versions 5 to {VERSION}: use the version that wrote it, or",
        ),
        *((version, rf"has checkpoint version {version}, but this code reads versions 5 to {VERSION}: {TOO_OLD}") for version in (2, 3, 4)),
    ],
)
def test_other_versions_are_refused_with_a_remedy(version: int, said: str):
    config = unpacked("version_5/O2")
    checkpoints.seal(latest(Path("O2")), version=version)
    with pytest.raises(ValueError, match=f"O2/iter_0000018 {said}"):
        tiny.run(config)


RUN = {"id": "a", "parent": {"run": "b", "iteration": 4, "finetune": False}, "adopted": False}
HEALTH = {"problem": None, "mean_loss": 4.1, "losses": 3}
DATASET = {"prefix": "p", "weight": 1.0, "documents": [0, 9], "tokens": 90, "index": "0", "content": "0"}
DATA = {"order": "epochs", "seed": 1, "datasets": [DATASET]}
WRONG: dict[str, tuple[dict[str, object], str]] = {
    "an iteration below 0": ({"iteration": -1}, "has iteration -1; it must be an integer of at least 0; load an older"),
    "an iteration of text": ({"iteration": "4"}, "has iteration '4'; it must be an integer"),
    "an iteration with a fraction": ({"iteration": 4.0}, "has iteration 4.0; it must be an integer"),
    "an iteration that is true": ({"iteration": True}, "has iteration True; it must be an integer"),
    "an iteration of 10^30": ({"iteration": 10**30}, "has iteration 10+; it must be an integer"),
    "no schedule_steps": ({"schedule_steps": None}, "has schedule_steps None; it must be"),
    "skipped_steps that are NaN": ({"skipped_steps": math.nan}, "has skipped_steps nan; it must be"),
    "no processes": ({"processes": 0}, "has processes 0; it must be an integer of at least 1"),
    "a vocabulary that is a list": ({"vocab_size": [60]}, r"has vocab_size \[60\]; it must be"),
    "a loss scale of 0": ({"loss_scale": {"loss_scale": 0.0, "unskipped": 0}}, "has the invalid loss scale"),
    "a loss scale that is infinite": ({"loss_scale": {"loss_scale": math.inf, "unskipped": 0}}, "has the invalid loss scale"),
    "a loss scale that is NaN": ({"loss_scale": {"loss_scale": math.nan, "unskipped": 0}}, "has the invalid loss scale"),
    "a loss scale that is a number": ({"loss_scale": 65536.0}, "has the invalid loss scale 65536.0"),
    "a loss scale that counts back": ({"loss_scale": {"loss_scale": 2.0, "unskipped": -1}}, "has the invalid loss scale"),
    "a configuration that is a list": ({"config": []}, "has a configuration that is not sections of settings"),
    "a section that is null": ({"config": {"model": None}}, "has a configuration that is not sections of settings"),
    "an unknown section": ({"config": {"models": {}}}, "has a configuration that cannot be read: 'models' is not a known section"),
    "a setting of another type": ({"config": {"model": {"num_layers": "2"}}}, "has a configuration that cannot be read: "),
    "no files": ({"files": None}, "has a checkpoint.json without a table of files"),
    "files that are a list": ({"files": [1]}, "has a checkpoint.json without a table of files"),
    "a file without a size": ({"files": {"__0_0.bin": {"sha256": "0"}}}, "without bytes and SHA-256 of '__0_0.bin'"),
    "a file with a negative size": ({"files": {"__0_0.bin": {"bytes": -1, "sha256": "0"}}}, "without bytes and SHA-256"),
    "a digest that is a number": ({"files": {"__0_0.bin": {"bytes": 1, "sha256": 0}}}, "without bytes and SHA-256"),
    "a version that is text": ({"version": "5"}, "has checkpoint version '5', which is not an integer"),
    **{
        f"{name} that is {entry!a:.90}": (
            {name: entry},
            f"has {name} {re.escape(ascii(entry)[:80])} in its checkpoint.json, which no run writes; load an older checkpoint",
        )
        for name, entries in {
            "run": ("a", {}, RUN | {"id": 7}, RUN | {"parent": {}}, RUN | {"parent": {"run": "b", "iteration": -1, "finetune": False}}),
            "health": (
                [],
                HEALTH | {"problem": 3},
                HEALTH | {"mean_loss": math.nan},
                HEALTH | {"mean_loss": 10**400},
                HEALTH | {"losses": "2"},
            ),
            "data": ("x", {}, DATA | {"datasets": None}, DATA | {"datasets": [{}]}, DATA | {"datasets": [DATASET | {"documents": [1]}]}),
        }.items()
        for entry in entries
    },
    "no version": ({"version": None}, "has checkpoint version None, which is not an integer"),
}


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    """A `checkpoint.json`."""
    with tarfile.open(ROOT / "version_5" / "O3.tar.xz") as archive:
        (member,) = (member for member in archive.getmembers() if member.name.endswith("checkpoint.json"))
        return json.load(archive.extractfile(member))  # type: ignore[arg-type]


def judged(info: dict[str, Any]) -> None:
    now = upgraded(info)
    files_of(now)
    check_info(now)


@pytest.mark.promise("Checkpoints", "Types and ranges in `checkpoint.json` are checked, with one line for what is wrong.")
@pytest.mark.parametrize("name", WRONG)
def test_what_no_checkpoint_says_is_refused(info: dict[str, Any], name: str):
    changes, said = WRONG[name]
    judged(info)
    judged(info | {"run": RUN, "health": HEALTH, "data": DATA})
    judged(info | {"run": RUN | {"parent": None}, "health": HEALTH | {"mean_loss": None}})
    judged(info | {"loss_scale": {"loss_scale": 65536.0, "unskipped": 3, "overflows_left": 1}})
    with pytest.raises(ValueError, match=said) as caught:
        judged(info | changes)
    assert len(str(caught.value).splitlines()) == 1

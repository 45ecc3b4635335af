"""MS-AMP has the same import name: where it is installed too it is named, and refused where its files and ours lie in one folder."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch import nn

import msamp
from msamp.integrations.ms_amp import check_alone

PACKAGE = Path(msamp.__file__).parent


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed distributions, MS-AMP 0.4.0 among them."""
    (tmp_path / "ms_amp-0.4.0.dist-info").mkdir()
    (tmp_path / "ms_amp-0.4.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: MS-AMP\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_alone_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_alone()


@pytest.mark.promise("Packaging", "MS-AMP in the same folder is refused before anything is converted.")
def test_in_one_folder_it_is_refused_before_a_layer_is_converted(site):
    (site / "msamp").symlink_to(PACKAGE)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"^MS-AMP 0\.4\.0 is also installed in .* pip uninstall ms-amp msamp, then install the one"):
        msamp.initialize(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.promise("Packaging", "MS-AMP in another folder is named in a warning.")
def test_elsewhere_it_is_named_where_the_caller_of_initialize_stands(site):
    def initialize():
        check_alone()

    with pytest.warns(UserWarning, match=r"^MS-AMP 0\.4\.0 is also installed .*; import msamp imports this package") as told:
        initialize()
    assert [warning.filename for warning in told if "MS-AMP" in str(warning.message)] == [__file__]


def test_a_checkout_whose_files_have_moved_since_it_was_installed_is_whole(installed):
    """pip leaves msamp.egg-info there, whose list of files `git pull` does not change."""
    shutil.rmtree(installed / "msamp-0.1.0.dist-info")
    info = installed / "msamp.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: msamp\nVersion: 0.1.0\n")
    (info / "SOURCES.txt").write_text("msamp/__init__.py\nmsamp/nn/moved.py\n")
    run = started(installed)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.fixture
def installed(tmp_path):
    """This project as a wheel leaves it in a folder, without its tests."""
    site, root = tmp_path / "site", PACKAGE.parent
    for package in ("msamp", "megatron/lm"):
        shutil.copytree(root / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "msamp-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: msamp\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("".join(f"{f.relative_to(site)},,\n" for f in site.rglob("*.py")))
    return site


def started(site: Path) -> subprocess.CompletedProcess:
    program = "import sys; from megatron.lm.pretrain import main; sys.exit(main(['--help']))"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-c", program], cwd=site, env=environment, capture_output=True, text=True, check=False)


def test_the_trainer_names_ms_amp_that_was_installed_later_and_what_it_took_along(installed):
    """Where `import msamp` is MS-AMP, and where its uninstallation took the files that both have."""
    run = started(installed)
    assert (run.returncode, run.stderr) == (0, "")
    (installed / "msamp" / "__init__.py").write_text("import deepspeed\n")
    theirs = installed / "ms_amp-0.4.0.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-amp\nVersion: 0.4.0\n")
    run = started(installed)
    assert run.returncode == 2
    assert run.stderr.startswith("error: MS-AMP 0.4.0 is also installed in ")
    assert "pip uninstall ms-amp msamp, then install the one that you need" in run.stderr
    shutil.rmtree(theirs)
    for gone in ("optim/optimizer.py", "nn/linear.py"):
        (installed / "msamp" / gone).unlink()
    run = started(installed)
    assert run.returncode == 2
    assert run.stderr.startswith("error: 2 files of msamp 0.1.0 are missing (msamp/")
    shutil.rmtree(installed / "msamp" / "integrations")
    run = started(installed)
    assert run.returncode == 2
    assert "which is not the msamp of this trainer" in run.stderr

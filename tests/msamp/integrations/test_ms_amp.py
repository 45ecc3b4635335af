"""MS-AMP has the same import name: where it is installed too it is named, and refused where its files and ours lie in one folder."""

import importlib
import shutil
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


@pytest.mark.parametrize("backend", ["MSAMP", "TE"])
def test_the_import_names_our_accelerator_where_accelerate_is_set_to_ms_amp(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        importlib.reload(msamp)
    named = [w for w in told if "msamp.integrations.accelerate.Accelerator" in str(w.message)]
    assert len(named) == (backend == "MSAMP")


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

"""MS-AMP has the same import name: where it is installed too it is named, and refused where its files and ours lie in one folder."""

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


def test_in_one_folder_it_is_refused_before_a_layer_is_converted(site):
    (site / "msamp").symlink_to(PACKAGE)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"^MS-AMP 0\.4\.0 is installed in .* pip uninstall ms-amp msamp, then install the one"):
        msamp.initialize(model)
    assert type(model[0]) is nn.Linear


def test_elsewhere_it_is_named_where_the_caller_of_initialize_stands(site):
    def initialize():
        check_alone()

    with pytest.warns(UserWarning, match=r"^MS-AMP 0\.4\.0 is installed too .*; import msamp takes this package") as told:
        initialize()
    assert [warning.filename for warning in told if "MS-AMP" in str(warning.message)] == [__file__]

"""The documentation's configuration: docstrings in Markdown, the page of flags, and that every public name has a place."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import msamp

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    pytest.importorskip("sphinx", reason="of the extra `docs`")
    spec = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_documented():
    told = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    rooms = {name: value.__name__ for name in msamp.__all__ if isinstance(value := getattr(msamp, name), ModuleType)}
    documented = set(re.findall(r"auto(?:class|function):: (\w+)", told))
    assert set(msamp.__all__) - documented - set(rooms) == set()
    assert set(rooms.values()) == {room for room in rooms.values() if f"automodule:: {room}\n" in told}


def test_the_page_of_flags_has_every_flag_of_the_help(conf):
    text = conf.help_text()
    groups = {title: dict(flags) for title, _, flags in conf.groups_of(text)}
    shown = {flag.split()[0].rstrip(",") for flags in groups.values() for flag in flags}
    assert shown == set(re.findall(r"^  (-[\w-]+)", text, re.MULTILINE))
    assert groups["model"]["--hidden-size N"] == "width of the residual stream (required)"

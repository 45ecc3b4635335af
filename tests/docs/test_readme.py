"""README: short enough to be read in five minutes, and every link in it leads to a file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]


def test_it_is_at_most_160_lines_of_120_characters():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 160
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#"))]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []

"""How tests ask for the trainers and libraries of others."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import hosts

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "docs" / "reference" / "hosts_matrix.md"
MISSING = "no_such_host"


def test_a_host_that_is_not_there_skips_the_test_and_names_the_extra(monkeypatch):
    monkeypatch.delenv("REQUIRE_HOSTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"needs no_such_host .*pip install -e '\.\[integrations\]'"):
        hosts.need(MISSING)


def test_an_extra_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("REQUIRE_HOSTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"needs no_such_host .*pip install -e '\.\[data\]', or make test-extras"):
        hosts.need(MISSING, "data")


def test_where_hosts_are_required_a_missing_one_fails_the_test(monkeypatch):
    monkeypatch.setenv("REQUIRE_HOSTS", "1")
    with pytest.raises(pytest.fail.Exception, match=r"REQUIRE_HOSTS is 1 and this test needs no_such_host"):
        hosts.need(MISSING)


def test_ci_runs_every_test_that_needs_a_host_and_lets_none_be_skipped():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^step .*\btest-hosts\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert "REQUIRE_HOSTS=1 $(PARALLEL) $(HOST_TESTS)" in makefile
    names = re.search(r"^HOST_TESTS = tests/integrations \$\(addprefix (tests/msamp/integrations/test_),(.+)\)$", makefile, re.MULTILINE)
    assert names is not None
    run = {names[1] + name for name in names[2].split()}
    asking = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if re.search(r"hosts\.need\(\"\w+\"\)", path.read_text())
    }
    assert {path for path in asking if not path.startswith("tests/integrations/")} == run


def test_ci_runs_every_test_that_needs_an_extra():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^step .*\btest-extras\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    named = re.search(r"^EXTRA_TESTS = ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert named is not None
    run = named[1].replace("\\\n", " ").split()
    asking = [path for path in ROOT.glob("tests/**/test_*.py") if re.search(r"hosts\.need\(\"\w+\", \"", path.read_text())]
    assert asking
    for path in asking:
        assert any(path.is_relative_to(ROOT / part) for part in run), f"{path} asks for an extra, and EXTRA_TESTS does not name it"


def calls_of_extras(*nodes: ast.AST) -> int:
    calls = [ast.unparse(node).replace("'", '"') for part in nodes for node in ast.walk(part) if isinstance(node, ast.Call)]
    return sum(hosts._EXTRA.fullmatch(call) is not None for call in calls)


def test_extras_are_asked_for_where_the_flag_extras_sees_it(request):
    """In a test or at the top level of its file: not in a fixture or helper."""
    for path in ROOT.glob("tests/**/test_*.py"):
        tree = ast.parse(text) if "hosts.need(" in (text := path.read_text()) else ast.Module([])
        seen = [node for node in tree.body if not isinstance(node, ast.FunctionDef) or node.name.startswith("test_")]
        assert calls_of_extras(tree) == calls_of_extras(*seen), f"{path}: ask for the extra in the test itself"
    assert not hosts.asks_for_an_extra(request.node)


def test_a_file_that_keeps_the_module_of_an_extra_asks_for_it(request, monkeypatch):
    call = "hosts." + 'need("wandb", "wandb")'
    for line, asks in ((f"wandb = {call}", True), (f"    {call}", False)):  # the second is in another test
        sources = {"module": line, request.node.function: ""}
        monkeypatch.setattr(hosts, "inspect", SimpleNamespace(getmodule=lambda _: "module", getsource=sources.get))
        assert hosts.asks_for_an_extra(request.node) == asks


def test_every_test_that_the_matrix_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", MATRIX.read_text())
    assert len(named) > 10
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test} is not there"


def test_every_cell_says_what_works_is_refused_or_was_not_tried_and_its_test_is_listed():
    table, _, listing = MATRIX.read_text().partition("## The tests\n")
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 8
    sections = dict(re.findall(r"^### (.+)\n\n((?:- .+\n)+)", listing, re.MULTILINE))
    assert list(sections) == [row[0] for row in rows]
    for host, *cells in rows:
        listed = dict(re.findall(r"^- (.+?): (.+)$", sections[host], re.MULTILINE))
        assert list(listed) == head[1:]
        for what, cell in zip(head[1:], cells, strict=True):
            assert re.match(r"works|refused|not tried", cell), f"{host}, {what}: {cell!r}"
            assert "refused" not in cell or "refuse" in listed[what], f"{host}, {what}: a refusal has no test"
            assert "::test_" in listed[what] or cell.startswith("not tried"), f"{host}, {what} has no test"

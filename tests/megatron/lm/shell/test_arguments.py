"""Values that cannot serve are refused while the command line is read."""

import argparse

import pytest

from megatron.lm.shell import arguments


@pytest.mark.promise("Tools", "An empty path, or an output that cannot be written, is refused before the work.")
@pytest.mark.parametrize(
    ("judge", "text", "message"),
    [
        (arguments.path, "", "is empty: a shell variable may be unset"),
        (arguments.output_file, " ", "is empty"),
        (arguments.output_file, "/", "is a folder: give a file in it"),
        (arguments.output_file, "/dev/null/x/y", "is below /dev/null, which is a file"),
        (arguments.output_file, "x" * 300, "cannot be written"),
        (arguments.count(0), "-1", "-1 is out of range: give 0 to 2147483647"),
        (arguments.count(1, 8), "9", "9 is out of range: give 1 to 8"),
        (arguments.count(1), "1.5", "'1.5' is not an integer"),
    ],
)
def test_a_value_that_cannot_serve_is_refused_before_the_work(judge, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        judge(text)


@pytest.mark.promise("Tools", "A refused tool call is one line with value and fix, and exit code 2.")
def test_errors_are_one_line(capsys):
    parser = arguments.Parser(description="A tool.\n\n    python tool.py")
    parser.add_argument("--runs", type=arguments.count(1))
    with pytest.raises(SystemExit) as leaving:
        parser.parse_args(["--runs", "0"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "error: argument --runs: 0 is out of range: give 1 to 2147483647 (--help lists the flags)\n"
    assert "A tool.\n\n    python tool.py" in parser.format_help()


def test_a_word_that_is_no_utf8_is_refused(capsys, monkeypatch):
    """It stands in the arguments with lone surrogates, and the tool would fail where it prints it, when the work is done."""
    parser = arguments.Parser()
    parser.add_subparsers().add_parser("to").add_argument("--out", type=arguments.path)
    monkeypatch.setattr("sys.argv", ["tool", "to", "--out", "o/\udc80/x"])
    for given in (None, ["to", "--out=\udc80"], ["\udc80"]):
        with pytest.raises(SystemExit) as leaving:
            parser.parse_args(given)
        assert leaving.value.code == 2
        assert "\\udc80" in (said := capsys.readouterr().err)
        assert said.endswith("' is not valid UTF-8: rename it, or the file (--help lists the flags)\n")
    assert parser.parse_args(["to", "--out", "ö"]).out.name == "ö"


def test_a_path_that_can_serve_is_taken(tmp_path):
    assert arguments.output_file(f"{tmp_path}/new/rows.csv") == tmp_path / "new" / "rows.csv"
    assert not list(tmp_path.iterdir())
    assert arguments.count(2)("2") == 2

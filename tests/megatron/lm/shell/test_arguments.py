"""Values that cannot serve are refused while the command line is read."""

import argparse

import pytest

from megatron.lm.shell import arguments


@pytest.mark.promise("Tools", "An empty path, or an output that cannot be written, is refused before the work.")
@pytest.mark.parametrize(
    ("judge", "text", "message"),
    [
        (arguments.path, "", "empty"),
        (arguments.output_file, " ", "empty"),
        (arguments.output_file, "/", "folder"),
        (arguments.output_file, "/dev/null/x/y", "/dev/null"),
        (arguments.output_file, "x" * 300, "cannot be written"),
        (arguments.count(0), "-1", "-1"),
        (arguments.count(1, 8), "9", "9"),
        (arguments.count(1), "1.5", "1.5"),
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
    said = capsys.readouterr().err
    assert "--runs" in said
    assert said.count("\n") == 1
    assert "A tool.\n\n    python tool.py" in parser.format_help()


def test_a_path_that_can_serve_is_taken(tmp_path):
    assert arguments.output_file(f"{tmp_path}/new/rows.csv") == tmp_path / "new" / "rows.csv"
    assert not list(tmp_path.iterdir())
    assert arguments.count(2)("2") == 2

"""Reading metrics files, and a page that stands alone with plots that hold what the files say."""

import base64
import json
import math

import pytest

from megatron.lm.tools import report

BYTES = {"weight": 2, "grad": 1, "master": 0, "m": 1, "v": 2}


def train_line(iteration, loss, **more):
    line = {"kind": "train", "iteration": iteration, "tokens": iteration * 10, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "skipped": 0}
    return line | {"tokens_per_s": 1000.0, "tflops": 0.1, "memory_gib": 0.5} | more


def valid_line(iteration, loss):
    return {"kind": "valid", "iteration": iteration, "tokens": 0, "loss": loss, "ppl": math.exp(loss), "bits_per_byte": None}


def write(path, lines, tail=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


@pytest.fixture
def files(tmp_path):
    found = {}
    for name, offset in (("O0", 0.0), ("O2", 0.02)):
        lines = [{"kind": "precision", "bytes_per_parameter": BYTES, "parameters": 10}]
        lines += [train_line(i, 8 - 0.1 * i + offset) for i in range(1, 21)]
        lines += [valid_line(10, 7.2 + offset), valid_line(20, 6.2 + offset)]
        found[name] = write(tmp_path / f"{name}.jsonl", lines)
    return found


def test_a_resumed_run_overrides_and_a_half_written_line_is_left_out(tmp_path):
    lines = [train_line(1, 5.0), train_line(2, 4.0), train_line(2, 3.0)]
    run = report.read_run("x", write(tmp_path / "m", lines, tail='{"kind": "tra'))
    assert [(line["iteration"], line["loss"]) for line in run.train] == [(1, 5.0), (2, 3.0)]


@pytest.mark.promise("Tools", "An invalid line of metrics is refused with its number.")
@pytest.mark.parametrize(
    ("lines", "tail", "message"),
    [
        ([], "", "no training line"),
        ([train_line(1, 5.0)], "not json\n", "line 2 is not a line of metrics"),
        ([train_line(1, 5.0)], "[1]\n", "line 2"),
        ([{"kind": "train"}], "", "line 1"),
        ([train_line(1, "low")], "", "loss 'low' is not a number"),
        ([train_line(1, 5.0, memory_gib=10**400)], "", "memory_gib 10+ is not a number"),
        ([train_line("one", 5.0)], "", "iteration 'one' is not a count"),
        ([{"kind": "precision", "bytes_per_parameter": {"m": "two"}}], "", "is not a table of numbers"),
    ],
)
def test_bad_files_are_refused(tmp_path, lines, tail, message):
    with pytest.raises(ValueError, match=message):
        report.read_run("x", write(tmp_path / "m", lines, tail))


@pytest.mark.promise("Tools", "`report` accepts a run that diverged and says so.")
def test_a_loss_that_is_not_finite_is_a_gap_and_is_said(tmp_path, capsys):
    """The trainer writes null for it."""
    good = write(tmp_path / "a", [train_line(i, 5.0) for i in (1, 2)] + [valid_line(2, 5.0)])
    lines = [train_line(1, 5.0, memory_gib=None, tokens_per_s=None), train_line(2, None), valid_line(2, 5.0) | {"loss": None, "ppl": None}]
    dead = write(tmp_path / "b", lines)
    assert report.main([f"a={good}", f"b={dead}", "--out", str(tmp_path / "out")]) == 0
    assert "validation loss: a 5.0000, b not finite" in capsys.readouterr().out
    assert (tmp_path / "out" / "loss.png").is_file()


def test_losses_at_different_iterations_are_not_compared(tmp_path):
    runs = [report.read_run(name, write(tmp_path / name, [train_line(1, 5.0), valid_line(at, 5.0)])) for name, at in (("a", 1), ("b", 2))]
    assert report.summary(runs, None)[1] == "the last evaluations are at iterations 1, 2, so losses are not compared"


def test_a_loss_of_zero_divides_nothing():
    assert report.relative(0.0, 0.0) == 0.0
    assert report.relative(0.0, 1.0) == math.inf


@pytest.mark.parametrize("text", ["{", "[1]", '{"unigram_entropy_nats": "3"}', '{"unigram_entropy_nats": 0}'])
def test_a_bad_meta_is_refused_and_leaves_nothing(tmp_path, files, capsys, text):
    (tmp_path / "meta.json").write_text(text)
    flags = [f"O0={files['O0']}", "--meta", str(tmp_path / "meta.json"), "--out", str(tmp_path / "o" / "out")]
    assert report.main(flags) == 2
    assert "give the meta.json that msamp prepare-text writes" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_differences_are_relative_and_over_common_iterations():
    base = report.Run(name="a", train=[train_line(i, 2.0) for i in (1, 2, 3)])
    other = report.Run(name="b", train=[train_line(i, 2.1) for i in (2, 3, 4)])
    iterations, relative = report.differences(base, other, 2)
    assert iterations == [2, 3]
    assert relative == pytest.approx([0.05, 0.05])
    with pytest.raises(ValueError, match="no common iteration"):
        report.differences(base, report.Run(name="c", train=[train_line(9, 1.0)]), 2)


def test_page_stands_alone(files, tmp_path, capsys):
    meta = tmp_path / "meta.json"
    meta.write_text('{"unigram_entropy_nats": 6.6}')
    arguments = [f"O0={files['O0']}", f"O2={files['O2']}", "--meta", str(meta)]
    assert report.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/report.html").read_text()
    picture = (tmp_path / "out" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert base64.b64encode(picture).decode() in page
    assert "http" not in page
    assert "<td>6.2200</td>" in page
    assert "2 weight, 1 grad, 1 m, 2 v" in page
    printed = capsys.readouterr().out
    assert "O2 is +0.32 % from O0; O0 is 6.1 % below the unigram entropy of 6.6000" in printed
    assert report.main([f"<i>={files['O0']}", f"O2={files['O2']}", "--out", str(tmp_path / "named")]) == 0
    named = (tmp_path / "named/report.html").read_text()
    assert "<th>&lt;i&gt;</th>" in named
    assert "<i>" not in named


def test_plots_show_the_files_numbers(files):
    runs = [report.read_run(name, path) for name, path in files.items()]
    loss = report.loss_figure(runs, 6.6, 1)
    labels = [text.get_text() for text in loss.axes[0].get_legend().get_texts()]
    assert labels == ["O0 training", "O0 validation", "O2 training", "O2 validation", "unigram entropy 6.60"]
    points = next(line for line in loss.axes[0].get_lines() if line.get_label() == "O2 validation")
    assert points.get_xydata().tolist() == [[10, pytest.approx(7.22)], [20, pytest.approx(6.22)]]
    assert loss.get_figwidth() <= 6, "wider, its letters cannot be read on a phone"

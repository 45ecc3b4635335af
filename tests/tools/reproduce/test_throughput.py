"""Entries that time whole steps on a GPU: what they ask of the benchmarks, and what they make of their rows."""

import csv
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args
from tools.bench import training_steps
from tools.bench.rows import machine
from tools.precisions import precision_flags
from tools.reproduce import coat, collage, grids, throughput
from tools.reproduce.entry import Task
from tools.reproduce.registry import ENTRIES

SIZES = {"fp8lm-table5": grids, "collage-table7": collage, "coat-memory": coat}


def task(piece: str, folder: Path) -> Task:
    return Task("full", piece, folder / "text", folder / "kept" / "entry")


class Bench:
    """Plays both benchmarks: reads their command line as they do, and writes rows as they would, of `trials`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, trials: dict[tuple[str, int], tuple[float, float]]) -> None:
        self.trials, self.flags = trials, []
        monkeypatch.setattr(throughput, "rows_of", self.rows)

    def rows(self, tool, words, file, folder="tools/reproduce", goes_on=False):
        assert goes_on == (tool == "coat_memory")  # a search is resumed trial by trial
        values = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
        flags = next(word.partition("=")[2] for word in words if word.startswith("--flags="))
        self.flags.append((values["--preset"], int(values["--micro-batch-size"]), flags))
        key = "--cases" if tool == "coat_memory" else "--levels"
        start = words.index(key) + 1
        cases = words[start : next(i for i in range(start, len(words)) if words[i].startswith("--"))]
        assert (folder, tool) in {("tools/reproduce", "coat_memory"), ("tools/bench", "bench_step")}
        found = [(case, size, told) for (case, size), told in self.trials.items() if case in cases]
        file.parent.mkdir(parents=True, exist_ok=True)
        where = {key: value for key, value in machine(values.get("--commit")).items() if key in ("commit", "gpu", "torch")}
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [*where, "case", "micro_batch", "ms", "tokens_s_gpu", "peak_gib"])
            writer.writeheader()
            for case, size, (speed, peak) in found:
                there = {"ms": 1.0, "tokens_s_gpu": speed, "peak_gib": peak} if speed else {}
                writer.writerow({**where, "case": case, "micro_batch": size, **there})
            if goes_on:  # of a call of another day that was cut off
                writer.writerow(
                    {**where, "commit": "0ther", "case": found[0][0], "micro_batch": 64, "tokens_s_gpu": 1e6, "ms": 1, "peak_gib": 1}
                )
        with file.open(newline="") as stream:
            return list(csv.DictReader(stream))


def quantities(findings):
    found = list(findings)
    assert len({finding.quantity for finding in found}) == len(found)
    return {finding.quantity: (finding.ours, finding.paper) for finding in found}


def test_table_5_beside_o0_with_its_micro_batch_and_with_the_largest(tmp_path, monkeypatch):
    trials = {("O0", 2): (100.0, 70.0), ("O0", 4): (0.0, 0.0), ("O1", 2): (130.0, 60.0), ("O2", 2): (140.0, 50.0)}
    bench = Bench(monkeypatch, trials | {("O3", 2): (150.0, 40.0), ("O3", 4): (180.0, 60.0)})
    found = quantities(throughput.table5(task("7b", tmp_path)))
    assert found["7b, O3, micro-batch 2: times O0's speed"] == (1.5, pytest.approx(219.8 / 159.2))
    assert found["7b, O3, each at its largest: times O0's speed"] == (1.8, pytest.approx(230.5 / 159.2))
    assert found["7b, O1, micro-batch 2: times O0's speed"] == (1.3, None)
    assert found["7b, O3: largest micro-batch"] == (4.0, None)
    assert found["7b, O0, micro-batch 2: peak memory"] == (70.0, None)
    assert bench.flags == [("7b", 2, "--fp8-min-gain 0")]


def test_a_baseline_that_does_not_fit_leaves_the_others_their_own_figures(tmp_path, monkeypatch):
    Bench(monkeypatch, {("O0", 1): (0.0, 0.0), ("O1", 1): (0.0, 0.0), ("O2", 1): (9.0, 99.0), ("O3", 1): (8.0, 90.0)})
    found = quantities(throughput.table5(task("13b", tmp_path)))
    assert found["13b, O0, micro-batch 1"] == ("does not fit", None)
    assert found["13b, O3, micro-batch 1: tokens a second"] == (8.0, None)
    assert not [quantity for quantity in found if "times" in quantity]


def test_collages_speeds_on_file_are_of_the_newest_tree_with_all_options():
    """No page quotes a superseded row beside a newer one: at 1.3B and 6.7B the older trees had slower 16-bit layers."""
    for model, (preset, micro_batch, flags) in throughput.MODELS7.items():
        found = {finding.quantity: finding for finding in throughput.collage_on_file(task(model, Path("folder")))}
        where = {"preset": f"{preset} {flags}".strip(), "micro_batch": str(micro_batch), "case": "bf16-d"}
        rows = [row for row in throughput.read(throughput.STEP) if where.items() <= row.items()]
        plus = found[f"{model}, collage-plus: speed over D's"]
        assert {finding.where["commit"] for finding in found.values()} == {rows[-1]["commit"]}
        assert plus.where["case"] == "collage-plus"
        assert plus.ours == pytest.approx(float(plus.where["tokens_s_gpu"]) / float(rows[-1]["tokens_s_gpu"]))


def test_a_model_of_collages_table_7_without_steps_is_refused(monkeypatch):
    monkeypatch.setattr(throughput, "read", lambda file: [])
    with pytest.raises(ValueError, match=r"has no commit with all options of 1\.3b: run tools/bench/bench_step\.py"):
        list(throughput.collage_on_file(task("1.3b", Path("folder"))))


UNFUSED = {"bf16-a": (3.0, 1.78), "collage-light": (2.25, 1.74), "collage-plus": (2.0, 1.67)}


def test_options_are_compared_with_a_d_whose_update_is_torchs(monkeypatch):
    """Ours takes 1 ms per 100M parameters and torch's 5: with 200M D's step of 10 ms would take 18, twice plus's 9 and 3 times A's 6."""
    torchs = {"level": "bf16-d --num-layers 2", "case": "step by torch, one tensor at a time", "params_m": "100", "ms": "5"}
    rows = [torchs, torchs | {"case": "step in a graph", "ms": "1"}, torchs | {"level": "O3", "ms": "50"}]
    steps = {"bf16-d": {"ms": "10", "params_m": "200"}, "bf16-a": {"ms": "6"}, "collage-light": {"ms": "8"}, "collage-plus": {"ms": "9"}}
    monkeypatch.setattr(throughput, "read", lambda file: rows if file == throughput.OPTIMIZER else [])
    found = quantities(throughput.unfused("1.3b", steps))
    update = "speed over D's with the update by torch, one tensor at a time"
    assert found == {f"1.3b, {option}: {update}": speeds for option, speeds in UNFUSED.items()}


def test_collages_speeds_and_savings_are_against_option_d(tmp_path, monkeypatch):
    trials = {("bf16-d", 2): (100.0, 80.0), ("bf16-a", 2): (200.0, 40.0), ("collage-light", 2): (190.0, 60.0)}
    bench = Bench(monkeypatch, trials | {("collage-plus", 2): (180.0, 64.0)})
    found = quantities(throughput.collage(task("2.7b", tmp_path)))
    assert found["2.7b, collage-plus: speed over D's"] == (pytest.approx(1.8), 2.48)
    assert found["2.7b, collage-plus: peak memory saved against D"] == (pytest.approx(20.0), None)
    assert found["2.7b, bf16-a: peak memory saved against D"] == (pytest.approx(50.0), None)
    ((preset, _, flags),) = bench.flags
    config = parse_args(["--preset", preset, "--micro-batch-size", "1", "--train-iters", "1", *flags.split()])
    shape = config.model
    assert (shape.num_layers, shape.hidden_size) == (32, 2560)
    assert 2.5e9 < 12 * shape.num_layers * shape.hidden_size**2 < 2.7e9


def test_coats_memory_and_speed_are_against_bf16(tmp_path, monkeypatch):
    Bench(monkeypatch, {("bf16", 1): (10.0, 100.0), ("O3", 1): (18.0, 60.0), ("coat", 1): (15.0, 50.0), ("coat", 2): (16.0, 60.0)})
    found = quantities(throughput.coat(task("llama2-7b", tmp_path)))
    assert found["llama2-7b, coat, micro-batch 1: times less memory"] == (2.0, 1.54)
    assert found["llama2-7b, coat, micro-batch 1: times bf16's speed"] == (1.5, 1.43)
    assert found["llama2-7b, O3, micro-batch 1: times less memory"] == (pytest.approx(1.67), None)


@pytest.mark.parametrize("name", SIZES)
def test_the_entries_know_their_pieces_and_keep_what_needs_no_gpu(name, tmp_path, monkeypatch):
    one, asked = ENTRIES[name], []
    first, *models = one.pieces("full")
    for function in ("table5", "collage", "coat"):
        monkeypatch.setattr(throughput, function, lambda task: asked.append(task.piece) or iter(()))
    smallest = next(iter(one.sizes))
    kept = quantities(one.run(Task("full", first, tmp_path / "text", tmp_path)))
    assert kept == quantities(one.run(Task(smallest, first, tmp_path / "text", tmp_path)))
    assert one.headline in kept or one.headline.partition(",")[0] in models
    for piece in models:
        assert list(one.run(task(piece, tmp_path))) == []
    assert asked == models


def test_every_case_is_one_that_the_benchmarks_take(monkeypatch):
    for case in {*throughput.LEVELS5, "bf16", "coat", "bf16-d", *throughput.SPEEDS7["1.3b"]}:
        precision_flags(case)
    presets = [*throughput.SAMPLES5, *(preset for preset, *_ in throughput.MODELS7.values())]
    assert {*presets, *(preset for preset, _ in throughput.MODELS_COAT.values())} <= set(training_steps.PRESETS)


def test_table_5_on_file_takes_the_newest_steps_and_the_peers_beside_them(tmp_path, monkeypatch):
    def row(case: str, micro_batch: int, speed: float, preset: str = f"7b {throughput.NO_TRIAL}", commit: str = "new") -> dict[str, str]:
        told = {
            "case": case,
            "preset": preset,
            "micro_batch": micro_batch,
            "ms": 1,
            "tokens_s_gpu": speed,
            "tflops": 4 * speed,
            "mfu_bf16_peak": 0.4,
            "mfu_fp8_peak": 0.2,
            "peak_gib": 50,
            "commit": commit,
        }
        return {name: str(value) for name, value in told.items()}

    old, new = [row("O0", 2, 1.0, commit="old")], [row("O0", 2, 100.0), row("O3", 2, 150.0), row("O3", 16, 220.0)]
    peers = [row("te-delayed", 2, 130.0, preset="7b"), row("te-delayed", 4, 999.0, preset="7b"), row("O3", 2, 999.0, preset="7b")]
    monkeypatch.setattr(throughput, "read", lambda file: old + new + peers if file == throughput.STEP else [])
    findings = list(throughput.on_file(task("7b", tmp_path)))
    found = quantities(findings)
    assert found["7b, O3, micro-batch 2: times O0's speed"] == (1.5, pytest.approx(219.8 / 159.2))
    assert found["7b, O3, each at its largest: times O0's speed"] == (2.2, pytest.approx(230.5 / 159.2))
    assert found["7b, O3: largest micro-batch"] == (16.0, None)
    assert found["7b, O0, micro-batch 2, one card: MFU"] == (40.0, 45.0)
    assert found["7b, O3, micro-batch 2, one card: speed"] == (600.0, 615.0)
    assert found["7b, O3, micro-batch 2, one card: MFU"] == (20.0, 31.1)
    assert found["7b, te-delayed, micro-batch 2: times O0's speed"] == (1.3, pytest.approx(224.5 / 159.2))
    assert {finding.where["commit"] for finding in findings} == {"new"}


def test_table_5_tells_of_the_layers_of_175b_on_file(tmp_path, monkeypatch):
    def row(preset: str, **more: str) -> dict[str, str]:
        return {"case": "O3", "preset": preset, "micro_batch": "1", "tflops": "700", "mfu_fp8_peak": "0.35", "peak_gib": "101"} | more

    rows = [row("175b --num-layers 8 --fp8-min-gain 0", tflops="1"), row("7b --num-layers 8"), row("175b --num-layers 8 --fp8-min-gain 0")]
    monkeypatch.setattr(throughput, "read", lambda file: rows)
    found = quantities(grids.table5(task("175b", tmp_path)))
    told = "175b, 8 layers whole on a card, O3, micro-batch 1: "
    assert found == {told + "speed": (700.0, 677.0), told + "MFU": (35.0, 34.2), told + "peak memory": (101.0, None)}
    o0 = row("175b --num-layers 3", case="O0", tokens_s_gpu="50", mfu_bf16_peak="0.5")
    te = row("175b --num-layers 3", case=throughput.TE5, tokens_s_gpu="60", mfu_fp8_peak="")
    lost = row("175b --num-layers 3", case=f"{throughput.TE5} (OutOfMemoryError)", tflops="")
    rows += [row("175b --num-layers 3", tokens_s_gpu="90"), o0, te, lost]
    found = quantities(grids.table5(task("175b", tmp_path)))
    beside = "175b, 3 layers whole on a card, "
    assert found[f"{beside}O0, micro-batch 1: MFU"] == (50.0, 39.0)
    assert found[f"{beside}{throughput.TE5}, micro-batch 1: speed"] == (700.0, 493.0)
    assert found[f"{beside}O3, micro-batch 1: times O0's speed"] == (1.8, pytest.approx(1.75, abs=0.01))
    assert found[f"{beside}O3, micro-batch 1: times {throughput.TE5}'s speed"] == (1.5, pytest.approx(1.37, abs=0.01))
    assert found[f"{beside}O0, micro-batch 1: times {throughput.TE5}'s speed"][1] == pytest.approx(22.4 / 28.7)
    assert not [name for name in found if "OutOfMemory" in name or name.endswith(f"{throughput.TE5}, micro-batch 1: MFU")]
    (entry,) = [entry for entry in grids.ENTRIES if entry.name == "fp8lm-table5"]
    assert ["175b" in entry.pieces(size) for size in entry.sizes] == [False, True, False]

"""COAT's entries that need no training."""

from pathlib import Path

import pytest

from tools.reproduce import coat, coat_flow
from tools.reproduce.coat_activations import KEPT, OUTLIERS, SWIGLU
from tools.reproduce.entry import Task


def test_the_share_of_norms_and_swiglu_by_hand():
    """Llama-7B here has a feed-forward of 10,880: bytes a token of two norms' inputs and fc1's output, of the inputs of the linear layers,
    and of queries, keys and values."""
    found = {finding.quantity: finding.ours for finding in coat.share(Task("toy", "whole", Path("text"), Path("folder")))}
    kept, other = 2 * (2 * 4096 + 2 * 10880), 2 * (2 * 4096 + 4096 + 10880) + 2 * 3 * 4096
    assert found["7b, activations kept as compute: norms and SwiGLU"] == pytest.approx(100 * kept / (kept + other))
    assert found["7b, activations kept as compute: linear layers"] == pytest.approx(100 * 2 * (2 * 4096 + 10880) / (kept + other))
    kept *= 17 / 32
    assert found["7b, activations kept as coat: norms and SwiGLU"] == pytest.approx(100 * kept / (kept + other))


def test_a_flow_reports_each_tenth_of_its_steps(monkeypatch, tmp_path, capsys):
    course = [(step, 5.0 - step / 10) for step in range(1, 11)]
    monkeypatch.setattr(coat_flow, "train", lambda flow, loop, text, seed: iter([*course, (10, 3.5)]))
    (tmp_path / "text").write_bytes(b"abc")
    found = list(coat.flow(Task("toy", "FP8 GEMMs, seed 7", tmp_path / "text", tmp_path)))
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == [
        f"step {step} of 10, loss {5.0 - step / 10:.4f}" for step in range(1, 10)
    ]
    assert [(one.quantity, one.ours, one.seed) for one in found if one.x is None] == [("FP8 GEMMs: validation loss", 3.5, 7)]


def test_memory_takes_the_newest_steps_that_were_measured_together(monkeypatch):
    """Rows by hand: an older run, a newer one that is whole, and a newest without BF16."""

    def row(commit: str, case: str, speed: float, peak: float, gpu: str = "H200") -> dict[str, str]:
        told = {
            "case": case,
            "preset": "1.3b --fp8-min-gain 0",
            "micro_batch": 4,
            "tokens_s_gpu": speed,
            "ms": 8192e3 / speed,
            "peak_gib": peak,
            "commit": commit,
        }
        return {"commit": commit, "gpu": gpu} | {name: str(value) for name, value in told.items()}

    cases = ["bf16", "O3", "coat", f"O3 {coat.ALL_FP8}", f"coat {coat.ALL_FP8}"]
    rows = [row("old1234", case, 100, 30) for case in cases]
    rows += [row("new1234", case, 100 + 10 * place, 30 / (1 + place)) for place, case in enumerate(cases)]
    rows += [row("new1234", "O3", 1, 1), row("part123", "coat", 1, 1)]  # a second row of one tree, and a tree without BF16
    rows += [row("two1234", case, 1, 1, gpu) for case, gpu in zip(cases, ("H100", *["H200"] * 4), strict=True)]
    monkeypatch.setattr(coat.throughput, "read", lambda file: rows)
    found = {finding.quantity: finding for finding in coat.memory(Task("kept", "whole", Path("text"), Path("folder")))}
    less, speed = (found[f"coat, micro-batch 4: times {name}"] for name in ("less memory", "BF16's speed"))
    assert (less.ours, less.paper, speed.ours, speed.paper) == (pytest.approx(3.0), 1.54, pytest.approx(1.2), 1.43)
    assert less.where["commit"] == "new1234"
    both = found[f"coat {coat.ALL_FP8}, micro-batch 4: times BF16's speed"]
    assert (both.ours, both.paper) == (pytest.approx(1.4), None)


def test_memory_without_steps_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(coat.throughput, "read", lambda file: [])
    with pytest.raises(ValueError, match="has no tree with bf16, O3 and coat, with and without --attention-precision fp8"):
        list(coat.memory(Task("kept", "whole", Path("text"), Path("folder"))))


def test_memory_on_file():
    found = {finding.quantity: finding for finding in coat.memory(Task("kept", "whole", Path("text"), Path("folder")))}
    assert next(one.headline for one in coat.ENTRIES if one.name == "coat-memory") in found
    assert found["coat, micro-batch 4: times less memory"].where["gpu"] == "NVIDIA H200"


def test_the_worst_layer_and_the_gain_of_rows_made_by_hand():
    """Layer 1 has the larger peak, and layer 0 the worse token in groups."""
    inputs, found = (*KEPT, SWIGLU), []
    for what in inputs:
        for layer, (peak, tensor, groups) in enumerate([(3, 20, 24), (9, 12, 30)]):
            found.append(
                {"what": what, "layer": str(layer), "kept": "BF16"} | dict.fromkeys(OUTLIERS, "0.5") | {"peak_over_rms": str(peak)}
            )
            for kept, token in (("tensor", tensor), ("token", 25), (coat.GROUPS, groups), ("groups of 16 tokens", 26)):
                measured = {
                    "sqnr_db": "31",
                    "token_db": "30",
                    "worst_token_db": str(token),
                    "underflow": f"0.{layer + 1}",
                    "saturation": "0",
                }
                found.append({"what": what, "layer": str(layer), "kept": kept} | measured)
    told = list(coat.of_layers(found))
    lines = {finding.quantity: finding.ours for finding in told if finding.x is None}
    assert len(lines) == sum(finding.x is None for finding in told)
    assert lines["QKV input, layer 1, which has the largest peak: largest magnitude over the rms"] == 9
    assert lines["QKV input, tensor: underflow, worst layer"] == pytest.approx(20)
    assert lines["QKV input: groups of 16 channels above one scale, worst token and layer"] == 24 - 12
    assert lines[coat.GAIN] == 12
    assert [(f.x, f.ours) for f in told if f.quantity == "MLP norm input by tensor, share lost to zero (%)"] == [(0, 10), (1, 20)]


def test_a_model_that_is_not_there_is_named_with_what_makes_it(tmp_path):
    needs = next(one for one in coat.ENTRIES if one.name == "coat-activations").sizes["smollm2"]
    assert needs.lacking(tmp_path) == "data/smollm2 (examples/smollm2.py creates it)"


def test_the_gain_of_two_stages_by_hand(monkeypatch):
    """The newest row of a kernel counts."""
    times = {"just-in-time cast": 60, "just-in-time cast by maxima": 40, "norm backward": 50, "norm backward with maxima": 55}
    times |= {"norm backward, just-in-time cast": 120, "norm backward, just-in-time cast by maxima": 100}
    found = [{"kernel": f"{name}, 64 wide", "us": str(us), "gpu": "one"} for name, us in times.items()]
    monkeypatch.setattr(coat, "read", lambda name: ({"kernel": "just-in-time cast, 64 wide", "us": "1"}, {"kernel": "norm"}, *found))
    told = {finding.quantity: finding for finding in coat.group_scaling(Task("kept", "whole", Path("text"), Path("folder")))}
    assert {name: round(finding.ours, 6) for name, finding in told.items()} == {
        "64 wide: what the maxima cost their producer": 10,
        "64 wide, just-in-time cast: one stage over two": 1.5,
        "64 wide, norm backward, just-in-time cast: one stage over two": 1.2,
    }
    assert all(finding.where["gpu"] == "one" for finding in told.values())


def test_kept_rows_have_both_widths():
    one = next(one for one in coat.ENTRIES if one.name == "coat-group-scaling")
    told = [finding.quantity for finding in coat.group_scaling(Task("kept", "whole", Path("text"), Path("folder")))]
    assert one.headline in told
    assert len(told) == 6


def test_llama_on_one_card_beside_the_paper_on_two(tmp_path, monkeypatch):
    def row(case: str, micro_batch: int, speed: float, peak: float, preset: str = coat.ONE_CARD) -> dict[str, str]:
        told = {"case": case, "preset": preset, "micro_batch": micro_batch, "tokens_s_gpu": speed, "peak_gib": peak, "commit": "abc1234"}
        return {name: str(value) for name, value in told.items()}

    rows = [
        row("bf16", 1, 8000, 116),
        row("coat", 2, 16000, 60),
        row("coat", 16, 20000, 114),
        row("coat", 2, 1, 1, preset="1.3b"),
        row("O3", 4, 9000, 112, preset=coat.THIRTEEN),
    ]
    monkeypatch.setattr(coat, "read", lambda file: rows)
    found = {finding.quantity: (finding.ours, finding.paper) for finding in coat.llama(Task("kept", "whole", tmp_path, tmp_path))}
    assert found["coat, each at its largest: times BF16's speed"] == (2.5, pytest.approx(11351 / 6130))
    assert found["bf16, the largest micro-batch measured: tokens a second and GPU"] == (8000.0, 6130.0)
    assert found["coat, micro-batch 2: peak memory"] == (60.0, None)
    assert found["13B, O3, micro-batch 4: tokens a second"] == (9000.0, None)


def test_the_loss_of_pre_training_has_an_entry_with_its_interval():
    found = {finding.quantity: finding for finding in coat.loss(Task("kept", "whole", Path("text"), Path("folder")))}
    assert found["half width of its 95 % interval"].ours > abs(found[coat.ABOVE].ours)
    assert found[coat.ABOVE].paper == 0
    seeds = [finding.seed for finding in coat.loss(Task("kept", "whole", Path("text"), Path("folder"))) if finding.seed]
    assert seeds == [1234, 1235, 1236] * 2


def test_the_multiple_at_the_largest_micro_batch_names_its_older_tree():
    found = {finding.quantity: finding for finding in coat.memory(Task("kept", "whole", Path("text"), Path("folder")))}
    times = {name: finding.ours for name, finding in found.items() if name.startswith("bf16, micro-batch 4, at ")}
    assert len(times) == 2
    (told,) = [name for name in found if name.startswith("coat, each at its largest")]
    commit = found[told].where["commit"]
    assert f"both at {commit}" in told
    assert times[f"bf16, micro-batch 4, at {commit}"] == max(times.values())

"""What an entry is made of, and which size a machine takes."""

import pytest
import torch

from tools.reproduce.entry import Entry, Finding, Needs


def found(task):
    return [Finding("a", 1.0)]


def made(**changes):
    return Entry(**({"name": "a-b", "title": "A, B", "claim": "C.", "run": found} | changes))


def test_an_entry_without_a_size_is_refused():
    with pytest.raises(ValueError, match="a-b has no size: define one, with what it requires"):
        made(sizes={})


def test_the_largest_size_is_the_last_that_the_machine_has_all_for(monkeypatch, tmp_path):
    sizes = {"toy": Needs(), "small": Needs(minutes=3, files=("setup.py",)), "full": Needs(gpus=1, gib=80)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert made(run=found, sizes=sizes).largest() == "small"
    assert sizes["small"].lacking(tmp_path) == "setup.py (megatron.lm.tools.prepare_text makes data)"
    assert Needs(files=("data/a",), maker="b.py makes it").lacking(tmp_path) == "data/a (b.py makes it)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for gib, size in ((79.2, "full"), (40.0, "small")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gib=gib: type("Card", (), {"total_memory": gib * 2**30})())
        assert made(run=found, sizes=sizes).largest() == size


def test_what_cannot_be_run_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"a-b needs 2 GPU\(s\); this machine has 0: run it there"):
        made(run=found, sizes={"full": Needs(gpus=2)}).largest()


def test_needs_in_words():
    assert str(Needs()) == "CPU, seconds"
    assert str(Needs(gpus=1, gib=80, minutes=40, files=("data/enwik8",))) == "1 GPU(s) of 80 GiB, 40 min, data/enwik8"

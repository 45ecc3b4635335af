"""Flags in common, and what a checkpoint remembers of them."""

from pathlib import Path

import pytest
import torch

from megatron.lm.post import flags
from megatron.lm.shell import arguments


@pytest.fixture
def parser():
    made = arguments.Parser()
    flags.common(made, lr=1e-3, train_iters=7)
    return made


def test_defaults_are_those_given(parser):
    args = parser.parse_args(["--load", "a", "--save", "b"])
    assert (args.lr, args.train_iters, args.load) == (1e-3, 7, Path("a"))


def test_what_changes_nothing_is_not_remembered(parser):
    args = parser.parse_args(["--load", "a", "--save", "b", "--rows", "c.csv"])
    args.device = torch.device("cpu")
    found = flags.settings(args, data="abc")
    assert not flags.UNTOLD & found.keys()
    assert (found["load"], found["lr"], found["data"]) == ("a", 1e-3, "abc")


def test_the_roundings_that_are_given_reach_initialize(parser):
    words = ["--load", "a", "--save", "b"]
    assert flags.roundings(parser.parse_args(words)) == {}
    words += ["--moment-rounding", "stochastic"]
    assert flags.roundings(parser.parse_args(words)) == {"moment_rounding": "stochastic"}
    words += ["--master-rounding", "nearest"]
    assert flags.roundings(parser.parse_args(words)) == {"moment_rounding": "stochastic", "master_rounding": "nearest"}


def test_another_rounding_is_refused(parser, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--load", "a", "--save", "b", "--master-rounding", "up"])
    assert "choose from" in capsys.readouterr().err


def test_one_of_several_processes_ends(parser, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert flags.device(parser).type in ("cpu", "cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        flags.device(parser)
    assert "one process" in capsys.readouterr().err

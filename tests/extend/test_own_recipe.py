"""A recipe that no source file knows, with a scaling rule and a granularity of its own.

The rule takes twice the mean of the last two amaxes; the granularity gives each row of an operand its scale. Both are defined here, and the
recipe is registered here, in every process. The trainer then trains the tiny GPT with it on two processes, with and without tensor
parallelism, saves, resumes and plans. The blockwise recipes, which do have source files, go the same way: only the GEMM room and the recipe
table know them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoints, dist, tiny
from megatron.lm.config import Config
from megatron.lm.planning.fits import report
from megatron.lm.planning.memory import plan
from megatron.lm.run.trainer import Trainer
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import Current, Scaling, scale_from_amax

STEPS, SAVED = 6, 3


@dataclass(frozen=True)
class TwiceTheMean(Scaling):
    """Twice the mean of the last amaxes."""

    window: int = 2

    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        return scale_from_amax(2 * history.mean(-1), fp_max, last)


@dataclass(frozen=True)
class Rows:
    """One scale a row."""

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        amax = x.detach().abs().amax(-1).float()
        return amax.masked_fill(amax.isnan(), float("inf"))

    def spread(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return values.unsqueeze(-1)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[:-1])


GEMM = Gemms.of(input=Cast(E4M3, TwiceTheMean()), weight=Cast(E4M3, Current(), Rows()), grad_output=Cast(E5M2, Current(), Rows()))
OWN = replace(recipe.O2, name="own-rows", gemm=GEMM)
BLOCKWISE = ("blockwise", "blockwise-power-of-two", "mxfp8")
GRIDS: dict[str, dict[str, Any]] = {
    "data parallel, ZeRO": {"use_distributed_optimizer": True},
    "tensor and sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"own, {grid}": {"precision": OWN.name, **flags} for grid, flags in GRIDS.items()},
    "O1 blockwise, data parallel": {"opt_level": "O1", "fp8_recipe": "blockwise"},
    "O2 blockwise-power-of-two, tensor parallel": {
        "opt_level": "O2",
        "fp8_recipe": "blockwise-power-of-two",
        "tensor_model_parallel_size": 2,
    },
    "O3 blockwise, tensor and sequence parallel": {"opt_level": "O3", "fp8_recipe": "blockwise", **GRIDS["tensor and sequence parallel"]},
    "O3 mxfp8, data parallel": {"opt_level": "O3", "fp8_recipe": "mxfp8"},
    "coat blockwise, data parallel": {"precision": "coat", "fp8_recipe": "blockwise"},
}


DEFAULT = ("own, tensor and sequence parallel", "O3 blockwise, tensor and sequence parallel")
EVERY_CASE = [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.nightly(10)) for case in CASES]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known in this process too, to the end of the test."""
    monkeypatch.setattr(recipe, "_TABLE", dict(recipe._TABLE))
    recipe.register(OWN)


def settings(prefix: str, case: str, **more: Any) -> Config:
    shared = {"train_iters": STEPS, "global_batch_size": 8, "ddp_bucket_size": 5000, "hidden_size": 64}
    return tiny.config(prefix, **shared, **CASES[case], **more)


def trained(config: Config) -> dict[str, Any]:
    """A run, and what this rank has at its end."""
    rows: list[dict[str, Any]] = []
    with tiny.started(config):
        made = Trainer(config)
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        weights = tiny.bits(p for p in made.training.model.parameters() if not getattr(p, "tensor_model_parallel", False))
        return {"rows": rows, "everything": checkpoints.everything(made), "shared": weights, "model": str(made.training.model)}


def two_processes(prefix: str, folder: str, cases: Sequence[str]) -> dict[str, Any]:
    recipe.register(OWN)
    found: dict[str, Any] = {}
    for number, case in enumerate(cases):
        save = f"{folder}/{number}"
        found[case] = {
            "whole": trained(checkpoints.pointed(settings(prefix, case, save_interval=SAVED), save=save)),
            "resumed": trained(checkpoints.pointed(settings(prefix, case, ckpt_step=SAVED), load=save)),
        }
    return found


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_data(tmp_path_factory.mktemp("data")))


class Ranks:
    """What two processes have found of a case; the cases of the default run are trained by one start of them."""

    def __init__(self, prefix: str, folder: Path) -> None:
        self.prefix, self.folder = prefix, folder
        self.seen: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, case: str) -> list[dict[str, Any]]:
        if case not in self.seen:
            cases = DEFAULT if case in DEFAULT else [case]
            found = dist.run(two_processes, 2, self.prefix, str(self.folder / str(len(self.seen))), cases, timeout=600)
            self.seen |= {name: [rank[name] for rank in found] for name in cases}
        return self.seen[case]


@pytest.fixture(scope="module")
def ranks(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(prefix, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("case", EVERY_CASE)
def test_it_trains_the_gpt_and_both_ranks_share_what_they_share(ranks: Ranks, case: str):
    first, second = (rank["whole"] for rank in ranks[case])
    losses = tiny.losses(first["rows"])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
    assert first["shared"]
    assert tiny.same(first["shared"], second["shared"])


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_resumed_run_is_the_run_that_never_stopped(ranks: Ranks, case: str):
    for rank in ranks[case]:
        assert tiny.same(rank["resumed"]["everything"], rank["whole"]["everything"])
    assert tiny.losses(ranks[case][0]["resumed"]["rows"]) == tiny.losses(ranks[case][0]["whole"]["rows"])[SAVED:]


@pytest.mark.parametrize("case", [case for case in DEFAULT if "own" in case])
def test_its_rule_and_its_granularity_cast_the_operands(ranks: Ranks, case: str):
    assert "TwiceTheMean" in ranks[case][0]["whole"]["model"]
    assert "Rows" in ranks[case][0]["whole"]["model"]


def test_the_granularity_changes_what_is_computed(ranks: Ranks):
    own, blocks = (tiny.losses(ranks[case][0]["whole"]["rows"]) for case in DEFAULT[:2])
    assert own != blocks


@pytest.mark.parametrize("case", CASES)
def test_it_appears_in_the_plan(prefix: str, case: str):
    config = settings(prefix, case)
    assert config.precision.name in report(config, 2)
    assert not config.fuses_layers  # no kernel of the fused blocks casts so
    assert plan(config, 2)[0].total > 0


def test_what_its_recipe_does_not_send_in_fp8_is_refused_by_name(prefix: str):
    from megatron.lm.config.rules.check import check

    config = settings(prefix, "O3 blockwise, tensor and sequence parallel", tp_wire="fp8")
    with pytest.raises(ValueError, match=r"--tp-wire fp8"):
        check(config, 2)

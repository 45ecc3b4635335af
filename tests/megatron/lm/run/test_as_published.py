"""`--as-published`: what each paper fixes, what contradicts it, and two processes that train so, save and resume."""

from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints, dist, tiny
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args, to_argv
from megatron.lm.config.rules.check import check
from megatron.lm.run.trainer import Trainer
from msamp.numerics.recipe import PAPERS, as_published, by_name
from msamp.numerics.scaling import Exact

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --vocab-size 128"
RUN = f"{SHAPE} --micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data --dry-run"


def parsed(flags: str) -> Config:
    config = parse_args(f"{RUN} {flags}".split())
    check(config, 1)
    assert parse_args(to_argv(config)) == config
    return config


@pytest.mark.parametrize("level", ["", "--opt-level O1", "--precision O2"])
def test_fp8_lm(level: str):
    config = parsed(f"--as-published fp8-lm {level}")
    recipe, sent = config.precision.recipe, config.communication
    assert recipe.name == (level.split() or ["O3"])[-1]
    assert (recipe.states.master_rounding, recipe.states.moment_rounding) == ("nearest", "nearest")
    assert (sent.grad_exchange, sent.gradient_scaling, sent.mu_adaptation) == ("nccl", "auto", "paper")
    assert config.precision.grad_accum == "fp8"
    assert recipe.whole_tensors


def test_collage_and_coat():
    plus, light = (parsed(f"--as-published collage {flags}").precision.recipe for flags in ("", "--precision collage-light"))
    assert [states.update for states in (plus.states, plus.vectors, light.states)] == ["plus-published"] * 2 + ["light-published"]
    coat = parsed("--as-published coat").precision
    assert coat.recipe.gemm is not None
    assert {cast.scaling for cast in coat.recipe.gemm.casts.values()} == {Exact()}
    assert (coat.recipe.weight.name, coat.kept_activations) == ("fp16", "coat-exact")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("fp8-lm --grad-exchange fp32-sum", "--as-published fp8-lm contradicts --grad-exchange fp32-sum: drop one, or give nccl"),
        ("fp8-lm --mu-rule halve", "contradicts --mu-rule halve"),
        ("fp8-lm --grad-scaling pre", "contradicts --grad-scaling pre"),
        ("fp8-lm --grad-accum-dtype bf16", "contradicts --grad-accum-dtype bf16"),
        ("fp8-lm --grad-accum-on owner", "contradicts --grad-accum-on owner"),
        ("fp8-lm --moment-rounding stochastic", "contradicts --moment-rounding stochastic"),
        ("fp8-lm --fp8-recipe mxfp8", "contradicts --fp8-recipe mxfp8"),
        ("coat --save-activations coat", "contradicts --save-activations coat: drop one, or give coat-exact"),
        ("coat --bf16", "--as-published coat is not for --bf16: drop one, or choose coat"),
        ("fp8-lm --precision coat", "--as-published fp8-lm is not for --precision coat: drop one, or choose O3 or O2 or O1"),
        ("fp9", "--as-published fp9: choose one of fp8-lm, collage, coat"),
    ],
)
def test_a_contradiction_is_refused_by_name(flags: str, words: str):
    with pytest.raises(ValueError, match=words):
        parsed(f"--as-published {flags}")


def test_from_python():
    assert {paper: as_published(paper).name for paper in PAPERS} == {"fp8-lm": "O3", "collage": "collage-plus", "coat": "coat"}
    for paper, recipes in PAPERS.items():
        for recipe in recipes:
            once = as_published(paper, recipe)
            assert once != recipe
            assert as_published(paper, once) == once
    with pytest.raises(ValueError, match="paper is 'fp8lm'; choose one of fp8-lm, collage, coat"):
        as_published("fp8lm")
    with pytest.raises(ValueError, match="recipe 'bf16' is not of the paper 'coat'; choose one of coat"):
        as_published("coat", by_name("bf16"))


CASES: dict[str, dict[str, Any]] = {
    "fp8-lm": {"grad_exchange": "nccl", "mu_rule": "paper"},
    "collage": {},
    "coat": {},
}
STEPS, SAVED = 6, 3


def settings(prefix: str, paper: str, **more: Any) -> Config:
    shared = {"train_iters": STEPS, "global_batch_size": 16, "hidden_size": 64}
    return tiny.config(prefix, **{"as_published": paper, **CASES[paper], **shared, **more})


def trained(config: Config) -> tuple[list[float], Any]:
    rows: list[dict[str, Any]] = []
    with tiny.started(config):
        run = Trainer(config)
        run.metrics.write = rows.append  # type: ignore[method-assign]
        run.run()
        cut = any(len(bucket.pieces) > len({piece.index for piece in bucket.pieces}) for bucket in run.training.grad_sync.buckets)
        return tiny.losses(rows), (checkpoints.everything(run), cut)


def two_processes(prefix: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for paper in CASES:
        save = f"{folder}/{paper}"
        whole = trained(checkpoints.pointed(settings(prefix, paper, save_interval=SAVED), save=save))
        resumed = trained(checkpoints.pointed(settings(prefix, paper, ckpt_step=SAVED), load=save))
        refused = []
        for precision in (PAPERS[paper][0].name, None):
            default = settings(prefix, paper, as_published=None, precision=precision, ckpt_step=SAVED)
            with pytest.raises(ValueError, match="the run that wrote the checkpoint computed with") as error:
                trained(checkpoints.pointed(default, load=save))
            refused.append(str(error.value))
        other = {"fp8-lm": "O1", "collage": "bf16", "coat": "bf16"}[paper]  # a named one converts, in FP8 and in BF16
        converted = settings(prefix, paper, as_published=None, precision=other, ckpt_step=SAVED)
        found[paper] = whole, resumed, refused, trained(checkpoints.pointed(converted, load=save))[0]
    return found


def test_two_processes_train_so_and_resume_only_so(tmp_path: Path):
    first, second = dist.run(two_processes, 2, str(tiny.write_data(tmp_path)), str(tmp_path / "runs"), timeout=600)
    assert all(runs[0][0][-1] < runs[0][0][0] - 0.1 for runs in first.values())
    for rank in (first, second):
        for paper, (whole, resumed, refused, converted) in rank.items():
            losses, (everything, cut) = whole
            assert resumed[0] == losses[SAVED:]
            assert tiny.same(resumed[1][0], everything)
            assert not (cut and paper == "fp8-lm")
            assert converted == pytest.approx(losses[SAVED:], rel=0.01)
            assert all(f"add --as-published {paper} to resume it, name another --precision" in message for message in refused)

"""Experts in FP8 as one autograd function, against the same experts one by one in FP32."""

import pytest
import torch
import torch.nn.functional as F

from helpers.choices import each_once
from helpers.numerics import KINDS, make
from msamp.kernels import ops
from msamp.kernels.reference.grouped_mm import GROUP_ALIGNMENT
from msamp.nn.cast_scales import CastScales
from msamp.nn.experts import ExpertSettings, ExpertsFunction, ExpertWeights
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.recipe import GEMMS, O2

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 150, 64, 48, 6, 2
JUST_IN_TIME = CastScales(None, None, None)
# Least SQNR in dB of y and of the gradients of x, probs, W1 and W2.
LIMITS = {
    "normal": (23.5, 20.0, 21.5, 20.0, 21.5),
    "channel-outlier": (21.7, 19.7, 22.1, 19.3, 19.7),
    "log-normal": (21.0, 19.9, 17.5, 18.9, 18.7),
}


def inputs(kind: str = "normal") -> list[torch.Tensor]:
    """x, probabilities, W1 and W2, each requiring a gradient."""
    x = make(kind, (TOKENS, HIDDEN))
    x = x / x.square().mean().sqrt()
    probs = torch.rand((TOKENS, TOP_K), generator=torch.Generator().manual_seed(2))
    fc1, fc2 = make("normal", (EXPERTS, 2 * WIDTH, HIDDEN), seed=3) / 8, make("normal", (EXPERTS, HIDDEN, WIDTH), seed=4) / 7
    return [t.requires_grad_() for t in (x, probs, fc1, fc2)]


def settings(fc1: torch.Tensor, fc2: torch.Tensor, slots: tuple[CastScales, ...] = (JUST_IN_TIME,) * 4) -> ExpertSettings:
    ones = torch.ones(EXPERTS)
    return ExpertSettings(O2.gemm, *(ExpertWeights(*ops.expert_cast(w.detach(), ones, E4M3.dtype)) for w in (fc1, fc2)), *slots)


def one_by_one(x, probs, experts, fc1, fc2) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, choice = torch.where(experts == e)
        gate, up = (x[token] @ fc1[e].t()).chunk(2, 1)
        out = out.index_add(0, token, (F.silu(gate) * up) @ fc2[e].t() * probs[token, choice, None])
    return out


def chosen(load: str) -> torch.Tensor:
    if load == "one expert takes all":
        return torch.full((TOKENS, TOP_K), 3)
    experts = torch.rand((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(1)).topk(TOP_K).indices
    return experts.clamp(max=EXPERTS - 2) if load == "the last has none" else experts


@each_once(kind=KINDS, load=["random", "one expert takes all", "the last has none"])
def test_output_and_gradients(kind, load):
    x, probs, fc1, fc2 = tensors = inputs(kind)
    experts, grad = chosen(load), make("normal", (TOKENS, HIDDEN), seed=9)
    want = one_by_one(x, probs, experts, fc1, fc2)
    got = ExpertsFunction.apply(x, probs, experts, fc1, fc2, settings(fc1, fc2))
    grads = [torch.autograd.grad(y, tensors, grad) for y in (want, got)]
    measured = [sqnr_db(want, got), *(sqnr_db(w, g) for w, g in zip(*grads, strict=True))]
    assert all(m >= limit for m, limit in zip(measured, LIMITS[kind], strict=True)), measured
    for w, g in zip(grads[0][2:], grads[1][2:], strict=True):
        assert not g[w.flatten(1).abs().sum(1) == 0].any(), "an expert without tokens has no gradient"


@pytest.mark.parametrize("watched", [False, True])
def test_rows_after_the_last_expert_s_are_never_read(watched, monkeypatch):
    """With expert parallelism most of the rows are room for another load, which kernels leave out: what is in there must not matter."""
    x, probs, fc1, fc2 = tensors = inputs()
    experts, grad = chosen("random"), make("normal", (TOKENS, HIDDEN), seed=9)
    experts, seen = torch.where(experts < 2, experts, -1), []  # the others are on another rank
    offsets, source, _ = ops.group_tokens(experts, EXPERTS, GROUP_ALIGNMENT)
    room, nan = torch.arange(int(offsets[-1]), len(source)), float("nan")
    slot = JUST_IN_TIME._replace(watch=lambda *args: seen.extend(args)) if watched else JUST_IN_TIME

    def results() -> list[torch.Tensor]:
        seen.clear()
        given = settings(fc1, fc2, (JUST_IN_TIME, slot, slot, JUST_IN_TIME))
        y = ExpertsFunction.apply(x, probs, experts, fc1, fc2, given)
        return [y, *torch.autograd.grad(y, tensors, grad), *(values.float() for values in seen)]

    want, spoiled = results(), []

    def spoil(name: str, rows: dict[int, int], read: int = 0) -> None:
        """Write NaN to the room of results, given by the dimension of their rows. The twin reads the room of its first `read` arguments,
        unlike the kernel."""
        run = getattr(ops, name)

        def spoiling(*args, **flags):
            if name != "grouped_mm" and flags.get("end") is None:
                return run(*args, **flags)
            made = run(*(a.index_fill(0, room, 0.0) for a in args[:read]), *args[read:], **flags)
            results = made if isinstance(made, tuple) else (made,)
            for number, dim in rows.items():
                if results[number].numel():
                    spoiled.append(name)
                    results[number].copy_(results[number].float().index_fill(dim, room, nan))
            return made

        monkeypatch.setattr(ops, name, spoiling)

    spoil("permute", {0: 0, 1: 1})
    spoil("expert_swiglu", {0: 0}, 1)
    spoil("expert_swiglu_backward", {0: 0, 1: 1, 3: 1, 4: 1}, 2)
    spoil("grouped_mm", {0: 0})
    assert all(got.equal(expected) for got, expected in zip(results(), want, strict=True))
    assert len(spoiled) == (8 if watched else 13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_recomputing_changes_no_bit(dtype):
    x, probs, fc1, fc2 = inputs("log-normal")
    x, grad, tensors = x.detach().to(dtype).requires_grad_(), make("normal", (TOKENS, HIDDEN), seed=9).to(dtype), []
    for recompute in (False, True):
        y = ExpertsFunction.apply(x, probs, chosen("random"), fc1, fc2, settings(fc1, fc2)._replace(recompute=recompute))
        tensors.append([y, *torch.autograd.grad(y, (x, probs, fc1, fc2), grad)])
    assert all(a.equal(b) for a, b in zip(*tensors, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gemm": GEMMS["blockwise"]},
            "experts need one scale per tensor, from its amax or history; input is cast as .*: use O1, O2 or O3",
        ),
        ({"probs": torch.rand((TOKENS, TOP_K)).bfloat16()}, r"probs are torch.bfloat16 \(150, 2\) and experts \(150, 2\)"),
        ({"probs": torch.rand((TOKENS, 1))}, r"probs are torch.float32 \(150, 1\) and experts \(150, 2\); they must be \[tokens, hidden\]"),
        ({"x": torch.zeros((2, TOKENS, HIDDEN))}, r"x is \(2, 150, 64\)"),
        ({"x": torch.zeros((TOKENS, 32))}, r"weights are \(6, 96, 64\) and \(6, 64, 48\) for 32 features; they must be \[E, 2F, hidden\]"),
    ],
)
def test_what_is_refused(change, message):
    x, probs, fc1, fc2 = inputs()
    given = settings(fc1, fc2)
    x, probs, given = change.get("x", x), change.get("probs", probs), given._replace(gemm=change.get("gemm", given.gemm))
    with pytest.raises(ValueError, match=message):
        ExpertsFunction.apply(x, probs, chosen("random"), fc1, fc2, given)

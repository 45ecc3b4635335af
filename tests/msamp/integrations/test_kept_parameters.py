"""Lists of parameters that a loop took before `msamp.initialize`, on one and on two processes."""

import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import msamp

LEVELS = ("O1", "O3", "coat", "bf16")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    return 100 * (model(x) - x).square().mean()


def through_lists(level: str) -> dict[str, object]:
    """Clip, average, freeze and count hooks by lists from before the conversion."""
    model = mlp()
    params, first, fired = list(model.parameters()), list(model[0].parameters()), []
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    live = dict(model.named_parameters())
    params[0].register_hook(lambda g: fired.append("hook"))
    params[2].register_post_accumulate_grad_hook(lambda p: fired.append("post"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(params, lr=1e-2), recipe=level, clip_grad=float("inf"))
    loss_of(model).backward()
    large = msamp.clip_grad_norm_(params, 1.0)
    clipped = msamp.clip_grad_norm_(params, 1.0)
    optimizer.step()
    moved = max(float((average[name] - p.detach().float()).abs().max()) for name, p in live.items())
    for p in first:
        p.requires_grad_(False)
        p.grad = None
    frozen, saved = [p.detach().clone().float() for p in first], io.BytesIO()
    optimizer.zero_grad()
    torch.save([model.state_dict(), optimizer.state_dict()], saved)
    model.load_state_dict(torch.load(io.BytesIO(saved.getvalue()))[0])
    same = all(p is q for p, q in zip(params, model.parameters(), strict=True))
    return {"large": float(large), "clipped": float(clipped), "moved": moved, "fired": fired, "same": same, "frozen": frozen}


@pytest.mark.promise("Conversion", "A list of parameters taken before `initialize` clips, averages and freezes.")
@pytest.mark.parametrize("level", LEVELS)
def test_lists_taken_before_initialize_act_on_the_converted_model(level):
    found = through_lists(level)
    assert found["large"] > 5
    assert found["clipped"] == pytest.approx(1.0, rel=0.05)
    assert found["moved"] > 0
    assert sorted(found["fired"]) == ["hook", "post"]
    assert found["same"]


COMPUTED = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.promise("Conversion", "Layers with computed weights (weight_norm, pruning) stay unconverted and train.")
@pytest.mark.parametrize("kind", list(COMPUTED))
@pytest.mark.filterwarnings("ignore")
def test_a_layer_whose_weight_is_computed_stays_as_it_is_and_trains(kind):
    losses = []
    for recipe in ("fp32", "O2"):
        model = mlp()
        COMPUTED[kind](model[0])
        if recipe == "O2":
            assert "computed from other parameters" in msamp.survey(model).left["0"]
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=recipe)
        assert type(model[0]) is nn.Linear
        for step in range(10):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        assert pickle.loads(pickle.dumps(model.state_dict())).keys() == model.state_dict().keys()
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def refused(what: str) -> list[bool]:
    """Whether the model is the same object by object after a refusal of `initialize`, on each of its parts."""
    model = mlp()
    params = list(model.parameters())
    given, options = torch.optim.AdamW(params), {"recipe": "O3"}
    if what == "a parameter of another dtype":
        given.add_param_group({"params": [nn.Parameter(torch.zeros(4, dtype=torch.float64))]})
    if what == "a view":
        options["view"] = params[0].view(-1)
    if what == "NaN":
        with torch.no_grad():
            params[2][0, 0] = float("nan")
    if what == "an option":
        given = torch.optim.AdamW(params, amsgrad=True)
    if what == "a rank alone" and torch.distributed.get_rank() == 1:
        given = torch.optim.AdamW(params, amsgrad=True)
    before = [(id(p), type(p), p.detach().clone()) for p in params], [type(module) for module in model.modules()], vars(given).keys()
    view = options.pop("view", None)
    words = r"float64|cannot be replaced in place|NaN or infinite|amsgrad=True|rank . of the group failed"
    with pytest.raises(ValueError, match=words):
        msamp.initialize(model, given, **options)
    del view
    after = [(id(p), type(p)) for p in model.parameters()]
    return [
        after == [each[:2] for each in before[0]],
        all(p.nan_to_num(7.0).equal(each[2].nan_to_num(7.0)) for p, each in zip(params, before[0], strict=True)),
        [type(module) for module in model.modules()] == before[1],
        not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params),
        not list(model.buffers()),
    ]


CAUSES = ("a parameter of another dtype", "a view", "NaN", "an option")


@pytest.mark.promise("Conversion", "A refusal of `initialize` leaves the whole model as it was.")
@pytest.mark.parametrize("what", CAUSES)
def test_a_refusal_leaves_the_whole_model_as_it_was(what):
    assert all(refused(what))


def after_moves(level: str | None) -> dict[str, object]:
    """What hooks, attributes, weak references and lists of a converted model do after `model.to` and its kin."""
    model, fired = mlp(), []
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if level is not None:
        model, optimizer = msamp.initialize(model, optimizer, recipe=level)
    params, references = list(model.parameters()), [weakref.ref(p) for p in model.parameters()]
    handles = [p.register_hook(lambda g: fired.append("hook")) for p in params]
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: fired.append("post"))
        p.own = "kept"
    loss = loss_of(model)  # alive to the end, and its graph with it
    loss.backward()
    optimizer.zero_grad()
    fired.clear()
    counts = []
    for move in (lambda: model.to("cpu"), model.cpu, model.bfloat16, model.float, lambda: model.to(torch.float32)):
        move()
        loss_of(model.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append((fired.count("hook"), fired.count("post")))
        fired.clear()
    for handle in handles:
        handle.remove()
    loss_of(model).backward()
    same = all(p is q for p, q in zip(params, model.parameters(), strict=True))
    return {
        "counts": {*counts},
        "removed": fired.count("hook"),
        "same": same and all(ref() is p for ref, p in zip(references, params, strict=True)),
        "own": {getattr(p, "own", None) for p in params},
    }


@pytest.mark.promise("Conversion", "Hooks, attributes and weak references of converted weights survive `model.to`.")
@pytest.mark.parametrize("level", [None, *LEVELS])
def test_hooks_fire_once_after_the_model_was_moved_or_cast(level):
    assert after_moves(level) == {"counts": {(4, 4)}, "removed": 0, "same": True, "own": {"kept"}}

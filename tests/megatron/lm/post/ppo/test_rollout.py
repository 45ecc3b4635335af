"""Generation inside of training: the cache changes no token, the weights stay where they are, padding changes nothing."""

import pytest
import torch

import msamp
from helpers import post_runs
from helpers.choices import each_once
from megatron.lm.post import models
from megatron.lm.post.memory import stored
from megatron.lm.post.ppo.gae import KLControl, advantages, whitened
from megatron.lm.post.ppo.rewards import TASKS, tagged
from megatron.lm.post.ppo.rollout import generate, log_probs, values
from msamp.kernels import ops
from msamp.nn.linear import FP8Linear
from msamp.numerics.metrics import sqnr_db

PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [100, 3, 100]]
EOS, PAD = 256, 257
HOW = {"max_new_tokens": 12, "eos": EOS, "pad": PAD, "seed": 3}
LEVELS = ["O0", "O2", "O3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return post_runs.toy(tmp_path_factory.mktemp("toy"))


def trained(folder, level, steps=0):
    """A policy at a level, perhaps after some steps; 20 fill the windows of delayed scaling."""
    model = models.load_model(folder, "AutoModelForCausalLM", torch.float32, "cpu")
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)
    tokens = torch.arange(60).view(2, 30)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@each_once(2.0, level=LEVELS, steps=[20, 0])
def test_tokens_with_the_cache_are_those_without(folder, level, steps):
    model = trained(folder, level, steps)
    for temperature in (0.0, 1.0):
        with_cache, without = (generate(model, PROMPTS, temperature=temperature, cache=cache, **HOW) for cache in (True, False))
        assert with_cache.tokens.equal(without.tokens)


@pytest.mark.parametrize("level", [pytest.param("O2", marks=pytest.mark.nightly(3)), "O3"])
def test_logits_of_the_cache_are_those_of_training(folder, level):
    """Before the windows of delayed scaling are filled, a cast's scale is taken over one token with the cache, and over the whole sequence
    without: a power of two either way, so that only the smallest values differ."""
    tokens = torch.arange(24)[None]
    for trained_for in (0, 20):
        model, cache, steps = trained(folder, level, trained_for).eval(), None, []
        with torch.no_grad():
            whole = model(tokens, use_cache=False).logits[0]
            for place in range(24):
                out = model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                steps.append(out.logits[0, 0])
        assert sqnr_db(whole, torch.stack(steps)) > 100


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_generation_multiplies_by_the_weights_as_they_are_stored(folder, level, monkeypatch):
    model = trained(folder, level, 1)
    weights = [m.weight for m in model.modules() if isinstance(m, FP8Linear)]
    places, held = [w.payload.data_ptr() for w in weights], stored(model)
    versions = [w.payload._version for w in weights]
    multiply, seen = ops.scaled_mm, []

    def spy(a, b, *rest, **settings):
        seen.append(b.untyped_storage().data_ptr())
        return multiply(a, b, *rest, **settings)

    monkeypatch.setattr(ops, "scaled_mm", spy)
    generate(model, PROMPTS, temperature=1.0, **HOW)
    assert [w.payload.data_ptr() for w in weights] == places
    assert [w.payload._version for w in weights] == versions
    assert stored(model) == held
    assert len(seen) >= 12 * len(weights)
    if level == "O3":  # the GEMM's operand is the stored weight itself
        assert set(seen) == set(places)


def test_a_seed_is_a_draw_and_leaves_torchs_generator_alone(folder):
    model = trained(folder, "O0")
    state = torch.get_rng_state()
    first, second, third = (generate(model, PROMPTS, temperature=1.0, **(HOW | {"seed": seed})) for seed in (1, 1, 2))
    assert first.tokens.equal(second.tokens)
    assert not first.tokens.equal(third.tokens)
    assert torch.get_rng_state().equal(state)
    assert model.train() is model


def test_a_folders_own_habits_of_generation_do_not_count(folder):
    model = trained(folder, "O0")
    want = generate(model, PROMPTS, temperature=1.0, **HOW)
    model.generation_config.update(temperature=0.01, top_k=1, repetition_penalty=5.0, min_new_tokens=3)
    assert generate(model, PROMPTS, temperature=1.0, **HOW).tokens.equal(want.tokens)


def test_what_is_behind_the_end_of_text_is_padding(folder):
    model = trained(folder, "O0")
    with torch.no_grad():
        model.lm_head.weight[EOS] = 10 * model.lm_head.weight[20:60].mean(0)
    found = generate(model, PROMPTS * 20, temperature=1.0, **HOW)
    lengths = found.answer.sum(-1)
    assert len(set(lengths.tolist())) > 1
    for row, length in enumerate(lengths.tolist()):
        answer = found.answers[row].tolist()
        assert EOS not in answer[: length - 1]
        assert answer[length:] == [PAD] * (found.length - length)
        assert length == found.length or answer[length - 1] == EOS
        assert found.attended[row].sum() == len(PROMPTS[row % 3]) + length


@torch.no_grad()
def test_padding_changes_no_log_probability_and_no_value(folder, tmp_path_factory):
    model, critic = trained(folder, "O0"), models.scalar_model(folder, torch.float32, "cpu")
    torch.nn.init.normal_(critic.score.weight)
    done = generate(model, PROMPTS, temperature=0.7, **HOW)
    found, guessed = log_probs(model, done, 0.7), values(critic, done)
    for row, prompt in enumerate(PROMPTS):
        length = int(done.answer[row].sum())
        answer = done.answers[row, :length]
        alone = torch.cat([torch.tensor(prompt), answer])[None]
        logits = torch.log_softmax(model(alone).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        assert torch.allclose(found[row, :length], logits.gather(-1, answer[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(guessed[row, :length], critic(input_ids=alone).logits[0, len(prompt) - 1 : -1, 0], atol=1e-5)


# Advantages against a case by hand and a sum by definition; whitening; the coefficient of the divergence.


def test_a_case_by_hand():
    # gamma 1/2, lam 1/2. Row 1: d = (1 + 2/2 - 4, 2 + 0/2 - 2) = (-2, 0) with values 4, 2 behind which all is 0.
    rewards = torch.tensor([[1.0, 2.0, 9.0], [0.0, 0.0, 8.0]])
    values = torch.tensor([[4.0, 2.0, 7.0], [2.0, 4.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gains, returns = advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    # Row 2: d = (0 + 2 - 2, 0 + 2 - 4, 8 - 4) = (0, -2, 4); A = (0 + (-1) / 4, -2 + 4 / 4, 4)
    assert gains.tolist() == [[-2.0, 0.0, 0.0], [-0.25, -1.0, 4.0]]
    assert returns.tolist() == [[2.0, 2.0, 0.0], [1.75, 3.0, 8.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (0.99, 1.0)])
def test_it_is_the_discounted_sum_of_its_definition(gamma, lam):
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 6, generator=draw) for _ in range(2))
    lengths = [6, 3, 1]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    gains, returns = advantages(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        value = [*values[row, :length].tolist(), 0.0]
        deltas = [rewards[row, t].item() + gamma * value[t + 1] - value[t] for t in range(length)]
        want = [sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)]
        assert gains[row, :length].tolist() == pytest.approx(want, abs=1e-5)
        assert not gains[row, length:].any()
    if lam == 1.0:  # then returns are the discounted rewards, whatever the values
        assert returns[0, 4].item() == pytest.approx(rewards[0, 4].item() + gamma * rewards[0, 5].item(), abs=1e-6)


def test_whitened_has_mean_zero_and_variance_one_over_the_mask():
    x = torch.tensor([[1.0, 5.0, 100.0], [3.0, 7.0, -50.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    found = whitened(x, mask)
    assert found[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert found[mask].square().mean().item() == pytest.approx(1, rel=1e-5)
    assert not found[~mask].any()
    assert not whitened(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)).any()


def test_an_adaptive_one_follows_its_target_by_a_fifth_at_most():
    control = KLControl(0.1, target=2.0, horizon=100)
    control.update(2.2, 10)
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    control = KLControl(0.1, target=2.0, horizon=100)
    control.update(200.0, 10)
    assert control.coefficient == pytest.approx(0.1 * 1.02)
    control.update(0.0, 10)
    assert control.coefficient == pytest.approx(0.1 * 1.02 * 0.98)


NUMBERS = [(-1, None, "--kl-coef -1"), (float("nan"), None, "nan"), (1, 0, "--kl-target 0")]


@pytest.mark.parametrize(("coefficient", "target", "said"), NUMBERS)
def test_numbers_out_of_range_are_refused(coefficient, target, said):
    with pytest.raises(ValueError, match=f"{said} is out of range"):
        KLControl(coefficient, target)


# What a program says of answers.


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("<answer>12</answer>", 1),
        (" <answer> 12 </answer>\n", 1),
        ("<answer>13</answer>", 0.5),
        ("It is <answer>12</answer>", 0.1),
        ("12", 0),
    ],
)
def test_tagged(answer, want):
    assert tagged(answer, "12") == want


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_of_the_generator_and_hold_their_sum(name):
    first, second = (TASKS[name].questions(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first == second
    assert len({question.expected for question in first}) > 1
    assert all(question.messages[-1]["role"] == "user" for question in first)
    assert TASKS[name].judge("<answer>5</answer>" if name == "format" else "5", "5") == 1


def test_a_fixed_coefficient_stays():
    control = KLControl(0.1)
    control.update(1e9, 64)
    assert control.coefficient == 0.1

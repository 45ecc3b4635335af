"""Generation inside of training: the cache changes no token, the weights stay where they are, padding changes nothing."""

import pytest
import torch

import msamp
from helpers import post_runs
from helpers.choices import each_once
from megatron.lm.post import models
from megatron.lm.post.memory import stored
from megatron.lm.post.ppo.rollout import generate, log_probs, scores, values
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


def test_the_mode_is_as_before(folder):
    model = trained(folder, "O0").train()
    generate(model, PROMPTS, temperature=0.0, **HOW)
    assert model.training


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


@torch.no_grad()
def test_padding_changes_no_score(folder, tmp_path):
    post_runs.toy(tmp_path, reward=True)
    judge = models.reward_model(tmp_path, torch.float32, "cpu", models.load_tokenizer(folder)).eval()
    done = generate(trained(folder, "O0"), PROMPTS, temperature=1.0, **HOW)
    for row, score in enumerate(scores(judge, done)):
        alone = done.tokens[row][done.attended[row]][None]
        assert torch.allclose(score, judge(input_ids=alone).logits[0, 0], atol=1e-5)


def test_rows_are_taken_together(folder):
    done = generate(trained(folder, "O0"), PROMPTS, temperature=1.0, **HOW)
    part = done.rows(torch.tensor([2, 0]))
    assert part.tokens.equal(done.tokens[[2, 0]])
    assert part.answer.shape == (2, done.length)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_no_prompt_is_refused(folder, prompts):
    with pytest.raises(ValueError, match="give each prompt at least one token"):
        generate(trained(folder, "O0"), prompts, temperature=1.0, **HOW)

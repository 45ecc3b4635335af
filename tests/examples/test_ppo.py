"""examples/ppo.py: advantages and losses by hand, runs that repeat bit for bit, rows of Table 4, and flags that are refused."""

import re

import pytest
import torch

from helpers import post_runs, refusals

MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.fixture(scope="module")
def ppo():
    return post_runs.example("ppo.py")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return post_runs.toy(tmp_path_factory.mktemp("ppo") / "toy")


def words(toy, **settings):
    given = {"load": toy, "reward": "digits", "lr": 3e-3, "train-iters": 3, "max-new-tokens": 8, "global-batch-size": 12,
             "mini-batch-size": 8, "kl-coef": 0.02} | settings  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 0.0)])
def test_advantages_are_the_sum_by_hand(ppo, gamma, lam):
    rewards, values = torch.tensor([[0.1, -0.2, 1.0], [0.5, 7.0, 7.0]]), torch.tensor([[0.3, 0.4, -0.5], [0.2, 9.0, 9.0]])
    first = [0.1 + gamma * 0.4 - 0.3, -0.2 + gamma * -0.5 - 0.4, 1.0 - -0.5]  # the errors d_t, with the value 0 after the last token
    want = [[sum((gamma * lam) ** (k - t) * first[k] for k in range(t, 3)) for t in range(3)], [0.5 - 0.2, 0.0, 0.0]]
    gains, returns = ppo.advantages(rewards, values, MASK, gamma, lam)
    torch.testing.assert_close(gains, torch.tensor(want))
    torch.testing.assert_close(returns, gains + torch.where(MASK, values, 0))


def test_losses_are_clipped(ppo):
    before, gains = torch.zeros(2, 3), torch.tensor([[2.0, -1.0, 2.0], [-1.0, 5.0, 5.0]])
    now = torch.tensor([[1.5, 0.5, 0.5], [1.5, 9.0, 9.0]]).log().requires_grad_()
    loss = ppo.policy_loss(now, before, gains, MASK)  # 1.5 is held to 1.2 and 0.5 to 0.8, where that is worse
    assert loss.item() == pytest.approx((-2 * 1.2 + 0.8 - 2 * 0.5 + 1.5) / 4)
    loss.backward()
    assert now.grad.flatten().tolist() == pytest.approx([0, 0, -2 * 0.5 / 4, 1.5 / 4, 0, 0])
    values, returns = torch.tensor([[0.5, -0.1, 0.5], [0.1, 9.0, 9.0]]), torch.tensor([[1.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    assert ppo.value_loss(values, before, returns, MASK).item() == pytest.approx(0.5 * (0.8**2 + 0.1**2 + 0.5**2 + 0) / 4)


def test_programs_judge(ppo):
    assert [ppo.judge("digits", answer, "") for answer in ("12", "1 a?", "")] == [1.0, 0.25, 0.0]
    assert [ppo.judge("arithmetic", answer, "12") for answer in (" 12.", "5 + 7 is 12", "12 or 7", "none")] == [1.0, 0.5, 0.1, 0.0]


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_run_repeats_and_is_a_row(ppo, toy, tmp_path, capsys, level):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    printed = []
    for name in ("one", "two"):
        with torch.random.fork_rng():
            assert ppo.main(words(toy, **{"opt-level": level, "save": tmp_path / name, "rows": tmp_path / "rows.csv"})) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    steps = torch.tensor([[float(x) for x in line] for line in re.findall(r"reward (\S+)  kl (\S+)  value loss (\S+)", printed[0])])
    assert (steps.isfinite().all(), steps[:, 0].unique().numel() > 1) == (True, True)
    assert abs(steps[0, 1]) < 1e-4 < steps[2, 1]  # policy and reference compute the same before the first update
    start, one, two = (load_file(folder / "model.safetensors") for folder in (toy, tmp_path / "one", tmp_path / "two"))
    assert all(one[name].equal(two[name]) and not one[name].equal(start[name].float()) for name in one)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").dtype == torch.float32
    columns = (post_runs.ROOT / "tools/bench/results/ppo.csv").read_text().splitlines()[0]
    header, _, last = (tmp_path / "rows.csv").read_text().splitlines()
    row = dict(zip(header.split(","), last.split(","), strict=True))
    weights, states, gradients = (float(row[f"{kind}_mib"]) * 2**20 / int(row["parameters"]) for kind in ("weight", "state", "gradient"))
    assert (header, row["models"], row["peak_mib"]) == (columns, "3", "")
    # Two of three models of equal size are trained; a quarter of their weights are embeddings, in BF16 at O3 too.
    assert (weights, states, gradients) == pytest.approx({"O0": (2, 8, 4 / 3), "O3": (1.2, 3.35, 0.8)}[level], rel=0.02)


@pytest.mark.nightly(6)
def test_the_reward_rises(ppo, toy, capsys):
    with torch.random.fork_rng():
        assert ppo.main(words(toy, **{"opt-level": "O3", "train-iters": 12})) == 0
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", capsys.readouterr().out)]
    assert sum(rewards[-4:]) > sum(rewards[:4])  # a flipped sign of the policy's loss ends below


def test_the_value_model_has_its_own_rate(ppo, toy, capsys):
    printed = []
    for rate in (0, 3e-3):
        with torch.random.fork_rng():
            assert ppo.main(words(toy, **{"opt-level": "O0", "train-iters": 1, "lr": 0, "value-lr": rate})) == 0
        printed.append(re.findall(r"(reward .*)  value loss (\S+)", capsys.readouterr().out)[0])
    assert (printed[0][0], printed[0][1] != printed[1][1]) == (printed[1][0], True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"reward": "wit"}, "invalid choice: 'wit'"), ({"kl-coef": "nan"}, "--kl-coef nan is out of range: give 0 to 1000000"),
     ({"lr": 2}, "--lr 2.0 is out of range: give 0 to 1"), ({"ppo-epochs": 0}, "--ppo-epochs 0 is out of range: give 1 to 1000"),
     ({"opt-level": "O9"}, "choice: 'O9'"), ({"max-new-tokens": 600}, "positions for 512 tokens"), ({"save": "."}, "--save . cannot be"),
     ({"value-lr": -1}, "--value-lr -1.0 is out of range: give 0 to 1"), ({"save": f"{__file__}/x"}, "cannot be made (Not a directory)")],
)  # fmt: skip
def test_bad_flags_are_refused(ppo, toy, tmp_path, capsys, settings, message):
    code = refusals.code(ppo.main, words(toy, rows=tmp_path / "rows.csv", **settings))
    assert (code, message in capsys.readouterr().err) == (2, True)
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(("flag", "message"), [("save", "save.partial cannot be made (File exists)"), ("rows", "write to another file")])
def test_outputs_are_refused_before_the_models_load(ppo, tmp_path, capsys, flag, message):
    (tmp_path / "save.partial").mkdir()
    (tmp_path / "rows").write_text("date,commit\n")
    code = refusals.code(ppo.main, words(tmp_path / "none", **{flag: tmp_path / flag}))
    assert (code, message in capsys.readouterr().err) == (2, True)

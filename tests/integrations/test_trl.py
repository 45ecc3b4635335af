"""TRL's trainers for SFT, DPO and GRPO over ours (msamp.integrations.transformers.Trainer)."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, hosts, post_runs
from megatron.lm.post import models
from msamp.nn.linear import FP8Linear
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import ScalingTensor

hosts.need("accelerate")
trl, datasets, transformers = hosts.need("trl"), hosts.need("datasets"), hosts.need("transformers")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMON = {
    "use_cpu": True, "report_to": [], "logging_steps": 1, "bf16": False, "per_device_train_batch_size": 8, "disable_tqdm": True,
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_strategy": "no", "dataloader_pin_memory": False,
}  # fmt: skip
OWN = {"SFT": {"max_length": 64}, "DPO": {"beta": 0.1}, "GRPO": {"num_generations": 4, "max_completion_length": 6, "beta": 0.04}}
KINDS = pytest.mark.parametrize("kind", list(OWN))

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet")]


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


PAIRS = [
    {"prompt": said("user", f"{n}+{n}="), "chosen": said("assistant", str(2 * n)), "rejected": said("assistant", f"no {n}")}
    for n in range(8)
]
ROWS = {
    "SFT": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS],
    "DPO": PAIRS,
    "GRPO": [{"prompt": row["prompt"], "answer": row["chosen"][0]["content"]} for row in PAIRS],
}


@functools.cache
def toy() -> Path:
    return post_runs.toy(Path(tempfile.mkdtemp()) / "toy")


def tokenizer() -> Any:
    found = post_runs.example("toy_chat.py").tokenizer()
    found.chat_template, found.padding_side = TEMPLATE, "left"
    return found


def policy(folder: Path | None = None) -> Any:
    return models.load_model(folder or toy(), "AutoModelForCausalLM", torch.float32, "cpu")


def right(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    return [float(given[0]["content"] == want) for given, want in zip(completions, answer, strict=True)]


def low_tokens(completion_ids: list[list[int]], **others: Any) -> list[float]:
    return [sum(token < 100 for token in given) / len(given) for given in completion_ids]


def given_answers(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """The same completions for every precision, right and wrong ones in turn; sampled ones would differ from the first step on."""
    words, found = trainer.processing_class, {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for number, prompt in enumerate(prompts):
        n = int(prompt[0]["content"].split("+")[0])
        answer = words((str(2 * n) if number % 2 == 0 else f"no {n}") + "<|end|>")["input_ids"]
        found["prompt_ids"].append(words.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        found["completion_ids"].append(answer)
        found["logprobs"].append([0.0] * len(answer))
    return found


def trainer(kind: str, recipe: str | None, folder: Path, model: Any = None, parts: dict[str, Any] | None = None, **settings: Any) -> Any:
    """TRL's trainer; a recipe puts ours before it. `parts` are its arguments, `settings` those of its configuration."""
    from msamp.integrations.transformers import Trainer

    theirs = getattr(trl, f"{kind}Trainer")
    arguments = getattr(trl, f"{kind}Config")(str(folder), **(COMMON | OWN[kind] | settings))
    given = {"train_dataset": datasets.Dataset.from_list(ROWS[kind]), "processing_class": tokenizer(), "args": arguments}
    if kind == "GRPO":
        given |= {"reward_funcs": right, "rollout_func": given_answers}
    given |= parts or {}
    torch.manual_seed(0)
    if recipe is None:
        return theirs(model or policy(), **given)
    return type(f"{kind}Trainer", (Trainer, theirs), {})(model or policy(), recipe=recipe, **given)


def losses(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


@torch.no_grad()
def surprise(model: Any) -> float:
    """Nats per token of the right answers."""
    words, found = tokenizer(), []
    for row in PAIRS:
        prompt = words.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = words(row["chosen"][0]["content"] + "<|end|>")["input_ids"]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        found.append(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(answer)).item())
    return sum(found) / len(found)


def summary(trained: Any) -> tuple[float, float]:
    return sum(losses(trained)[-3:]) / 3, surprise(trained.model)


@functools.cache
def in_fp32(kind: str) -> tuple[float, float]:
    plain = trainer(kind, None, toy().parent / kind, max_steps=10)
    plain.train()
    return summary(plain)


@pytest.mark.promise("Hosts", "TRL's SFTTrainer, DPOTrainer and GRPOTrainer end within 1.5 % of their loss in FP32 at O1, O2 and O3.")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@KINDS
def test_it_ends_where_it_ends_in_fp32(kind, level, tmp_path):
    low = trainer(kind, level, tmp_path, max_steps=10)
    low.train()
    assert sum(isinstance(m, FP8Linear) for m in low.model.modules()) == 14
    assert summary(low) == pytest.approx(in_fp32(kind), rel=0.015)
    assert surprise(low.model) < surprise(policy()) - 0.1


@KINDS
def test_it_saves_what_from_pretrained_reads_and_resumes(kind, tmp_path):
    whole = trainer(kind, "O3", tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    whole.train()
    folder = tmp_path / "checkpoint-3"
    assert surprise(policy(folder)) == pytest.approx(surprise(policy(tmp_path / "checkpoint-6")), rel=0.2)
    resumed = trainer(kind, "O3", tmp_path / "resumed", max_steps=6)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 6
    assert losses(resumed) == pytest.approx(losses(whole), rel=0.015)
    assert surprise(resumed.model) == pytest.approx(surprise(whole.model), rel=0.015)


@KINDS
def test_the_exported_model_says_what_the_trained_one_says(kind, tmp_path):
    low = trainer(kind, "O2", tmp_path, max_steps=2)
    low.train()
    low.save_model(str(tmp_path / "export"))
    tokens = torch.arange(32).view(2, 16) % 200
    with torch.no_grad():
        assert sqnr_db(policy(tmp_path / "export")(tokens).logits, low.model.eval()(tokens).logits) > 20


def test_grpo_generates_with_fp8_layers_and_earns_more(tmp_path):
    settings = {"max_steps": 12, "learning_rate": 1e-2, "beta": 0.0, "per_device_train_batch_size": 16, "num_generations": 8}
    low = trainer("GRPO", "O3", tmp_path, parts={"reward_funcs": low_tokens, "rollout_func": None}, **settings)
    low.train()
    rewards = [row["reward"] for row in low.state.log_history if "reward" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_grpo_with_capture_stays_eager(tmp_path):
    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}
    eager = trainer("GRPO", "O3", tmp_path, **settings)
    eager.train()
    with pytest.warns(UserWarning, match="own _prepare_inputs"):
        captured = trainer("GRPO", "O3", tmp_path, parts={"capture": True}, **settings)
    captured.train()
    assert losses(captured) == losses(eager)


def on_this_rank(kind: str, source: Path, folder: Path) -> dict[str, Any]:
    low = trainer(kind, "O3", folder, policy(source), max_steps=3, per_device_train_batch_size=4)
    low.train()
    weights = [p.detach().dequantize() if isinstance(p, ScalingTensor) else p.detach() for p in low.model.parameters()]
    return {"losses": losses(low), "weights": weights, "kind": type(low.model_wrapped).__name__}


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_two_processes_train_alike(kind, tmp_path):
    first, second = dist.run(on_this_rank, 2, kind, toy(), tmp_path)
    assert first["kind"] == "LlamaForCausalLM"
    assert all(a.equal(b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert first["losses"][-1] != first["losses"][0]


def test_a_compiled_model_trains_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # transformers sets it, and leaves it to the tests after this one
    whole = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        low = trainer("SFT", "O2", tmp_path, policy(post_runs.toy(tmp_path / "toy", layers=1)), max_steps=4, **settings)
        low.train()
        whole.append(losses(low))
    assert whole[1] == pytest.approx(whole[0], rel=1e-2)

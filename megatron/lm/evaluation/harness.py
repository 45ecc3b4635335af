"""Adapter of our models for lm-eval (EleutherAI's language model evaluation harness), and tasks from local files.

Requires lm-eval: `pip install -e '.[eval]'`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.lm.evaluation.generation import Sampling
from megatron.lm.evaluation.models import CheckpointModel, FolderModel, Model

TASKS = Path(__file__).parent / "tasks"
MAX_GEN_TOKENS = 256  # default for tasks, as in lm-eval's own adapters
_IGNORED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class Adapter(TemplateLM):
    """lm-eval adapter of a model from `megatron.lm.evaluation.models`.

    Requests run in batches of about equal length. Results depend neither on the batch nor on the order of requests.

    Args:
        model: the model.
        batch_size: requests per batch.
        seed: for tasks that sample.
    """

    def __init__(self, model: Model, batch_size: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.model, self.batch_size, self._seed = model, batch_size, seed

    @property
    def eot_token_id(self) -> int:
        """Return the end-of-document token."""
        return self.model.eod

    @property
    def max_length(self) -> int:
        """Return the context length in tokens."""
        return self.model.seq_length

    @property
    def tokenizer_name(self) -> str:
        """Return the key of lm-eval's request cache."""
        return self.model.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids, without special tokens."""
        return self.model.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        todo = []
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"an answer of {len(continuation)} tokens is longer than the model's context of {self.max_length}: leave the task out"
                )
            if continuation:
                # Truncate on the left, as lm-eval's own adapters do.
                todo.append((i, (context + continuation)[-(self.max_length + 1) :], len(continuation)))
        todo.sort(key=lambda entry: (-len(entry[1]), entry[0]))  # longest first, so that running out of memory shows at once
        for begin in range(0, len(todo), self.batch_size):
            batch = todo[begin : begin + self.batch_size]
            scores = self.model.score([tokens for _, tokens, _ in batch], [len(tokens) - last for _, tokens, last in batch])
            for (i, _, _), score in zip(batch, scores, strict=True):
                answers[i] = float(score.logprobs.double().sum()), score.greedy
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, scoring each token once, with batched windows."""
        cut: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, scored in map(make_disjoint_window, pairs):
                cut.append((None, context, scored))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(cut), strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to the first of the strings in `until`, which is left out."""
        if not isinstance(self.model, CheckpointModel):
            raise ValueError(f"generation from {self.model.name} is not supported here: use lm-eval's own adapter")
        texts = [""] * len(requests)
        groups: dict[tuple[Any, ...], list[tuple[int, list[int]]]] = {}
        for i, request in enumerate(requests):
            context, settings = request.args
            unknown = set(settings) - _IGNORED
            if unknown:
                raise ValueError(
                    f"a task sets the unknown generation options {', '.join(sorted(unknown))}: only {', '.join(sorted(_IGNORED))} are "
                    "supported"
                )
            until = settings.get("until") or []
            until = (until,) if isinstance(until, str) else tuple(until)
            count = int(settings.get("max_gen_toks", MAX_GEN_TOKENS))
            if not 0 < count < self.max_length:
                raise ValueError(
                    f"a task requests {count} tokens, but the model's context has {self.max_length}: request at least 1 and fewer than that"
                )
            key = until, count, _sampling(settings, self._seed)
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            groups.setdefault(key, []).append((i, tokens[-(self.max_length - count) :]))
        for (until, count, sampling), members in groups.items():
            members.sort(key=lambda member: (-len(member[1]), member[0]))
            for begin in range(0, len(members), self.batch_size):
                batch = members[begin : begin + self.batch_size]
                continuations = self._continued([tokens for _, tokens in batch], until, count, sampling)
                for (i, _), text in zip(batch, continuations, strict=True):
                    texts[i] = text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _continued(self, prompts: list[list[int]], until: tuple[str, ...], count: int, sampling: Sampling) -> list[str]:
        assert isinstance(self.model, CheckpointModel)

        def stopped(tokens: list[int]) -> bool:
            text = self.model.decode(tokens)
            return any(stop in text for stop in until)

        generated = self.model.generate(prompts, count, sampling, stopped if until else None)
        return [_before(self.model.decode(tokens), until) for tokens in generated.tokens]


def _is_result(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and key != "sample_len"


def _sampling(settings: dict[str, Any], seed: int) -> Sampling:
    if not settings.get("do_sample", False):
        return Sampling(temperature=0, seed=seed)
    values = {name: settings[name] for name in ("temperature", "top_k", "top_p") if name in settings}
    return Sampling(seed=seed, **values)


def _before(text: str, until: tuple[str, ...]) -> str:
    """Return the text before the first of `until`."""
    return text[: min([place for stop in until if stop and (place := text.find(stop)) >= 0], default=len(text))]


def manager(data_dir: Path, include: Sequence[Path] = ()) -> TaskManager:
    """Return our tasks and those in further YAML folders, with data files in `data_dir`; without lm-eval's own tasks, which download
    data."""
    return TaskManager(include_path=[TASKS, *include], include_defaults=False, metadata={"data_dir": str(data_dir)})


def check_tasks(tasks: Sequence[str], known: TaskManager) -> None:
    """Raise a ValueError if a task is unknown or its files are missing."""
    unknown = [task for task in tasks if task not in known.all_tasks]
    if unknown:
        raise ValueError(f"--tasks {' '.join(unknown)}: unknown task; choose from {', '.join(known.all_tasks)}")
    known.load(list(tasks))


def evaluate(
    model: CheckpointModel | FolderModel,
    tasks: Sequence[str],
    known: TaskManager,
    *,
    batch_size: int,
    limit: int | None = None,
    fewshot: int | None = None,
) -> dict[str, Any]:
    """Return `{metric: value, metric_stderr: its standard error, "samples": count}` of each task, as lm-eval computes them."""
    if isinstance(model, FolderModel):
        from lm_eval.models.huggingface import HFLM

        adapter: Any = HFLM(pretrained=model.network, tokenizer=model.tokenizer, batch_size=batch_size, max_length=model.seq_length)
    else:
        adapter = Adapter(model, batch_size)
    results = simple_evaluate(
        adapter, tasks=list(tasks), task_manager=known, limit=limit, num_fewshot=fewshot, log_samples=False, batch_size=batch_size
    )
    assert results is not None
    rows = {}
    for task, values in results["results"].items():
        named = {key.replace(",none", "").replace(",", "/"): value for key, value in values.items() if _is_result(key, value)}
        rows[task] = named | {"samples": results["n-samples"][task]["effective"]} if task in results["n-samples"] else named
    return rows

"""Our models in lm-eval (EleutherAI's language model evaluation harness), and tasks from local files.

Imported only where lm-eval is installed: `pip install -e '.[eval]'`.
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
MAX_GEN_TOKENS = 256  # where a task says nothing, as lm-eval's own adapters
_IGNORED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class Adapter(TemplateLM):
    """A model of `megatron.lm.evaluation.models` as lm-eval asks for it.

    Requests run in batches of about equal length; what a request gives depends neither on its batch nor on the order of requests.

    Args:
        model: what answers.
        batch_size: requests that run side by side.
        seed: of draws, where a task asks for some.
    """

    def __init__(self, model: Model, batch_size: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.model, self.batch_size, self._seed = model, batch_size, seed

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.model.eod

    @property
    def max_length(self) -> int:
        """Tokens that the model sees."""
        return self.model.seq_length

    @property
    def tokenizer_name(self) -> str:
        """Of lm-eval's cache of requests."""
        return self.model.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, nothing added."""
        return self.model.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        todo = []
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"an answer of {len(continuation)} tokens is longer than the model's sequence of {self.max_length}: leave the task out"
                )
            if continuation:
                # What is too long for the model is cut in front, as lm-eval's own adapters do it.
                todo.append((i, (context + continuation)[-(self.max_length + 1) :], len(continuation)))
        todo.sort(key=lambda entry: (-len(entry[1]), entry[0]))  # the longest first: memory that lacks is told at once
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
        """Log-likelihood of whole texts, each token told once, in windows side by side."""
        cut: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, told in map(make_disjoint_window, pairs):
                cut.append((None, context, told))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(cut), strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of the texts in `until`, which is left out."""
        if not isinstance(self.model, CheckpointModel):
            raise ValueError(f"{self.model.name} is not generated from here: lm-eval's own adapter does it")
        texts = [""] * len(requests)
        groups: dict[tuple[Any, ...], list[tuple[int, list[int]]]] = {}
        for i, request in enumerate(requests):
            context, settings = request.args
            unknown = set(settings) - _IGNORED
            if unknown:
                raise ValueError(f"a task asks to generate with {', '.join(sorted(unknown))}: only {', '.join(sorted(_IGNORED))} are known")
            until = settings.get("until") or []
            until = (until,) if isinstance(until, str) else tuple(until)
            count = int(settings.get("max_gen_toks", MAX_GEN_TOKENS))
            if not 0 < count < self.max_length:
                raise ValueError(f"a task asks for {count} tokens of a model that sees {self.max_length}: let it ask for 1 to one fewer")
            key = until, count, _sampling(settings, self._seed)
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            groups.setdefault(key, []).append((i, tokens[-(self.max_length - count) :]))
        for (until, count, sampling), members in groups.items():
            members.sort(key=lambda member: (-len(member[1]), member[0]))
            for begin in range(0, len(members), self.batch_size):
                batch = members[begin : begin + self.batch_size]
                found = self._continued([tokens for _, tokens in batch], until, count, sampling)
                for (i, _), text in zip(batch, found, strict=True):
                    texts[i] = text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _continued(self, prompts: list[list[int]], until: tuple[str, ...], count: int, sampling: Sampling) -> list[str]:
        assert isinstance(self.model, CheckpointModel)

        def stopped(tokens: list[int]) -> bool:
            text = self.model.decode(tokens)
            return any(stop in text for stop in until)

        made = self.model.generate(prompts, count, sampling, stopped if until else None)
        return [_before(self.model.decode(tokens), until) for tokens in made.tokens]


def _is_result(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and key != "sample_len"


def _sampling(settings: dict[str, Any], seed: int) -> Sampling:
    if not settings.get("do_sample", False):
        return Sampling(temperature=0, seed=seed)
    values = {name: settings[name] for name in ("temperature", "top_k", "top_p") if name in settings}
    return Sampling(seed=seed, **values)


def _before(text: str, until: tuple[str, ...]) -> str:
    """The text before the first of `until`."""
    return text[: min([place for stop in until if stop and (place := text.find(stop)) >= 0], default=len(text))]


def manager(data_dir: Path, include: Sequence[Path] = ()) -> TaskManager:
    """Our tasks and those of further folders of YAML, their files below `data_dir`; none of lm-eval's own, which would download."""
    return TaskManager(include_path=[TASKS, *include], include_defaults=False, metadata={"data_dir": str(data_dir)})


def check_tasks(tasks: Sequence[str], known: TaskManager) -> None:
    """ValueError for a task that is none, or with files that lack."""
    unknown = [task for task in tasks if task not in known.all_tasks]
    if unknown:
        raise ValueError(f"--tasks {' '.join(unknown)}: there is no such task; choose of {', '.join(known.all_tasks)}")
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
    """Of each task, `{metric: value, metric_stderr: its standard error, "samples": how many}`, as lm-eval computes them."""
    if isinstance(model, FolderModel):
        from lm_eval.models.huggingface import HFLM

        adapter: Any = HFLM(pretrained=model.network, tokenizer=model.tokenizer, batch_size=batch_size, max_length=model.seq_length)
    else:
        adapter = Adapter(model, batch_size)
    found = simple_evaluate(
        adapter, tasks=list(tasks), task_manager=known, limit=limit, num_fewshot=fewshot, log_samples=False, batch_size=batch_size
    )
    assert found is not None
    rows = {}
    for task, values in found["results"].items():
        named = {key.replace(",none", "").replace(",", "/"): value for key, value in values.items() if _is_result(key, value)}
        rows[task] = named | {"samples": found["n-samples"][task]["effective"]} if task in found["n-samples"] else named
    return rows

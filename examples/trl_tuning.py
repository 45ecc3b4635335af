"""Fine-tune a chat model by TRL at a precision and judge its export: python examples/trl_tuning.py sft --load MODEL --data FILE

Tasks: `sft` (conversations), `dpo` (preferences), and `grpo` with the reward `digits`, the share of digits in an answer, which has no data.
The model is a transformers folder, the data as in megatron/lm/post/conversations.py; the last --valid-rows rows are held out. Prints JSON:
the peak memory of training, models and data included, and the held-out loss in the layers that were trained, before and after, and of their
export in BF16 and in FP32; or the mean reward of the first and the last ten steps of `grpo`; and the
training loss or the reward of each step.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

import msamp
from megatron.lm.post import conversations, models
from megatron.lm.shell import arguments, exit_codes

# Settings of a task, besides those that all share.
COMMON = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "gradient_checkpointing": False,
          "lr_scheduler_type": "cosine", "max_grad_norm": 1.0}  # fmt: skip
SETTINGS = ("task", "opt_level", "dtype", "lr", "seed", "steps")
MEASURED = ("seconds", "peak_gib", "start_loss", "own_loss", "bf16_loss", "fp32_loss", "first_reward", "last_reward", "curve")
OWN: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"beta": 0.1},
    "grpo": {"num_generations": 8, "max_completion_length": 32, "beta": 0.0, "temperature": 1.0},
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__)
    add = parser.add_argument
    add("task", choices=tuple(OWN))
    add("--load", type=arguments.path, required=True, help="transformers folder")
    add("--data", type=arguments.path, help="JSON or JSON lines of conversations or preferences")
    add("--opt-level", default="O2", choices=("O0", "O1", "O2", "O3", "fp32"), help="(default: %(default)s)")
    add(
        "--dtype",
        default="bf16",
        choices=tuple(models.DTYPES),
        help="of the weights; fp32 computes under autocast to BF16, unless the level is fp32 (default: %(default)s)",
    )
    add("--lr", type=float, default=1e-5, help="(default: %(default)s)")
    add("--seed", type=arguments.count(0), default=1234, help="(default: %(default)s)")
    add("--steps", type=arguments.count(1), default=60, help="(default: %(default)s)")
    add("--batch", type=arguments.count(1), default=16, help="conversations, pairs or answers of a step (default: %(default)s)")
    add(
        "--seq-length",
        type=arguments.count(8),
        default=512,
        help="tokens after which TRL cuts a conversation (default: %(default)s)",
    )
    add("--valid-rows", type=arguments.count(1), default=99, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if (args.data is None) != (args.task == "grpo"):
        parser.error(f"{args.task} {'needs' if args.data is None else 'has no'} --data")
    return args


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows in TRL's form."""
    if args.task == "grpo":
        sums = torch.randint(100, (args.steps * args.batch, 2), generator=torch.Generator().manual_seed(args.seed)).tolist()
        return [{"prompt": [{"role": "user", "content": f"{a}+{b}"}]} for a, b in sums]
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(conversations.rows(args.data), 1):
        where = f"row {number} of {args.data}"
        if args.task == "sft":
            messages = conversations.conversation(row, where)
            rows.append({"prompt": messages[:-1], "completion": messages[-1:]})
        else:
            pair = conversations.preference(row, where)
            answers = {"chosen": pair.chosen, "rejected": pair.rejected}
            rows.append({"prompt": pair.prompt} | {key: [{"role": "assistant", "content": text}] for key, text in answers.items()})
    if len(rows) <= args.valid_rows:
        raise ValueError(f"{args.data} has {len(rows)} rows: hold out fewer than that by --valid-rows, which is {args.valid_rows}")
    return rows


def digits(completions: Sequence[Any], **others: Any) -> list[float]:
    """Return the share of digits in each answer."""
    texts = [each[0]["content"] for each in completions]
    return [sum(letter in "0123456789" for letter in text) / max(1, len(text)) for text in texts]


class Tuning:
    """A task on its data. `trainer` returns TRL's trainer over a model; with a level, the model is converted, and ours comes before it.
    Without one it only judges."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.trl, self.datasets = args, models.need("trl"), models.need("datasets")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = models.load_tokenizer(args.load)
        rows = rows_of(args)
        cut = len(rows) if args.task == "grpo" else len(rows) - args.valid_rows
        self.train, self.valid = rows[:cut], rows[cut:]

    def model(self, dtype: torch.dtype) -> Any:
        return models.load_model(self.args.load, "AutoModelForCausalLM", dtype, self.device)

    def trainer(self, folder: str, model: Any, level: str | None = None, *, autocast: bool = False) -> Any:
        from msamp.integrations.transformers import Trainer

        args, name = self.args, self.args.task.upper()
        theirs = getattr(self.trl, f"{name}Trainer")
        settings = COMMON | OWN[args.task] | {"max_steps": args.steps, "warmup_steps": max(1, args.steps // 10), "learning_rate": args.lr}
        settings |= {"per_device_train_batch_size": args.batch, "seed": args.seed, "bf16": autocast, "use_cpu": self.device == "cpu"}
        if args.task != "grpo":
            settings |= {"max_length": args.seq_length, "per_device_eval_batch_size": args.batch}
        parts = {"train_dataset": self.train if level else self.valid, "eval_dataset": self.valid}
        given: dict[str, Any] = {key: self.datasets.Dataset.from_list(rows) for key, rows in parts.items() if rows}
        given |= {"args": getattr(self.trl, f"{name}Config")(folder, **settings), "processing_class": self.tokenizer}
        if args.task == "grpo":
            given["reward_funcs"] = digits
        if args.task == "dpo":  # in the layers of the policy, so that both start equal
            reference = self.model(next(model.parameters()).dtype)
            given["ref_model"] = models.freeze(reference, msamp.recipes.by_name(level)) if level else reference
        if level is None:
            return theirs(model, **given)
        trainer = type(f"{name}Trainer", (Trainer, theirs), {})(model, **given)
        adam = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
        # All layers in FP8: the levels' losses are compared, not their times.
        _, trainer.optimizer = msamp.initialize(model, adam, level, fp8_min_gain=0)
        return trainer


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the settings and what was measured."""
    tuning = Tuning(args)
    row: dict[str, Any] = {name: getattr(args, name) for name in SETTINGS} | dict.fromkeys(MEASURED, "")
    torch.manual_seed(args.seed)
    autocast = args.dtype == "fp32" and args.opt_level != "fp32"
    with tempfile.TemporaryDirectory() as folder:
        model = tuning.model(models.DTYPES[args.dtype])
        trainer = tuning.trainer(folder, model, args.opt_level, autocast=autocast)
        if args.task != "grpo":
            # Where the reference is prepared by accelerate already, the policy is only when training starts.
            with torch.autocast(tuning.device, torch.bfloat16, enabled=autocast):
                row["start_loss"] = trainer.evaluate()["eval_loss"]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        trainer.train()
        row["seconds"] = round(time.perf_counter() - began, 1)
        if torch.cuda.is_available():
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        what = "reward" if args.task == "grpo" else "loss"
        course = [entry[what] for entry in trainer.state.log_history if what in entry]
        row["curve"] = " ".join(f"{each:.4f}" for each in course)
        if args.task == "grpo":
            return row | {"first_reward": sum(course[:10]) / len(course[:10]), "last_reward": sum(course[-10:]) / len(course[-10:])}
        row["own_loss"] = trainer.evaluate()["eval_loss"]
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state = msamp.plain_state_dict(model, optimizer, dtype=torch.float32)
        for name, dtype in models.DTYPES.items():
            exported = tuning.model(dtype)
            exported.load_state_dict(state)
            row[f"{name}_loss"] = tuning.trainer(folder, exported).evaluate()["eval_loss"]
    return row


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    print(json.dumps(tune(parse(argv))))


if __name__ == "__main__":
    sys.exit(main())

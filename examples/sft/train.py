"""Supervised fine-tuning of a chat model at O0 to O3: python examples/sft/train.py --load MODEL --data FILE --save FOLDER

The model is a transformers folder, the data JSON or JSON lines of conversations (megatron/lm/post/conversations.py lists the formats). The
loss covers the assistant's answers. Conversations are packed into sequences and do not attend to each other. The same command resumes an
interrupted run. At the end `from_pretrained` reads FOLDER/model.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

import msamp
from examples.post_training import Run, Trained
from megatron.lm.post import chat, conversations, flags, memory, models, packing, saved
from megatron.lm.post.losses import answer_loss
from megatron.lm.post.schedule import drawn
from megatron.lm.shell import arguments, exit_codes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__)
    flags.common(parser, lr=2e-5, train_iters=100)
    add = parser.add_argument
    flags.data(parser, "conversations", unit="conversations", in_batch="sequences", micro_batch=4, global_batch=4)
    add("--lora-rank", type=arguments.count(0), default=0, help="train adapters of this rank on a frozen base; 0 trains all weights")
    add("--no-packing", action="store_true", help="one conversation per sequence")
    args = parser.parse_args(argv)
    flags.check_multiple(parser, args, "micro_batch_size")
    if args.lora_rank and args.export_dtype:
        parser.error("--export-dtype is for whole models; adapters (--lora-rank) keep their own dtype: omit one of the two")
    args.device = flags.device(parser)
    return args


def read(args: argparse.Namespace, tokenizer: Any) -> tuple[list[list[chat.Example]], list[list[chat.Example]]]:
    """Return the training sequences and the held-out ones."""
    given, cut = flags.training_rows(args)
    examples = []
    for number, row in enumerate(given, 1):
        where = f"row {number} of {args.data}"
        examples.append(chat.encode(tokenizer, conversations.conversation(row, where), where))
    parts = []
    for part in (examples[:cut], examples[cut:]):
        fit = packing.fitting(part, args.seq_length, args.long_rows) if part else []
        parts.append([[example] for example in fit] if args.no_packing else packing.packed(fit, args.seq_length))
    return parts[0], parts[1]


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss, summed over the tokens of the answers."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return answer_loss(logits, batch["input_ids"], batch["answer"])


@torch.no_grad()
def judge(model: Any, sequences: list[list[chat.Example]], args: argparse.Namespace, pad: int) -> float | None:
    """Return the mean loss per answer token of the held-out conversations; None if there are none."""
    if not sequences:
        return None
    model.eval()
    total, tokens = 0.0, 0
    for at in range(0, len(sequences), args.micro_batch_size):
        batch = packing.batch(sequences[at : at + args.micro_batch_size], args.seq_length, pad, args.device)
        total += loss_of(model, batch).item()
        tokens += int(batch["answer"].sum())
    model.train()
    return total / tokens


def train(args: argparse.Namespace) -> None:
    tokenizer = models.load_tokenizer(args.load)
    chat.use_template(tokenizer, args.chat_template)
    (sequences, held_out), pad = read(args, tokenizer), tokenizer.pad_token_id
    run = Run(args)

    torch.manual_seed(args.seed)  # seed of dropout, if the model uses any
    recipe = msamp.recipes.by_name(args.opt_level)
    model = models.load_model(args.load, "AutoModelForCausalLM", models.DTYPES[args.dtype], args.device)
    models.check_vocabulary(model, tokenizer)
    models.check_positions(model, args.seq_length, "--seq-length")
    if not args.no_packing:
        packing.check_separates(model)
    if args.lora_rank:
        model = models.with_lora(model, recipe, args.lora_rank, args.seed)
    policy = Trained(model, recipe, args.lr, args)
    run.resume(policy.load)
    before = {} if run.metrics else {"valid_loss": judge(policy.model, held_out, args, pad)}

    def step(number: int) -> dict[str, Any]:
        policy.rate(number)
        chosen = [sequences[row] for row in drawn(number, args.global_batch_size, len(sequences), args.seed)]
        batch = packing.batch(chosen, args.seq_length, pad, args.device)
        answers, loss = int(batch["answer"].sum()), 0.0
        for at in range(0, args.global_batch_size, args.micro_batch_size):
            part = loss_of(policy.model, {name: values[at : at + args.micro_batch_size] for name, values in batch.items()}) / answers
            part.backward()
            loss += part.item()
        policy.update()
        tokens = sum(len(example.tokens) for row in chosen for example in row)
        return {"loss": loss, "grad_norm": float(policy.optimizer.grad_norm), "tokens": tokens} | (before if number == 0 else {})

    def at_end() -> dict[str, Any]:
        return {"valid_loss": judge(policy.model, held_out, args, pad)} if held_out else {}

    run.train(step, policy.state, "loss {loss:.4f}  grad norm {grad_norm:.3f}", at_end)
    done = saved.finish(args, policy.model, tokenizer, run.metrics, policy.optimizer)
    report(args, policy.stored(), run)
    print(done)


def report(args: argparse.Namespace, held: memory.Stored, run: Run) -> None:
    """Print the run's memory, speed and loss, and append them to --rows."""
    metrics, timed, peak, parameters = run.metrics, run.timed(), memory.peak(args.device), held.parameters
    speed = sum(row["tokens"] for row in timed) / sum(row["seconds"] for row in timed)
    row = {
        "model": args.load.name, "parameters": parameters, "recipe": args.opt_level, "dtype": args.dtype, "lora_rank": args.lora_rank,
        "seq_length": args.seq_length, "global_batch_size": args.global_batch_size, "steps": len(metrics), "seed": args.seed,
        "loss_first": f"{metrics[0]['loss']:.4f}", "loss_last": f"{metrics[-1]['loss']:.4f}",
        "valid_loss_before": metrics[0].get("valid_loss"), "valid_loss_after": metrics[-1].get("valid_loss"),
        "tokens_per_s": f"{speed:.1f}", "weight_bytes": f"{held.weights / parameters:.3f}",
        "gradient_bytes": f"{held.gradients / parameters:.3f}", "master_bytes": f"{held.masters / parameters:.3f}",
        "moment_bytes": f"{held.moments / parameters:.3f}", "peak_bytes": "" if peak is None else f"{peak / parameters:.3f}",
    }  # fmt: skip
    print("bytes per parameter: " + ", ".join(f"{name.removesuffix('_bytes')} {row[name]}" for name in row if name.endswith("_bytes")))
    print(f"{speed:.0f} tokens/s; loss {row['loss_first']} -> {row['loss_last']}")
    run.record(row)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    train(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

"""Direct preference optimization at O0 to O3: python examples/rlhf/dpo.py --load MODEL --data FILE --save FOLDER

The model is a chat model of transformers, the data JSON or JSON lines of prompts with a chosen and a rejected answer. The reference is the
same model, frozen, at FP8 levels with one byte per weight. The same command resumes an interrupted run; FOLDER/model is the result.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

import msamp
from examples.post_training import Run, Trained, mib
from megatron.lm.post import chat, conversations, flags, memory, models, packing, saved
from megatron.lm.post.losses import answer_log_probs, dpo_loss
from megatron.lm.post.schedule import drawn
from megatron.lm.shell import arguments, exit_codes

Pair = tuple[chat.Example, chat.Example]  # the chosen and the rejected answer, each after its prompt


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__)
    flags.common(parser, lr=1e-6, train_iters=100)
    flags.data(parser, "preferences", unit="pairs", in_batch="pairs", micro_batch=2, global_batch=8)
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the tie to the reference (default: %(default)s)")
    args = parser.parse_args(argv)
    flags.check_multiple(parser, args, "micro_batch_size")
    if not 0 < args.beta < math.inf:
        parser.error(f"--beta {args.beta} is out of range: give more than 0")
    args.device = flags.device(parser)
    return args


def read(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs to train on and the held-out pairs, without those that do not fit a sequence."""
    given, cut = flags.training_rows(args)
    pairs: list[Pair] = []
    held_out: list[Pair] = []
    for number, row in enumerate(given, 1):
        where = f"row {number} of {args.data}"
        asked = conversations.preference(row, where)
        examples = [chat.encode_answer(tokenizer, asked.prompt, answer, where) for answer in (asked.chosen, asked.rejected)]
        if args.long_rows == "drop" and max(len(example.tokens) for example in examples) > args.seq_length:
            continue
        try:
            chosen, rejected = packing.fitting(examples, args.seq_length, args.long_rows)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        (pairs if number <= cut else held_out).append((chosen, rejected))
    if not pairs:
        raise ValueError(f"no pair of {args.data} fits --seq-length {args.seq_length}: give a larger one")
    return pairs, held_out


def answers(model: Any, pairs: Sequence[Pair], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities of the chosen and of the rejected answers, [b] each."""
    sequences = [[pair[0]] for pair in pairs] + [[pair[1]] for pair in pairs]
    batch = packing.batch(sequences, max(len(row[0].tokens) for row in sequences), pad, device)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    chosen, rejected = answer_log_probs(logits, batch["input_ids"], batch["answer"]).chunk(2)
    return chosen, rejected


@torch.no_grad()
def judge(model: Any, reference: Any, pairs: Sequence[Pair], args: argparse.Namespace, pad: int) -> dict[str, float] | None:
    """Return the mean loss of held-out pairs and the share of pairs with a positive margin; None without pairs."""
    if not pairs:
        return None
    model.eval()
    total, right = 0.0, 0
    for at in range(0, len(pairs), args.micro_batch_size):
        part = pairs[at : at + args.micro_batch_size]
        before = answers(reference, part, pad, args.device)
        losses, margins = dpo_loss(*answers(model, part, pad, args.device), *before, args.beta)
        total += losses.sum().item()
        right += int((margins > 0).sum())
    model.train()
    return {"valid_loss": total / len(pairs), "valid_accuracy": right / len(pairs)}


def train(args: argparse.Namespace) -> None:
    tokenizer = models.load_tokenizer(args.load)
    chat.use_template(tokenizer, args.chat_template)
    (pairs, held_out), pad = read(args, tokenizer), tokenizer.pad_token_id
    run = Run(args)

    torch.manual_seed(args.seed)  # seed of dropout, if the model uses any
    recipe, dtype = msamp.recipes.by_name(args.opt_level), models.DTYPES[args.dtype]
    model, reference = (models.load_model(args.load, "AutoModelForCausalLM", dtype, args.device) for _ in range(2))
    models.check_vocabulary(model, tokenizer)
    models.check_positions(model, args.seq_length, "--seq-length")
    reference = models.freeze(reference, recipe)
    policy = Trained(model, recipe, args.lr, args)
    run.resume(policy.load)

    def step(number: int) -> dict[str, Any]:
        policy.rate(number)
        chosen = [pairs[row] for row in drawn(number, args.global_batch_size, len(pairs), args.seed)]
        loss, margins = 0.0, []
        for at in range(0, args.global_batch_size, args.micro_batch_size):
            part = chosen[at : at + args.micro_batch_size]
            with torch.no_grad():
                before = answers(reference, part, pad, args.device)
            losses, margin = dpo_loss(*answers(policy.model, part, pad, args.device), *before, args.beta)
            mean = losses.sum() / args.global_batch_size
            mean.backward()
            loss += mean.item()
            margins += margin.tolist()
        policy.update()
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        return {"loss": loss, "margin": sum(margins) / len(margins), "accuracy": accuracy, "grad_norm": float(policy.optimizer.grad_norm)}

    def at_end() -> dict[str, float]:
        return judge(policy.model, reference, held_out, args, pad) or {}

    run.train(step, policy.state, "loss {loss:.4f}  margin {margin:.4f}  accuracy {accuracy:.2f}", at_end)
    done = saved.finish(args, policy.model, tokenizer, run.metrics, policy.optimizer)
    report(args, policy.stored(), memory.stored(reference), run)
    print(done)


def report(args: argparse.Namespace, policy: memory.Stored, reference: memory.Stored, run: Run) -> None:
    """Print the run's memory, and append memory, speed and loss to --rows."""
    metrics, timed, tail = run.metrics, run.timed(), run.metrics[-10:]
    row = {
        "model": args.load.name, "parameters": policy.parameters, "recipe": args.opt_level, "dtype": args.dtype, "beta": args.beta,
        "global_batch_size": args.global_batch_size, "steps": len(metrics), "seed": args.seed, "loss_first": f"{metrics[0]['loss']:.4f}",
        "loss_last": f"{sum(row['loss'] for row in tail) / len(tail):.4f}",
        "accuracy_last": f"{sum(row['accuracy'] for row in tail) / len(tail):.3f}",
        "pairs_per_s": f"{args.global_batch_size * len(timed) / sum(row['seconds'] for row in timed):.2f}",
        "policy_weight_mib": mib(policy.weights), "reference_weight_mib": mib(reference.weights), "gradient_mib": mib(policy.gradients),
        "state_mib": mib(policy.states), "peak_mib": mib(memory.peak(args.device)),
    }  # fmt: skip
    print("MiB: " + ", ".join(f"{name.removesuffix('_mib')} {row[name]}" for name in row if name.endswith("_mib")))
    run.record(row)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    train(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

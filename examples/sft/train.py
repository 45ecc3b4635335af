"""Supervised fine-tuning of a chat model at O0 to O3: python examples/sft/train.py --load MODEL --data FILE --save FOLDER

The model is a transformers folder, the data JSON or JSON lines of conversations (megatron/lm/post/conversations.py lists the formats). The
loss covers the assistant's answers. Conversations are packed into sequences and do not attend to each other. The same command resumes an
interrupted run. At the end `from_pretrained` reads FOLDER/model.
"""

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import msamp
from megatron.lm.errors import RunStopped
from megatron.lm.post import chat, conversations, flags, memory, models, packing, saved
from megatron.lm.post.losses import answer_loss
from megatron.lm.post.schedule import drawn, learning_rate
from megatron.lm.shell import arguments, exit_codes
from tools.bench import rows


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
    sequences, held_out = read(args, tokenizer)
    settings = flags.settings(args, data=hashlib.sha256(args.data.read_bytes()).hexdigest())
    resumed = saved.load(args.save, settings, args.device)

    torch.manual_seed(args.seed)  # seed of dropout, if the model uses any
    recipe = msamp.recipes.by_name(args.opt_level)
    model = models.load_model(args.load, "AutoModelForCausalLM", models.DTYPES[args.dtype], args.device)
    models.check_vocabulary(model, tokenizer)
    models.check_positions(model, args.seq_length, "--seq-length")
    if not args.no_packing:
        packing.check_separates(model)
    if args.lora_rank:
        model = models.with_lora(model, recipe, args.lora_rank, args.seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=args.weight_decay)
    model, optimizer = msamp.initialize(model, optimizer, recipe, clip_grad=args.clip_grad or None, **flags.roundings(args))
    model.train()

    step, metrics = 0, []
    if resumed is not None:
        step, metrics = resumed["step"], resumed["metrics"]
        with saved.restoring(args.save):
            model.load_state_dict(resumed["content"]["model"])
            optimizer.load_state_dict(resumed["content"]["optimizer"])
        print(f"resuming at step {step} of {args.train_iters}")
    before, gradients = (metrics[0]["valid_loss"] if metrics else judge(model, held_out, args, tokenizer.pad_token_id)), 0
    memory.reset_peak([args.device])
    while step < args.train_iters:
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=args.train_iters, warmup=args.lr_warmup_iters, peak=args.lr)
        chosen = [sequences[row] for row in drawn(step, args.global_batch_size, len(sequences), args.seed)]
        whole = packing.batch(chosen, args.seq_length, tokenizer.pad_token_id, args.device)
        answers, loss = int(whole["answer"].sum()), 0.0
        for at in range(0, args.global_batch_size, args.micro_batch_size):
            part = loss_of(model, {name: values[at : at + args.micro_batch_size] for name, values in whole.items()}) / answers
            part.backward()
            loss += part.item()
        if not math.isfinite(loss):
            raise RunStopped(f"the loss of step {step + 1} is {loss}: give a lower --lr; the same command resumes from the last checkpoint")
        gradients = gradients or memory.stored(model).gradients
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        metrics.append({"step": step, "loss": loss, "grad_norm": float(optimizer.grad_norm), "valid_loss": None})
        metrics[-1] |= {"tokens": sum(len(example.tokens) for row in chosen for example in row), "seconds": time.perf_counter() - began}
        metrics[0]["valid_loss"] = before
        if step % args.log_interval == 0 or step == args.train_iters:
            print(f"step {step:5}  loss {loss:.4f}  grad norm {metrics[-1]['grad_norm']:.3f}", flush=True)
        if step == args.train_iters and held_out:
            metrics[-1]["valid_loss"] = judge(model, held_out, args, tokenizer.pad_token_id)
        if saved.due(args, step):
            state = {"model": msamp.exact_state_dict(model), "optimizer": optimizer.state_dict()}
            saved.save(args.save, step, state, settings, metrics)
    done = saved.finish(args, model, tokenizer, metrics, optimizer)
    report(args, model, replace(memory.stored(model, optimizer), gradients=gradients), metrics)
    print(done)


def report(args: argparse.Namespace, model: Any, held: memory.Stored, metrics: list[dict[str, Any]]) -> None:
    """Print the run's memory, speed and loss, and append them to --rows."""
    timed = metrics[min(3, len(metrics) - 1) :]  # the first steps warm up
    speed = sum(row["tokens"] for row in timed) / sum(row["seconds"] for row in timed)
    peak, parameters = memory.peak(args.device), held.parameters
    row = {
        "model": args.load.name, "parameters": parameters, "recipe": args.opt_level, "dtype": args.dtype, "lora_rank": args.lora_rank,
        "seq_length": args.seq_length, "global_batch_size": args.global_batch_size, "steps": len(metrics), "seed": args.seed,
        "loss_first": f"{metrics[0]['loss']:.4f}", "loss_last": f"{metrics[-1]['loss']:.4f}",
        "valid_loss_before": metrics[0]["valid_loss"], "valid_loss_after": metrics[-1]["valid_loss"], "tokens_per_s": f"{speed:.1f}",
        "weight_bytes": f"{held.weights / parameters:.3f}", "gradient_bytes": f"{held.gradients / parameters:.3f}",
        "master_bytes": f"{held.masters / parameters:.3f}", "moment_bytes": f"{held.moments / parameters:.3f}",
        "peak_bytes": "" if peak is None else f"{peak / parameters:.3f}",
    }  # fmt: skip
    print("bytes per parameter: " + ", ".join(f"{name.removesuffix('_bytes')} {row[name]}" for name in row if name.endswith("_bytes")))
    print(f"{speed:.0f} tokens/s; loss {row['loss_first']} -> {row['loss_last']}")
    if args.rows is not None:
        rows.append(args.rows, [rows.machine(args.commit) | row])


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    train(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

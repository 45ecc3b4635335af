"""PPO at O0 to O3 on a model's own answers: python examples/rlhf/ppo.py --load MODEL --reward arithmetic --save FOLDER

Four models: the policy and the value model are trained; the reference and the reward model, if used, are frozen, at FP8 levels with one
byte per weight. The reward comes from a task that a program judges (--reward), or from a reward model for prompts of a file (--reward-model
and --data). The current policy samples the answers with a KV cache. The divergence from the reference is subtracted from the reward of each
token. The same command resumes an interrupted run; FOLDER/model is the policy.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import msamp
from examples.post_training import Run, Trained, mib
from megatron.lm.post import chat, conversations, flags, memory, models, saved
from megatron.lm.post.losses import masked_mean, policy_loss, value_loss
from megatron.lm.post.ppo import gae, rollout
from megatron.lm.post.ppo.rewards import TASKS
from megatron.lm.post.schedule import drawn, generator
from megatron.lm.shell import arguments, exit_codes

# step -> prompts of the step, and the function that computes rewards [b] of its rollout
Prompts = Callable[[int], tuple[list[list[int]], Callable[[rollout.Rollout], torch.Tensor]]]
RANGES = {"temperature": (1e-3, 100), "gamma": (0, 1), "lam": (0, 1), "clip_range": (1e-6, 1), "clip_range_value": (1e-6, 1e6)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__)
    flags.common(parser, lr=1e-6, train_iters=100)
    add = parser.add_argument
    add("--reward", choices=TASKS, help="task that a program judges; the seed draws its questions")
    add("--reward-model", type=arguments.path, help="folder of a model for sequence classification with one label")
    add("--data", type=arguments.path, help="prompts for the reward model, JSON or JSON lines of conversations")
    add(
        "--value-load",
        type=arguments.path,
        help="model from which the value model takes its layers (default: --reward-model, or --load)",
    )
    add("--value-lr", type=float, help="learning rate of the value model (default: --lr)")
    add("--seq-length", type=arguments.count(8), default=512, help="maximum tokens of a prompt and its answer (default: %(default)s)")
    add("--max-new-tokens", type=arguments.count(1), default=32, help="maximum tokens of an answer (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: %(default)s)")
    add("--global-batch-size", type=arguments.count(1), default=64, help="answers per step (default: %(default)s)")
    add("--mini-batch-size", type=arguments.count(1), default=32, help="answers per update (default: %(default)s)")
    add("--ppo-epochs", type=arguments.count(1), default=2, help="passes over the answers of a step (default: %(default)s)")
    add("--kl-coef", type=float, default=0.05, help="penalty per nat of divergence (default: %(default)s)")
    add("--kl-target", type=float, help="target divergence per answer in nats, to which the penalty adapts (default: fixed penalty)")
    add("--kl-horizon", type=arguments.count(1), default=10_000, help="answers over which the penalty adapts (default: %(default)s)")
    add("--gamma", type=float, default=1.0, help="discount of rewards (default: %(default)s)")
    add("--lam", type=float, default=0.95, help="lambda of generalized advantage estimation (default: %(default)s)")
    add("--clip-range", type=float, default=0.2, help="clip range of the probability ratio (default: %(default)s)")
    add("--clip-range-value", type=float, default=0.2, help="clip range of values (default: %(default)s)")
    args = parser.parse_args(argv)
    if (args.reward is None) == (args.reward_model is None):
        parser.error("give either --reward or --reward-model")
    if (args.reward_model is None) != (args.data is None):
        parser.error("--reward-model and --data require each other: --data contains the prompts that the reward model judges")
    flags.check_multiple(parser, args, "mini_batch_size")
    for name, (low, high) in RANGES.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is out of range: give {low:g} to {high:g}")
    args.value_load, args.value_lr = args.value_load or args.reward_model or args.load, args.lr if args.value_lr is None else args.value_lr
    args.device = flags.device(parser)
    return args


def check_lengths(prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> None:
    """Raise a ValueError if a prompt leaves no room for its answer."""
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    size = len(prompts[longest]) + args.max_new_tokens
    if size > args.seq_length:
        raise ValueError(
            f"prompt {longest + 1} has {len(prompts[longest])} tokens, and with --max-new-tokens {args.max_new_tokens} more than "
            f"--seq-length {args.seq_length}: give --seq-length {size} or more, or a shorter prompt"
        )


def judged_by_program(args: argparse.Namespace, tokenizer: Any) -> Prompts:
    """Return the prompts of the task, whose program judges the text of each answer."""

    def prompts(step: int) -> tuple[list[list[int]], Callable[[rollout.Rollout], torch.Tensor]]:
        task = TASKS[args.reward]
        questions = task.questions(args.global_batch_size, generator(args.seed, step))
        encoded = [chat.encode_prompt(tokenizer, question.messages) for question in questions]
        check_lengths(encoded, args)

        def rewards(done: rollout.Rollout) -> torch.Tensor:
            texts = tokenizer.batch_decode([row[inside].tolist() for row, inside in zip(done.answers, done.answer, strict=True)],
                                           skip_special_tokens=True)  # fmt: skip
            return torch.tensor([task.judge(text, question.expected) for text, question in zip(texts, questions, strict=True)])

        return encoded, rewards

    return prompts


def judged_by_model(args: argparse.Namespace, tokenizer: Any, judge: Any) -> Prompts:
    """Return the prompts of the file, whose answers the reward model scores."""
    encoded = []
    for number, row in enumerate(conversations.rows(args.data), 1):
        asked = conversations.prompt(row, f"row {number} of {args.data}")
        encoded.append(chat.encode_prompt(tokenizer, asked))
    check_lengths(encoded, args)

    def prompts(step: int) -> tuple[list[list[int]], Callable[[rollout.Rollout], torch.Tensor]]:
        chosen = drawn(step, args.global_batch_size, len(encoded), args.seed)
        return [encoded[row] for row in chosen], lambda done: rollout.scores(judge, done)

    return prompts


def update(policy: Trained, value: Trained, reference: Any, done: rollout.Rollout, rewards: torch.Tensor, control: gae.KLControl, step: int
           ) -> dict[str, float]:  # fmt: skip
    """Do one step of PPO on sampled answers and their rewards [b]; return its statistics."""
    args, mask = policy.args, done.answer
    with torch.no_grad():
        before = rollout.log_probs(policy.model, done, args.temperature)
        divergence = torch.where(mask, before - rollout.log_probs(reference, done, args.temperature), 0)
        expected = rollout.values(value.model, done)
        penalized = -control.coefficient * divergence
        penalized[torch.arange(len(penalized), device=penalized.device), mask.sum(-1) - 1] += rewards.to(
            penalized
        )  # at the last token of each answer
        gains, returns = gae.advantages(penalized, expected, mask, args.gamma, args.lam)
        gains = gae.whitened(gains, mask)
    draw, sums = generator(args.seed, step), dict.fromkeys(("policy_loss", "value_loss", "clipped"), 0.0)
    updates = args.ppo_epochs * args.global_batch_size // args.mini_batch_size
    for _ in range(args.ppo_epochs):
        for chosen in torch.randperm(len(mask), generator=draw).to(mask.device).split(args.mini_batch_size):
            part = done.rows(chosen)
            now = rollout.log_probs(policy.model, part, args.temperature)
            loss, clipped = policy_loss(now, before[chosen], gains[chosen], part.answer, args.clip_range)
            loss.backward()
            policy.update()
            sums["policy_loss"] += loss.item() / updates
            sums["clipped"] += clipped.item() / updates
            guess = rollout.values(value.model, part)
            error = value_loss(guess, expected[chosen], returns[chosen], part.answer, args.clip_range_value)
            error.backward()
            value.update()
            sums["value_loss"] += error.item() / updates
    mean = divergence.sum(-1).mean().item()
    sums |= {"reward": rewards.mean().item(), "kl": mean, "kl_coef": control.coefficient, "tokens": mask.sum(-1).float().mean().item(),
             "log_prob": masked_mean(before, mask).item()}  # fmt: skip
    control.update(mean, len(mask))
    return sums


def train(args: argparse.Namespace) -> None:
    recipe, dtype = msamp.recipes.by_name(args.opt_level), models.DTYPES[args.dtype]
    control = gae.KLControl(args.kl_coef, args.kl_target, args.kl_horizon)
    tokenizer = models.load_tokenizer(args.load)
    chat.use_template(tokenizer, args.chat_template)
    judge = None
    if args.reward_model is not None:
        judge = models.freeze(models.reward_model(args.reward_model, dtype, args.device, tokenizer), recipe)
    ask = judged_by_program(args, tokenizer) if judge is None else judged_by_model(args, tokenizer, judge)
    ask(0)
    run = Run(args)

    torch.manual_seed(args.seed)  # seed of the value model's head
    actor, reference = (models.load_model(args.load, "AutoModelForCausalLM", dtype, args.device) for _ in range(2))
    models.check_vocabulary(actor, tokenizer)
    models.check_positions(actor, args.seq_length, "--seq-length")
    reference = models.freeze(reference, recipe)
    value = Trained(models.scalar_model(args.value_load, dtype, args.device), recipe, args.value_lr, args)
    models.check_vocabulary(value.model, tokenizer)
    policy = Trained(actor, recipe, args.lr, args)

    def load(content: Mapping[str, Any]) -> None:
        policy.load(content["policy"])
        value.load(content["value"])
        control.coefficient = float(content["kl_coef"])

    def state() -> dict[str, Any]:
        return {"policy": policy.state(), "value": value.state(), "kl_coef": control.coefficient}

    def step(number: int) -> dict[str, float]:
        began = time.perf_counter()
        policy.rate(number)
        value.rate(number)
        prompts, rewards = ask(number)
        done = rollout.generate(policy.model, prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
                                eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id, seed=args.seed * 1_000_003 + number)  # fmt: skip
        seconds = time.perf_counter() - began
        return update(policy, value, reference, done, rewards(done), control, number) | {"rollout_seconds": seconds}

    run.resume(load)
    run.train(step, state, "reward {reward:.3f}  kl {kl:.3f}  value loss {value_loss:.4f}")
    done = saved.finish(args, policy.model, tokenizer, run.metrics, policy.optimizer)
    held = {"policy": policy.stored(), "value": value.stored(), "reference": memory.stored(reference)}
    report(args, held | ({} if judge is None else {"reward_model": memory.stored(judge)}), run)
    print(done)


def report(args: argparse.Namespace, held: dict[str, memory.Stored], run: Run) -> None:
    """Print weights and states of all models (FP8-LM, Table 4), and append them with reward and speed to --rows."""
    metrics, timed, whole = run.metrics, run.timed(), sum(held.values(), memory.Stored())
    few = min(10, len(metrics))
    seconds, rollouts = (sum(row[name] for row in timed) for name in ("seconds", "rollout_seconds"))
    tokens = sum(row["tokens"] for row in timed) * args.global_batch_size
    row = {
        "model": args.load.name, "parameters": whole.parameters, "models": len(held), "recipe": args.opt_level, "dtype": args.dtype,
        "reward": args.reward or args.reward_model.name, "global_batch_size": args.global_batch_size, "steps": len(metrics),
        "seed": args.seed, "reward_first": f"{sum(row['reward'] for row in metrics[:few]) / few:.4f}",
        "reward_last": f"{sum(row['reward'] for row in metrics[-few:]) / few:.4f}", "kl_last": f"{metrics[-1]['kl']:.4f}",
        "s_per_step": f"{seconds / len(timed):.4f}", "rollout_tokens_per_s": f"{tokens / rollouts:.1f}",
        "weight_mib": mib(whole.weights), "state_mib": mib(whole.states), "gradient_mib": mib(whole.gradients),
        "peak_mib": mib(memory.peak(args.device)),
    }  # fmt: skip
    for name, of_model in (held | {"all": whole}).items():
        weights, states, gradients = map(mib, (of_model.weights, of_model.states, of_model.gradients))
        print(f"{name:12} weights {weights:>9} MiB, states {states:>9}, gradients {gradients:>9}")
    run.record(row)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    train(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

"""PPO at O0 to O3 on a model's own answers: python examples/rlhf/ppo.py --load MODEL --reward arithmetic --save FOLDER

Four models: the policy and the value model are trained; the reference and the reward model, if used, are frozen, at FP8 levels with one
byte per weight. The reward comes from a task that a program judges (--reward), or from a reward model for prompts of a file (--reward-model
and --data). The current policy samples the answers with a KV cache. The divergence from the reference is subtracted from the reward of each
token. The same command resumes an interrupted run; FOLDER/model is the policy.
"""

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import msamp
from megatron.lm.errors import RunStopped
from megatron.lm.post import chat, conversations, flags, memory, models, saved
from megatron.lm.post.losses import masked_mean, policy_loss, value_loss
from megatron.lm.post.ppo import gae, rollout
from megatron.lm.post.ppo.rewards import TASKS
from megatron.lm.post.schedule import drawn, generator, learning_rate
from megatron.lm.shell import arguments, exit_codes
from tools.bench import rows

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


class Trained:
    """A model that PPO trains with `msamp.initialize`, and its learning rate."""

    def __init__(self, model: Any, recipe: msamp.recipes.Recipe, peak: float, args: argparse.Namespace) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=args.weight_decay)
        self.model, self.optimizer = msamp.initialize(model, optimizer, recipe, clip_grad=args.clip_grad or None, **flags.roundings(args))
        self.model.train()
        self.peak, self.args, self.gradients = peak, args, 0

    def rate(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=self.args.train_iters, warmup=self.args.lr_warmup_iters, peak=self.peak)

    def step(self, loss: torch.Tensor) -> float:
        loss.backward()
        self.gradients = self.gradients or memory.stored(self.model).gradients
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {"model": msamp.exact_state_dict(self.model), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def stored(self) -> memory.Stored:
        return replace(memory.stored(self.model, self.optimizer), gradients=self.gradients)


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
            sums["policy_loss"] += policy.step(loss) / updates
            sums["clipped"] += clipped.item() / updates
            guess = rollout.values(value.model, part)
            error = value_loss(guess, expected[chosen], returns[chosen], part.answer, args.clip_range_value)
            sums["value_loss"] += value.step(error) / updates
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
    digest = hashlib.sha256(args.data.read_bytes()).hexdigest() if args.data else None
    settings = flags.settings(args, data=digest)
    resumed = saved.load(args.save, settings, args.device)

    torch.manual_seed(args.seed)  # seed of the value model's head
    policy, reference = (models.load_model(args.load, "AutoModelForCausalLM", dtype, args.device) for _ in range(2))
    models.check_vocabulary(policy, tokenizer)
    models.check_positions(policy, args.seq_length, "--seq-length")
    reference = models.freeze(reference, recipe)
    value = Trained(models.scalar_model(args.value_load, dtype, args.device), recipe, args.value_lr, args)
    models.check_vocabulary(value.model, tokenizer)
    policy = Trained(policy, recipe, args.lr, args)

    step, metrics = 0, []
    if resumed is not None:
        step, metrics = resumed["step"], resumed["metrics"]
        with saved.restoring(args.save):
            policy.load(resumed["content"]["policy"])
            value.load(resumed["content"]["value"])
            control.coefficient = float(resumed["content"]["kl_coef"])
        print(f"resuming at step {step} of {args.train_iters}")
    memory.reset_peak([args.device])
    while step < args.train_iters:
        began = time.perf_counter()
        policy.rate(step)
        value.rate(step)
        prompts, rewards = ask(step)
        done = rollout.generate(policy.model, prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
                                eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id, seed=args.seed * 1_000_003 + step)  # fmt: skip
        sampled = time.perf_counter()
        row = update(policy, value, reference, done, rewards(done), control, step)
        if not all(map(math.isfinite, row.values())):
            raise RunStopped(f"step {step + 1} gave {row}: give a lower --lr; the same command resumes from the last checkpoint")
        step += 1
        metrics.append({"step": step} | row | {"rollout_seconds": sampled - began, "seconds": time.perf_counter() - began})
        if step % args.log_interval == 0 or step == args.train_iters:
            print(f"step {step:5}  reward {row['reward']:.3f}  kl {row['kl']:.3f}  value loss {row['value_loss']:.4f}", flush=True)
        if saved.due(args, step):
            state = {"policy": policy.state(), "value": value.state(), "kl_coef": control.coefficient}
            saved.save(args.save, step, state, settings, metrics)
    done = saved.finish(args, policy.model, tokenizer, metrics, policy.optimizer)
    held = {"policy": policy.stored(), "value": value.stored(), "reference": memory.stored(reference)}
    report(args, held | ({} if judge is None else {"reward_model": memory.stored(judge)}), metrics)
    print(done)


def report(args: argparse.Namespace, held: dict[str, memory.Stored], metrics: list[dict[str, Any]]) -> None:
    """Print weights and states of all models (FP8-LM, Table 4), and append them with reward and speed to --rows."""
    few = min(10, len(metrics))
    whole = sum(held.values(), memory.Stored())
    timed = metrics[min(3, len(metrics) - 1) :]  # the first steps warm up
    seconds, rollouts = (sum(row[name] for row in timed) for name in ("seconds", "rollout_seconds"))
    tokens = sum(row["tokens"] for row in timed) * args.global_batch_size
    row = {
        "model": args.load.name, "parameters": whole.parameters, "models": len(held), "recipe": args.opt_level, "dtype": args.dtype,
        "reward": args.reward or args.reward_model.name, "global_batch_size": args.global_batch_size, "steps": len(metrics),
        "seed": args.seed, "reward_first": f"{sum(row['reward'] for row in metrics[:few]) / few:.4f}",
        "reward_last": f"{sum(row['reward'] for row in metrics[-few:]) / few:.4f}", "kl_last": f"{metrics[-1]['kl']:.4f}",
        "s_per_step": f"{seconds / len(timed):.4f}", "rollout_tokens_per_s": f"{tokens / rollouts:.1f}",
        "weight_mib": f"{whole.weights / 2**20:.3f}", "state_mib": f"{whole.states / 2**20:.3f}",
        "gradient_mib": f"{whole.gradients / 2**20:.3f}",
        "peak_mib": "" if (peak := memory.peak(args.device)) is None else f"{peak / 2**20:.3f}",
    }  # fmt: skip
    for name, of_model in (held | {"all": whole}).items():
        weights, states, gradients = (size / 2**20 for size in (of_model.weights, of_model.states, of_model.gradients))
        print(f"{name:12} weights {weights:9.3f} MiB, states {states:9.3f}, gradients {gradients:9.3f}")
    if args.rows is not None:
        rows.append(args.rows, [rows.machine(args.commit) | row])


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    train(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

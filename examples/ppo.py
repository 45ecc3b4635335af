"""PPO at O0 to O3 on a model's own answers, judged by a program: python examples/ppo.py --load MODEL --reward digits --opt-level O3

The policy and a value model (the same with a head of one output) are trained; the reference is frozen, in one byte per linear weight at O1
to O3. transformers samples at temperature 1, in the tokenizer's chat template. A token's reward is minus --kl-coef times its divergence
from the reference; an answer's last token also gets the judge's, 0 to 1. No reward model, no resuming; gamma, lambda, clip ranges: fixed.
"""

import argparse
import math
import re
import sys
import time

import torch
from torch import Tensor, nn

import msamp
from megatron.lm.errors import RunStopped
from megatron.lm.post import models
from megatron.lm.shell import arguments, exit_codes
from tools.bench import rows
from tools.reproduce.rlhf_memory import Stored, stored

GAMMA, LAM, CLIP = 1.0, 0.95, 0.2  # discount of rewards, lambda of advantages, clip range of ratios and of values
QUESTIONS = {"digits": "{a}+{b}", "arithmetic": "What is {a} + {b}? Answer with the number alone."}
FLAGS = {  # default, lowest, highest, meaning
    "train-iters": (100, 1, 10**6, "steps"), "global-batch-size": (64, 1, 10**6, "answers of a step"),
    "mini-batch-size": (32, 1, 10**6, "most answers of an update"), "ppo-epochs": (2, 1, 1000, "passes over the answers of a step"),
    "max-new-tokens": (32, 1, 10**6, "most tokens of an answer"), "seed": (1234, 0, 2**31, "of questions, samples and roundings"),
    "lr": (1e-6, 0, 1, "peak learning rate, followed by a cosine to 0"), "kl-coef": (0.05, 0, 1e6, "penalty per nat of divergence"),
}  # fmt: skip
COLUMNS = ("model", "parameters", "models", "recipe", "dtype", "reward", "global_batch_size", "steps", "seed", "reward_first",
    "reward_last", "kl_last", "s_per_step", "rollout_tokens_per_s", "weight_mib", "state_mib", "gradient_mib", "peak_mib")  # fmt: skip


def judge(reward: str, answer: str, total: str) -> float:
    """Return the share of digits; for `arithmetic` 1 for the sum alone, 1/2 if it is the last number of a text, 1/10 for another number."""
    if reward == "digits":
        return sum(letter in "0123456789" for letter in answer) / max(1, len(answer))
    numbers = re.findall(r"\d+", answer)
    return 1.0 if answer.strip().rstrip(".") == total else 0.0 if not numbers else 0.5 if numbers[-1] == total else 0.1


def advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return A_t = sum over k of (gamma lam)^k d_{t+k}, d_t = r_t + gamma V_{t+1} - V_t [Schulman et al. 2016, equation 16], and A + V; all
    FP32 [b, n], 0 outside of `mask`, the tokens of answers."""
    values = torch.where(mask, values, 0)
    deltas = torch.where(mask, rewards + gamma * nn.functional.pad(values[:, 1:], (0, 1)) - values, 0)
    place = torch.arange(values.shape[1], device=values.device)
    gains = deltas @ ((gamma * lam) ** (place[:, None] - place).clamp(min=0)).tril()
    return gains, gains + values


def policy_loss(now: Tensor, before: Tensor, gains: Tensor, mask: Tensor) -> Tensor:
    """Return PPO's clipped loss [Schulman et al. 2017, equation 7] of log probabilities now and at sampling; all [b, n]."""
    ratio = torch.exp(torch.where(mask, now - before, 0))  # padding could overflow
    return torch.maximum(-gains * ratio, -gains * ratio.clamp(1 - CLIP, 1 + CLIP))[mask].mean()


def value_loss(now: Tensor, before: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return half the squared error of values, clipped to within CLIP of those at sampling; all [b, n]."""
    clipped = before + (now - before).clamp(-CLIP, CLIP)
    return 0.5 * torch.maximum((now - returns).square(), (clipped - returns).square())[mask].mean()


class PPO:
    """The models of a run, by name, in evaluation mode, since dropout would change the ratios of probabilities."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.words, dtype = args, models.load_tokenizer(args.load), models.DTYPES[args.dtype]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy, value, reference = (models.load_model(args.load, "AutoModelForCausalLM", dtype, device) for _ in range(3))
        self.models = {"policy": policy, "value": value, "reference": reference}  # from_pretrained leaves them in evaluation mode
        models.check_vocabulary(policy, self.words)
        value.set_output_embeddings(nn.Linear(value.config.hidden_size, 1, bias=False).to(device, dtype))
        nn.init.zeros_(value.get_output_embeddings().weight)
        # In place of the folder's own, which may sample from another distribution than the log probabilities are of.
        draw = {"do_sample": True, "top_k": 0, "eos_token_id": self.words.eos_token_id, "pad_token_id": self.words.pad_token_id}
        policy.generation_config = models.need("transformers").GenerationConfig(max_new_tokens=args.max_new_tokens, **draw)
        self.optimizers, self.held = {}, {"reference": stored(models.freeze(reference, msamp.recipes.by_name(args.opt_level)))}
        for name, model in (("policy", policy), ("value", value)):  # all layers in FP8: rewards are compared, not times
            adam = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
            _, self.optimizers[name] = msamp.initialize(model, adam, args.opt_level, clip_grad=1.0, fp8_min_gain=0, seed=args.seed)

    def outputs(self, name: str, inputs: dict[str, Tensor], count: int) -> Tensor:
        """Return a model's outputs before each of the last `count` tokens, FP32 [b, count, vocabulary or 1]."""
        return self.models[name](**inputs, use_cache=False, logits_to_keep=count + 1).logits[:, :-1].float()

    def log_probs(self, name: str, inputs: dict[str, Tensor], count: int) -> Tensor:
        """Return the log probability of each of the last `count` tokens, FP32 [b, count]."""
        logits, tokens = self.outputs(name, inputs, count), inputs["input_ids"][:, -count:]
        return -nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)

    def sample(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return left-padded prompts with right-padded answers as models' inputs [b, p + n], the answers' mask [b, n], and rewards [b]."""
        args, words, policy = self.args, self.words, self.models["policy"]
        pairs = torch.randint(100, (args.global_batch_size, 2)).tolist()
        chats = [[{"role": "user", "content": QUESTIONS[args.reward].format(a=a, b=b)}] for a, b in pairs]
        prompts = words.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt")
        asked, attended = (prompts[name].to(policy.device) for name in ("input_ids", "attention_mask"))
        models.check_positions(policy, asked.shape[1] + args.max_new_tokens, "a prompt plus --max-new-tokens")
        answers = policy.generate(input_ids=asked, attention_mask=attended)[:, asked.shape[1] :]
        mask = (ends := (answers == words.eos_token_id).long()).cumsum(-1) == ends  # up to the first end of text
        decoded = words.batch_decode([row[inside].tolist() for row, inside in zip(answers, mask, strict=True)], skip_special_tokens=True)
        rewards = [judge(args.reward, text, str(a + b)) for text, (a, b) in zip(decoded, pairs, strict=True)]
        tokens, attended = torch.cat([asked, torch.where(mask, answers, words.pad_token_id)], 1), torch.cat([attended, mask.long()], 1)
        inputs = {"input_ids": tokens, "attention_mask": attended, "position_ids": (attended.cumsum(-1) - 1).clamp(min=0)}
        return inputs, mask, torch.tensor(rewards, device=mask.device)

    def step(self, number: int) -> dict[str, float]:
        """Do a step, counted from 0, and return its measurements."""
        args, began = self.args, time.perf_counter()
        torch.manual_seed(args.seed * 1_000_003 + number)
        for name, peak in (("policy", args.lr), ("value", args.value_lr)):
            for group in self.optimizers[name].param_groups:
                group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * number / max(1, args.train_iters - 1)))
        inputs, mask, rewards = self.sample()
        sampled, losses, (size, count) = time.perf_counter() - began, {"policy": [], "value": []}, mask.shape
        with torch.no_grad():
            before, expected = self.log_probs("policy", inputs, count), self.outputs("value", inputs, count)[..., 0]
            divergence = torch.where(mask, before - self.log_probs("reference", inputs, count), 0)
            penalized = -args.kl_coef * divergence
            penalized[torch.arange(size, device=mask.device), mask.sum(-1) - 1] += rewards
            gains, returns = advantages(penalized, expected, mask, GAMMA, LAM)
            gains = (gains - gains[mask].mean()) * torch.rsqrt(gains[mask].var(correction=0) + 1e-8)
        for chosen in (part for _ in range(args.ppo_epochs) for part in torch.randperm(size).to(mask.device).split(args.mini_batch_size)):
            part, inside = {name: x[chosen] for name, x in inputs.items()}, mask[chosen]
            for name, optimizer in self.optimizers.items():
                if name == "policy":
                    loss = policy_loss(self.log_probs(name, part, count), before[chosen], gains[chosen], inside)
                else:
                    loss = value_loss(self.outputs(name, part, count)[..., 0], expected[chosen], returns[chosen], inside)
                loss.backward()
                optimizer.step()
                self.held[name] = stored(self.models[name], optimizer) if number == 0 else self.held[name]  # stays the same
                optimizer.zero_grad()
                losses[name].append(loss.item())
        if not math.isfinite(sum(map(sum, losses.values()))):
            raise RunStopped(f"a loss of step {number + 1} is not finite ({losses}): give a lower --lr or --value-lr")
        return {"reward": rewards.mean().item(), "kl": divergence.sum(-1).mean().item(), "tokens": mask.sum().item(), "sampled": sampled,
                "value_loss": sum(losses["value"]) / len(losses["value"]), "seconds": time.perf_counter() - began}  # fmt: skip


@exit_codes.command
def main(argv: list[str] | None = None) -> None:
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--load", required=True, type=arguments.path, help="transformers folder")
    parser.add_argument("--reward", required=True, choices=QUESTIONS, help="the answer's share of digits, or the right sum")
    parser.add_argument("--opt-level", default="O2", choices=("O0", "O1", "O2", "O3"), help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=models.DTYPES, help="of the weights before the level (default: %(default)s)")
    parser.add_argument("--save", type=arguments.path, help="new folder for the trained policy, in FP32, which keeps small updates")
    parser.add_argument("--rows", type=arguments.output_file, help="append rewards, memory and speed to this CSV file")
    parser.add_argument("--commit", type=arguments.name, help="commit hash for --rows if the tree is not a git checkout")
    for flag, (default, _, _, meaning) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--value-lr", type=float, help="peak learning rate of the value model (default: --lr)")
    args = parser.parse_args(argv)
    args.value_lr = args.lr if args.value_lr is None else args.value_lr
    for flag, (_, low, high, _) in (FLAGS | {"value-lr": FLAGS["lr"]}).items():
        if not low <= (value := getattr(args, flag.replace("-", "_"))) <= high:
            parser.error(f"--{flag} {value} is out of range: give {low} to {high}")
    if torch.distributed.is_torchelastic_launched():
        parser.error("this loop supports one process: start it without torchrun")
    machine = rows.machine(args.commit)
    if args.rows is not None:
        rows.check(args.rows, [*machine, *COLUMNS])
    partial = args.save and args.save.parent / f"{args.save.name}.partial"  # renamed when whole
    for folder in filter(None, (args.save, partial)):
        try:
            folder.mkdir(parents=True)
            folder.rmdir()
        except OSError as error:
            parser.error(f"--save {folder} cannot be made ({error.strerror}): choose a new folder")
    ppo, measured = PPO(args), []
    for number in range(args.train_iters):
        measured.append(ppo.step(number))
        print("step {:5}  reward {reward:.4f}  kl {kl:.4f}  value loss {value_loss:.4f}".format(number + 1, **measured[-1]), flush=True)
    whole, peak = sum(ppo.held.values(), Stored()), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    sizes = {"weight": whole.weights, "state": whole.states, "gradient": whole.gradients, "peak": peak}  # the CPU's peak is not counted
    memory = {f"{kind}_mib": f"{size / 2**20:.3f}" if size else "" for kind, size in sizes.items()}
    print("all models: " + ", ".join(f"{name} {size or 'unknown'}" for name, size in memory.items()))
    few, timed = min(10, len(measured)), measured[min(3, len(measured) - 1) :]  # the first three steps warm up
    first, last = (f"{sum(each['reward'] for each in part) / few:.4f}" for part in (measured[:few], measured[-few:]))
    seconds, sampled, tokens = (sum(each[name] for each in timed) for name in ("seconds", "sampled", "tokens"))
    row = {"model": args.load.resolve().name, "parameters": whole.parameters, "models": len(ppo.held), "recipe": args.opt_level,
           "dtype": args.dtype, "reward": args.reward, "global_batch_size": args.global_batch_size, "steps": len(measured),
           "seed": args.seed, "reward_first": first, "reward_last": last, "kl_last": f"{measured[-1]['kl']:.4f}",
           "s_per_step": f"{seconds / len(timed):.4f}", "rollout_tokens_per_s": f"{tokens / sampled:.1f}"} | memory  # fmt: skip
    if partial is not None:
        exported = models.load_model(args.load, "AutoModelForCausalLM", torch.float32, "cpu")
        exported.load_state_dict(msamp.plain_state_dict(ppo.models["policy"], ppo.optimizers["policy"], torch.float32))
        exported.save_pretrained(partial)
        ppo.words.save_pretrained(partial)
        partial.rename(args.save)
    if args.rows is not None:
        rows.append(args.rows, [machine | row])


if __name__ == "__main__":
    sys.exit(main())

"""Continue a prompt with a trained model.

    python -m megatron.lm.tools.generate --load runs/quickstart/O2/checkpoint --prompt "The state of" --tokens 40 --temperature 0.8

--load is the folder the trainer was given as --save. Runs on one process; the whole context is computed anew for every token, which
serves to look at a model and not to serve it.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.lm import entry
from megatron.lm.tools import arguments

MOST_TOKENS = 10**6  # that are asked for at once
Logits = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]


@torch.no_grad()
def sample(
    model: Logits,
    tokens: torch.Tensor,
    n: int,
    *,
    seq_length: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Append `n` sampled tokens to each row of `tokens`.

    model: (tokens [b, s] int64, position_ids [b, s] int64, None) -> logits [b, s, vocabulary]; columns beyond `vocab_size` are padding
    and never drawn. tokens: [b, s] int64, s >= 1; the model sees its last `seq_length` columns. temperature: divides the logits;
    0 takes the likeliest token. top_k: draw among this many; 0 means all. generator: on the CPU, where tokens are drawn, so that a seed
    means the same on every device.

    Returns:
        [b, s + n] int64, on the device of `tokens`.

    Raises:
        ValueError: no token to start from, n, temperature or top_k out of range, or logits that are not finite.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens have shape {list(tokens.shape)}, wanted [batch, sequence] with at least one token: give a prompt")
    if not 0 <= n <= MOST_TOKENS or not 0 <= temperature < math.inf or top_k < 0:
        raise ValueError(
            f"tokens {n}, temperature {temperature} and top-k {top_k} must each be 0 or more, tokens at most {MOST_TOKENS}, and the "
            "temperature finite"
        )
    for _ in range(n):
        context = tokens[:, -seq_length:]
        positions = torch.arange(context.shape[1], device=tokens.device).expand_as(context)
        logits = model(context, positions, None)[:, -1, :vocab_size].float().cpu()
        if not logits.isfinite().all():
            raise ValueError("the model's logits are NaN or infinite: it has diverged, load an older checkpoint")
        tokens = torch.cat([tokens, _draw(logits, temperature, top_k, generator).to(tokens.device)], dim=1)
    return tokens


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """One token a row: logits [b, vocabulary] FP32 -> [b, 1] int64."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    values, indices = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    # From the likeliest down, and in FP64: so that no temperature above 0 divides to infinity less infinity.
    below = (values - values[:, :1]).double() / temperature
    chosen = torch.multinomial(torch.softmax(below, dim=-1).float(), 1, generator=generator)
    return indices.gather(-1, chosen)


def generate(load: Path, prompt: str, *, n: int, temperature: float, top_k: int, seed: int) -> str:
    """Load the checkpoint in the folder `load` and return the prompt with its continuation, up to the end of the document."""
    from megatron.lm.checkpoint import load_for_inference
    from megatron.lm.process_groups import shutdown

    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"--seed {seed} must lie between -2^63 and 2^64 - 1")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"--prompt is no UTF-8 text ({error.reason} at character {error.start}): give it in UTF-8") from None
    try:
        model, config, tokenizer = load_for_inference(load)
        device = next(model.parameters()).device
        start = tokenizer.tokenize(prompt) or [tokenizer.eod]  # a document begins after the end of another
        tokens = sample(
            model,
            torch.tensor([start], dtype=torch.int64, device=device),
            n,
            seq_length=config.model.seq_length,
            vocab_size=tokenizer.vocab_size,
            temperature=temperature,
            top_k=top_k,
            generator=torch.Generator().manual_seed(seed),
        )
    finally:
        shutdown()
    continuation = tokens[0, len(start) :].tolist()
    if tokenizer.eod in continuation:
        continuation = continuation[: continuation.index(tokenizer.eod)]
    return tokenizer.detokenize([token for token in start if token != tokenizer.eod] + continuation)


@entry.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; its exit codes are those of `megatron.lm.entry`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--load", required=True, type=arguments.path, help="folder of the trainer's checkpoints (its --save)")
    parser.add_argument("--prompt", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to append (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=40, help="draw among the likeliest k; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    args = parser.parse_args(argv)
    print(generate(args.load, args.prompt, n=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed))


if __name__ == "__main__":
    sys.exit(main())

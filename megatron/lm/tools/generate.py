"""Continue prompts with a trained model.

    python -m megatron.lm.tools.generate --load runs/quickstart/O2/checkpoint --prompt "The state of" --tokens 40 --temperature 0.8
    python -m megatron.lm.tools.generate --load checkpoints --prompt-file prompts.txt --batch-size 16 > continuations.jsonl

--load is the trainer's --save folder, from any grid; FP8 weights stay FP8. Keys and values are cached; prompts of different lengths are
batched, and the result is batch-invariant: each prompt has the same continuation as alone. One prompt prints text; several print a line of
JSON each: {"prompt", "continuation", "ended"}. Tokens/s are printed on stderr. Runs on one process.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.lm.evaluation.generation import MOST_TOKENS, Generated, Sampling, generate
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import read_text


def continuations(load: Path, prompts: Sequence[str], *, n: int, sampling: Sampling, batch_size: int) -> Iterator[tuple[str, str, bool]]:
    """Load the checkpoint in the folder `load`; yield each prompt, its continuation, and whether the document ended there.

    Prints the speed of each batch on stderr.

    Raises:
        ValueError: no checkpoint, a prompt that is not UTF-8, or longer than the model's sequence.
    """
    from megatron.lm.checkpoint import load_for_inference
    from megatron.lm.evaluation.decoding import Decoder
    from megatron.lm.processes.process_groups import shutdown

    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt is not UTF-8 text ({error.reason} at character {error.start}): give it in UTF-8") from None
    try:
        model, config, tokenizer = load_for_inference(load)
        if config.model.objective != "causal-lm":
            raise ValueError(f"{load} contains a model of --objective {config.model.objective}, which cannot continue text: load a GPT")
        seq_length = config.model.seq_length
        # A document begins after the end of another.
        starts = [tokenizer.tokenize(prompt) or [tokenizer.eod] for prompt in prompts]
        for i, start in enumerate(starts):
            if len(start) > seq_length:
                raise ValueError(f"prompt {i + 1} has {len(start)} tokens, but the model supports {seq_length}: shorten it")
        decoder = Decoder(model, seq_length)  # type: ignore[arg-type]
        for first in range(0, len(starts), batch_size):
            batch = starts[first : first + batch_size]
            own = Sampling(**{**vars(sampling), "seed": sampling.seed + first})
            generated: Generated = generate(
                decoder, batch, n, own, seq_length=seq_length, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod
            )
            print(generated.speed, file=sys.stderr, flush=True)
            for i, (start, tokens) in enumerate(zip(batch, generated.tokens, strict=True)):
                read = tokenizer.detokenize([token for token in start if token != tokenizer.eod])
                whole = tokenizer.detokenize([token for token in start if token != tokenizer.eod] + tokens)
                # Tokens that end in the middle of a character are read together with what follows.
                yield read, whole[len(read) :] if whole.startswith(read) else tokenizer.detokenize(tokens), generated.ended[i]
    finally:
        shutdown()


def _prompts(given: Sequence[str] | None, file: Path | None) -> list[str]:
    if file is None:
        return list(given or [""])
    if given:
        raise ValueError(f"--prompt and --prompt-file {file} contradict each other: give one of them")
    prompts = [line for line in read_text(file, "a file with one prompt per line").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompt-file {file} contains no prompt: write one per line")
    return prompts


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--load", required=True, type=arguments.path, help="folder of the trainer's checkpoints (its --save)")
    parser.add_argument("--prompt", action="append", help="text to continue; can be repeated (default: the beginning of a document)")
    parser.add_argument("--prompt-file", type=arguments.path, help="prompts, one per line, instead of --prompt")
    parser.add_argument(
        "--tokens", type=arguments.count(0, MOST_TOKENS), default=40, help="tokens to append to each prompt (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 picks the most likely token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="sample from the k most likely tokens; 0: all (default: 40, or all at temperature 0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens of this total probability (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first prompt's samples; incremented per prompt (default: %(default)s)")
    parser.add_argument("--batch-size", type=arguments.count(1, 65536), default=8, help="prompts per batch (default: %(default)s)")
    args = parser.parse_args(argv)
    top_k = args.top_k if args.top_k is not None else 40 * (args.temperature != 0)
    sampling = Sampling(temperature=args.temperature, top_k=top_k, top_p=args.top_p, seed=args.seed)
    prompts = _prompts(args.prompt, args.prompt_file)
    for prompt, continuation, ended in continuations(args.load, prompts, n=args.tokens, sampling=sampling, batch_size=args.batch_size):
        if len(prompts) == 1:
            print(prompt + continuation)
        else:
            print(json.dumps({"prompt": prompt, "continuation": continuation, "ended": ended}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())

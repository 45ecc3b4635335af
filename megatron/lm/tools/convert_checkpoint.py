"""Convert the trainer's checkpoints to and from Hugging Face folders, to plain safetensors and to FP8 for inference; list their contents.

    msamp convert to-hf --load checkpoints --output gpt-hf --dtype bfloat16
    msamp convert from-hf --load gpt-hf --output imported      # then train with --load imported --finetune
    msamp convert export-bf16 --load checkpoints --output plain
    msamp convert export-fp8 --load checkpoints --output gpt-fp8
    msamp convert to-megatron --load checkpoints --output for-megatron
    msamp convert inspect --load checkpoints

- to-hf writes a gpt2, gpt_neox (sequential residual), llama, qwen2, qwen3, or, with experts, a mixtral, qwen3_moe or olmoe of transformers,
  whichever can represent the model: weights from the best copy in the checkpoint (the master, if there is one), without the padding rows
  of the vocabulary, and the tokenizer's files.
- to-megatron writes a torch_dist checkpoint that plain megatron-core loads: BF16 weights, and FP32 masters and moments of AdamW. Models
  with experts are refused.
- from-hf reads safetensors and JSON, never pickled files, and writes only the weights.
- export-bf16 keeps our names and the padded vocabulary; the configuration is in the file's metadata.
- export-fp8 writes E4M3 linear weights, the rest BF16, in a layout that servers read: compressed-tensors with one scale per weight
  (--layout tensor) or per 128 x 128 block (block), or DeepSeek-V3's blocks (deepseek).

A non-empty output folder is refused; the output appears only when it is complete. Runs on a CPU, for a checkpoint of any grid.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.lm.config import TOKENIZERS, Config, DataConfig
from megatron.lm.config.cli import config_to_dict, to_argv
from megatron.lm.config.rules.data import SIZED
from megatron.lm.hugging_face.folder import Tensors, check_finite, read_json, write_json, write_tensors
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import new_folder
from megatron.lm.shell.progress import Progress
from megatron.lm.tools.convert import tokenizer_files
from megatron.lm.tools.convert.fp8_export import LAYOUTS, check_blocks, fp8_tensors, kept_in_bf16, quantization_config, routers
from megatron.lm.tools.convert.hugging_face import from_hf, hf_config, hf_rules, hf_tensors
from msamp.numerics.tensor import ScalingTensor

if TYPE_CHECKING:
    from megatron.lm.checkpoint.reader import CheckpointReader

_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def _saved(load: Path) -> "CheckpointReader":
    from megatron.lm.checkpoint.reader import CheckpointReader  # importing megatron-core takes seconds, which --help should not

    return CheckpointReader(load)


def _given_tokenizer(args: argparse.Namespace) -> dict[str, str]:
    given = {name: str(getattr(args, name)) for name in _TOKENIZER if getattr(args, name) is not None}
    if given and "tokenizer_type" not in given:
        raise ValueError(f"{', '.join(given)}: add --tokenizer-type, one of {', '.join(TOKENIZERS)}")
    return given


def _configured(saved: "CheckpointReader", args: argparse.Namespace) -> Config:
    """Return the checkpoint's configuration, with the tokenizer of the command line if it names one."""
    config = saved.config
    given = _given_tokenizer(args)
    if not given:
        return config
    model = replace(config.model, vocab_size=saved.info["vocab_size"] if given["tokenizer_type"] in SIZED else None)
    same = config.data.tokenizer_type == given["tokenizer_type"]  # whose other settings also apply to the files on the command line
    return replace(config, model=model, data=replace(config.data if same else DataConfig(), **given))  # type: ignore[arg-type]


def to_hf(args: argparse.Namespace) -> str:
    """Convert a checkpoint to a Hugging Face folder; export-fp8 keeps FP8 weights."""
    fp8 = args.command == "export-fp8"
    saved = _saved(args.load).separate_experts()
    config, vocab_size = _configured(saved, args), saved.info["vocab_size"]
    tokenizer = tokenizer_files.matching(config.data, config.model.vocab_size, vocab_size)
    dtype = torch.bfloat16 if fp8 else getattr(torch, args.dtype)
    about = hf_config(config.model, vocab_size, dtype, tokenizer.eod)
    rules = hf_rules(config.model, vocab_size, saved.names())
    in_bf16 = kept_in_bf16(rules, config.precision.layers_in_bf16(config.model.num_layers))
    if fp8:
        about["quantization_config"] = quantization_config(about["model_type"], [*in_bf16, *routers(rules)], args.layout)
        if args.layout != "tensor":
            check_blocks(rules, in_bf16)
    tensors = fp8_tensors(rules, saved.values, saved.weight, in_bf16, args.layout) if fp8 else hf_tensors(rules, saved.values, dtype)
    with new_folder(args.output) as folder:
        total = sum(len(rule.theirs) for rule in rules)
        size = write_tensors(folder, args.progress.counted(tensors, total, "tensors"))
        write_json(folder / "config.json", about)
        tokenizer_files.write(config.data, config.model.max_positions, tokenizer, folder)
    return f"{args.output}: {about['model_type']}, iteration {saved.info['iteration']}, {size:,} bytes"


def to_megatron(args: argparse.Namespace) -> str:
    """Convert a checkpoint to Megatron-LM's format torch_dist."""
    from megatron.lm.checkpoint.writers import write_megatron

    saved = _saved(args.load)
    with new_folder(args.output) as folder:
        written = write_megatron(saved, folder, states=not args.no_optim).name
        held = "weights and optimizer states" if args.no_optim is False and saved.step(saved.names()[0]) is not None else "weights"
    return (
        f"{args.output}: {held} as {written}; load it in Megatron-LM with --use-distributed-optimizer "
        "--dist-ckpt-optim-fully-reshardable, or with --no-load-optim"
    )


def export_bf16(args: argparse.Namespace) -> str:
    """Convert a checkpoint to BF16 safetensors under our names."""
    saved = _saved(args.load)
    metadata = {key: json.dumps(saved.info[key]) for key in ("version", "config", "vocab_size", "iteration")}

    def in_bf16() -> Iterator[tuple[str, Tensor]]:
        for name in saved.names():
            rounded = saved.values(name).bfloat16()
            check_finite(name, rounded)
            yield name, rounded

    with new_folder(args.output) as folder:
        size = write_tensors(folder, args.progress.counted(in_bf16(), len(saved.names()), "tensors"), metadata)
    return f"{args.output}: iteration {saved.info['iteration']}, {size:,} bytes"


def import_hf(args: argparse.Namespace) -> str:
    """Convert a Hugging Face folder to a checkpoint with only weights; the message lists the flags for the trainer."""
    from megatron.lm.checkpoint.content import description
    from megatron.lm.checkpoint.writers import write_weights

    about, tensors = read_json(args.load / "config.json"), Tensors(args.load)
    given = _given_tokenizer(args)
    data = DataConfig(**given) if given else tokenizer_files.settings_in(args.load)  # type: ignore[arg-type]
    settings = {name: getattr(data, name) for name in _TOKENIZER}
    size = None if data.tokenizer_type == "NullTokenizer" else tokenizer_files.build_tokenizer(data).vocab_size
    with new_folder(args.output) as folder:
        config, vocab_size, weights = from_hf(about, tensors, settings, size, args.make_vocab_size_divisible_by)
        write_weights(folder, description(config_to_dict(config), vocab_size, processes=1), weights)
    argv = to_argv(config)
    for own in ("--lr", "--micro-batch-size", "--train-iters", "--precision"):  # the run's, not the model's
        at = argv.index(own)
        del argv[at : at + 2]
    return f"{args.output}: weights of a {about['model_type']}; train with --load {args.output} --finetune {shlex.join(argv)}"


def inspect(args: argparse.Namespace) -> str:
    """List what a checkpoint contains."""
    saved = _saved(args.load)
    config = saved.config
    shown = ("version", "torch", "iteration", "consumed_samples", "vocab_size")
    lines = [f"{saved.folder}: whole", *(f"{key}: {saved.info[key]}" for key in shown if key in saved.info)]
    grid = config.parallel.axes(saved.info["processes"])
    lines += [f"precision: {config.precision.name}", f"grid: {grid}", f"flags: {shlex.join(to_argv(config))}", ""]
    lines.append(f"{'tensor':<56}{'shape':<20}{'dtype':<16}{'bytes':>14}  scale_inv")
    elements, size = 0, 0
    for name in args.progress.counted(saved.names(), len(saved.names()), "tensors"):
        dtype, shape, scales = saved.format(name)
        weight = saved.weight(name) if scales else None
        scale = f"{weight.scale_inv.item():g}" if isinstance(weight, ScalingTensor) else f"{scales} scales" if scales else "-"
        lines.append(
            f"{name:<56}{' x '.join(map(str, shape)):<20}{str(dtype).removeprefix('torch.'):<16}{shape.numel() * dtype.itemsize:>14,}  "
            + scale
        )
        elements, size = elements + shape.numel(), size + shape.numel() * dtype.itemsize
    return "\n".join([*lines, "", f"{len(saved.names())} tensors, {elements:,} parameters, {size:,} bytes of weights"])


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def subcommand(name: str, work: Callable[[argparse.Namespace], str], source: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=(work.__doc__ or "").strip(), description=work.__doc__)
        added.set_defaults(work=work)
        added.add_argument("--load", required=True, type=arguments.path, help=source)
        if work is not inspect:
            added.add_argument("--output", required=True, type=arguments.path, help="folder to create; a non-empty one is refused")
        return added

    def tokenizer_flags(to: argparse.ArgumentParser, default: str) -> None:
        to.add_argument("--tokenizer-type", choices=TOKENIZERS, help=f"as in the trainer (default: {default})")
        to.add_argument("--tokenizer-model", type=arguments.path, help="tokenizer.json of HuggingFaceTokenizer")
        to.add_argument("--vocab-file", type=arguments.path, help="encoder.json of GPT2BPETokenizer")
        to.add_argument("--merge-file", type=arguments.path, help="vocab.bpe of GPT2BPETokenizer")

    null = "the checkpoint's; NullTokenizer writes no files"
    ours = "folder of the trainer's checkpoints (its --save), or of one iteration"
    to = subcommand("to-hf", to_hf, ours)
    to.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (default: %(default)s)")
    tokenizer_flags(to, null)
    fp8 = subcommand("export-fp8", to_hf, ours)
    fp8.add_argument("--layout", choices=LAYOUTS, default="tensor", help="of weights and scales (default: %(default)s)")
    tokenizer_flags(fp8, null)
    subcommand("export-bf16", export_bf16, ours)
    megatron = subcommand("to-megatron", to_megatron, ours)
    megatron.add_argument("--no-optim", action="store_true", help="leave out the optimizer's masters and moments")
    of = subcommand("from-hf", import_hf, "folder with config.json and safetensors")
    tokenizer_flags(of, "the folder's own, else NullTokenizer")
    divisible = "pad the vocabulary to a multiple of this x tensor-parallel size (default: %(default)s)"
    of.add_argument("--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help=divisible)
    subcommand("inspect", inspect, ours)
    return parser


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    args: Any = _parser().parse_args(argv)
    with Progress(f"{args.command} {args.load}") as args.progress:
        text = args.work(args)
    print(text)


if __name__ == "__main__":
    sys.exit(main())

"""Print how to generate text from a checkpoint: export it to Hugging Face, and use transformers. `evaluate tasks` does so for lm-eval.

python -m megatron.lm.tools.generate --load runs/quickstart/O2/checkpoint
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.lm.shell import arguments, exit_codes

TRANSFORMERS = "then use transformers: pipeline('text-generation', model='{folder}')"
LM_EVAL = "then run lm_eval --model hf --model_args pretrained={folder} --include_path {tasks} --tasks ..."


def by_export(words: Sequence[str], then: str) -> ValueError:
    """Return the error that names the export of the checkpoint of `--load`, or why it has none.

    Args:
        words: the command line; other flags are ignored.
        then: what to do with the exported folder.
    """
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--load", nargs="+", type=arguments.path, default=[Path("CHECKPOINT")], help="folder of the trainer's checkpoints")
    load = parser.parse_known_args(words)[0].load[0]
    what = {"folder": f"{load}-hf", "tasks": str(Path(__file__).parents[1] / "evaluation" / "tasks")}
    if (load / "config.json").is_file():
        return ValueError(f"{load} is a Hugging Face folder, which this command no longer loads: {then.format(**what | {'folder': load})}")
    if load.exists():
        import torch

        from megatron.lm.checkpoint.reader import CheckpointReader
        from megatron.lm.tools.convert.hugging_face import hf_config

        try:
            saved = CheckpointReader(load)
            hf_config(saved.config, saved.info["vocab_size"], torch.bfloat16, eod=0)
        except ValueError as error:
            return ValueError(f"this command runs on an export to Hugging Face, and {load} has none: {error}")
    export = f"msamp convert to-hf --load {load} --output {load}-hf"
    return ValueError(f"this command runs on an export to Hugging Face: {export}; {then.format(**what)}")


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`.

    Raises:
        ValueError: always; its message names the export.
    """
    raise by_export(sys.argv[1:] if argv is None else argv, TRANSFORMERS)


if __name__ == "__main__":
    sys.exit(main())

"""`msamp NAME ARGUMENTS...` runs the module of that name, as `python -m MODULE ARGUMENTS...` does.

Modules are imported only when they are run, so that `msamp --help` and `msamp env` answer without torch.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megatron.lm.errors import missing, report
from megatron.lm.shell.exit_codes import REFUSED


class Command(NamedTuple):
    """A command: the module whose `main(arguments)` returns its exit code or None, and what it does, in one line."""

    module: str
    help: str


COMMANDS = {
    "pretrain": Command("megatron.lm.pretrain", "train a model, with Megatron-LM's flags"),
    "quickstart": Command("megatron.lm.command.quickstart", "train a small GPT in BF16 and at O2 and compare the two"),
    "torchrun": Command("megatron.lm.shell.torchrun", "start a command on several processes: torchrun with errors in one line"),
    "plan": Command("megatron.lm.tools.plan", "predict memory, bytes sent and time per step, grid by grid"),
    "prepare-text": Command("megatron.lm.tools.prepare_text", "prepare a public text for training"),
    "preprocess": Command("megatron.lm.tools.preprocess_data", "tokenize a corpus into megatron-core's datasets"),
    "convert": Command("megatron.lm.tools.convert_checkpoint", "convert checkpoints to and from Hugging Face, Megatron-LM and safetensors"),
    "evaluate": Command("megatron.lm.tools.evaluate", "evaluate models by bits per byte of a text"),
    "report": Command("megatron.lm.tools.report", "write a page about training runs"),
    "compare": Command("megatron.lm.tools.loss_compare", "compare the losses of training runs"),
    "inspect": Command("megatron.lm.tools.inspect_scales", "show what the precision recorder measured"),
    "env": Command("megatron.lm.command.environment", "print versions, GPUs and settings for a bug report"),
}


def usage() -> str:
    """Return the help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: msamp [--help] [--version] COMMAND ...",
            "",
            *lines,
            "",
            "msamp COMMAND --help shows the flags of a command; msamp quickstart is the first to try.",
        ]
    )


def refuse(message: str) -> int:
    """Print an error in one line and return its exit code."""
    report(f"error: {message}", message)
    return REFUSED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 if there is no such command or a package is missing."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        from megatron.lm.command.environment import msamp_version

        print(f"msamp {msamp_version()}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        return refuse(f"msamp has no command {name!r}: {meant}msamp --help lists {', '.join(COMMANDS)}")
    sys.argv[0] = f"msamp {name}"  # argparse's name of the program
    try:
        module = importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("megatron.lm"):
            raise
        return refuse(missing(error.name))
    return int(module.main(rest) or 0)


if __name__ == "__main__":
    sys.exit(main())

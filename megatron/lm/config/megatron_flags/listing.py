"""The table as text: sections of `--help`."""

import textwrap

from megatron.lm.config.megatron_flags.table import DROPPED, REFUSED, TRANSLATED, rows

PAGE = "docs/reference/megatron_flags.md"
WIDTH = 132
HEADING = "Megatron flags"
EXAMPLES = """examples:
  a small model on the data of `make quickstart`, on one GPU or a CPU:
    python -m megatron.lm.pretrain --preset 125m --opt-level O2 --data-path data/quickstart/train_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/quickstart/tokenizer.json --train-iters 100
  the memory per process of a large run, without starting it:
    WORLD_SIZE=64 python -m megatron.lm.pretrain --preset llama3-8b --opt-level O3 --dry-run
  eight GPUs, with checkpoints that the same command resumes from:
    torchrun --nproc-per-node 8 -m megatron.lm.pretrain --preset 1.3b --opt-level O3 --data-path DATA --tokenizer-type \\
        HuggingFaceTokenizer --tokenizer-model tokenizer.json --save RUN --load RUN --save-interval 1000
"""


def help_sections() -> str:
    """Return the end of `--help`: how Megatron-LM's flags are treated, and three examples."""
    parts = [f"{HEADING} (the log gives the reasons for those that a run drops or translates; see {PAGE}):"]
    for treatment, label in ((TRANSLATED, "translated"), (DROPPED, "dropped, since they have no effect here"), (REFUSED, "refused")):
        some = [row for row in rows() if row.treatment == treatment and not row.conditional and row.subject != "removed"]
        lines = [f"{row.line} -> {' '.join(row.becomes)}" if treatment == TRANSLATED else row.line for row in some]
        joined = ", ".join(line.replace(" ", "\0") for line in lines)  # a flag and its value stay on one line
        listed = textwrap.fill(joined, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False).replace("\0", " ")
        parts.append(f"  {label}:\n{listed}")
    return "\n".join(parts) + "\n\n" + EXAMPLES

"""The table as text: sections of `--help`, and the page `docs/reference/megatron_flags.md`."""

import textwrap

from megatron.lm.config.megatron_flags.table import DROPPED, REFUSED, TRANSLATED, defaults, rows

PAGE = "docs/reference/megatron_flags.md"
WIDTH = 132
HEADING = "Megatron flags"
HEAD = """# Flags of Megatron-LM

What the trainer does with each flag of Megatron-LM (core_v0.16.1, and some of older versions). Start
`megatron.lm.pretrain` instead of `pretrain_gpt.py` ([before and after](../guide/moving.md#from-megatron-lm)) and keep the flags, unless one
is refused: the message names all of them. `--bf16` alone computes in BF16: replace it by `--opt-level O3` for FP8, since both together are
refused. `--bf16 --fp8-format hybrid` becomes O1 with FP32 states. `make tables` generates this page from
`megatron/lm/config/megatron_flags/flags.toml`.

- **accepted**: the trainer has the flag, with Megatron-LM's meaning. [Its own page](flags.md) describes it.
- **translated**: the trainer has it under another name.
- **dropped**: the flag has no effect here; the log gives the reason at the start of the run.
- **refused**: the run does not start; the message gives the reason and what to do instead.

Underscores are accepted for hyphens. A flag that ends with `*` means every flag that begins with the part before it.
"""
DIFFERENT = """## Defaults that differ

At the start, the log lists these defaults for the flags that are absent; `--megatron-defaults` uses Megatron-LM's instead. V is
`--vocab-size`, which includes the end of document here. Defaults of FP16 and of delayed scaling are listed only if the run uses them.

| flag | Megatron-LM | here |
| --- | --- | --- |
"""
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
    parts = [f"{HEADING} (the log names those that a run drops or translates; {PAGE} gives the reasons):"]
    for treatment, label in ((TRANSLATED, "translated"), (DROPPED, "dropped, since they have no effect here"), (REFUSED, "refused")):
        some = [row for row in rows() if row.treatment == treatment and not row.conditional]
        lines = [f"{row.line} -> {' '.join(row.becomes)}" if treatment == TRANSLATED else row.line for row in some]
        joined = ", ".join(line.replace(" ", "\0") for line in lines)  # a flag and its value stay on one line
        listed = textwrap.fill(joined, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False).replace("\0", " ")
        parts.append(f"  {label}:\n{listed}")
    return "\n".join(parts) + "\n\n" + EXAMPLES


def page() -> str:
    """Return the page of the documentation."""
    parts = [HEAD, DIFFERENT]
    for default in defaults():
        what = f"`{default.what}`" if default.what.startswith("--") else default.what
        parts.append(f"| {what} | {default.megatron} | {default.ours} |\n")
    some = [row for row in rows() if not row.conditional]
    for subject in dict.fromkeys(row.subject for row in some):
        parts.append(f"\n## {subject.capitalize()}\n\n| flag | here | |\n| --- | --- | --- |\n")
        for row in some:
            if row.subject == subject:
                text = f"`{' '.join(row.becomes)}`" if row.treatment == TRANSLATED else row.why
                parts.append(f"| `{row.line}` | {row.treatment} | {text} |\n")
    return "".join(parts)

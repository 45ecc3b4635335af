"""Tables and figures that nothing here reproduces, and why."""

from tools.reproduce.entry import Entry

ENTRIES = (
    Entry(
        name="coat-llama",
        title="COAT, its table of memory and speed",
        claim="Llama-2 7B on two GPUs: 11,351 tokens/s/GPU at 52.8 GB, against BF16's 6,130.",
        reason="7B on two GPUs of 80 GiB was not run; the rows at 1.3B stand under coat-memory.",
    ),
)

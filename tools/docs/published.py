"""A sentence that puts a row of ours beside a figure that others have published."""

from collections.abc import Callable

from tools.docs.cells import BENCH, Sentence, pick

STEP = f"{BENCH}/step.csv"
CASE = "O3 --attention-precision fp8 --output-layer-precision fp8-all"
MODEL = "llama3-8b --seq-length 8192 --fp8-min-gain 0 --vocab-size 128256"
NVIDIA = 14451  # tokens/s per GPU: Llama-3-8B at sequence 8,192 on eight H100s, FP8 with current scaling, FSDP over eight
NVIDIA_PAGE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html"


def llama() -> Sentence:
    """Llama-3-8B on one card, beside NVIDIA's highest published figure for Hopper."""
    row = pick(STEP, lambda row: (row["case"], row["preset"]) == (CASE, MODEL))[-1]
    card, gib = row["gpu"].removeprefix("NVIDIA "), f"{float(row['peak_gib']):.0f} GiB"
    text = f"""Llama-3-8B at sequence 8,192 trains at {int(row["tokens_s_gpu"]):,} tokens/s on one {card} (O3 with FP8 attention and head,
        {gib}, random tokens, update included). NVIDIA's highest [published figure]({NVIDIA_PAGE}) is {NVIDIA:,} tokens/s per GPU on eight
        H100s (Megatron-Bridge 25.11, FP8 with current scaling), which also communicate."""
    return Sentence(" ".join(text.split()), [(STEP, [row])])


TABLES: dict[str, Callable[[], Sentence]] = {"llama-published": llama}

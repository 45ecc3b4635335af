"""Sentences for README: a step of ours compared with a figure that others have published, and with the baselines of the same run."""

from collections.abc import Callable

from tools.docs import losses
from tools.docs.cells import BENCH, Sentence, pick
from tools.docs.evidence import Row

STEP = f"{BENCH}/step.csv"
CASE = "O3 --attention-precision fp8 --output-layer-precision fp8-all"
MODEL = "llama3-8b --seq-length 8192 --fp8-min-gain 0 --vocab-size 128256"
NVIDIA = 14451  # tokens/s per GPU: Llama-3-8B at sequence 8,192 on eight H100s, FP8 with current scaling, FSDP over eight
NVIDIA_PAGE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html"


def llama() -> Sentence:
    """Llama-3-8B on one card, compared with NVIDIA's highest published figure for Hopper."""
    row = pick(STEP, lambda row: (row["case"], row["preset"]) == (CASE, MODEL))[-1]
    card, gib = row["gpu"].removeprefix("NVIDIA "), f"{float(row['peak_gib']):.0f} GiB"
    text = f"""Llama-3-8B at sequence 8,192 trains at {int(row["tokens_s_gpu"]):,} tokens/s on one {card} (`{CASE}`,
        {gib}, random tokens, update included). NVIDIA's highest [published figure]({NVIDIA_PAGE}) is {NVIDIA:,} tokens/s per GPU on eight
        H100s (Megatron-Bridge 25.11, FP8 with current scaling), which also communicate."""
    return Sentence(" ".join(text.split()), [(STEP, [row])])


OURS = "O3"
COMPILED, EAGER = "8136b16", "d77a990"  # runs of GPT-1.3B that timed O3 back to back with compiled baselines, and with eager ones


def step_of(commit: str, case: str) -> Row:
    """Return the step of GPT-1.3B with micro-batch 4 on one card of a run."""
    return pick(STEP, lambda row: (row["commit"], row["case"], row["preset"], row["micro_batch"]) == (commit, case, "1.3b", "4"))[-1]


def faster(commit: str, case: str) -> float:
    """Return how many times as fast as a baseline O3 is in a run of both."""
    return float(step_of(commit, case)["ms"]) / float(step_of(commit, OURS)["ms"])


def ratios() -> Sentence:
    """O3's step relative to baselines, each measured back to back with it."""
    runs = ((COMPILED, ("torchao bf16", "torchao ao-tensorwise")), (EAGER, ("megatron bf16", "megatron te-delayed")))
    (bf16, ao), (core, te) = ([faster(commit, case) for case in cases] for commit, cases in runs)
    text = f"""A step of GPT-1.3B at O3 (nearest rounding) on one H200, in CUDA graphs, is {bf16:.2f} times as fast as BF16 and
        {ao:.2f} times as fast as torchao's FP8, both compiled by torch.compile and timed in the same run. It is {core:.2f} times as fast as
        Megatron-core with Transformer Engine in BF16 and {te:.2f} times in FP8, but these ran eagerly and waited for the host: the compiled
        baselines are the ones to compare with."""
    rows = [step_of(commit, case) for commit, cases in runs for case in (OURS, *cases)]
    return Sentence(" ".join(text.split()), [(STEP, rows)])


TABLES: dict[str, Callable[[], Sentence]] = {"llama-published": llama, "step-ratios": ratios, "loss-longest": losses.longest}

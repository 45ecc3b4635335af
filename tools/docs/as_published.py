"""The table of `--as-published` in docs/guide/papers.md: what each paper fixes, its value in the default and as published, and why."""

from collections.abc import Callable

from msamp.comm.grad_scaling import MU_RULES
from msamp.kernels.reference.collage import VARIANTS
from msamp.numerics.recipe import PAPERS, Recipe, as_published


def _rule(recipe: Recipe) -> str:
    assert recipe.gemm is not None
    return {"current": "powers of two", "exact": "amax / largest value"}[str(recipe.gemm.input.scaling)]


# Paper -> its parts: name, the value in a recipe, and why the default is another.
PARTS: dict[str, list[tuple[str, Callable[[Recipe], str], str]]] = {
    "fp8-lm": [
        ("sum of gradients over ranks", lambda x: x.exchange, "`nccl` adds in FP8 and rounds at every addition"),
        ("fall of mu", lambda x: x.mu_rule or MU_RULES[0], "a fall to 1/2 at once is no fall for mu below 1/2; halving reaches 1/(4N)"),
        ("sums over micro-batches", lambda x: x.accumulator, "FP8 rounds in every micro-batch"),
        ("rounding of masters", lambda x: x.states.master_rounding, "nearest loses updates below half a code of FP16"),
        ("rounding of moments", lambda x: x.states.moment_rounding, "the same, in E4M3 and FP16"),
        ("tensors of Algorithm 1", lambda x: "whole" if x.whole_tensors else "cut into rows", "whole ones leave ranks idle"),
    ],
    "collage": [
        ("eps", lambda x: "sqrt(v + eps)" if VARIANTS[x.states.update].published else "sqrt(v) + eps", "as in `torch.optim.AdamW`"),
        ("sum for v", lambda x: "Fast2Sum" if VARIANTS[x.states.update].published else "TwoSum", "a squared gradient can be larger than v"),
    ],
    "coat": [
        ("stored weight", lambda x: str(x.weight), "GEMMs read E4M3 only, so a second byte is unused"),
        ("scales of tensors", _rule, "a power of two casts without an error of its own, and fused kernels support it"),
        ("scales of groups of activations", lambda x: "amax / 448" if "exact" in x.activations else "powers of two", "one byte per group"),
    ],
}  # fmt: skip


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| paper | part | default | as published | why the default |", "| --- | --- | --- | --- | --- |"]
    for paper, parts in PARTS.items():
        default, published = PAPERS[paper][0], as_published(paper)
        lines += [f"| `{paper}` | {part} | {value(default)} | {value(published)} | {why} |" for part, value, why in parts]
    return "\n".join(lines)

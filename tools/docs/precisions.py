"""The pages of the precisions: what each one does, how to select it, its memory as a picture, and what was measured.

Everything but the headings and the reference to the paper comes from the recipe, from shapes and from the rows of measurements.
"""

import functools
import shlex
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from msamp.numerics import recipe
from msamp.numerics.recipe_words import describe
from tools.docs import losses as losses_of
from tools.docs import rounding, shapes
from tools.docs.cells import PRECISIONS, Table, column, kilo, of
from tools.docs.drawing import Numbers, draw_bytes
from tools.docs.evidence import Row, read
from tools.docs.figures import Figure
from tools.docs.tables import STEP, same_case, whole_step
from tools.precisions import precision_flags

OWN_LOOP = " In [your own loop](../../guide/own_loop.md):"
PAGES = "docs/reference/precisions"
STATES = ("weight", "gradient", "master", "m", "v")


class Page(NamedTuple):
    """The page of a precision.

    Attributes:
        name: of the page and its picture.
        recipe: its name in flags.
        title: heading.
        paper: what it implements.
        note: a sentence on its use, with links as Markdown.
    """

    name: str
    recipe: str
    title: str
    paper: str
    note: str


ALL = (
    Page(
        "o0", "O0", "O0: BF16", "Mixed precision as in Megatron-LM", "The baseline: every comparison here is with it, on the same batches."
    ),
    Page(
        "o1",
        "O1",
        "O1: FP8 GEMMs and gradients",
        "FP8-LM, sections 2 and 2.1",
        "It leaves the moments in FP32: take it if O2's loss is in doubt ([another level](../../guide/checkpoints.md)).",
    ),
    Page(
        "o2",
        "O2",
        "O2: FP8 GEMMs, gradients and optimizer",
        "FP8-LM, sections 2.1 and 2.2",
        "It needs the least memory on one or two GPUs ([choosing](../../guide/choosing.md)).",
    ),
    Page(
        "o3",
        "O3",
        "O3: FP8 weights too, for several GPUs",
        "FP8-LM, section 2.3",
        "Weights travel in one byte per element. It needs the least memory where ZeRO divides master and moments over three GPUs or more.",
    ),
    Page(
        "coat",
        "coat",
        "coat: expanded moments and FP8 activations",
        "COAT",
        "[What differs from the paper](../../guide/papers.md#coat) is listed part by part.",
    ),
    Page(
        "collage",
        "collage-plus",
        "collage-plus: pairs of BF16",
        "Collage, algorithm 2",
        "Weight and second moment are pairs of BF16 without FP32 states; `collage-light` has the weight as a pair only.",
    ),
    Page(
        "fp16-amp",
        "fp16-amp",
        "fp16-amp: FP16 with loss scaling",
        "Micikevicius et al. 2017, and Apex's levels in `msamp.amp`",
        "For GPUs without BF16, and to compare. In your own loop `msamp.amp` has the same levels as Apex.",
    ),
)


def bytes_by_state() -> dict[str, dict[str, float]]:
    """Return the bytes per parameter of a linear weight, its gradient and its states, by recipe."""
    table = shapes.bytes_per_parameter()
    by_case = {}
    for cells in table.cells:
        weight, master, m, v, gradient = (_sum(cell) for cell in cells[1:6])
        by_case[cells[0].strip("`")] = dict(zip(STATES, (weight, gradient, master, m, v), strict=True))
    return by_case


def _sum(cell: str) -> float:
    return sum(float(part) for part in cell.partition(",")[0].split(" + "))


def picture(chosen: Page) -> Figure:
    """The bytes per parameter of all precisions on one scale, with one of them in full color."""
    by_recipe = bytes_by_state()
    numbers: Numbers = {"chosen": chosen.recipe, "bytes": {one.recipe: by_recipe[one.recipe] for one in ALL}}
    return Figure(numbers, draw_bytes, [])


FIGURES: dict[str, Callable[[], Figure]] = {f"precision-{one.name}": functools.partial(picture, one) for one in ALL}


def steps(one: Page) -> list[Row]:
    """Return the fastest measured step of GPT-1.3B in BF16 and in this precision, on one H200 with micro-batch 4."""
    rows = [row for row in read(STEP) if whole_step(row)]
    fastest = []
    for name in dict.fromkeys(("O0", one.recipe)):
        some = [row for row in rows if same_case(row["case"]) == same_case(name)]
        fastest += [min(some, key=lambda row: float(row["ms"]))] if some else []
    return fastest


def losses(one: Page) -> Table:
    """Return the validation loss of GPT-125M in BF16 and in this precision: of the levels' default rounding where it was measured."""
    name = recipe.by_name(one.recipe).name
    by_default = rounding.default_loss()
    shown = [cells for cells in by_default.cells if cells[0] in (f"`{losses_of.BASE}`", f"`{name}`")]
    if any(cells[0] == f"`{name}`" for cells in shown):
        return replace(by_default, columns=["GPT-125M, 800 steps", *by_default.columns[1:]], cells=shown)
    columns = {
        "GPT-125M, 2,000 steps": lambda row: f"`{row['precision']}`",
        "seeds": column("seeds"),
        "validation loss": column("valid_loss"),
        "lowest seed": column("least"),
        "highest seed": column("most"),
    }
    rows = [row for name in dict.fromkeys((losses_of.BASE, name)) for row in read(PRECISIONS) if row["precision"] == name]
    rounds = recipe.by_name(one.recipe).states.master_rounding != "nearest"
    return replace(of(PRECISIONS, rows, columns), note="Measured with nearest rounding, before it became stochastic." if rounds else "")


def page(one: Page) -> str:
    """Return the page."""
    known = recipe.by_name(one.recipe)
    flags = shlex.join(precision_flags(one.recipe))
    own = known.compute.name != "fp16"  # whose own loop is msamp.amp's
    lines = [f"# {one.title}", "", *textwrap.wrap(f"{one.paper}. {describe(known)}.", 118), "", *wrapped(one.note), ""]
    lines += [f"Flags of the trainer: `{flags}`.{OWN_LOOP if own else ''}", ""]
    if own:
        lines += ["```python", f'model, optimizer = msamp.initialize(model, optimizer, recipe="{one.recipe}")', "```", ""]
    sides = {"weight": "weight", "gradient": "gradient", "master": "master weight, or the weight's second component", "m": "m", "v": "v"}
    held = bytes_by_state()[one.recipe]
    lines += ["## Memory", "", f"![bytes per parameter of each precision](../../results/figures/precision-{one.name}.png)", ""]
    cells = [[sides[state], f"{size:g}"] for state, size in held.items()] + [["sum", f"{sum(held.values()):g}"]]
    note = "Bytes per parameter of a linear weight with one micro-batch per step, computed from the formats in `msamp/numerics/recipe.py`."
    lines += [Table(["state", "bytes per parameter"], cells, (), note).markdown(), "", "## Measured", ""]
    speed = steps(one)
    if any(same_case(row["case"]) == same_case(one.recipe) for row in speed):
        columns = {"GPT-1.3B, one H200": lambda row: f"`{row['case']}`", "ms/step": column("ms", 0), "tokens/s": kilo("tokens_s_gpu"),
                   "peak GiB": column("peak_gib", 1)}  # fmt: skip
        lines += [of(STEP, speed, columns).markdown(), ""]
    else:
        lines += ["No step of GPT-1.3B was measured in this precision.", ""]
    lines += [losses(one).markdown(), ""]
    lines += wrapped("[Results](../../results/results.md) has all measurements, and differences with their intervals. "
                     "[From the paper to the file](../../guide/papers.md) names the files.")  # fmt: skip
    return "\n".join([*lines, ""])


def wrapped(text: str) -> list[str]:
    """Return lines of at most 118 columns in which links stay whole."""
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def overview() -> str:
    """Return the page that leads to the others."""
    lines = ["# One page per precision", "", *wrapped(
        "What each precision does to a linear layer, how to select it, what it needs and what was measured. "
        "[Choosing a precision](../../guide/choosing.md) decides by GPU, model size and memory. "
        "`python tools/precisions.py` lists all names.")]  # fmt: skip
    lines += ["", "| precision | GEMMs, weight, gradient, moments |", "| --- | --- |"]
    lines += [f"| [{one.title}]({one.name}.md) | {describe(recipe.by_name(one.recipe))} |" for one in ALL]
    return "\n".join([*lines, ""])


def pages() -> Mapping[str, str]:
    """Return the generated pages, by path from the root."""
    return {f"{PAGES}/index.md": overview()} | {f"{PAGES}/{one.name}.md": page(one) for one in ALL}

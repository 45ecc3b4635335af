"""Tables computed only from shapes and formats: bytes per parameter, and the dry run of 7B on 8 GPUs."""

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.planning.fits import check_fits, device_memory, report
from megatron.lm.planning.memory import GIB, plan, state_formats
from msamp.optim import updates
from msamp.optim.updates import MASTER, format_names
from tools.docs.cells import Listing, Table

SIDE = 4096  # rows and columns of the counted weight
GPUS, MEMORY = 8, device_memory(None, "h100")  # of a host with H100s
STATES = ("master", "m", "v")
LEVELS = (
    ("O0", ("--opt-level", "O0")),
    ("O1", ("--opt-level", "O1")),
    ("O2", ("--opt-level", "O2")),
    ("O3", ("--opt-level", "O3")),
    ("`coat`", ("--precision", "coat")),
    ("`collage-light`", ("--precision", "collage-light")),
    ("`collage-plus`", ("--precision", "collage-plus")),
    ("`fp16-amp`", ("--precision", "fp16-amp")),
)


def config_7b(*flags: str) -> Config:
    """Return the trainer's configuration of GPT-7B for a dry run with these flags."""
    return parse_args(["--preset", "7b", "--dry-run", *flags])


def bytes_per_parameter() -> Table:
    """Bytes per element of a linear weight and of its gradient and states."""
    cells = []
    for name, flags in LEVELS:
        weight, states = state_formats(config_7b(*flags))["linear"]
        held: dict[str, list[str]] = {column: [] for column in STATES}
        total = weight.bytes + float(states.grad.bytes)
        for state in updates.by_name(states.update).states:
            kept = state.format_beside(weight, format_names(states))
            size = 0 if kept is None else kept.bytes_of((SIDE, SIDE)) / SIDE**2
            total += size
            if kept is not None:
                held[state.column].append(f"{size:g}")
        own = ", its own master" if not held[MASTER.column] and states.master == weight else ""
        beside = (" + ".join(held[column]) or "0" for column in STATES)
        cells.append([name, f"{weight.bytes}{own}", *beside, f"{states.grad.bytes}", f"{total:g}"])
    columns = ["level", "weight", "master, or the weight's second component", "m", "v", "gradient", "sum"]
    return Table(columns, cells, (), "Computed from the formats in `msamp/numerics/recipe.py`.")


def memory_7b() -> Table:
    """GiB on the fullest of 8 processes of GPT-7B under ZeRO, by level."""
    cells = []
    for name, flags in (*LEVELS[:4], ("O3, `--grad-accum-on owner`", (*LEVELS[3][1], "--grad-accum-on", "owner")), LEVELS[4]):
        rank = max(plan(config_7b(*flags, "--use-distributed-optimizer"), GPUS), key=lambda rank: rank.total)
        parts = [rank.weight, *(rank.states[column] for column in STATES), rank.gradient, rank.accumulated, rank.activations, rank.total]
        cells.append([name, *(f"{part / GIB:.2f}" for part in parts)])
    columns = ["GiB per process", "weight", *STATES, "gradient", "accumulated", "activations", "total"]
    footer = """Computed from shapes by `megatron/lm/planning/memory.py`. The total is a peak, weight, states, accumulated gradients and
        activations: the averaged gradient appears when activations have been freed, and counts only where it is larger than both."""
    return Table(columns, cells, (), " ".join(footer.split()))


def dry_run_7b() -> Listing:
    """The grid and memory that the dry run of GPT-7B at O3 on 8 processes prints."""
    return Listing(report(config_7b("--opt-level", "O3"), GPUS).splitlines())


def refused_7b() -> Listing:
    """The error of the dry run of GPT-7B at O0 without ZeRO on 8 H100s.

    Raises:
        ValueError: it fits.
    """
    config = config_7b("--opt-level", "O0")
    try:
        check_fits(config, GPUS, MEMORY)
    except ValueError as refusal:
        return Listing([f"error: {refusal}"])
    raise ValueError("GPT-7B at O0 fits into an H100 without ZeRO: docs/guide/choosing.md says that it does not")

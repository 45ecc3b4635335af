"""Tables of which share of an update arrives: through moments of each format at each beta, and through masters of each format.

Both are computed with the optimizer's reference kernels on the CPU when a page is generated, without a training run.

Moments: every element has a constant gradient. In FP32 Adam then moves each by lr per step, whatever the gradient's size. One tensor
    contains
gradients of the largest size and of sizes down to 2^-40 of it, 16 mantissas in each binade, shuffled so that each of COAT's groups has all
sizes. The share of a size is the mean displacement of its elements after 200 steps, divided by 200 lr.

Masters: every weight lies between 1 and 1.5 and moves by the same fraction of a code per step, until it has moved by two codes.
"""

import functools
from collections.abc import Sequence

import torch

from msamp.kernels.reference.adamw import Batch, adamw
from msamp.kernels.reference.coat_adamw import coat_adamw
from msamp.kernels.reference.store import load, rounding_of, store_
from msamp.numerics.formats import BF16, COAT_E4M3, COAT_E5M2, E4M3, E5M2, FP16, Format
from msamp.numerics.stochastic_rounding import ROUNDINGS, Thresholds, tensor_key
from msamp.optim.states import as_stored, begun, make_master
from tools.docs.cells import Table

BETAS = ((0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.95, 0.98))
NEAREST, STOCHASTIC = ROUNDINGS
MOMENTS: tuple[tuple[Format, Format, str], ...] = (
    (BF16, BF16, NEAREST),
    (FP16, FP16, NEAREST),
    (E4M3, FP16, NEAREST),
    (E4M3, FP16, STOCHASTIC),
    (E5M2, FP16, NEAREST),
    (E5M2, FP16, STOCHASTIC),
    (E4M3, E4M3, NEAREST),
    (E4M3, E4M3, STOCHASTIC),
    (COAT_E4M3, COAT_E4M3, NEAREST),
    (COAT_E5M2, COAT_E5M2, NEAREST),
)
STEPS, BINADES, MANTISSAS = 200, 41, 16
COLUMNS = (0, 7, 13, 17, 20)  # binades below the largest that contain 1, 1e-2, 1e-4, 1e-5 and 1e-6
DELIVERED = 0.9
MASTERS = (FP16, BF16, E4M3)
PARTS = (2, 8, 32, 128)
CODES, WEIGHTS = 2, 1024
LR = 2.0**-10  # a power of two, so that no displacement is rounded


@functools.cache
def moment_shares(m: Format, v: Format, rounding: str, betas: tuple[float, float]) -> tuple[float, ...]:
    """Return the share of FP32's displacement that arrives for gradients of each binade: entry i is for those from 2^-i down to 2^-(i + 1),
    exclusive, of the tensor's largest."""
    sizes = 2.0 ** -(torch.arange(BINADES)[:, None] + torch.arange(MANTISSAS) / MANTISSAS)
    copies = 1 if rounding == NEAREST else 2
    order = torch.randperm(copies * sizes.numel(), generator=torch.Generator().manual_seed(0))
    g = sizes.repeat(copies, 1, 1).reshape(-1)[order][None]
    p, step = torch.zeros_like(g), torch.zeros(())
    state = begun("m", m, g) | begun("v", v, g)
    batch = Batch(
        grads=[g],
        masters=[p],
        weights=[],
        states={"exp_avg": [as_stored(state, "m")], "exp_avg_sq": [as_stored(state, "v")]},
        steps=[step],
        indices=[0],
        places=[0],
        keys=[tensor_key(0, "w")],
        offsets=[0],
    )
    amaxes, kept = torch.ones(4, 1), torch.zeros(3, 1)
    hyper = torch.tensor([LR, *betas, 0.0, 0.0], dtype=torch.float64)
    update = coat_adamw if m.group else adamw
    stored = rounding_of(rounding, NEAREST, v, betas[1])
    for _ in range(STEPS):
        amaxes[1:] = kept
        update(None, batch, hyper, amaxes, kept, None, torch.tensor(True), decoupled=True, rounding=stored)
    arrived = torch.empty_like(p[0])
    arrived[order] = -p[0] / (LR * STEPS)
    return tuple(arrived.view(copies, BINADES, MANTISSAS).mean((0, 2)).tolist())


def smallest_delivered(shares: Sequence[float]) -> int | None:
    """Return the last binade, counted from the largest, down to which at least DELIVERED of each displacement arrives; None if it does not
    for the largest."""
    lost = next((place for place, share in enumerate(shares) if share < DELIVERED), len(shares))
    return lost - 1 if lost else None


def moments() -> Table:
    """Share of FP32's displacement after 200 steps of a constant gradient, by formats, rounding and betas."""
    cells = []
    for m, v, rounding in MOMENTS:
        for betas in BETAS:
            shares = moment_shares(m, v, rounding, betas)
            last = smallest_delivered(shares)
            least = "no gradient" if last is None else "all" if last == BINADES - 1 else f"2^-{last + 1}"
            cells.append([f"{m}, {v}", rounding, "{} / {}".format(*betas), *(f"{shares[place]:.2f}" for place in COLUMNS), least])
    columns = ["m, v", "rounding", "betas", "1", "1e-2", "1e-4", "1e-5", "1e-6", f"at least {DELIVERED:g} down to"]
    footer = (
        "Computed by `tools/docs/state_formats.py`; each column is the mean over the gradients of one binade, "
        "the last column is the bound of the smallest one."
    )
    return Table(columns, cells, (), footer)


@functools.cache
def master_share(fmt: Format, part: int, rounding: str) -> float:
    """Return the share that arrives of an update of 1 / `part` of a code per step, the mean over weights in [1, 1.5) and over the steps of
    two codes."""
    master = make_master(1.0 + torch.arange(WEIGHTS) / (2 * WEIGHTS), fmt)
    start, step_size = load([master])[0].clone(), 2.0**-fmt.mantissa_bits / part
    for step in range(1, CODES * part + 1):
        drawn = None if rounding == NEAREST else [Thresholds(tensor_key(0, "w"), 0, step)]
        values = [load([master])[0] + step_size]
        store_([master], values, torch.full((1,), 4.0), drawn, "master")
    return float((load([master])[0] - start).mean()) / (CODES * part * step_size)


def masters() -> Table:
    """Share of an update that reaches a master, by format and size of the update."""
    cells = []
    for fmt in MASTERS:
        for part in PARTS:
            shares = (f"{master_share(fmt, part, rounding):.2f}" for rounding in (NEAREST, STOCHASTIC))
            largest = 2.0**-fmt.mantissa_bits / part
            cells.append([str(fmt), f"1/{part}", f"{largest / 2:.1e} to {largest:.1e}", *shares])
    columns = ["master", "update, codes", "update / weight", "nearest", "stochastic"]
    return Table(columns, cells, (), "Computed by `tools/docs/state_formats.py`.")

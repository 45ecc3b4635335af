"""Measure how much of FP8's range Adam's moments use, and the error of the update when they are stored in FP8 (COAT, part 1).

Over all groups of 128 of the moments m and v, for linear weights, embeddings (and LM head), vectors (norms, biases), and all of them:

- range: largest over smallest non-zero magnitude of a group; 10th percentile, median and 90th percentile over the groups. The page's
  figures (page_range) are about 1e3 for m and 1e1 for v; E4M3 spans 2.3e5, E5M2 3.8e9.
- error: error of the update u = m / (sqrt(v) + eps), with the run's eps and m and v quantized group by group in each pair of formats, with
  and without expansion. mse: mean of squares; sqnr_db: the same relative to the mean of u^2; group_error: |error| / |u| of a group, median
  over the groups; underflow: share of the non-zero elements of m and of v that became zero. Where v became zero and m did not, u is divided
  by eps alone; a few such elements then determine mse and sqnr_db, which is why the median is reported too.

Bias correction is omitted, since it is one factor for all elements.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.metrics import sqnr_db, underflow_frac
from msamp.numerics.range_expand import STATE_GROUP, dynamic_range, quantize_expanded

if TYPE_CHECKING:
    from megatron.lm.checkpoint.reader import CheckpointReader

PAGE_RANGE = {"m": 1e3, "v": 1e1}
FP8 = (E4M3, E5M2)
PERCENTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}
EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")
MEASURES = ("range_p10", "range_median", "range_p90", "page_range")
ERRORS = ("m", "v", "expand", "mse", "sqnr_db", "group_error", "underflow_m", "underflow_v")
COLUMNS = ("weights", "elements", "what", *MEASURES, *ERRORS)
Moments = Sequence[tuple[Tensor, Tensor]]


def kind(name: str, x: Tensor) -> str:
    """Return the kind of the weight `name`, whose moment is `x`."""
    if name.endswith(EMBEDDINGS):
        return "embedding"
    return "linear" if x.dim() > 1 else "vector"


def moments(saved: "CheckpointReader") -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Read (m, v) of every weight, FP32, by kind of weight, `all` last; on a GPU if there is one, since a CPU takes minutes for 125M.

    Raises:
        ValueError: the checkpoint contains no moments, or not in FP32.
    """
    tensors, device = saved.stored.tensors, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs_by_kind: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in ("linear", "embedding", "vector", "all")}
    for name in (key.removeprefix("exp_avg/") for key in tensors if key.startswith("exp_avg/") and "@" not in key):
        keys = (f"exp_avg/{name}", f"exp_avg_sq/{name}")
        other = [tensors[key].dtype for key in keys if tensors[key].dtype != torch.float32]
        if other:
            raise ValueError(
                f"{saved.folder}: the moments of {name} are {other[0]}, so they are already rounded: give a run at O0 or O1 (FP32)"
            )
        m, v = (saved.stored.tensor(key).to(device) for key in keys)
        pairs_by_kind[kind(name, m)].append((m, v))
        pairs_by_kind["all"].append((m, v))
    if not pairs_by_kind["all"]:
        raise ValueError(f"{saved.folder} contains no moments (exp_avg); give a checkpoint that a training run has written")
    return {name: pairs for name, pairs in pairs_by_kind.items() if pairs}


def range_row(pairs: Moments, moment: str) -> dict[str, Any]:
    """Return the columns of the ranges of `m` or `v`; groups of zeros are skipped."""
    ranges = torch.cat([dynamic_range(pair["mv".index(moment)]).flatten() for pair in pairs])
    ranges = ranges[~ranges.isnan()].sort().values
    row: dict[str, Any] = {"what": f"range of {moment}", "page_range": f"{PAGE_RANGE[moment]:g}"}
    return row | {f"range_{name}": f"{ranges[int(share * (len(ranges) - 1))]:.3g}" for name, share in PERCENTILES.items()}


def error_row(pairs: Moments, formats: tuple[Format, Format], expand: bool, eps: float) -> dict[str, Any]:
    """Return the columns of the errors of the updates with m and v in `formats`."""
    stored = [[quantize_expanded(x, fmt, expand=expand).dequantize() for x, fmt in zip(pair, formats, strict=True)] for pair in pairs]
    exact, rounded = ([m / (v.sqrt() + eps) for m, v in of] for of in (pairs, stored))
    shares = [_norms(e - r) / _norms(e) for e, r in zip(exact, rounded, strict=True)]
    update, approx = _flat(exact), _flat(rounded)
    under = {f"underflow_{name}": underflow_frac(_flat(p[i] for p in pairs), _flat(s[i] for s in stored)) for i, name in enumerate("mv")}
    measured = {
        "mse": (update - approx).double().square().mean().item(),
        "sqnr_db": sqnr_db(update, approx),
        "group_error": torch.cat(shares).nanmedian().item(),  # groups of zeros are 0 / 0
    } | under
    row = {"what": "error of m / (sqrt(v) + eps)", "m": str(formats[0]), "v": str(formats[1]), "expand": "yes" if expand else "no"}
    return row | {name: f"{value:.4g}" for name, value in measured.items()}


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(STATE_GROUP.split(x), dim=-1).flatten()


def _flat(xs: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in xs])


def table(by_kind: Mapping[str, Moments], eps: float) -> list[dict[str, Any]]:
    """Return all rows, each with all of COLUMNS."""
    lines = []
    for weights, pairs in by_kind.items():
        common = dict.fromkeys(COLUMNS, "") | {"weights": weights, "elements": sum(m.numel() for m, _ in pairs)}
        lines += [common | range_row(pairs, moment) for moment in PAGE_RANGE]
        lines += [common | error_row(pairs, (m, v), expand, eps) for expand, m, v in product((False, True), FP8, FP8)]
    return lines


def measured(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the newest checkpoint in a folder."""
    from megatron.lm.checkpoint.reader import CheckpointReader  # megatron-core, for seconds

    saved = CheckpointReader(folder)
    return table(moments(saved), saved.config.optimizer.adam_eps)

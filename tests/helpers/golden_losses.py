"""Losses of four 200-step training runs, which a change of the numbers must not move beyond the spread of the seeds.

    python tests/helpers/golden_losses.py        writes tests/golden/training_losses.json; 16 trainings, some ten minutes

Do so only after a change that is meant to move losses, and say in its commit by how much. The spread is the standard deviation over the
seeds: of a precision's loss, and of its difference from O0 on the same seed, which starts from the same weights and sees the same batches.
A loss is the mean of a run's last 20 steps.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as pytest has it
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from helpers import tiny

FILE = Path(__file__).resolve().parents[1] / "golden/training_losses.json"
PRECISIONS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "coat": {"precision": "coat"},
}
SEEDS = (1, 2, 3, 4)
GOLDEN_SEED = SEEDS[0]
STEPS, LAST = 200, 20
MODEL = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "micro_batch_size": 16}
# Standard deviations, of all precisions together: four seeds of one estimate it too roughly. Two runs differ by root two of them, and 3 is
# 2.1 of that. Another CPU, whose GEMMs add in another order, moved O0 by 0.0002, and O2, O3 and COAT by 0.001 to 0.006.
ALLOWED = 3.0


def loss(precision: str, seed: int, prefix: Path, **settings: Any) -> float:
    """The mean loss of the last steps of a training on the data at `prefix`."""
    flags = MODEL | PRECISIONS[precision] | {"seed": seed, "train_iters": STEPS} | settings
    found = tiny.losses(tiny.run(tiny.config(prefix, **flags)))
    assert len(found) == STEPS
    return statistics.fmean(found[-LAST:])


def golden(losses: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    """Precision, seed -> loss becomes what is committed: by precision the loss of the golden seed, and the two spreads."""
    made = {}
    for name, by_seed in losses.items():
        differences = [value - losses["O0"][seed] for seed, value in by_seed.items()]
        made[name] = {
            "loss": by_seed[GOLDEN_SEED],
            "spread": statistics.stdev(by_seed.values()),
            "spread_of_difference": statistics.stdev(differences) if name != "O0" else 0.0,
        }
    return made


def moved(losses: Mapping[str, float], committed: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each loss that moved beyond the spread of the seeds; empty if none did. `losses` are of the golden seed."""
    spread = pooled([line["spread"] for line in committed.values()])
    apart = pooled([line["spread_of_difference"] for name, line in committed.items() if name != "O0"])
    lines = []
    for name, value in losses.items():
        line, base = committed[name], committed["O0"]
        changes = {"its loss": (value - line["loss"], spread)}
        if name != "O0" and "O0" in losses:
            changes["its difference from O0"] = ((value - losses["O0"]) - (line["loss"] - base["loss"]), apart)
        for what, (change, deviation) in changes.items():
            if not math.fabs(change) <= ALLOWED * deviation:
                lines.append(f"{name}: {what} moved by {change:+.5f}, more than {ALLOWED:g} times the spread of the seeds, {deviation:.5f}")
    return lines


def pooled(deviations: Sequence[float]) -> float:
    """The standard deviation of samples of one size together."""
    return math.sqrt(statistics.fmean(deviation**2 for deviation in deviations))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = tiny.write_data(Path(folder))
        losses: dict[str, dict[int, float]] = {}
        for name in PRECISIONS:
            for seed in SEEDS:
                losses.setdefault(name, {})[seed] = loss(name, seed, prefix)
                print(name, seed, losses[name][seed], flush=True)
    FILE.write_text(json.dumps(golden(losses), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

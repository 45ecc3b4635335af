"""Checkpoints of one version of the format, for the tests of all later ones; run once, by code that still writes that version.

    git worktree add ../then COMMIT
    cd ../then && OMP_NUM_THREADS=1 PYTHONPATH=.:tests python -P ../here/tests/helpers/make_checkpoints.py \\
        ../here/tests/checkpoints_of/version_6 [NAME ...]

The folder gets the corpus, and of each run NAME.tar.xz, the checkpoint, and NAME.json, what the code of then made of it: the
SHA-256 of every tensor of model and optimizer after loading, and the losses of the steps after that. Beside tests/helpers/tiny.py of the
checkout only such parts of a training are used here as versions have in common. Without names of `RUNS` all of them are made.
"""

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helpers import tiny

STEPS_AFTER = 4
SMALL = {"num_layers": 1, "ffn_hidden_size": 64, "disable_bias_linear": True, "normalization": "RMSNorm"}
# After how many steps a run is saved, and its settings. O2 and O3 have filled the window of 16 steps; the loss scale has fallen.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "O2": (18, {"precision": "O2"}),
    "O2-current": (3, {"precision": "O2", "fp8_recipe": "tensorwise"}),
    "O3": (18, {"precision": "O3"}),
    "coat": (3, {"precision": "coat"}),
    "collage-fp8": (3, {"precision": "collage-fp8"}),
    "fp16-amp": (6, {"precision": "fp16-amp", "initial_loss_scale": 2.0**19, "loss_scale_window": 3}),
}


def digests(training: Any) -> dict[str, str]:
    """SHA-256 of the bits of every weight, buffer and optimizer state, by its name."""
    tensors = {f"model/{key}": x for key, x in training.model.state_dict().items() if not key.endswith("_extra_state")}
    for name, p in training.model.named_parameters():
        tensors |= {f"{key}/{name}": x for key, x in training.optimizer.state[p].items()}
    tensors |= {f"mu/{name}": x for name, x in training.grad_sync.state_dict()["mu"].items()}
    return {key: hashlib.sha256(b"".join(part.numpy().tobytes() for part in tiny.bits([x]))).hexdigest() for key, x in tensors.items()}


def resumed(settings: Any) -> dict[str, Any]:
    """What a run that resumes has after loading, and the losses of its steps."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        training = made.training
        found = {
            "iteration": training.iteration,
            "consumed_samples": training.consumed_samples,
            "loss_scale": training.loss_scaler.state_dict() if training.loss_scaler is not None else None,
            "digests": digests(training),
        }
        made.metrics.write = rows.append
        made.run()
        return found | {"losses": tiny.losses(rows)}


def main(folder: Path, names: Iterable[str]) -> None:
    """Write the corpus and the checkpoints of these runs into `folder`, which must not exist."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # no path of this machine gets into a configuration
        tiny.write_data(Path())
        for file in Path().iterdir():
            shutil.copy(file, folder)
        for name in names:
            saved, settings = RUNS[name]
            shared = SMALL | settings | {"train_iters": saved + STEPS_AFTER}
            tiny.run(tiny.config("corpus", **shared, exit_interval=saved, save=name, metrics_file="metrics.jsonl"))
            (Path(name) / ".lock").unlink()
            shutil.make_archive(str(folder / name), "xztar", base_dir=name)
            then = resumed(tiny.config("corpus", **shared, load=name))
            (folder / f"{name}.json").write_text(json.dumps(then, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:] or RUNS)

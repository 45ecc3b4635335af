"""One entry of a sealed checkpoint in another shape or dtype, of every kind that a run writes: each reader takes it or says a line."""

import io
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from attack import fuzz_checkpoints
from torch import Tensor

from helpers import checkpoints, tiny
from helpers.make_checkpoints import SMALL
from megatron.lm.checkpoint import CheckpointReader
from megatron.lm.tools import convert_checkpoint

KINDS = ("linear_fc1.weight", "final_layernorm.weight", "word_embeddings.weight")


def entries(held: dict[str, Tensor], kinds: Sequence[str]) -> list[str]:
    """Of every kind of tensor, its states and what stands beside either, one."""
    return [key for key in held if any(kind in key for kind in kinds) and ("layers." not in key or "layers.0." in key)]


def said(argv: list[str]) -> tuple[int, str]:
    """Exit code and stderr of convert_checkpoint."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
        code = convert_checkpoint.main(argv)
    return code, err.getvalue()


# By default every third change of an entry, from another one for each entry: each entry and each change is there.
@pytest.mark.parametrize(
    ("level", "kinds", "every"),
    [
        ("collage-fp8", KINDS[:1], 3),
        *(pytest.param(level, KINDS, 1, marks=pytest.mark.nightly(40), id=level) for level in ("collage-fp8", "coat", "O3")),
    ],
)
def test_an_entry_of_another_shape_or_dtype_ends_in_a_line(level: str, kinds: Sequence[str], every: int, tmp_path: Path):
    checkpoints.saved(tiny.write_data(tmp_path), tmp_path / "good", precision=level, **SMALL)
    good = next(path for path in (tmp_path / "good").rglob("iter_*") if path.is_dir())
    held, refused = checkpoints.tensors(good), 0
    for place, key in enumerate(entries(held, kinds)):
        for number, change in list(enumerate(fuzz_checkpoints.CHANGES[5:]))[place % every :: every]:  # those of shape and dtype
            try:
                changed = change(held[key]).contiguous()
            except (NotImplementedError, RuntimeError, TypeError):  # an operation that FP8 lacks
                continue
            made = Path(shutil.copytree(good, tmp_path / good.name))
            checkpoints.rewrite(made, {key: changed})
            command = ["inspect", "export-bf16"][number % 2]
            code, err = said([command, "--load", str(made), *(["--output", str(tmp_path / "o")] if command != "inspect" else [])])
            assert code in (0, 2), (key, number, err)
            assert err.count("\n") == (code == 2), (key, number, err)
            refused += code == 2
            name = key.partition("/")[2].partition(".scale_inv@")[0].partition(".max@")[0].partition(".k@")[0]
            for read in (CheckpointReader(made).values, CheckpointReader(made).weight):
                try:
                    read(name)
                except ValueError:
                    refused += 1
            shutil.rmtree(made)
            shutil.rmtree(tmp_path / "o", ignore_errors=True)
    assert refused > 30 / every

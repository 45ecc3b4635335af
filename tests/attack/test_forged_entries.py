"""One entry of a sealed checkpoint in another shape or dtype, of every kind that a run writes: each reader takes it or says a line."""

import io
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from attack import fuzz_checkpoints
from torch import Tensor

from helpers import checkpoints, tiny
from helpers.make_checkpoints import SMALL
from megatron.lm.checkpoint import CheckpointReader
from megatron.lm.checkpoint.files.folder import read_info
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


# Numbers behind a valid seal that no run writes: each reader refuses them in one line.


NORM, QKV = "decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
# Finite values of weights and moments that no run has: the first step after a load would make NaN of them.
HUGE = {
    f"exp_avg/{NORM}": torch.full((32,), 1e38),
    f"exp_avg_sq/{NORM}": torch.full((32,), 1e38),
    f"master/{NORM}": torch.full((32,), 1e38),
    f"exp_avg/{QKV}": torch.tensor(2.0**100),  # by its scale
    f"exp_avg_sq/{QKV}": torch.tensor(2.0**100),
}


@pytest.fixture
def folder(prefix: Path, tmp_path: Path) -> Path:
    return checkpoints.saved(prefix, tmp_path / "saved", opt_level="O2") / "iter_0000004"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 5.0])
def test_a_step_counter(folder: Path, tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]):
    checkpoints.rewrite(folder, {f"step/{NORM}": torch.tensor(value)})
    assert convert_checkpoint.main(["to-megatron", "--load", str(folder), "--output", str(tmp_path / "o")]) == 2
    err = capsys.readouterr().err
    assert f"step/{NORM}" in err.splitlines()[-1]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 2**60, 1.5])
@pytest.mark.parametrize("precision", ["bf16", "fp16-amp"])
def test_a_step_counter_of_torch_dist(prefix: Path, tmp_path: Path, precision: str, value: float):
    settings = {"precision": precision, "ckpt_format": "torch_dist", "num_layers": 1}
    folder = checkpoints.saved(prefix, tmp_path / "saved", **settings) / "iter_0000004"
    common = torch.load(folder / "common.pt", weights_only=False)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["step"] = value
    torch.save(common, folder / "common.pt")
    checkpoints.seal(folder)
    with pytest.raises(ValueError, match=r"step is .* it must be an integer in \[0, 2\^24\)"):
        tiny.run(tiny.config(prefix, train_iters=6, load=str(folder.parent), **settings))


@pytest.mark.parametrize("value", [1e30, -1e30, float("nan")])
def test_a_bias_of_a_router_that_no_run_has(prefix: Path, tmp_path: Path, value: float):
    settings: dict[str, Any] = {"num_experts": 4, "moe_router_enable_expert_bias": True, "num_layers": 1, "opt_level": "O2"}
    settings |= {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "moe_router_score_function": "sigmoid"}
    folder = checkpoints.saved(prefix, tmp_path / "saved", **settings) / "iter_0000004"
    key = next(key for key in checkpoints.tensors(folder) if key.endswith("router.expert_bias"))
    checkpoints.rewrite(folder, {key: torch.full((4,), value)})
    with pytest.raises(ValueError, match=r"expert_bias is not \(4,\) FP32 values in"):
        tiny.run(tiny.config(prefix, train_iters=6, load=str(folder.parent), **settings))


@pytest.mark.parametrize("key", HUGE)
def test_a_finite_value_that_no_run_has(prefix: Path, folder: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]):
    by_scale = not HUGE[key].dim()
    checkpoints.rewrite(folder, {f"{key}.scale_inv@0,0" if by_scale else key: HUGE[key]})
    said = rf"{key} has the value [-\d.]+e\+3\d; no run can use values above 2\^64"
    assert convert_checkpoint.main(["to-megatron", "--load", str(folder), "--output", str(tmp_path / "o")]) == 2
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "o").exists()
    with pytest.raises(ValueError, match=said) as refused:
        checkpoints.resume(prefix, folder.parent)
    assert "\n" not in str(refused.value)


def test_a_finite_maximum_of_coats_groups_that_no_run_has(prefix: Path, tmp_path: Path):
    folder = checkpoints.saved(prefix, tmp_path / "coat", precision="coat", num_layers=1) / "iter_0000004"
    checkpoints.rewrite(folder, {f"exp_avg/{QKV}.max@0,0": torch.full((96, 1), 1e38)})
    with pytest.raises(ValueError, match=rf"exp_avg/{QKV} has groups with a maximum or exponent out of range: maximum 1e\+38"):
        tiny.run(tiny.config(prefix, precision="coat", num_layers=1, train_iters=6, load=str(folder.parent)))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("precision", "fp8_amax_history_len", 2**40),
        ("model", "num_layers", 10**9),
        ("model", "hidden_size", 2**50),
        ("precision", "fp8_margin", -1),
    ],
)
def test_a_number_of_the_configuration(prefix: Path, folder: Path, section: str, name: str, value: int, capsys: pytest.CaptureFixture[str]):
    info = read_info(folder)
    info["config"][section][name] = value
    checkpoints.seal(folder, info)
    said = f"has --{name.replace('_', '-')} {value}; it must be in "
    for command in (["inspect"], ["to-megatron", "--output", str(folder.parent / "o")]):
        assert convert_checkpoint.main([*command, "--load", str(folder)]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(ValueError, match=said):
        checkpoints.resume(prefix, folder.parent)
    assert json.loads((folder / "checkpoint.json").read_text())["config"][section][name] == value

"""The precision recorder: its numbers against the definitions, and a run that it watches against one that it does not."""

import contextlib
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers import checkpoints, dist, tiny
from helpers.numerics import undelivered_frac
from megatron.lm.build import build_training
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.recorder import CAST_COLUMNS, UPDATE_COLUMNS, Recorder, summary
from megatron.lm.step import train_step
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Training
from msamp.kernels import ops
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import edq, lost_frac, saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor, fp32_values

LINEAR = "decoder.layers.1.mlp.linear_fc1"
UNFUSED = {"hidden_dropout": 0.1}  # whose linear layers call their hooks


def read(file: Path) -> list[dict[str, Any]]:
    """The lines; a torn one is left out."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def cast(x: Tensor, fmt: Any, scale: Tensor | None = None) -> dict[str, float]:
    """The columns of a cast, from the definitions; just in time without a scale."""
    x = x.detach().float()
    scale = scale_from_amax(x.abs().amax(), fmt.max) if scale is None else scale
    payload = quantize(x, scale, fmt)
    values = dequantize(payload, 1 / scale)
    return {
        "amax": float(x.abs().amax()),
        "underflow": underflow_frac(x, values),
        "saturation": saturation_frac(payload, fmt),
        "sqnr_db": sqnr_db(x, values),
        "scale_exponent": math.log2(scale),
    }


def stored(state: Tensor, wanted: Tensor) -> dict[str, float]:
    assert isinstance(state, ScalingTensor)
    values = state.dequantize(torch.float32)
    return {
        "amax": float(wanted.abs().amax()),
        "underflow": underflow_frac(wanted, values),
        "saturation": saturation_frac(state.payload, state.format),
        "sqnr_db": sqnr_db(wanted, values),
        "scale_exponent": -math.log2(state.scale_inv),
    }


def by_hand(made: Training, recorder: Recorder, steps: int) -> tuple[dict[str, dict[str, float]], list[float]]:
    """The casts of one linear layer in the last of some steps, and its update, from what hooks and states show."""
    layer = chunks(made.model)[0].decoder.layers[1].mlp.linear_fc1
    stream = tiny.random_batches(made.config)
    for _ in range(steps):
        train_step(made, stream)
    optimizer, seen = made.optimizer, {}
    slots, weight = layer.scaling.slots(record=False), fp32_values(layer.weight).clone()
    want = {"weight": cast(weight, E4M3)}
    before = {key: fp32_values(optimizer.state[layer.weight][key]).clone() for key in ("exp_avg", "exp_avg_sq")}
    handles = [
        layer.register_forward_hook(lambda _, args, out: (seen.update(input=args[0]), out[0].register_hook(lambda g: seen.update(g=g)))[0]),
        layer.weight.register_hook(lambda g: seen.update(grad=g.clone())),
    ]
    with recorder.step(steps + 1):
        train_step(made, stream, recorder=recorder)
    for handle in handles:
        handle.remove()
    want |= {"input": cast(seen["input"], E4M3, slots[0].scale), "grad_output": cast(seen["g"], E5M2, slots[1].scale)}
    want["grad"] = cast(seen["grad"], E4M3)
    coefficient = min(1.0, made.config.optimizer.clip_grad / (float(optimizer.grad_norm) + 1e-6))
    g = fp32_values(ScalingTensor.quantize(seen["grad"], E4M3)).double() * coefficient
    group, count = optimizer.param_groups[0], steps + 1
    (beta1, beta2), lr = group["betas"], made.config.optimizer.lr
    m, v = (beta * before[key].double() for beta, key in ((beta1, "exp_avg"), (beta2, "exp_avg_sq")))
    m, v = m + (1 - beta1) * g, v + (1 - beta2) * g.square()
    step = m / (1 - beta1**count) / ((v / (1 - beta2**count)).sqrt() + group["eps"])
    after = weight.double() * (1 - lr * group["weight_decay"]) - lr * step
    state = optimizer.state[layer.weight]
    want |= {"m": stored(state["exp_avg"], m), "v": stored(state["exp_avg_sq"], v), "master": stored(layer.weight, after)}
    update, effective = after - weight.double(), fp32_values(layer.weight).double() - weight.double()
    shares = [lost_frac(update, effective), undelivered_frac(update, effective)]
    return want, [float(fp32_values(layer.weight).norm()), float(update.norm()), edq(update, effective), *shares]


@pytest.mark.parametrize("steps", [2, tiny.WINDOW + 1], ids=["just in time", "delayed"])
def test_numbers_are_the_definitions(tmp_path: Path, steps: int):
    constant = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "train_iters": 30}
    config = tiny.config("corpus", precision="O2", **UNFUSED, **constant)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made = build_training(config, tiny.VOCABULARY)
        recorder = Recorder(made, str(tmp_path / "new" / "p.jsonl"), 100, lambda *_: None)
        want, update = by_hand(made, recorder, steps)
        recorder.close()
        assert not any(layer.watches for layer in made.model.modules() if isinstance(layer, LinearScaling))
        assert not made.grad_sync.statistics.recording
    (row,) = read(tmp_path / "new" / "p.jsonl")
    assert (row["iteration"], row["skipped"], row["mu"]) == (steps + 1, False, {})
    assert row["columns"] == {"casts": list(CAST_COLUMNS), "sums": ["slope", "sqnr_db"], "updates": list(UPDATE_COLUMNS)}
    assert row["casts"][LINEAR].keys() == want.keys()
    for tensor, columns in want.items():
        found = dict(zip(CAST_COLUMNS, row["casts"][LINEAR][tensor], strict=True))
        assert found == pytest.approx(columns, rel=2e-3, abs=1e-12), tensor
    assert row["updates"][LINEAR] == pytest.approx(update, rel=2e-3, abs=1e-4)
    norms = [values[0] for values in row["updates"].values()]
    assert row["total"][0] == pytest.approx(math.hypot(*norms), rel=1e-3)
    assert len(norms) == sum(1 for _ in made.model.parameters())


@pytest.mark.parametrize(
    ("level", "settings"),
    [
        pytest.param("O2", {}, marks=pytest.mark.nightly),
        ("O3", {"micro_batch_size": 2, "global_batch_size": 4}),
        pytest.param("bf16", {}, marks=pytest.mark.nightly),
    ],
)
def test_a_recorded_run_ends_with_the_same_bits(prefix: Path, tmp_path: Path, level: str, settings: dict[str, Any]):
    file, ends = tmp_path / "p.jsonl", []
    for recorded in (None, str(file)):
        config = tiny.config(prefix, precision=level, train_iters=19, record_precision=recorded, record_interval=6, **settings)
        with tiny.trainer(config) as run:
            run.run()
            assert (run.recorder is None) == (recorded is None)
            ends.append(checkpoints.everything(run))
    assert tiny.same(*ends)
    rows = read(file)
    assert [row["iteration"] for row in rows] == [1, 6, 12, 18]
    assert rows[0]["updates"] == {}
    casts = rows[-1]["casts"][LINEAR].keys()
    assert casts == ({"weight"} if level == "bf16" else {"input", "weight", "grad_output", "grad", "master", "m", "v"})
    if level == "bf16":
        assert rows[-1]["total"][3] == 0.0  # an FP32 master loses nothing
        assert rows[-1]["total"][4] < 1e-3
    else:
        assert 0 < rows[-1]["total"][3] < 0.2
        assert rows[-1]["casts"][LINEAR]["grad_output"][3] < rows[-1]["casts"][LINEAR]["input"][3] < rows[-1]["casts"][LINEAR]["master"][3]


class Reads(TorchFunctionMode):
    """Counts what brings numbers to the host, by its name."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.counting = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.counting and name in self.NAMES:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_recorded_step_reads_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny.config("corpus", precision="O3")
    with tiny.started(config):
        made = build_training(config, tiny.VOCABULARY)
        recorder = Recorder(made, str(tmp_path / "p.jsonl"), 1, lambda *_: None)
        stream, reads, update = tiny.random_batches(config), Reads(), ops.adamw

        def kernel(*args: Any, **flags: Any) -> None:
            """A kernel reads nothing, its twin learning rates and step counts."""
            reads.counting = False
            update(*args, **flags)
            reads.counting = True

        monkeypatch.setattr(ops, "adamw", kernel)
        for _ in range(tiny.WINDOW):  # the step that may fill it asks the device
            train_step(made, stream)
        found = []
        for step in (contextlib.nullcontext(), recorder.step(tiny.WINDOW + 2)):
            reads.found.clear()
            with reads, step:
                train_step(made, stream, recorder=recorder)
            found.append(Counter(reads.found))
        recorder.close()
    # The two bools are the flag whether the step can be taken: on a GPU nobody asks for it before the table is there.
    assert found[1] - found[0] == Counter({"tolist": 1, "__bool__": 2})


@pytest.mark.parametrize("more", [{"qk_layernorm": True}, {"bf16_linears": ("linear_proj",)}], ids=["fused", "not fused"])
def test_fp8_attention_is_recorded_and_ends_with_the_same_bits(prefix: Path, tmp_path: Path, more: dict[str, Any]):
    config = tiny.config(prefix, precision="O3", attention_precision="fp8", train_iters=4, **more)
    record = {"record_precision": str(tmp_path / "p.jsonl"), "record_interval": 1}
    recorded = replace(config, logging=replace(config.logging, **record))
    assert tiny.losses(tiny.run(recorded)) == tiny.losses(tiny.run(config))
    casts = read(tmp_path / "p.jsonl")[-1]["casts"]["decoder.layers.1.self_attention.core_attention"]
    assert casts.keys() == {"query", "key", "value", "grad_attention"}
    for tensor, values in casts.items():
        told = dict(zip(CAST_COLUMNS, values, strict=True))
        assert 20 < told["sqnr_db"] < 40, tensor
        assert told["underflow"] < 0.01, tensor


def test_a_skipped_step_says_so_and_a_torn_line_is_left_behind(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2, "casts": {"dec')
    config = tiny.config("corpus", precision="O2", train_iters=5)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made = build_training(config, tiny.VOCABULARY)
        recorder = Recorder(made, str(file), 1, lambda *_: None)
        train_step(made, tiny.random_batches(config))
        batch = next(tiny.random_batches(config))
        batch["loss_mask"][0, 0] = math.inf
        with recorder.step(3):
            train_step(made, iter([batch]), recorder=recorder)
        recorder.close()
    rows = read(file)
    assert [row["iteration"] for row in rows] == [1, 3]
    assert rows[1]["skipped"]
    assert rows[1]["updates"] == {}
    assert rows[1]["total"] is None
    assert rows[1]["casts"][LINEAR]["grad_output"][0] is None


def test_mu_and_tensorboard(prefix: Path, tmp_path: Path):
    file, folder = tmp_path / "p.jsonl", tmp_path / "events"
    settings = {"grad_exchange": "nccl", "train_iters": 3, "tensorboard_dir": str(folder), "metrics_file": str(tmp_path / "m.jsonl")}
    tiny.run(tiny.config(prefix, precision="O2", record_precision=str(file), record_interval=3, **settings))
    row = read(file)[-1]
    assert row["mu"][LINEAR] == pytest.approx(4.0 ** (3 / 1000), rel=1e-4)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    curves = summary(row)
    assert {f"precision/{name}" for name in curves} <= set(events.Tags()["scalars"])
    worst = curves["mlp.linear_fc1/input/sqnr_db_worst"]
    assert worst == min(row["casts"][f"decoder.layers.{i}.mlp.linear_fc1"]["input"][3] for i in range(2))
    assert events.Scalars("precision/mlp.linear_fc1/input/sqnr_db_worst")[-1].value == pytest.approx(worst)
    assert events.Scalars("precision/total/lost")[-1].step == 3
    shares = [values[UPDATE_COLUMNS.index("undelivered")] for values in row["updates"].values()]
    assert curves["updates/undelivered_worst"] == max(shares)
    assert events.Scalars("precision/updates/undelivered")[-1].value == pytest.approx(sum(shares) / len(shares), abs=1e-9)


GRIDS: dict[str, dict[str, Any]] = {
    "O2 DP": {"precision": "O2"},
    "O3 DP": {"precision": "O3"},
    "O2 nccl": {"precision": "O2", "grad_exchange": "nccl"},
    "O3 TP+SP": {"precision": "O3", "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "O3 PP": {"precision": "O3", "pipeline_model_parallel_size": 2},
}


def on_every_grid(prefix: str, folder: str) -> dict[str, tuple[list[dict[str, Any]], bool]]:
    """In the same processes: the lines of each grid, and whether the weights are those of the run without a recorder."""
    found = {}
    for name, grid in GRIDS.items():
        file, ends = Path(folder) / f"{name}.jsonl", []
        for recorded in (None, str(file)):
            shared = {"train_iters": 4, "micro_batch_size": 2, "global_batch_size": 8, "record_interval": 2}
            with tiny.trainer(tiny.config(prefix, record_precision=recorded, num_attention_heads=4, **shared, **grid)) as run:
                run.run()
                ends.append(tiny.bits(run.training.model.parameters()))
        found[name] = (read(file) if torch.distributed.get_rank() == 0 else [], tiny.same(*ends))
    return found


@pytest.mark.nightly
def test_on_grids_one_line_tells_of_the_whole_model(gloo_prefix: Path, tmp_path: Path):
    first, second = dist.run(on_every_grid, 2, str(gloo_prefix), str(tmp_path), timeout=800)
    for name, (rows, same) in first.items():
        assert same, name
        assert second[name][1], name
        assert [row["iteration"] for row in rows] == [1, 2, 4], name
        layers = {f"decoder.layers.{i}.{kind}" for i in range(2) for kind in ("self_attention.linear_qkv", "mlp.linear_fc2")}
        assert layers <= rows[-1]["casts"].keys(), name
        tensors = {"input", "weight", "grad_output", "grad", "master", "m", "v"}
        assert rows[-1]["casts"][LINEAR].keys() == tensors | ({"grad_reduced"} if "DP" in name or "nccl" in name else set()), name
        assert rows[-1]["total"][0] == pytest.approx(first["O3 DP"][0][-1]["total"][0], rel=1e-3), name
        assert rows[-1]["updates"].keys() == first["O2 DP"][0][-1]["updates"].keys(), name
        for values in rows[-1]["casts"][LINEAR].values():
            assert values[1] is None or values[1] < 0.05, name
    assert first["O2 nccl"][0][-1]["casts"][LINEAR]["grad_reduced"][3] is None
    assert first["O2 nccl"][0][-1]["mu"].keys() >= {LINEAR}
    assert first["O2 DP"][0][-1]["casts"][LINEAR]["grad_reduced"][3] > 20


@pytest.mark.parametrize("way", ["blockwise", "mxfp8"])
def test_operands_in_blocks_are_judged_by_the_scale_of_their_block(tmp_path: Path, way: str):
    config = tiny.config("corpus", opt_level="O2", fp8_recipe=way)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made = build_training(config, tiny.VOCABULARY)
        recorder, stream = Recorder(made, str(tmp_path / "p.jsonl"), 1, lambda *_: None), tiny.random_batches(made.config)
        for iteration in (1, 2):
            with recorder.step(iteration):
                train_step(made, stream, recorder=recorder)
        recorder.close()
    row = read(tmp_path / "p.jsonl")[-1]
    sqnr, saturation = CAST_COLUMNS.index("sqnr_db"), CAST_COLUMNS.index("saturation")
    linears = [tensors for tensors in row["casts"].values() if "input" in tensors]
    assert len(linears) == 4 * config.model.num_layers
    for tensor, values in ((name, tensors[name]) for tensors in linears for name in ("input", "weight", "grad_output")):
        assert 20 < values[sqnr] < 45, tensor
        assert values[saturation] < 0.1, tensor

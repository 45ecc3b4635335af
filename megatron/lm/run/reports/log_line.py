"""The log line of a training interval: time, iteration, loss and speed in one line.

    10:52:40  iter   200/95368  loss 4.1947  lr 1.2e-04  norm 1.85  143 ms  61.9k tok/s  MFU 42/21%  14.6 GiB  ETA 3:46:40

norm is the gradient norm, tok/s is over all devices, TFLOP/s and MFU are per device. If two peaks are known, MFU has both: relative to the
BF16 peak, then to the FP8 peak. Skipped steps and the loss scale are shown if there are any. "3 eager" are steps of the interval that ran
before the CUDA graphs were captured, and so took longer; with delayed scaling these are at least as many as its window. With their flags,
"params" is the norm of the parameters and "zeros" the number of zeros in the gradients. The metrics file has all numbers at full precision,
and more of them.
"""

import textwrap
import time
from collections.abc import Mapping
from typing import Any

WIDTH, SEPARATOR = 120, "  "


def wrapped(text: str) -> str:
    """Wrap `text` to lines of at most `WIDTH` columns with a hanging indent; longer words, such as paths, are not broken."""
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def duration(seconds: float) -> str:
    """Format seconds as `1:02:03`."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


def short(value: float) -> str:
    """Format a number with three or four digits and k, M or G: 897, 61.9k, 1.06M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{scaled:.2f}{unit}" if scaled < 10 else f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{value:,.0f}"


def train_line(row: Mapping[str, Any], train_iters: int, seconds_left: float) -> str:
    """Return the log line of a `row` of the metrics file, kind "train"."""
    shares = [100 * value for name, value in row.items() if name.startswith("mfu_")]
    tflops = row["tflops"]
    speed = f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{1e3 * tflops:.2f} GFLOP/s"
    if shares:
        speed = f"MFU {'/'.join(f'{share:.0f}' for share in shares)}%"
    low, high = f"{row['memory_gib_min']:.1f}", f"{row['memory_gib']:.1f}"
    ms = row["step_ms"]
    step = f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms" if ms < 1e4 else f"{ms / 1e3:.1f} s"
    parts = [
        time.strftime("%H:%M:%S"),
        f"iter {row['iteration']:>{len(str(train_iters))}}/{train_iters}",
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.1e}",
        *([f"loss scale {row['loss_scale']:g}"] if "loss_scale" in row else []),
        f"norm {row['grad_norm']:.3g}",
        *([f"params {row['params_norm']:.4g}"] if "params_norm" in row else []),
        *([f"zeros {short(row['num_zeros_in_grad'])}"] if "num_zeros_in_grad" in row else []),
        *([f"load {row['moe_load_min']:.2f} to {row['moe_load_max']:.2f}"] if "moe_load_max" in row else []),
        *([f"aux {row['moe_aux_loss']:.4g}"] if row.get("moe_aux_loss") else []),
        *([f"skipped {row['skipped']}"] if row["skipped"] else []),
        *([f"{row['eager_steps']} eager"] if row.get("eager_steps") else []),
        step,
        f"{short(row['tokens_per_s'])} tok/s",
        speed,
        f"{low if low == high else f'{low}-{high}'} GiB",
        f"ETA {duration(seconds_left)}",
    ]
    return SEPARATOR.join(parts)


def megatron_line(row: Mapping[str, Any], train_iters: int, samples: int, batch: int, skipped: int) -> str:
    """Return a log line as Megatron-LM prints it: `row` as for `train_line`, samples so far and of a step, skipped steps."""
    parts = [
        time.strftime(" [%Y-%m-%d %H:%M:%S]") + f" iteration {row['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {samples:12d}",
        f"elapsed time per iteration (ms): {row['step_ms']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {row['tflops']:.1f}",
        f"learning rate: {row['lr']:.6E}",
        f"global batch size: {batch:5d}",
        f"lm loss: {row['loss']:.6E}",
        f"loss scale: {row.get('loss_scale', 1.0):.1f}",
        f"grad norm: {row['grad_norm']:.3f}",
        *(f"{name}: {row[key]:.3f}" for name, key in (("num zeros", "num_zeros_in_grad"), ("params norm", "params_norm")) if key in row),
        f"number of skipped iterations: {skipped:3d}",
    ]
    return " | ".join(parts) + " |"


def evaluation_line(row: Mapping[str, Any], megatron: bool) -> str:
    """Return the log line of an evaluation: `row` of the metrics file, kind "valid" or "test"; with `megatron` as Megatron-LM prints it."""
    if megatron:
        where = f"iteration {row['iteration']}" + (" on test set" if row["kind"] == "test" else "")
        return f" validation loss at {where} | lm loss value: {row['loss']:.6E} | lm loss PPL: {row['ppl']:.6E} |"
    bits = [] if row["bits_per_byte"] is None else [f"{row['bits_per_byte']:.4f} bits per byte"]
    where = f"{row['kind']} at iteration {row['iteration']}"
    return SEPARATOR.join([time.strftime("%H:%M:%S"), where, f"loss {row['loss']:.4f}", f"perplexity {row['ppl']:.2f}", *bits])

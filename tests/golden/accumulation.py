"""Writes accumulation.json: FP8 products of a Hopper GPU, as hashes of their bits and a few values. Run it on one.

    PYTHONPATH=.:tests python tests/golden/accumulation.py [OUT]

Products are those of `torch._scaled_mm` (cuBLAS), of our grouped GEMMs, and of `tl.dot` by `max_num_imprecise_acc`. Each is compared with
`msamp.numerics.accumulation` on the CPU and printed; tests/msamp/numerics/test_accumulation.py does the same without a GPU.

Fields of a product: the hash of all bits (NaN as one value), the first values in hexadecimal, and `pieces`: into how many pieces along K
cuBLAS split the sum, the first number with which the definition has its bits; null if there is none.
"""

import importlib.metadata
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from helpers.fp8_sums import CASES, FILE, ROWS, SCALE_INVS, Case, defined, digest, in_pieces, operands, summed, values
from msamp.kernels import ops
from msamp.numerics.accumulation import product

IMPRECISE = (None, 0, 32, 64, 128)


def on_cublas(case: Case) -> list[dict[str, Any]]:
    a, b = (x.repeat(case.size // ROWS, 1).cuda() for x in operands(case))
    scales = {"scale_a": torch.tensor(SCALE_INVS[0]).cuda(), "scale_b": torch.tensor(SCALE_INVS[1]).cuda()}
    rows = []
    for fast in (True, False):
        for out in (torch.float32, torch.bfloat16):
            got = torch._scaled_mm(a, b.t(), **scales, out_dtype=out, use_fast_accum=fast)[:ROWS, :ROWS].cpu()
            counts = range(1, min(32, math.ceil(case.K / 128)) + 1)
            pieces = next((n for n in counts if digest(defined(case, fast, out, n)) == digest(got)), None)
            rows.append(
                {"case": str(case), "fast": fast, "out": str(out)[6:], "pieces": pieces, "sha256": digest(got), "first": values(got)}
            )
            print(f"cuBLAS, {case}, fast {fast}, {rows[-1]['out']}: {pieces} pieces", flush=True)
    return rows


def of_bias(case: Case) -> dict[str, Any]:
    """The share of elements whose bits each way to add a BF16 bias to a BF16 product has."""
    a, b = operands(case)
    alpha = torch.tensor(SCALE_INVS[0]) * torch.tensor(SCALE_INVS[1])
    bias, sums = b[:, 0].to(torch.bfloat16), product(a, b, "fast")
    scales = {"scale_a": torch.tensor(SCALE_INVS[0]).cuda(), "scale_b": torch.tensor(SCALE_INVS[1]).cuda()}
    got = torch._scaled_mm(a.cuda(), b.cuda().t(), **scales, bias=bias.cuda(), out_dtype=torch.bfloat16, use_fast_accum=True).cpu()
    ways = {
        "one rounding": (sums.double() * alpha.double() + bias.double()).float().bfloat16(),
        "FP32 product, FP32 sum": (sums * alpha + bias.float()).bfloat16(),
        "BF16 product, BF16 sum": (sums * alpha).bfloat16() + bias,
    }
    shares = {name: float((way == got).float().mean()) for name, way in ways.items()}
    print(f"bias, {case}: {shares}", flush=True)
    return {"case": str(case), **shares}


def on_grouped(case: Case) -> list[dict[str, Any]]:
    """Our grouped GEMM of one expert: rows of the forward and the weight gradient, which is the same product here."""
    a, b = (x.repeat(128 // ROWS, 1).cuda() for x in operands(case))
    one, ends = torch.ones((), device="cuda"), {n: torch.tensor([n], dtype=torch.int32, device="cuda") for n in (128, case.K)}
    rows = []
    for fast in (True, False):
        want = summed(case, fast)
        runs = {
            "grouped_mm": ops.grouped_mm(a, b[None], ends[128], one, one[None], torch.float32, fast_accum=fast),
            "grouped_mm_grad_weight": ops.grouped_mm_grad_weight(
                a, b, ends[case.K], one, one, torch.float32, fast_accum=fast, aligned=True
            )[0],
        }
        for name, result in runs.items():
            got = result[:ROWS, :ROWS].cpu()
            rows.append({"case": str(case), "kernel": name, "fast": fast, "defined": digest(got) == digest(want), "sha256": digest(got)})
            print(f"{name}, {case}, fast {fast}: as defined: {rows[-1]['defined']}", flush=True)
    return rows


@triton.jit
def dot(a, b, c, K, SIZE: tl.constexpr, BLOCK: tl.constexpr, IMPRECISE: tl.constexpr):
    i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for at in range(0, K, BLOCK):
        left = tl.load(a + i[:, None] * K + at + k[None, :])
        right = tl.load(b + i[None, :] * K + at + k[:, None])
        total = tl.dot(left, right, total, max_num_imprecise_acc=IMPRECISE)
    tl.store(c + i[:, None] * SIZE + i[None, :], total)


def on_triton(case: Case) -> list[dict[str, Any]]:
    """`tl.dot` of blocks of 128 by its `max_num_imprecise_acc`: which sum has its bits, and its error."""
    a, b = (x.repeat(2, 1).cuda() for x in operands(case))
    left, right = operands(case)
    sums = {f"FP32 after every {n}": in_pieces(left, right, "fast", n) for n in (32, 64, 128)}
    sums |= {"fast": product(left, right, "fast"), "exact": product(left, right, "exact")}
    rows = []
    for imprecise in IMPRECISE:
        c = torch.empty(64, 64, device="cuda")
        dot[(1,)](a, b, c, case.K, 64, 128, imprecise, num_warps=4)
        got = c[:ROWS, :ROWS].cpu()
        same = next((name for name, sum_ in sums.items() if digest(sum_) == digest(got)), None)
        error = float((got.double() - sums["exact"].double()).norm() / sums["exact"].double().norm())
        rows.append({"case": str(case), "imprecise": imprecise, "sum": same, "error": float(f"{error:.3g}"), "sha256": digest(got)})
        print(f"tl.dot, {case}, max_num_imprecise_acc {imprecise}: {same}, error {error:.2e}", flush=True)
    return rows


def main(file: Path) -> None:
    torch.set_num_threads(1)  # for the small operations of the definition
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions() if "cublas" in (dist.name or "").lower()}
    long = [case for case in CASES if case.kind != "special" and not case.K % 128]
    record = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, **packages},
        "inputs": {str(case): [digest(x.view(torch.uint8)) for x in operands(case)] for case in CASES},
        "cublas": [row for case in CASES for row in on_cublas(case)],
        "bias": [of_bias(case) for case in CASES if case.size == ROWS and case.K == 1024],
        "grouped": [row for case in long for row in on_grouped(case)],
        "tl.dot": [row for case in long if case.K >= 4096 for row in on_triton(case)],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)

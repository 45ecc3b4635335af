#!/bin/bash
# Gradients of mse_loss on DTensors that are split over the batch are too large by the number of ranks, and cross_entropy with ignored labels is wrong.
#
# Seen with torch 2.13.0 and gloo on a CPU, Linux x86-64, input and target Shard(0). mse_loss, smooth_l1_loss, huber_loss, binary_cross_entropy
# and soft_margin_loss with their default reduction return the right loss of 12 rows on two or four ranks, and gradients times the ranks: their
# backward divides by the local number of elements. (x - y).square().mean() is right, and so are l1_loss, kl_div and the gradients of
# binary_cross_entropy_with_logits. cross_entropy's gradients are right, but where ranks have unequal numbers of ignored labels, as padded batches
# have, its loss is the mean of the ranks' means, and NaN if a rank has nothing else. Of rows that cannot be split evenly mse_loss and others are
# wrong themselves. Adam hides the factor; clipping, logged norms and SGD do not. Nothing is reported.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > losses.py <<'PROGRAM'
import os

import torch
import torch.multiprocessing
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

LOSSES = {
    "mse_loss": functional.mse_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "binary_cross_entropy": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "soft_margin_loss": lambda x, y: functional.soft_margin_loss(x, y.sign()),
    "(x - y).square().mean()": lambda x, y: (x - y).square().mean(),
    "l1_loss": functional.l1_loss,
    "binary_cross_entropy_with_logits": lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl_div": lambda x, y: functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "cross_entropy": lambda x, y: functional.cross_entropy(x, y),
    "cross_entropy, ignored labels": lambda x, y: functional.cross_entropy(x, y),
}


def compare(rank: int, ranks: int, rows: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["FREE_PORT"])
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        x, y, labels = torch.randn(rows, 6), torch.randn(rows, 6), torch.randint(0, 6, (rows,))
        if "cross_entropy," in name:
            labels[: rows // 4] = -100
        target = labels if name.startswith("cross_entropy") else y
        whole = x.clone().requires_grad_()
        expected = loss(whole, target)
        expected.backward()
        split = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        try:
            seen = loss(split, distribute_tensor(target, mesh, [Shard(0)]))
        except RuntimeError:
            text = "RuntimeError"
        else:
            seen.backward()
            ratio = split.grad.full_tensor().norm() / whole.grad.norm()
            text = f"loss {float(seen.full_tensor()):.4f} ({float(expected):.4f}), gradients times {float(ratio):.2f}"
        if rank == 0:
            print(f"{ranks} ranks, {rows} rows, {name}: {text}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    for ranks, rows in ((2, 12), (4, 12), (2, 5)):
        torch.multiprocessing.spawn(compare, (ranks, rows), nprocs=ranks)
PROGRAM
FREE_PORT=$(venv/bin/python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
export FREE_PORT
OMP_NUM_THREADS=1 venv/bin/python -W ignore losses.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
2 ranks, 12 rows, mse_loss: loss 1.7067 (1.7067), gradients times 2.00
2 ranks, 12 rows, smooth_l1_loss: loss 0.6504 (0.6504), gradients times 2.00
2 ranks, 12 rows, huber_loss: loss 0.6504 (0.6504), gradients times 2.00
2 ranks, 12 rows, binary_cross_entropy: loss 0.7998 (0.7998), gradients times 2.00
2 ranks, 12 rows, soft_margin_loss: loss 0.7477 (0.7477), gradients times 2.00
2 ranks, 12 rows, (x - y).square().mean(): loss 1.7067 (1.7067), gradients times 1.00
2 ranks, 12 rows, l1_loss: loss 1.0452 (1.0452), gradients times 1.00
2 ranks, 12 rows, binary_cross_entropy_with_logits: loss 0.7998 (0.7998), gradients times 1.00
2 ranks, 12 rows, kl_div: loss 0.6053 (0.6053), gradients times 1.00
2 ranks, 12 rows, cross_entropy: loss 2.3255 (2.3255), gradients times 1.00
2 ranks, 12 rows, cross_entropy, ignored labels: loss 2.1902 (2.2244), gradients times 1.00
4 ranks, 12 rows, mse_loss: loss 1.7067 (1.7067), gradients times 4.00
4 ranks, 12 rows, smooth_l1_loss: loss 0.6504 (0.6504), gradients times 4.00
4 ranks, 12 rows, huber_loss: loss 0.6504 (0.6504), gradients times 4.00
4 ranks, 12 rows, binary_cross_entropy: loss 0.7998 (0.7998), gradients times 4.00
4 ranks, 12 rows, soft_margin_loss: loss 0.7477 (0.7477), gradients times 4.00
4 ranks, 12 rows, (x - y).square().mean(): loss 1.7067 (1.7067), gradients times 1.00
4 ranks, 12 rows, l1_loss: loss 1.0452 (1.0452), gradients times 1.00
4 ranks, 12 rows, binary_cross_entropy_with_logits: loss 0.7998 (0.7998), gradients times 1.00
4 ranks, 12 rows, kl_div: loss 0.6053 (0.6053), gradients times 1.00
4 ranks, 12 rows, cross_entropy: loss 2.3255 (2.3255), gradients times 1.00
4 ranks, 12 rows, cross_entropy, ignored labels: loss nan (2.2244), gradients times 1.00
2 ranks, 5 rows, mse_loss: loss 1.9752 (1.9505), gradients times 2.07
2 ranks, 5 rows, smooth_l1_loss: loss 0.7107 (0.7071), gradients times 2.01
2 ranks, 5 rows, huber_loss: loss 0.7107 (0.7071), gradients times 2.01
2 ranks, 5 rows, binary_cross_entropy: loss 0.7847 (0.7789), gradients times 2.05
2 ranks, 5 rows, soft_margin_loss: loss 0.8213 (0.8001), gradients times 2.09
2 ranks, 5 rows, (x - y).square().mean(): loss 1.9505 (1.9505), gradients times 1.00
2 ranks, 5 rows, l1_loss: loss 1.0725 (1.0725), gradients times 1.00
2 ranks, 5 rows, binary_cross_entropy_with_logits: loss 0.7847 (0.7789), gradients times 1.00
2 ranks, 5 rows, kl_div: loss 0.7552 (0.7552), gradients times 1.00
2 ranks, 5 rows, cross_entropy: RuntimeError
2 ranks, 5 rows, cross_entropy, ignored labels: RuntimeError
EXPECTED

#!/bin/bash
# torch.distributed.all_reduce(MAX) over gloo with a NaN on one rank returns neither NaN, as torch.max does, nor the largest other number.
#
# Seen with torch 2.13.0 and 2.14.1 on a CPU, Linux x86-64. Four ranks send the numbers 1 to 4, one of them NaN instead. Every rank gets
#   nan if it is rank 0's, 1.0 if rank 1's, 2.0 if rank 2's, 3.0 if rank 3's.
# So a NaN disappears unless it is rank 0's, and with it the larger numbers of the ranks after it: 4.0 is lost twice. All ranks agree, and
# nothing is reported. An amax or a flag that may be NaN must become infinity before it is sent: `msamp.numerics.granularity` does that.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}"
cat > ranks.py <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def one(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    for where in range(4):
        x = torch.tensor([float("nan") if rank == where else rank + 1.0])
        dist.all_reduce(x, dist.ReduceOp.MAX)
        everywhere = [torch.empty(1) for _ in range(4)]
        dist.all_gather(everywhere, x)
        if rank == 0:
            print("NaN on rank", where, [y.item() for y in everywhere], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.split("+")[0], flush=True)
    mp.spawn(one, (sys.argv[1],), 4)
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python ranks.py "$folder/rendezvous" | tee seen
diff <(tail -n +2 seen) - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
NaN on rank 0 [nan, nan, nan, nan]
NaN on rank 1 [1.0, 1.0, 1.0, 1.0]
NaN on rank 2 [2.0, 2.0, 2.0, 2.0]
NaN on rank 3 [3.0, 3.0, 3.0, 3.0]
EXPECTED

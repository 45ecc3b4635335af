#!/bin/bash
# rotary-embedding-torch gives neighbouring tokens of BF16 queries one rotation from position 256 on, under autocast too; x-transformers in BF16 does.
#
# Seen with rotary-embedding-torch 0.9.1, x-transformers 2.31.10 and torch 2.13.0 on a CPU, Linux x86-64. rotary-embedding-torch counts positions in
# the dtype of the queries, which autocast makes BF16: 256 and 257 are one number, and from 2,048 on 16 positions are. It turns autocast off for its
# arithmetic, which does not help. model.bfloat16() rounds its frequencies too, and then x-transformers counts in BF16 as well. At position 4,095 a
# rotated query is off by 0.36 to 0.67 of its norm; rounding it to BF16 costs 0.002. Attention cannot order what is tied, and a model trained in FP32
# reads other distances than it learned. Nothing is reported, and neither README names it. transformers and megatron-core keep frequencies and
# positions in FP32. Right: queries and keys rotated in FP32; for x-transformers, autocast.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${ROTARY:-rotary-embedding-torch==0.9.1}" "${X_TRANSFORMERS:-x-transformers==2.31.10}" \
    numpy==2.4.6
cat > positions.py <<'PROGRAM'
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn
from x_transformers.x_transformers import RotaryEmbedding as XRotaryEmbedding
from x_transformers.x_transformers import apply_rotary_pos_emb

LENGTH, WIDTH = 4096, 64


def first(cast: torch.dtype, queries: torch.Tensor) -> torch.Tensor:
    """Queries of any dtype rotated by a model that was cast to `cast`."""
    model = nn.ModuleDict({"rotary": RotaryEmbedding(dim=WIDTH)}).to(cast)
    return model["rotary"].rotate_queries_or_keys(queries)


def second(cast: torch.dtype, queries: torch.Tensor) -> torch.Tensor:
    model = nn.ModuleDict({"rotary": XRotaryEmbedding(WIDTH)}).to(cast)
    frequencies, scale = model["rotary"].forward_from_seq_len(LENGTH)
    return apply_rotary_pos_emb(queries, frequencies, scale)


same = torch.ones(1, 1, LENGTH, WIDTH)  # one query at every position
torch.manual_seed(0)
queries = torch.randn(1, 1, LENGTH, WIDTH)
for name, rotate in (("rotary-embedding-torch", first), ("x-transformers", second)):
    wide = rotate(torch.float32, queries)[0, 0]
    for case, cast in (("autocast, weights in FP32", torch.float32), ("model.bfloat16()", torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast == torch.float32):
            ones, low = (rotate(cast, x.bfloat16())[0, 0] for x in (same, queries))
        error = (low.float() - wide).norm(dim=-1) / wide.norm(dim=-1)
        print(
            f"{name}, {case}: {ones.unique(dim=0).shape[0]:,} rotations of {LENGTH:,} positions; "
            f"error {', '.join(f'{error[i]:.3f} at {i:,}' for i in (1, 257, 2047, 4095))}"
        )
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore positions.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
rotary-embedding-torch, autocast, weights in FP32: 769 rotations of 4,096 positions; error 0.003 at 1, 0.290 at 257, 0.224 at 2,047, 0.360 at 4,095
rotary-embedding-torch, model.bfloat16(): 769 rotations of 4,096 positions; error 0.003 at 1, 0.280 at 257, 0.372 at 2,047, 0.674 at 4,095
x-transformers, autocast, weights in FP32: 4,096 rotations of 4,096 positions; error 0.003 at 1, 0.002 at 257, 0.003 at 2,047, 0.002 at 4,095
x-transformers, model.bfloat16(): 769 rotations of 4,096 positions; error 0.003 at 1, 0.280 at 257, 0.372 at 2,047, 0.674 at 4,095
EXPECTED

#!/bin/bash
# On a CPU, torch sums gradients of BF16 embeddings and layer norms in BF16: a row that 4,096 tokens use gets 256 where 4,096 is right.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64, one thread. 256 + 1 is 256 in BF16 (2,048 + 1 is 2,048 in FP16), so the gradient of a token or
# channel stops growing, without a message. On 65,536 tokens whose frequencies fall as 1 / rank, with gradients of mean 0.02 and deviation 0.1, that
# of a BF16 nn.Embedding(512, 64) is off by 44 % and that of a LayerNorm's bias by 90 %; rounding once costs 0.2 %. FP32 parameters of the LayerNorm
# behind BF16 activations change nothing. LayerNorm's sum depends on the number of threads too: each ends at 256. index_put_ with accumulate stops
# likewise, and index_add_ of a vector; index_add_ of rows and the gradients of nn.Linear and nn.RMSNorm are summed in FP32.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > gradients.py <<'PROGRAM'
import torch
from torch import nn

TOKENS = 4096
torch.manual_seed(0)
torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    zeros, ones = torch.zeros(TOKENS, dtype=torch.long), torch.ones(TOKENS, 8, dtype=dtype)
    embedding, norm, rms, linear = nn.Embedding(4, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 8)
    embedding.to(dtype)(zeros).sum().backward()
    norm.to(dtype)(torch.randn(TOKENS, 8).to(dtype)).sum().backward()
    rms.to(dtype)(ones).sum().backward()
    linear.to(dtype)(ones).sum().backward()
    put = torch.zeros(4, 8, dtype=dtype).index_put_((zeros,), ones, accumulate=True)
    add = torch.zeros(4, 8, dtype=dtype).index_add_(0, zeros, ones)
    sums = {"Embedding": embedding.weight.grad, "LayerNorm": norm.bias.grad, "index_put_": put}
    sums |= {"index_add_": add, "RMSNorm": rms.weight.grad, "Linear": linear.bias.grad}
    print(str(dtype)[6:], ", ".join(f"{name} {x.flatten()[0]:g}" for name, x in sums.items()))

y = torch.multinomial(1 / torch.arange(1.0, 513), 65536, replacement=True)
grad = (torch.randn(65536, 64) * 0.1 + 0.02).bfloat16()
right = torch.zeros(512, 64, dtype=torch.float64).index_add_(0, y, grad.double())
embedding, norm = nn.Embedding(512, 64, dtype=torch.bfloat16), nn.LayerNorm(64)
embedding(y).backward(grad)
nn.functional.layer_norm(torch.randn(65536, 64).bfloat16(), (64,), norm.weight, norm.bias).backward(grad)
for name, x, z in (("Embedding", embedding.weight.grad, right), ("LayerNorm with FP32 parameters", norm.bias.grad, right.sum(0))):
    print(f"65,536 tokens, BF16: the gradient of {name} is off by more than 30 %: {(x.double() - z).norm() / z.norm() > 0.3}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python gradients.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32 Embedding 4096, LayerNorm 4096, index_put_ 4096, index_add_ 4096, RMSNorm 4096, Linear 4096
bfloat16 Embedding 256, LayerNorm 256, index_put_ 256, index_add_ 4096, RMSNorm 4096, Linear 4096
float16 Embedding 2048, LayerNorm 2048, index_put_ 2048, index_add_ 4096, RMSNorm 4096, Linear 4096
65,536 tokens, BF16: the gradient of Embedding is off by more than 30 %: True
65,536 tokens, BF16: the gradient of LayerNorm with FP32 parameters is off by more than 30 %: True
EXPECTED

#!/bin/bash
# torch.distributions.Categorical(probs=...) takes every BF16 probability below 2^-7 for 2^-7: log_prob is -4.85 for all but the likeliest tokens.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64. `probs` are clamped to the dtype's eps, which is 2^-7 in BF16 and 2^-10 in FP16, before their
# logarithm; the docstring of the function that clamps calls that "the smallest representable positive number", and Categorical's page does not name
# it. So log_prob, entropy and kl_divergence of a policy over 32,768 tokens are off by half and more, and as a clamped number has no gradient,
# log_prob of the tokens taken gives the logits none, or next to none: REINFORCE or PPO on softmax(logits) of a BF16 model learns nothing, without a
# message. Bernoulli and OneHotCategorical clamp as well. Right: Categorical(logits=...), which is exact to BF16, or probs in FP32.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > policies.py <<'PROGRAM'
import torch
from torch.distributions import Bernoulli, Categorical, kl_divergence

torch.manual_seed(0)
scores = torch.randn(64, 32768)
taken = torch.multinomial(scores.softmax(-1), 1)[:, 0]
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for given in ("logits", "probs"):
        logits = scores.to(dtype).requires_grad_()
        policies = [Categorical(**{given: x if given == "logits" else x.softmax(-1)}) for x in (logits, logits.detach().roll(1, -1))]
        chosen = policies[0].log_prob(taken)
        (gradient,) = torch.autograd.grad(chosen.sum(), logits, retain_graph=True)
        entropy, divergence = policies[0].entropy().detach(), kl_divergence(*policies).detach()
        means = [round(float(x.detach().float().mean()), 1) for x in (chosen, entropy, divergence)]
        moved = "some" if gradient.float().abs().sum() > 1 else "none"
        print(f"{str(dtype)[6:]} {given}: log_prob {means[0]}, entropy {means[1]}, divergence {means[2]}, gradient of log_prob {moved}")
    rare = Bernoulli(probs=torch.tensor(1e-4, dtype=dtype)).log_prob(torch.ones((), dtype=dtype))
    print(f"  Bernoulli(1e-4): log_prob of 1 is {float(rare):.1f}")
PROGRAM
venv/bin/python -W ignore policies.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32 logits: log_prob -10.0, entropy 9.9, divergence 1.0, gradient of log_prob some
float32 probs: log_prob -10.0, entropy 9.9, divergence 1.0, gradient of log_prob some
  Bernoulli(1e-4): log_prob of 1 is -9.2
float16 logits: log_prob -10.0, entropy 9.9, divergence 1.0, gradient of log_prob some
float16 probs: log_prob -6.9, entropy 6.9, divergence 0.0, gradient of log_prob some
  Bernoulli(1e-4): log_prob of 1 is -6.9
bfloat16 logits: log_prob -10.0, entropy 9.9, divergence 1.0, gradient of log_prob some
bfloat16 probs: log_prob -4.8, entropy 4.8, divergence 0.0, gradient of log_prob none
  Bernoulli(1e-4): log_prob of 1 is -4.8
EXPECTED

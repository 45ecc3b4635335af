#!/bin/bash
# jax.random.categorical of BF16 logits picks tokens by their number: of 32,768 equal ones nearly always one of the first few hundred.
#
# Seen with jax 0.8.1 on a CPU, Linux x86-64, defaults. The noise that it adds has 7 bits in BF16: the largest number of 32,768 is reached by
# hundreds of tokens at once, and argmax takes the first of them. So a model of BF16 logits samples tokens by their number: the mean place is 0.004
# of the vocabulary in place of 0.5. bernoulli of p = 0.001 draws 0.0077 for the same reason, and normal has nothing above 2.9 deviations (1 in 270
# should be). The page names a limit for float32 (probabilities below 1e-7) and mode="high", and says nothing of BF16; mode="high" helps in part,
# and logits in FP32 are right. torch.multinomial and torch.randn in BF16 (2.13.0) are right.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${JAX:-jax==0.8.1}" numpy==2.4.6
cat > tokens.py <<'PROGRAM'
import jax
import jax.numpy as jnp

key = jax.random.key(0)
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    logits = jnp.zeros((512, 32768), dtype)
    places = [jax.random.categorical(key, logits, mode=mode).mean() / 32768 for mode in (None, "high")]
    p = jnp.full(4_000_000, 0.001, dtype)
    rates = [jax.random.bernoulli(key, p, mode=mode).mean() for mode in ("low", "high")]
    normal = jnp.abs(jax.random.normal(key, (4_000_000,), dtype)).max()
    print(f"{jnp.dtype(dtype)}: mean place {places[0]:.3f} (mode high {places[1]:.3f}), p = 0.001 drawn {rates[0]:.4f} ({rates[1]:.4f})", end="")
    print(f", largest of 4,000,000 normal numbers {float(normal):.1f}")
PROGRAM
JAX_PLATFORMS=cpu venv/bin/python -W ignore tokens.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: mean place 0.502 (mode high 0.499), p = 0.001 drawn 0.0010 (0.0010), largest of 4,000,000 normal numbers 5.2
float16: mean place 0.032 (mode high 0.517), p = 0.001 drawn 0.0019 (0.0010), largest of 4,000,000 normal numbers 3.5
bfloat16: mean place 0.004 (mode high 0.361), p = 0.001 drawn 0.0078 (0.0010), largest of 4,000,000 normal numbers 2.9
EXPECTED

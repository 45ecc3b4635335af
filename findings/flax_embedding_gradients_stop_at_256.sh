#!/bin/bash
# Flax's Embed with dtype=bfloat16 and FP32 parameters, mixed precision, gives a token that occurs 4,096 times a gradient of 256.
#
# Seen with flax 0.12.8 and jax 0.10.2 on a CPU, Linux x86-64, in flax.linen and flax.nnx, jitted. Embed casts the whole table to BF16 and looks the
# rows up in that, so that the gradient of the lookup is summed in BF16, where 256 + 1 is 256; the FP32 parameter gets what is left, and an optimizer
# in FP32 does not help. Of 65,536 tokens whose frequencies fall as 1 / rank, with gradients of mean 0.02 and deviation 0.1, the table's gradient is
# off by 45 % (rounding once: 0.2 %). jax.ops.segment_sum and x.at[i].add(y), as in routers of experts or graph networks, stop as well. Nothing is
# reported; the docstring of `dtype` names the "embedding vectors" only. Right: Embed with dtype=float32, and a cast of its output. torch does the
# same for tables that are BF16 themselves, see cpu_gradients_stop_at_256.sh.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${FLAX:-flax==0.12.8}" "${JAX:-jax==0.10.2}" "${JAXLIB:-jaxlib==0.10.2}" numpy==2.4.6
cat > embedding.py <<'PROGRAM'
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY, WIDTH, TOKENS = 512, 64, 65536


def linen_gradient(dtype: jnp.dtype, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """The gradient of sum(weights * Embed(tokens)), of FP32 parameters."""
    module = flax.linen.Embed(VOCABULARY, WIDTH, dtype=dtype)
    params = module.init(jax.random.key(0), tokens[:1])
    gradient = jax.jit(jax.grad(lambda p, t, w: (module.apply(p, t).astype(jnp.float32) * w).sum()))(params, tokens, weights)
    return gradient["params"]["embedding"]


def nnx_gradient(dtype: jnp.dtype, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    module = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=nnx.Rngs(0))
    gradient = nnx.jit(nnx.grad(lambda m, t, w: (m(t).astype(jnp.float32) * w).sum()))(module, tokens, weights)
    return jax.tree.leaves(gradient)[0]


for name, gradient in (("flax.linen.Embed", linen_gradient), ("flax.nnx.Embed", nnx_gradient)):
    one, ones = jnp.zeros(4096, int), jnp.ones((4096, 1))
    low, wide = (gradient(dtype, one, ones) for dtype in (jnp.bfloat16, jnp.float32))
    print(f"{name}: a token that occurs 4,096 times: {low[0, 0]:.0f} in {low.dtype} with dtype=bfloat16, {wide[0, 0]:.0f} with float32")
    random = np.random.default_rng(0)
    chances = 1 / np.arange(1, VOCABULARY + 1)
    tokens = jnp.asarray(random.choice(VOCABULARY, TOKENS, p=chances / chances.sum()))
    weights = jnp.asarray(random.normal(0.02, 0.1, (TOKENS, WIDTH)), jnp.float32)
    low, wide = (gradient(dtype, tokens, weights) for dtype in (jnp.bfloat16, jnp.float32))
    print(f"  65,536 tokens: off by {100 * jnp.linalg.norm(low - wide) / jnp.linalg.norm(wide):.0f} %")
rows = jnp.ones(4096, jnp.bfloat16)
print(f"jax.ops.segment_sum of 4,096 ones: {jax.ops.segment_sum(rows, jnp.zeros(4096, int), 1)[0]}")
print(f"x.at[i].add(y) of 4,096 ones: {jnp.zeros(1, jnp.bfloat16).at[jnp.zeros(4096, int)].add(rows)[0]}")
PROGRAM
JAX_PLATFORMS=cpu venv/bin/python -W ignore embedding.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
flax.linen.Embed: a token that occurs 4,096 times: 256 in float32 with dtype=bfloat16, 4096 with float32
  65,536 tokens: off by 45 %
flax.nnx.Embed: a token that occurs 4,096 times: 256 in float32 with dtype=bfloat16, 4096 with float32
  65,536 tokens: off by 45 %
jax.ops.segment_sum of 4,096 ones: 256.0
x.at[i].add(y) of 4,096 ones: 256.0
EXPECTED

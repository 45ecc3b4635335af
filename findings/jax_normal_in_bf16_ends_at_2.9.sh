#!/bin/bash
# jax.random.normal in BF16 returns 128 numbers between -2.9 and 2.5 with a mean of -0.011, and initializers of BF16 parameters are made of them.
#
# Seen with jax 0.10.2 and flax 0.12.8 on a CPU, Linux x86-64. Random bits are turned into a BF16 uniform number of 7 bits first, one of 128, and
# erf_inv follows in BF16. Noise has no tail (27 of 10,000 numbers should be beyond 3), uniform is 0 once in 128, exponential ends at 4.8, laplace has
# a mean of 0.025. The mean of weights matters most: a Flax Dense with param_dtype=bfloat16 on 4,096 inputs of mean 0.5 has outputs of mean -0.6 and
# deviation 0.6 before any training, where the mean should be 0. FP16 ends at 3.5, and its mean is -0.002. Nothing is reported: the page of normal
# gives the density on all numbers, and no issue was found that says so. (torch 2.13 makes BF16 normals in FP32.) Right: draw in FP32 and cast.
# jax_samples_first_tokens_in_bf16.sh shows what the same uniform numbers do to jax.random.categorical.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${JAX:-jax==0.10.2}" "${FLAX:-flax==0.12.8}" numpy==2.4.6
cat > normal.py <<'PROGRAM'
import flax.linen
import jax
import numpy
from jax import numpy as jnp

key = jax.random.key(0)
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    name = dtype.__name__
    x = numpy.asarray(jax.random.normal(key, (1 << 22,), dtype), numpy.float64)
    beyond = 1e4 * (abs(x) > 3).mean()
    few = f"{len(set(x))} values" if len(set(x)) < 5000 else "many values"
    print(f"{name}: normal from {x.min():.1f} to {x.max():.1f}, mean {x.mean():.3f}, {beyond:.0f} of 10,000 beyond 3, {few}")
    uniform = numpy.asarray(jax.random.uniform(key, (1 << 20,), dtype), numpy.float64)
    exponential = numpy.asarray(jax.random.exponential(key, (1 << 20,), dtype), numpy.float64)
    laplace = numpy.asarray(jax.random.laplace(key, (1 << 20,), dtype), numpy.float64)
    print(f"{name}: uniform 0 in {1e4 * (uniform == 0).mean():.0f} of 10,000, exponential to {exponential.max():.0f}, laplace mean {laplace.mean():.3f}")
    inputs = jax.random.uniform(key, (64, 4096), jnp.float32)
    dense = flax.linen.Dense(1024, param_dtype=dtype, dtype=jnp.float32)
    outputs = numpy.asarray(dense.apply(dense.init(key, inputs), inputs), numpy.float64)
    print(f"{name}: Dense of parameters in it, inputs of mean 0.5: mean of outputs {outputs.mean():.1f}, deviation {outputs.std():.1f}")
PROGRAM
JAX_PLATFORMS=cpu venv/bin/python -W ignore normal.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: normal from -4.8 to 5.2, mean -0.000, 27 of 10,000 beyond 3, many values
float32: uniform 0 in 0 of 10,000, exponential to 13, laplace mean -0.000
float32: Dense of parameters in it, inputs of mean 0.5: mean of outputs -0.0, deviation 0.6
bfloat16: normal from -2.9 to 2.5, mean -0.011, 0 of 10,000 beyond 3, 128 values
bfloat16: uniform 0 in 77 of 10,000, exponential to 5, laplace mean 0.025
bfloat16: Dense of parameters in it, inputs of mean 0.5: mean of outputs -0.6, deviation 0.6
float16: normal from -3.5 to 3.2, mean -0.002, 29 of 10,000 beyond 3, 1024 values
float16: uniform 0 in 10 of 10,000, exponential to 7, laplace mean 0.005
float16: Dense of parameters in it, inputs of mean 0.5: mean of outputs -0.1, deviation 0.6
EXPECTED

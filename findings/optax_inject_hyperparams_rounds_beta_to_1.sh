#!/bin/bash
# optax.inject_hyperparams around Adam of BF16 parameters ends in NaN or never moves: it rounds every hyperparameter to their dtype, and 0.999 is 1.
#
# Seen with optax 0.2.8 and jax 0.10.2 on a CPU, Linux x86-64. inject_hyperparams is the way to change or log a learning rate. It takes the dtype of
# the first leaf of the parameters for all hyperparameters, beta2 = 0.999 becomes 1.0, and 1 - beta2^t, by which Adam divides, is 0. adam, adamw, lamb
# and nadam make NaN of every parameter at the first step; yogi and adabelief leave them where they are and report nothing; radam takes steps of
# another size. The same optimizers without inject_hyperparams train. The docstring lists hyperparam_dtype as an optional override, and does not say
# that its default is the parameters' dtype. Right: hyperparam_dtype=jnp.float32.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${OPTAX:-optax==0.2.8}" "${JAX:-jax==0.10.2}" "${JAXLIB:-jaxlib==0.10.2}"
cat > injected.py <<'PROGRAM'
import jax
import jax.numpy as jnp
import optax


def weight(optimizer: optax.GradientTransformation, dtype: jnp.dtype) -> float:
    """A weight that starts at 1, after 100 steps of 0.01 along a gradient of 1."""
    params = {"weight": jnp.ones((4, 4), dtype)}
    state = optimizer.init(params)
    for _ in range(100):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    return float(params["weight"][0, 0])


for name in ("adam", "adamw", "lamb", "nadam", "adabelief", "yogi", "radam", "sgd"):
    create = getattr(optax, name)
    injected = optax.inject_hyperparams(create)(learning_rate=1e-2)
    wide = optax.inject_hyperparams(create, hyperparam_dtype=jnp.float32)(learning_rate=1e-2)
    print(
        f"{name}: FP32 {weight(injected, jnp.float32):.2f}; BF16 {weight(injected, jnp.bfloat16):.2f}, "
        f"not injected {weight(create(1e-2), jnp.bfloat16):.2f}, with hyperparam_dtype {weight(wide, jnp.bfloat16):.2f}"
    )
PROGRAM
JAX_PLATFORMS=cpu venv/bin/python -W ignore injected.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
adam: FP32 0.00; BF16 nan, not injected -0.06, with hyperparam_dtype -0.06
adamw: FP32 -0.00; BF16 nan, not injected -0.06, with hyperparam_dtype -0.06
lamb: FP32 0.37; BF16 nan, not injected 0.39, with hyperparam_dtype 0.39
nadam: FP32 -0.01; BF16 nan, not injected -0.06, with hyperparam_dtype -0.06
adabelief: FP32 -2.33; BF16 1.00, not injected -2.23, with hyperparam_dtype -2.33
yogi: FP32 0.01; BF16 1.00, not injected -0.06, with hyperparam_dtype -0.06
radam: FP32 0.81; BF16 -0.06, not injected 0.89, with hyperparam_dtype 0.88
sgd: FP32 0.00; BF16 -0.06, not injected -0.06, with hyperparam_dtype -0.06
EXPECTED

#!/bin/bash
# optax.inject_hyperparams rounds every hyperparameter to the gradients' dtype: in BF16 adam's b2 = 0.999 is 1, and the first step makes NaN.
#
# Seen with optax 0.2.8 and jax 0.10.2 on a CPU, Linux x86-64. inject_hyperparams(adam)(1e-3) is the usual way to change or log a learning rate during
# a run. It casts numbers to the dtype of the first gradient, so that b2 is 1, its bias correction 0 and all weights NaN, where adam(1e-3) itself
# trains the same BF16 weights. What does not become NaN is another run without a message: lion's b2 = 0.99 is 0.988, rmsprop's decay of 0.9
# 0.898, a learning rate is off by up to 0.4 %. A learning rate given as a schedule stays FP32. The docstring names hyperparam_dtype as an override,
# not what it overrides. Right: inject_hyperparams(adam, hyperparam_dtype=jax.numpy.float32).
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${OPTAX:-optax==0.2.8}" "${JAX:-jax==0.10.2}" ml_dtypes==0.6.0 numpy==2.4.6
cat > injected.py <<'PROGRAM'
import jax
import optax

OPTIMIZERS = {"adam": optax.adam, "lion": optax.lion, "rmsprop": optax.rmsprop}
FP32 = jax.numpy.float32
for dtype in ("float32", "bfloat16"):
    for name, optimizer in OPTIMIZERS.items():
        kinds = {"plain": optimizer, "injected": optax.inject_hyperparams(optimizer)}
        kinds["injected in float32"] = optax.inject_hyperparams(optimizer, hyperparam_dtype=FP32)
        for kind, make in kinds.items():
            transform = make(0.1)
            weight = jax.numpy.full(4, 2.0, dtype)
            state = transform.init(weight)
            for _ in range(10):
                updates, state = transform.update(weight, state, weight)
                weight = optax.apply_updates(weight, updates)
            decays = {key: f"{float(value):.4f}" for key, value in getattr(state, "hyperparams", {}).items() if key in ("b1", "b2", "decay")}
            print(f"{dtype}, {name}, {kind}: weight after 10 steps {float(weight[0]):.1f} {decays or ''}".rstrip())
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore injected.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32, adam, plain: weight after 10 steps 1.0
float32, adam, injected: weight after 10 steps 1.0 {'b1': '0.9000', 'b2': '0.9990'}
float32, adam, injected in float32: weight after 10 steps 1.0 {'b1': '0.9000', 'b2': '0.9990'}
float32, lion, plain: weight after 10 steps 1.0
float32, lion, injected: weight after 10 steps 1.0 {'b1': '0.9000', 'b2': '0.9900'}
float32, lion, injected in float32: weight after 10 steps 1.0 {'b1': '0.9000', 'b2': '0.9900'}
float32, rmsprop, plain: weight after 10 steps 0.6
float32, rmsprop, injected: weight after 10 steps 0.6 {'decay': '0.9000'}
float32, rmsprop, injected in float32: weight after 10 steps 0.6 {'decay': '0.9000'}
bfloat16, adam, plain: weight after 10 steps 1.0
bfloat16, adam, injected: weight after 10 steps nan {'b1': '0.8984', 'b2': '1.0000'}
bfloat16, adam, injected in float32: weight after 10 steps 1.0 {'b1': '0.9000', 'b2': '0.9990'}
bfloat16, lion, plain: weight after 10 steps 1.0
bfloat16, lion, injected: weight after 10 steps 1.0 {'b1': '0.8984', 'b2': '0.9883'}
bfloat16, lion, injected in float32: weight after 10 steps 1.0 {'b1': '0.9000', 'b2': '0.9900'}
bfloat16, rmsprop, plain: weight after 10 steps 0.6
bfloat16, rmsprop, injected: weight after 10 steps 0.6 {'decay': '0.8984'}
bfloat16, rmsprop, injected in float32: weight after 10 steps 0.6 {'decay': '0.9000'}
EXPECTED

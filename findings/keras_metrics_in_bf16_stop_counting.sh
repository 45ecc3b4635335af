#!/bin/bash
# Keras with set_floatx("bfloat16") reports an accuracy of 1.0 where 0.5 is right, and a loss of 4.0 for 2.25: its metrics count in BF16.
#
# Seen with keras 3.15.1 and jax 0.10.2 on a CPU, Linux x86-64. Totals and counts of keras.metrics are of the dtype floatx, and stop growing, a count
# of batches or samples of 1 at 256, a total of 2.25s at 1,024. `fit` and `evaluate` report what is left from a few hundred batches of one sample on,
# and callbacks stop and save by it. The weights are unaffected. Nothing is reported, and the docstring of set_floatx warns of float16 only. Right:
# set_dtype_policy("bfloat16") or, for FP32 weights, "mixed_bfloat16"; both keep metrics in FP32.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${KERAS:-keras==3.15.1}" "${JAX:-jax==0.10.2}" numpy==2.4.6
cat > metrics.py <<'PROGRAM'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

x, y = np.zeros((2000, 4), np.float32), np.full((2000, 1), 1.5, np.float32)


def reported(name: str) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros", bias_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    loss = model.fit(x, y, batch_size=1, verbose=0).history["loss"][0]
    evaluated = model.evaluate(x, y, batch_size=1, verbose=0)
    accuracy = keras.metrics.BinaryAccuracy()
    for i in range(2000):
        accuracy.update_state(np.ones((1, 1)), np.full((1, 1), i % 2))
    print(f"{name}: loss of 2.25 in fit {loss:.2f}, in evaluate {evaluated:.2f}, accuracy of 0.5 {float(accuracy.result()):.2f}")


reported("float32")
for dtype in ("mixed_bfloat16", "bfloat16"):
    keras.config.set_dtype_policy(dtype)
    reported(f'set_dtype_policy("{dtype}")')
keras.config.set_dtype_policy("float32")
for dtype in ("float16", "bfloat16"):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    reported(f'set_floatx("{dtype}")')
PROGRAM
venv/bin/python -W ignore metrics.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: loss of 2.25 in fit 2.25, in evaluate 2.25, accuracy of 0.5 0.50
set_dtype_policy("mixed_bfloat16"): loss of 2.25 in fit 2.25, in evaluate 2.25, accuracy of 0.5 0.50
set_dtype_policy("bfloat16"): loss of 2.25 in fit 2.25, in evaluate 2.25, accuracy of 0.5 0.50
set_floatx("float16"): loss of 2.25 in fit 2.03, in evaluate 2.03, accuracy of 0.5 0.50
set_floatx("bfloat16"): loss of 2.25 in fit 4.00, in evaluate 4.00, accuracy of 0.5 1.00
EXPECTED

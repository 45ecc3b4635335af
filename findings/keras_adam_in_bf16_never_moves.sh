#!/bin/bash
# Keras 3: Adam and AdamW of a model in BF16 (`dtype="bfloat16"`, set_floatx) change no weight, at any learning rate: beta_2 = 0.999 is 1 in BF16.
#
# Seen with keras 3.15.1 and jax 0.10.2 on a CPU, Linux x86-64; the torch backend (torch 2.13.0) is the same. update_step casts both betas to the
# variable's dtype, and its bias correction sqrt(1 - beta_2^step) is then 0 for good. The moments move, the run takes its time, and the weights that
# it saves are those that it loaded: fine-tuning a BF16 checkpoint like this trains nothing, without a message. Nadam ends in NaN. Adamax, RMSprop,
# SGD, Lion and Adafactor learn. The rounded beta is 1 from 0.9981 on. Right: "mixed_bfloat16", whose variables are FP32, or beta_2 = 0.99. The
# docstrings of Adam and of dtype policies do not mention it.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${KERAS:-keras==3.15.1}" "${JAX:-jax==0.10.2}" numpy==2.4.6
cat > fits.py <<'PROGRAM'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
y = x.sum(1, keepdims=True)
optimizers = keras.optimizers
for policy in ("mixed_bfloat16", "bfloat16"):
    for name, make in (
        ("SGD", optimizers.SGD),
        ("Lion", optimizers.Lion),
        ("Adam", optimizers.Adam),
        ("AdamW", optimizers.AdamW),
        ("Adam, beta_2 = 0.99", lambda learning_rate: optimizers.Adam(learning_rate, beta_2=0.99)),
    ):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(32, activation="relu", dtype=policy), keras.layers.Dense(1, dtype=policy)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile(optimizer=make(learning_rate=0.01), loss="mse")
        before = model.get_weights()
        model.fit(x, y, epochs=20, verbose=0)
        moved = np.concatenate([(a != b).ravel() for a, b in zip(before, model.get_weights(), strict=True)]).mean()
        print(f"{policy}, {name}: {'no weight has' if moved == 0 else 'most weights have' if moved > 0.9 else moved} moved in 320 steps")
PROGRAM
venv/bin/python -W ignore fits.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
mixed_bfloat16, SGD: most weights have moved in 320 steps
mixed_bfloat16, Lion: most weights have moved in 320 steps
mixed_bfloat16, Adam: most weights have moved in 320 steps
mixed_bfloat16, AdamW: most weights have moved in 320 steps
mixed_bfloat16, Adam, beta_2 = 0.99: most weights have moved in 320 steps
bfloat16, SGD: most weights have moved in 320 steps
bfloat16, Lion: most weights have moved in 320 steps
bfloat16, Adam: no weight has moved in 320 steps
bfloat16, AdamW: no weight has moved in 320 steps
bfloat16, Adam, beta_2 = 0.99: most weights have moved in 320 steps
EXPECTED

#!/bin/bash
# Keras on TensorFlow, "mixed_bfloat16" on a CPU: biases of Dense, EinsumDense and Conv get gradients that stop at 256 times one token's.
#
# Seen with keras 3.15.1 and tensorflow-cpu 2.21.0 on Linux x86-64, in fit at its defaults, eager and with jit_compile. Variables are FP32, as the
# policy promises, but Keras adds a bias by tf.nn.bias_add, whose gradient TensorFlow sums in BF16, where 256 + 1 is 256. With 32,768 tokens in a
# batch a bias moves a 128th of what it should; of gradients with mean 0.02 and deviation 0.1 of 65,536 tokens the gradient is off by 80 %, where
# rounding once costs 0.2 %. Gradients of kernels and of LayerNormalization, Embedding and PReLU are right, and so is mixed_float16, which hides it:
# the model trains, and its biases nearly stay where they started. Nothing is reported, and the docstring of DTypePolicy does not name it. Right:
# Keras on jax or torch, or use_bias=False and an addition in FP32.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes and 2 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TENSORFLOW:-tensorflow-cpu==2.21.0}" "${KERAS:-keras==3.15.1}" numpy==2.4.6
cat > biases.py <<'PROGRAM'
import os

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3")
import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def gradients(layer: keras.layers.Layer, x: np.ndarray, weights: np.ndarray | float = 1.0) -> list[tf.Tensor]:
    """Of the sum of the layer's outputs times `weights`, in FP32, for its FP32 variables; the bias is the last."""
    inputs = tf.constant(x)
    layer(inputs[:1])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(layer(inputs), tf.float32) * weights)
    return tape.gradient(loss, layer.trainable_variables)


rows, image = np.ones((4096, 8), np.float32), np.ones((4, 32, 32, 3), np.float32)
for name, x, create in (
    ("Dense", rows, lambda policy: layers.Dense(4, dtype=policy)),
    ("EinsumDense", rows, lambda policy: layers.EinsumDense("ab,bc->ac", 4, bias_axes="c", dtype=policy)),
    ("Conv2D", image, lambda policy: layers.Conv2D(4, 1, dtype=policy)),
    ("LayerNormalization", rows, lambda policy: layers.LayerNormalization(dtype=policy)),
):
    found = [f"{policy} {float(gradients(create(policy), x)[-1][0]):.0f}" for policy in ("float32", "mixed_float16", "mixed_bfloat16")]
    print(f"{name}, gradient of a bias over 4,096 tokens: {', '.join(found)}")

random = np.random.default_rng(0)
x, weights = random.normal(size=(65536, 8)).astype("f4"), random.normal(0.02, 0.1, (65536, 64)).astype("f4")
low, wide = (gradients(layers.Dense(64, dtype=policy, kernel_initializer="ones"), x, weights) for policy in ("mixed_bfloat16", "float32"))
for name, a, b in zip(("kernel", "bias"), low, wide):
    print(f"random gradients of 65,536 tokens, {name}: off by {100 * float(tf.norm(a - b) / tf.norm(b)):.1f} %")

for policy in ("float32", "mixed_bfloat16"):
    keras.mixed_precision.set_dtype_policy(policy)
    model = keras.Sequential([layers.Input((512, 8)), layers.Dense(4, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, output: keras.ops.mean(output - y))
    model.fit(np.ones((64, 512, 8), "f4"), np.zeros((64, 512, 4), "f4"), batch_size=64, verbose=0)
    kernel, bias = (float(variable.numpy().flat[0]) for variable in model.layers[-1].trainable_variables)
    print(f"fit, {policy}, one step: kernel {kernel:.4f}, bias {bias:.4f}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore biases.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
Dense, gradient of a bias over 4,096 tokens: float32 4096, mixed_float16 4096, mixed_bfloat16 256
EinsumDense, gradient of a bias over 4,096 tokens: float32 4096, mixed_float16 4096, mixed_bfloat16 256
Conv2D, gradient of a bias over 4,096 tokens: float32 4096, mixed_float16 4096, mixed_bfloat16 256
LayerNormalization, gradient of a bias over 4,096 tokens: float32 4096, mixed_float16 4096, mixed_bfloat16 4096
random gradients of 65,536 tokens, kernel: off by 0.3 %
random gradients of 65,536 tokens, bias: off by 80.5 %
fit, float32, one step: kernel -0.2500, bias -0.2500
fit, mixed_bfloat16, one step: kernel -0.2500, bias -0.0020
EXPECTED

#!/bin/bash
# safetensors 0.8.0 writes NumPy arrays that are transposed or strided views with the numbers in another order; 0.7.0 wrote them right.
#
# Seen with safetensors 0.8.0, 0.7.0 and numpy 2.4.6 on Linux x86-64, in safetensors.numpy.save and save_file, any dtype. `{"weight": kernel.T}` is
# how a Dense layer of JAX, Keras or TensorFlow becomes a Linear of torch. 0.8.0 gives the writer the array's shape with a pointer to its memory,
# which holds the numbers in the order of `kernel`: the file has the right names, shapes and dtypes, loads everywhere, and is another matrix. A column
# of a larger array (a fused QKV that is split) and arrays in Fortran's order are written wrongly, too. The docstring says that tensors need to be
# contiguous, as before; safetensors.torch refuses others by name, and safetensors.flax copies them. Nothing is reported. Right:
# numpy.ascontiguousarray, on every array that a converter writes.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > written.py <<'PROGRAM'
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
for name, array in (("kernel", kernel), ("kernel.T", kernel.T), ("kernel[:, :2]", kernel[:, :2]), ("in Fortran's order", np.asfortranarray(kernel))):
    save_file({"weight": array}, "model.safetensors")
    found = load_file("model.safetensors")["weight"]
    print(f"safetensors {safetensors.__version__}, {name}: {array.tolist()} is read as {found.tolist()}")
kernel = np.random.default_rng(0).normal(size=(1024, 4096)).astype(np.float32)
save_file({"weight": kernel.T}, "model.safetensors")
found = load_file("model.safetensors")["weight"]
print(f"safetensors {safetensors.__version__}, 1,024 x 4,096 transposed: {np.mean(found != kernel.T):.1%} of the numbers are others")
PROGRAM
for version in "${SAFETENSORS:-safetensors==0.8.0}" safetensors==0.7.0; do
    "${PYTHON:-python3}" -m venv --clear venv
    venv/bin/python -m pip install --quiet "$version" numpy==2.4.6
    venv/bin/python written.py 2> log | tee -a seen || { cat log; exit 1; }
done
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
safetensors 0.8.0, kernel: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] is read as [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
safetensors 0.8.0, kernel.T: [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] is read as [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
safetensors 0.8.0, kernel[:, :2]: [[0.0, 1.0], [3.0, 4.0]] is read as [[0.0, 1.0], [2.0, 3.0]]
safetensors 0.8.0, in Fortran's order: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] is read as [[0.0, 3.0, 1.0], [4.0, 2.0, 5.0]]
safetensors 0.8.0, 1,024 x 4,096 transposed: 100.0% of the numbers are others
safetensors 0.7.0, kernel: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] is read as [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
safetensors 0.7.0, kernel.T: [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] is read as [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
safetensors 0.7.0, kernel[:, :2]: [[0.0, 1.0], [3.0, 4.0]] is read as [[0.0, 1.0], [3.0, 4.0]]
safetensors 0.7.0, in Fortran's order: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] is read as [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
safetensors 0.7.0, 1,024 x 4,096 transposed: 0.0% of the numbers are others
EXPECTED

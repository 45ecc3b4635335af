#!/bin/bash
# megatron-core's IndexedDatasetBuilder writes a tensor's token 70,000 to a uint16 dataset as 4,464; from a Python list the same is an error.
#
# Seen with megatron-core 0.16.1, torch 2.13.0 and numpy 2.4.6 on a CPU, Linux x86-64, in add_item and add_document, of tensors and of NumPy arrays.
# NumPy checks Python's integers against the dtype and wraps those of arrays, and add_item takes tensors only. A vocabulary of more than 65,536 with
# dtype=numpy.uint16, as in scripts that were written for GPT-2's, therefore becomes a dataset of other, valid tokens, -1 becomes 65,535, and training
# on it runs without a message. DType.optimal_dtype(vocab_size), which core's own preprocessing calls, is right if vocab_size counts added tokens,
# too. The docstrings name no range.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${CORE:-megatron-core==0.16.1}" numpy==2.4.6
cat > written.py <<'PROGRAM'
import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

tokens = [1, 65535, 65536, 70000, 128255]
for kind, given in (("list", tokens), ("array", np.array(tokens)), ("tensor", torch.tensor(tokens))):
    for dtype in (np.int32, np.uint16):
        for method in ("add_item", "add_document"):
            if (kind, method) in (("list", "add_item"), ("array", "add_item")):
                continue  # add_item is for tensors
            name = f"{kind}_{dtype.__name__}_{method}"
            builder = IndexedDatasetBuilder(f"{name}.bin", dtype=dtype)
            try:
                if method == "add_item":
                    builder.add_item(given)
                    builder.end_document()
                else:
                    builder.add_document(given, [len(given)])
            except OverflowError as error:
                print(f"{dtype.__name__}, {method} of a {kind}: refused, {error}")
                continue
            builder.finalize(f"{name}.idx")
            dataset = IndexedDataset(name)
            print(f"{dtype.__name__}, {method} of a {kind}: {dataset[0].tolist()}")
PROGRAM
venv/bin/python -W ignore written.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
int32, add_document of a list: [1, 65535, 65536, 70000, 128255]
uint16, add_document of a list: refused, Python integer 65536 out of bounds for uint16
int32, add_document of a array: [1, 65535, 65536, 70000, 128255]
uint16, add_document of a array: [1, 65535, 0, 4464, 62719]
int32, add_item of a tensor: [1, 65535, 65536, 70000, 128255]
int32, add_document of a tensor: [1, 65535, 65536, 70000, 128255]
uint16, add_item of a tensor: [1, 65535, 0, 4464, 62719]
uint16, add_document of a tensor: [1, 65535, 0, 4464, 62719]
EXPECTED

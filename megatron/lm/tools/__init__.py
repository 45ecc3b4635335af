"""Command-line tools next to the trainer: `python -m megatron.lm.tools.NAME --help`.

before a run    plan (the grids that fit a cluster, and their times), prepare_text (real text and its tokenizer, downloaded),
                preprocess_data (text of one's own -> datasets)
after it        report and loss_compare (runs side by side), inspect_scales (what the precision recorder saw), evaluate (bits per byte)
to elsewhere    convert_checkpoint, with convert/ (Hugging Face, safetensors, FP8 for inference)
of all of them  arguments and files of `megatron.lm.shell`, paired_difference of `megatron.lm.evaluation`

Benchmarks, reproduced tables, the quick start and what judges the tests need a checkout and stay in tools/ there.
"""

import sys
from importlib.util import find_spec

from megatron.lm.errors import missing

# As a command (runpy imports this before the tool): a tool's own imports would end in a traceback that does not name the interpreter.
if sys.argv[:1] == ["-m"] and (lacking := [name for name in ("torch", "numpy") if find_spec(name) is None]):
    print(f"error: {missing(lacking[0])}", file=sys.stderr)
    sys.exit(2)

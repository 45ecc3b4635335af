#!/bin/bash
# A tokenizer saved by transformers after a call with truncation=True truncates in datatrove: half of a data set's tokens are gone without a word.
#
# Seen with transformers 5.24.0, datatrove 0.10.1 and tokenizers 0.23.3 on Linux x86-64. The docstring of set_truncation_and_padding says that
# settings are "reset to no padding / truncation" behind a call. They are kept, and save_pretrained writes them into tokenizer.json, so that a
# checkpoint's tokenizer has the maximum length of whatever was tokenized last, an SFT set of 64 tokens here. transformers sets them anew at each
# call. datatrove's DocumentTokenizer takes the file as it is: documents end after 64 tokens, or are padded to the longest of their batch with
# what may be the end-of-document token, and that is training data. Right: tokenizer.backend_tokenizer.no_truncation() and no_padding() before
# save_pretrained; `megatron/lm` calls both on every file that it reads.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TRANSFORMERS:-transformers==5.24.0}" "${DATATROVE:-datatrove[io,processing]==0.10.1}" tokenizers==0.23.3 numpy==2.4.6
cat > tokenized.py <<'PROGRAM'
from pathlib import Path

import numpy
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END = "<|endoftext|>"
texts = [f"the quick brown fox jumps over lazy dog number {number} " * (2 + number % 20) for number in range(200)]
trained = Tokenizer(models.BPE())
trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=[END], show_progress=False, initial_alphabet=alphabet))
calls = {"no call": None, "truncation=True, max_length=64": {"truncation": True, "max_length": 64}, "padding=True": {"padding": True}}
for name, options in calls.items():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END, pad_token=END)
    if options is not None:
        tokenizer(texts[:4], **options)
    tokenizer.save_pretrained(name)
    tokens = sum(len(ids) for ids in AutoTokenizer.from_pretrained(name)(texts).input_ids) + len(texts)
    step = DocumentTokenizer(f"{name}/tokens", tokenizer_name_or_path=f"{name}/tokenizer.json", eos_token=END, shuffle_documents=False)
    step.run(Document(text=text, id=str(number)) for number, text in enumerate(texts))
    (path,) = Path(f"{name}/tokens").glob("*.ds")
    written = numpy.fromfile(path, dtype=numpy.uint16)
    ends = int((written == trained.token_to_id(END)).sum())
    print(f"{name}: transformers counts {tokens} tokens with one end per text; datatrove writes {len(written)}, {ends} of them ends of 200 texts")
PROGRAM
HF_HUB_OFFLINE=1 venv/bin/python -W ignore tokenized.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
no call: transformers counts 23400 tokens with one end per text; datatrove writes 23400, 200 of them ends of 200 texts
truncation=True, max_length=64: transformers counts 23400 tokens with one end per text; datatrove writes 11700, 200 of them ends of 200 texts
padding=True: transformers counts 23400 tokens with one end per text; datatrove writes 42400, 19200 of them ends of 200 texts
EXPECTED

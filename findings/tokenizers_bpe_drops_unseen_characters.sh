#!/bin/bash
# A byte-level BPE that `tokenizers` trains without initial_alphabet drops bytes that its training text lacks: "pays 25 € for" becomes "pays   for".
#
# Seen with tokenizers 0.23.3 and transformers 5.24.0 on Linux x86-64. ByteLevel is to make every text encodable; but BpeTrainer keeps only the
# bytes that it saw, and a BPE without unk_token, which byte-level models do not have, leaves the others out. Digits, capitals, accents and signs
# that a sample for training a tokenizer happens to lack vanish from training data and prompts, without a message, in transformers too. The
# docstrings of BPE and BpeTrainer describe unk_token and initial_alphabet, not what happens without both. Right: initial_alphabet =
# ByteLevel.alphabet(), which transformers' train_new_from_iterator adds by itself. `megatron/lm` refuses a text of which a tokenizer drops characters.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TOKENIZERS:-tokenizers==0.23.3}" "${TRANSFORMERS:-transformers==5.24.0}" numpy==2.4.6
cat > dropped.py <<'PROGRAM'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["The naïve fox pays 25 € for 7 dogs\n", "x = y[0] + 1  # 12 % off"]
for name, alphabet in (("initial_alphabet", pre_tokenizers.ByteLevel.alphabet()), ("default", [])):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog "] * 50, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        covered = len({place for begin, end in encoding.offsets for place in range(begin, end)})
        same = wrapped(text).input_ids == encoding.ids
        print(f"{name}: {text!r} -> {tokenizer.decode(encoding.ids)!r}, {covered} of {len(text)} characters; transformers the same: {same}")
PROGRAM
venv/bin/python -W ignore dropped.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
initial_alphabet: 'The naïve fox pays 25 € for 7 dogs\n' -> 'The naïve fox pays 25 € for 7 dogs\n', 35 of 35 characters; transformers the same: True
initial_alphabet: 'x = y[0] + 1  # 12 % off' -> 'x = y[0] + 1  # 12 % off', 24 of 24 characters; transformers the same: True
default: 'The naïve fox pays 25 € for 7 dogs\n' -> 'he nave fox pays   for  dogs', 27 of 35 characters; transformers the same: True
default: 'x = y[0] + 1  # 12 % off' -> 'x  y       off', 14 of 24 characters; transformers the same: True
EXPECTED

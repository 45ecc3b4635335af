#!/bin/bash
# lm-eval computes and adds the log-likelihoods of a BF16 model in BF16: answers 1 nat apart tie, and the first of them counts as the model's choice.
#
# Seen with lm-eval 0.4.13, transformers 5.24.0 and torch 2.13.0 on a CPU, Linux x86-64. `--model hf` takes the file's dtype, BF16 for most, takes
# log_softmax of its BF16 logits and adds an answer's tokens to one BF16 number: below -128 multiples of 1, below -256 of 2, and below -8192
# of 64, which is what a window of rolling perplexity has. Answers of 30 tokens that differ in the last three tie in a third of the questions
# of a random model here, and another answer is chosen in a sixth. Nothing is reported. With softmax_dtype=float32 in model_args nothing ties.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${LM_EVAL:-lm_eval==0.4.13}" transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cat > answers.py <<'PROGRAM'
import random

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
random.seed(0)
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w1", pad_token="w2")
sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.05)).bfloat16().eval()


def text(tokens: int) -> str:
    return " ".join(f"w{random.randrange(3, 512)}" for _ in range(tokens))


asked = []
for _ in range(100):  # questions, 4 answers each
    question, start = text(10), text(27)
    asked += [(question, f" {start} {text(3)}") for _ in range(4)]
chosen = {}
for dtype in (None, "float32"):
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu", softmax_dtype=dtype)
    found = lm.loglikelihood([Instance("loglikelihood", {}, one, i) for i, one in enumerate(asked)], disable_tqdm=True)
    x = torch.tensor([likelihood for likelihood, _ in found]).view(100, 4)
    ties, chosen[dtype] = int((x == x.max(1, keepdim=True).values).sum(1).gt(1).sum()), x.argmax(1)
    print(f"softmax_dtype {dtype}: {100 * int((x == x.round()).sum()) // 400} % of likelihoods are integers, more than 20 ties of 100: {ties > 20}")
    print("  such as", x[0].tolist(), ties, "ties", file=open("log", "a"))
other = int((chosen[None] != chosen["float32"]).sum())
print("another answer in more than 10 of 100 questions:", other > 10)
print(other, "others", file=open("log", "a"))
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore answers.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
softmax_dtype None: 100 % of likelihoods are integers, more than 20 ties of 100: True
softmax_dtype float32: 0 % of likelihoods are integers, more than 20 ties of 100: False
another answer in more than 10 of 100 questions: True
EXPECTED

#!/bin/bash
# transformers' Trainer with gradient_accumulation_steps=8 gives BERT, T5, BART and every classifier 8 times their gradient, and routers theirs.
#
# Seen with transformers 5.24.0, accelerate 1.15.0 and torch 2.13.0 on a CPU, Linux x86-64. A model whose forward has **kwargs is taken to divide its
# loss by num_items_in_batch itself, so that the Trainer does not divide by the steps. Causal language models do; models whose loss is the mean of a
# micro-batch, and that drop the count, do not: masked language models, encoder-decoders with their own loss, classification of sequences and tokens,
# regression. The auxiliary loss of Mixtral and others is added to the divided loss as it is, and its coefficient counts once per step. Adam hides
# the factor, but clipping at the default norm of 1 cuts what needs no cut, FP16's scaled losses overflow sooner, SGD takes larger steps, and
# the logged loss, 8 times the evaluated one, is all that shows it. Known: huggingface/transformers#47688, open since July 2026, and #48690, which
# is the auxiliary loss times the number of processes. Right, but for routers: `trainer.loss_is_scaled_for_ga = False` before train().
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRANSFORMERS:-transformers==5.24.0}" accelerate==1.15.0 numpy==2.4.6
cat > accumulated.py <<'PROGRAM'
import contextlib
import sys

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
BART = {"vocab_size": 64, "d_model": 32, "dropout": 0.0, "forced_eos_token_id": None, "decoder_start_token_id": 0, "max_position_embeddings": 32}
BART |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in {"layers": 1, "attention_heads": 2, "ffn_dim": 64}.items()}
torch.manual_seed(0)
tokens, values = torch.randint(1, 64, (8, 10)), torch.randn(8)
classes, tags = torch.randint(0, 3, (8,)), torch.randint(0, 3, (8, 10))


class Kept(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **_) -> None:
        self.gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).double()


def gradient(kind: str, config: PretrainedConfig, labels: Tensor, steps: int, inputs: Tensor, divides: bool) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    model, kept = getattr(transformers, kind)(config), Kept()
    silent = {"use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0}
    sizes = {"max_steps": 1, "per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
    data = [{"input_ids": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]
    trainer = Trainer(model, TrainingArguments("out", **sizes, **silent), train_dataset=data, callbacks=[kept])
    trainer.loss_is_scaled_for_ga = False if divides else None
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return kept.gradient, next(row["loss"] for row in trainer.state.log_history if "loss" in row)


def show(kind: str, config: str, labels: Tensor, settings: dict, what: str, divides: bool = False) -> None:
    made = getattr(transformers, config)(**settings)
    whole, loss = gradient(kind, made, labels, 1, tokens, divides)
    parts, logged = gradient(kind, made, labels, 8, tokens, divides)
    ratio = float((parts * whole).sum() / whole.square().sum())
    print(f"{kind}, {what}: gradient times {ratio:.1f}, logged loss times {logged / loss:.1f}", flush=True)


show("LlamaForCausalLM", "LlamaConfig", tokens, SMALL, "causal")
show("BertForMaskedLM", "BertConfig", tokens, BERT, "masked")
show("T5ForConditionalGeneration", "T5Config", tokens, T5, "sequence to sequence")
show("BartForConditionalGeneration", "BartConfig", tokens, BART, "sequence to sequence")
for family, settings in (("Bert", BERT), ("Roberta", BERT), ("DebertaV2", BERT), ("Llama", SMALL)):
    show(f"{family}ForSequenceClassification", f"{family}Config", classes, {**settings, "num_labels": 3}, "3 classes")
    show(f"{family}ForSequenceClassification", f"{family}Config", values, {**settings, "num_labels": 1}, "regression")
    show(f"{family}ForTokenClassification", f"{family}Config", tags, {**settings, "num_labels": 3}, "tags")
show("BertForMaskedLM", "BertConfig", tokens, BERT, "masked, loss_is_scaled_for_ga = False", divides=True)
same = tokens[:1].expand(8, -1)  # all rows alike, so that the router's loss of a row is that of the batch
experts, routers = {"num_key_value_heads": 2, "num_local_experts": 4}, {}
for steps in (1, 8):
    configs = [transformers.MixtralConfig(**SMALL, **experts, output_router_logits=True, router_aux_loss_coef=c) for c in (0.0, 1.0)]
    without, with_loss = (gradient("MixtralForCausalLM", config, same, steps, same, False)[0] for config in configs)
    routers[steps] = with_loss - without
ratio = float((routers[8] * routers[1]).sum() / routers[1].square().sum())
print(f"MixtralForCausalLM, the auxiliary loss: gradient times {ratio:.1f}")
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore accumulated.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
LlamaForCausalLM, causal: gradient times 1.0, logged loss times 1.0
BertForMaskedLM, masked: gradient times 8.0, logged loss times 8.0
T5ForConditionalGeneration, sequence to sequence: gradient times 8.0, logged loss times 8.0
BartForConditionalGeneration, sequence to sequence: gradient times 8.0, logged loss times 8.0
BertForSequenceClassification, 3 classes: gradient times 8.0, logged loss times 8.0
BertForSequenceClassification, regression: gradient times 8.0, logged loss times 8.0
BertForTokenClassification, tags: gradient times 8.0, logged loss times 8.0
RobertaForSequenceClassification, 3 classes: gradient times 8.0, logged loss times 8.0
RobertaForSequenceClassification, regression: gradient times 8.0, logged loss times 8.0
RobertaForTokenClassification, tags: gradient times 8.0, logged loss times 8.0
DebertaV2ForSequenceClassification, 3 classes: gradient times 8.0, logged loss times 8.0
DebertaV2ForSequenceClassification, regression: gradient times 8.0, logged loss times 8.0
DebertaV2ForTokenClassification, tags: gradient times 8.0, logged loss times 8.0
LlamaForSequenceClassification, 3 classes: gradient times 8.0, logged loss times 8.0
LlamaForSequenceClassification, regression: gradient times 8.0, logged loss times 8.0
LlamaForTokenClassification, tags: gradient times 8.0, logged loss times 8.0
BertForMaskedLM, masked, loss_is_scaled_for_ga = False: gradient times 1.0, logged loss times 1.0
MixtralForCausalLM, the auxiliary loss: gradient times 8.0
EXPECTED

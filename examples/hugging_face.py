"""A Hugging Face model at O2, saved so that `from_pretrained` reads it: python examples/hugging_face.py [FOLDER]

Requires transformers. The Llama here is small and random; use `AutoModelForCausalLM.from_pretrained(...)` instead for a real model.
"""

import copy
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(device)

plain = copy.deepcopy(model)
plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), recipe="O2")

for step in range(61):
    start = torch.randint(64, (16, 1), device=device)
    tokens = (start + 5 * torch.arange(16, device=device)) % 64
    losses = []
    for llama, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):  # the second in FP32, to compare
        loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step:2}  loss {losses[0]:.4f}  in FP32 {losses[1]:.4f}")

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
model.save_pretrained(folder)  # plain weights
reloaded = LlamaForCausalLM.from_pretrained(folder).to(device)
print(f"{folder} reloaded: loss {reloaded(input_ids=tokens, labels=tokens).loss.item():.4f}")

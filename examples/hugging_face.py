"""A Hugging Face model at O2, saved so that `from_pretrained` reads it: python examples/hugging_face.py [FOLDER]

Requires transformers. The Llama here is small and random; use `AutoModelForCausalLM.from_pretrained(...)` instead for a real model.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(device)

model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), recipe="O2")

for step in range(61):
    start = torch.randint(64, (16, 1), device=device)
    tokens = (start + 5 * torch.arange(16, device=device)) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
model.save_pretrained(folder)  # plain weights
reloaded = LlamaForCausalLM.from_pretrained(folder).to(device)
print(f"{folder} reloaded: loss {reloaded(input_ids=tokens, labels=tokens).loss.item():.4f}")

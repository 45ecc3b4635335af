#!/bin/bash
# transformers rounds the routers' FP32 correction biases of some mixtures of experts to BF16 when it loads them, and other experts are chosen.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, Linux x86-64, from_pretrained(dtype=torch.bfloat16) of a file whose biases are FP32.
# DeepSeek-V3's and GLM-4's classes keep `e_score_correction_bias` in FP32; MiniMax-M2's, Laguna's and LongCat-Flash's do not, and say nothing.
# Training moves such a bias by 1e-3 or so per step, but BF16 has steps of 0.03 from 4 to 8: biases that balance the experts become equal, and
# the model routes by scores that it never had. save_pretrained writes the rounded ones. Here the logits of 495, 76 and 138 of 512 tokens
# change when the file's biases are put back.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRANSFORMERS:-transformers==5.24.0}" safetensors==0.8.0 numpy==2.4.6
cat > biases.py <<'PROGRAM'
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
families = {
    "deepseek_v3": {**heads, **experts, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "glm4_moe": {**experts, "n_routed_experts": 8, "first_k_dense_replace": 0, "head_dim": 8, "num_key_value_heads": 2},
    "minimax_m2": {"num_experts_per_tok": 2, "num_local_experts": 8, "head_dim": 8, "num_key_value_heads": 2},
    "laguna": {**experts, "num_experts": 8, "num_key_value_heads": 2},
    "longcat_flash": {**heads, "n_routed_experts": 8, "moe_topk": 2, "zero_expert_num": 0, "num_layers": 1, "head_dim": 8},
}
families["longcat_flash"] |= {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 32}


def biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in tensors.items() if name.endswith("e_score_correction_bias")}


for family, settings in families.items():
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **settings)).save_pretrained(family)
    file = f"{family}/model.safetensors"
    tensors = {name: x.bfloat16() for name, x in load_file(file).items()}
    written = torch.arange(8) * 1e-3 + 5
    save_file(tensors | {name: written.clone() for name in biases(tensors)}, file, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.bfloat16)
    x = next(iter(biases(model.state_dict()).values()))
    tokens = torch.randint(64, (1, 512))
    y = model(tokens).logits
    for module in model.modules():
        for table in (module._buffers, module._parameters):
            for name in biases(table):
                table[name] = torch.nn.Parameter(written, requires_grad=False)
    others = int((model(tokens).logits != y).any(-1).sum())
    print(f"{family}: {str(x.dtype)[6:]}, {len(x.unique())} of 8 numbers; more than 50 of 512 tokens change with the file's: {others > 50}")
    print(others, "tokens", file=open("log", "a"))
PROGRAM
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1 venv/bin/python -W ignore biases.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
deepseek_v3: float32, 8 of 8 numbers; more than 50 of 512 tokens change with the file's: False
glm4_moe: float32, 8 of 8 numbers; more than 50 of 512 tokens change with the file's: False
minimax_m2: bfloat16, 1 of 8 numbers; more than 50 of 512 tokens change with the file's: True
laguna: bfloat16, 1 of 8 numbers; more than 50 of 512 tokens change with the file's: True
longcat_flash: bfloat16, 1 of 8 numbers; more than 50 of 512 tokens change with the file's: True
EXPECTED

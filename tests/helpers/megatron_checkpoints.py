"""Checkpoints that plain megatron-core writes for the tests, and what it holds when it does."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LLAMA: dict[str, Any] = {"swiglu": True, "groups": 2, "rms": True, "bias": False}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned_absolute"},  # TP 1, tied, FP32
    "llama": {"tp": 2, "tied": False, **LLAMA},
    "tied": {"tp": 2, "optimizer": "plain", **LLAMA},
    "bf16": {"tp": 2, "tied": False, "dtype": "bfloat16", **LLAMA},
    "stages": {"pp": 2, "tied": False, "dtype": "bfloat16", "optimizer": "plain"},
    "squared": {"squared_relu": True, "positions": "none", "bias": False, "qkv_bias": True},
    "stretched": {"rope_scaling": True, "interpolation": 2},
    "dp_reshardable": {"sharding": "dp_reshardable", "dtype": "bfloat16", **LLAMA},
}
# The trainer's settings of the same models; `tiny.config` has the others.
SHAPE: dict[str, Any] = {"num_attention_heads": 4, "ffn_hidden_size": 64}
OF_LLAMA = SHAPE | {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True}
OF_LLAMA |= {"group_query_attention": True, "num_query_groups": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": SHAPE | {"position_embedding_type": "learned_absolute"},
    "llama": OF_LLAMA | UNTIED,
    "tied": OF_LLAMA,
    "bf16": OF_LLAMA | UNTIED,
    "stages": SHAPE | UNTIED,
    "squared": SHAPE | {"squared_relu": True, "position_embedding_type": "none", "disable_bias_linear": True, "add_qkv_bias": True},
    "stretched": SHAPE | {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
    "dp_reshardable": OF_LLAMA,
}
_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def whole(folder: Path, case: str, what: str = "write") -> dict[str, Tensor]:
    """The parameters, masters and moments of all ranks of the job in `folder`, under our keys, put together by this function alone."""
    s = CASES[case]
    ranks = [torch.load(folder / case / f"{what}_{rank}.pt")["held"] for rank in range(2)]
    if s.get("pp") == 2:
        return {key: x for rank, held in enumerate(ranks) for name, x in held.items() for key in [_of_stage(name, rank)]}
    if s.get("tp") != 2:
        return ranks[0]
    return {key: _joined(key, [held[key] for held in ranks], s.get("swiglu", False)) for key in ranks[0]}


def _of_stage(key: str, rank: int) -> str:
    return key.replace("decoder.layers.0.", f"decoder.layers.{rank}.")  # two layers, one on each stage


def _joined(key: str, parts: list[Tensor], swiglu: bool) -> Tensor:
    if key.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        halves = [part.chunk(2) for part in parts] if swiglu else [(part,) for part in parts]
        return torch.cat([half[i] for i in range(len(halves[0])) for half in halves])
    if key.endswith(_ROWS):
        return torch.cat(parts)
    return torch.cat(parts, 1) if key.endswith(_COLUMNS) else parts[0]


def logits(folder: Path, case: str, what: str = "write") -> Tensor:
    """FP32 logits [2, 16, padded vocabulary] of megatron-core."""
    return torch.load(folder / case / f"{what}_0.pt")["logits"]


def tokens() -> Tensor:
    """The tokens of these logits."""
    return torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(3))

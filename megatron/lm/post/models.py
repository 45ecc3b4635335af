"""Load models and tokenizers from transformers folders for fine-tuning and RLHF."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatron.lm.hugging_face import models as hugging_face
from megatron.lm.hugging_face.models import check_vocabulary
from msamp.nn.convert import convert
from msamp.nn.decoder_layer import fuse
from msamp.numerics.recipe import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
__all__ = [
    "DTYPES",
    "check_folder",
    "check_positions",
    "check_vocabulary",
    "freeze",
    "load_model",
    "load_tokenizer",
    "need",
    "reward_model",
    "scalar_model",
    "with_lora",
]
_EXTRAS = {"transformers": "transformers", "peft": "-e '.[integrations]', or peft", "gguf": "gguf", "accelerate": "accelerate"}


def need(name: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ValueError: with the install command, if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed ({error}): pip install {_EXTRAS[name]}") from None


def check_folder(folder: Path) -> None:
    """Raise a ValueError if a folder is not a transformers model, with the conversion command for a checkpoint of the trainer."""
    if (folder / "config.json").is_file():
        return
    if (folder / "latest_checkpointed_iteration.txt").is_file():
        raise ValueError(
            f"{folder} contains checkpoints of msamp pretrain: run msamp convert to-hf --load "
            f"{folder} --output FOLDER, then give that folder"
        )
    raise ValueError(f"{folder} has no config.json: give the folder of a transformers model, as save_pretrained writes it")


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in a model's folder and set its padding token. Code in the folder is not run.

    Raises:
        ValueError: if there is none, or it has no end-of-text token.
    """
    need("transformers")
    check_folder(folder)
    tokenizer = hugging_face.load_tokenizer(folder, padding_side="left")
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {folder} must be a fast one with an eos_token: add tokenizer.json and its configuration")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is always masked, so any token will do
    return tokenizer


def load_model(folder: Path, kind: str, dtype: torch.dtype, device: torch.device | str, *, fresh: str = "", **settings: Any) -> Any:
    """Load a transformers model.

    Args:
        folder: as `save_pretrained` writes it. Only safetensors are read, and code in the folder is not run.
        kind: the class of transformers, such as "AutoModelForCausalLM".
        dtype: of its parameters.
        device: of its parameters.
        fresh: a module that may be missing in the folder and is then initialized.
        settings: of its configuration.

    Raises:
        ValueError: if the folder has no such model, or tensors are missing (`megatron.lm.hugging_face.models`).
    """
    need("transformers")
    check_folder(folder)
    return hugging_face.load_model(folder, kind, dtype=dtype, fresh=fresh, attention="sdpa", **settings).to(device)


def check_positions(model: Any, length: int, flag: str) -> None:
    """Raise a ValueError if a model has fewer positions than the `length` tokens that `flag` sets."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"{flag} is {length}, but {type(model).__name__} has positions for {most} tokens: set {most} or less")


def scalar_model(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Load a value model: the layers of the model in `folder`, and a head with one output per token, initialized to 0."""
    model = load_model(folder, "AutoModelForTokenClassification", dtype, device, fresh="score", num_labels=1, classifier_dropout=0.0)
    nn.init.zeros_(model.score.weight)
    if model.score.bias is not None:
        nn.init.zeros_(model.score.bias)
    return model


def reward_model(folder: Path, dtype: torch.dtype, device: torch.device | str, tokenizer: Any) -> Any:
    """Load a reward model, with one output per sequence, which must use the policy's tokens.

    Raises:
        ValueError: if its tokenizer has other tokens, or its head is untrained or has several outputs.
    """
    theirs = load_tokenizer(folder)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the reward model's tokenizer ({folder}, {len(theirs)} tokens) is not the policy's ({len(tokenizer)} tokens): give a reward "
            "model that was trained with the policy's tokenizer"
        )
    model = load_model(folder, "AutoModelForSequenceClassification", dtype, device, pad_token_id=tokenizer.pad_token_id)
    if model.config.num_labels != 1:
        raise ValueError(
            f"{folder} is not a reward model, its head has {model.config.num_labels} outputs: give a model for sequence classification "
            "with num_labels 1"
        )
    return model


def freeze(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Freeze a model: no gradients, no optimizer states, and with FP8 GEMMs one byte per linear weight.

    Weights are stored as the GEMM reads them, so a policy that starts from the same weights in BF16 computes the same.
    """
    model.requires_grad_(False).eval()
    if recipe.gemm is not None:
        convert(model, replace(recipe, weight=recipe.gemm.weight.format))
        fuse(model)
    return model


def with_lora(model: nn.Module, recipe: Recipe, rank: int, seed: int) -> Any:
    """Add PEFT's LoRA adapters of `rank` to the linear layers; base weights are frozen, in one byte with FP8 GEMMs.

    Raises:
        ValueError: if PEFT is not installed.
    """
    peft = need("peft")
    freeze(model, recipe).train()
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)

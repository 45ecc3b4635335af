"""Load models and tokenizers from transformers folders, and freeze models in one byte per weight."""

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
]


def need(name: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ValueError: with the install command, if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed ({error}): pip install {name}") from None


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


def load_model(folder: Path, kind: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Load a transformers model.

    Args:
        folder: as `save_pretrained` writes it. Only safetensors are read, and code in the folder is not run.
        kind: the class of transformers, such as "AutoModelForCausalLM".
        dtype: of its parameters.
        device: of its parameters.

    Raises:
        ValueError: if the folder has no such model, or tensors are missing (`megatron.lm.hugging_face.models`).
    """
    need("transformers")
    check_folder(folder)
    return hugging_face.load_model(folder, kind, dtype=dtype, attention="sdpa").to(device)


def check_positions(model: Any, length: int, flag: str) -> None:
    """Raise a ValueError if a model has fewer positions than the `length` tokens that `flag` sets."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"{flag} is {length}, but {type(model).__name__} has positions for {most} tokens: set {most} or less")


def freeze(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Freeze a model: no gradients, no optimizer states, and with FP8 GEMMs one byte per linear weight.

    Weights are stored as the GEMM reads them, so a policy that starts from the same weights in BF16 computes the same.
    """
    model.requires_grad_(False).eval()
    if recipe.gemm is not None:
        convert(model, replace(recipe, weight=recipe.gemm.weight.format))
        fuse(model)
    return model

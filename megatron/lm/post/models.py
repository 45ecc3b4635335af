"""Models and tokenizers from folders of transformers, as fine-tuning and RLHF take them."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from msamp.nn.convert import convert
from msamp.numerics.recipe import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_EXTRAS = {"transformers": "transformers", "peft": "-e '.[integrations]', or peft", "gguf": "gguf", "accelerate": "accelerate"}


def need(name: str) -> ModuleType:
    """The module of an optional package.

    Raises:
        ValueError: it is not installed, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed ({error}): pip install {_EXTRAS[name]}") from None


def check_folder(folder: Path) -> None:
    """ValueError where a folder is no model of transformers, with the way there from a checkpoint of the trainer."""
    if (folder / "config.json").is_file():
        return
    if (folder / "latest_checkpointed_iteration.txt").is_file():
        raise ValueError(
            f"{folder} holds checkpoints of megatron.lm.pretrain: run python -m megatron.lm.tools.convert_checkpoint to-hf --load {folder} "
            "--output FOLDER, then give that folder"
        )
    raise ValueError(f"{folder} holds no config.json: give the folder of a model of transformers, as save_pretrained writes it")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder, with a token to pad with. Code in the folder is not run.

    Raises:
        ValueError: none is there, or it has no end-of-text token.
    """
    transformers = need("transformers")
    check_folder(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that transformers reads ({_first_line(error)}): put tokenizer.json there") from None
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {folder} must be a fast one with an eos_token: put tokenizer.json and its configuration there")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is never looked at, whatever it is
    return tokenizer


def load_model(folder: Path, kind: str, dtype: torch.dtype, device: torch.device | str, *, fresh: str = "", **settings: Any) -> Any:
    """A model of transformers.

    Args:
        folder: as `save_pretrained` writes it. Safetensors are read alone, and code in the folder is not run.
        kind: the class of transformers, "AutoModelForCausalLM" or another.
        dtype: of its parameters.
        device: where it is put.
        fresh: the module that may be missing in the folder, and is new then.
        settings: of its configuration.

    Raises:
        ValueError: the folder holds no such model, or not all of it.
    """
    transformers = need("transformers")
    check_folder(folder)
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is refused below
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        for name, value in settings.items():
            setattr(config, name, value)
        model, report = getattr(transformers, kind).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} holds no model that {kind} reads: {_first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    missing = [name for name in report["missing_keys"] if not fresh or name.split(".")[0] != fresh]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors of a {type(model).__name__} ({sorted(missing)[0]}): give a folder with all of it"
        )
    quantised = getattr(model.config, "quantization_config", None)
    if quantised is not None:
        raise ValueError(f"{folder} holds packed weights ({quantised}): give the model in 16 or 32 bits")
    return model.to(device)


def check_positions(model: Any, length: int, flag: str) -> None:
    """ValueError where a model has no positions for sequences of `length` tokens, which `flag` asks for."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"{flag} is {length}, and {type(model).__name__} has positions for {most} tokens: give {most} or less")


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """ValueError where a tokenizer has tokens that a model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {rows}: give the tokenizer that the model came with"
        )


def scalar_model(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A value model: the layers of the model in `folder`, and a head that gives one number a token, 0 to begin with."""
    model = load_model(folder, "AutoModelForTokenClassification", dtype, device, fresh="score", num_labels=1, classifier_dropout=0.0)
    nn.init.zeros_(model.score.weight)
    if model.score.bias is not None:
        nn.init.zeros_(model.score.bias)
    return model


def reward_model(folder: Path, dtype: torch.dtype, device: torch.device | str, tokenizer: Any) -> Any:
    """A model that gives one number a sequence, and reads the tokens of the policy.

    Raises:
        ValueError: its tokenizer has other tokens, or its head is no trained one of one number.
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
            f"{folder} is no reward model, its head gives {model.config.num_labels} numbers: give a model for sequence classification with "
            "num_labels 1"
        )
    return model


def freeze(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A model that is not trained: no gradients, and at recipes with FP8 GEMMs its linear weights in one byte, without states.

    Weights are stored as the GEMM takes them, so that a policy that starts from the same weights in BF16 computes the same.
    """
    model.requires_grad_(False).eval()
    if recipe.gemm is not None:
        convert(model, replace(recipe, weight=recipe.gemm.weight.format))
    return model


def with_lora(model: nn.Module, recipe: Recipe, rank: int, seed: int) -> Any:
    """A model with adapters of `rank` (PEFT's) on its linear layers; their own weights are frozen, in one byte at recipes with FP8 GEMMs.

    Raises:
        ValueError: PEFT is not installed.
    """
    peft = need("peft")
    freeze(model, recipe).train()
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""Load models and tokenizers of transformers from folders that may come from anywhere, under the rules of `convert_checkpoint from-hf`.

`from_pretrained` of transformers, given a folder, asks on a terminal whether to run Python code in it, follows file names in its index out
of the folder, reads pickles, and draws missing weights at random. So transformers never sees the folder here. It gets a configuration that
was checked (`config_file`), and tensors that `folder.Tensors` has read from safetensors files of the folder itself. What the configuration
describes is compared with these tensors before memory is allocated for it.
"""

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.lm.hugging_face.config_file import read_config, refuse_code
from megatron.lm.hugging_face.folder import Tensors, check_finite, read_json, refuse_irregular
from megatron.lm.shell.exit_codes import Refused, one_line

_MODULES = 1000, 16  # the most modules of a model: the first number, plus the second per tensor of the folder
_ELEMENTS = 2**26, 2  # the most elements of parameters and buffers: the first number, plus the second per byte of the folder's tensors
_NO_WEIGHTS = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)  # old files have them
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# Arguments of tokenizer classes that name files to read; save_pretrained writes none of them.
_FILES = ("vocab", "merges", "init_inputs", "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "spm_file", "source_spm")


def load_model(
    folder: Path,
    kind: str,
    *,
    dtype: torch.dtype | str = "auto",
    quantized: Collection[str] = (),
    attention: str | None = None,
    **settings: Any,
) -> Any:
    """Load a transformers model from safetensors. Code in the folder is not run.

    Args:
        folder: as `save_pretrained` writes it, or a snapshot of a hub cache, whose files are links.
        kind: the class of transformers, such as "AutoModelForCausalLM".
        dtype: of its parameters; "auto" takes it from config.json, or from the tensors.
        quantized: `quant_method`s that may be loaded. Weights in blocks ("fp8", DeepSeek's layout) are dequantized, and activations then
            stay in 16 bits.
        attention: implementation of attention; None: transformers' choice.
        settings: of its configuration.

    Raises:
        ValueError: if the folder has code or pickles in place of a model, config.json and the tensors differ, or a weight is not finite, or
            has FP8 blocks that do not divide it.
    """
    import transformers

    config = read_config(folder, **settings)
    tensors, block = Tensors(folder), None
    if _quantization(config, quantized, folder) == "fp8":
        config.quantization_config["dequantize"] = True  # transformers downloads its kernels for blocks
        block = config.quantization_config.get("weight_block_size")
    sides = block if isinstance(block, list) and all(type(side) is int and side > 0 for side in block) else []  # others it refuses
    weights = {name: tensors[name] for name in tensors}
    for name, x in weights.items():
        if x.is_floating_point():
            check_finite(name, x)
        if x.dtype == torch.float8_e4m3fn and any(n > side and n % side for n, side in zip(x.shape[-2:], sides, strict=False)):
            raise ValueError(  # transformers infers a block's size from the numbers of weights and scales
                f"{folder}: {name} is {' x '.join(map(str, x.shape))}, which blocks of {sides} do not divide, and transformers takes the "
                "scales of such a weight for other blocks': give the model in 16 or 32 bits"
            )
    options = {} if attention is None else {"attn_implementation": attention}
    generation = _generation_config(folder)
    with _quiet(transformers.utils.logging), one_line(f"{folder} has no model that {kind} can load"):
        described = _described(getattr(transformers, kind), config, weights, options, folder)
        described.config.dtype = config.dtype  # from_config has filled it
        model, report = type(described).from_pretrained(
            None,
            config=described.config,
            state_dict=weights,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # _check_report refuses them, by name
            generation_config=generation,
            trust_remote_code=False,
            **options,
        )
    _check_report(model, report, folder)
    model.config.name_or_path = model.name_or_path = str(folder)
    return model


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise a ValueError if a tokenizer has more tokens than a model has embeddings."""
    rows = model.get_input_embeddings().weight.shape[0]
    count = max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if count > rows:
        raise ValueError(f"the tokenizer has {count} tokens but the model has {rows} embeddings: give the model's own tokenizer")


def _described(auto: Any, config: Any, weights: Mapping[str, Tensor], options: Mapping[str, str], folder: Path) -> Any:
    """Return the model of `config` on the meta device, if it is no larger than the folder's tensors can fill."""
    size = sum(x.nbytes for x in weights.values())
    with torch.device("meta"), _at_most(_MODULES[0] + _MODULES[1] * len(weights), folder):
        model: nn.Module = auto.from_config(copy.deepcopy(config), trust_remote_code=False, **options)
    elements = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    if elements > _ELEMENTS[0] + _ELEMENTS[1] * size:
        raise Refused(
            f"{folder / 'config.json'} describes a model of {elements:,} numbers, but the folder's tensors have {size:,} bytes: it is "
            "incomplete, or config.json is another model's"
        )
    return model


@contextlib.contextmanager
def _at_most(modules: int, folder: Path) -> Iterator[None]:
    """Refuse a model with more modules while it is built."""
    count = 0

    def added(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > modules:
            raise Refused(
                f"{folder / 'config.json'} describes a model of more than {modules} modules, which the folder's tensors cannot fill: it is "
                "incomplete, or config.json is another model's"
            )

    handle = nn.modules.module.register_module_module_registration_hook(added)
    try:
        yield
    finally:
        handle.remove()


def _quantization(config: Any, accepted: Collection[str], folder: Path) -> str | None:
    """Return the `quant_method` of a folder's weights, which must be accepted; None if they are not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
    if method not in accepted:
        also = f", or quantized by {' or '.join(accepted)}" if accepted else ""
        raise ValueError(f"{folder} contains quantized weights ({quantization}): give the model in 16 or 32 bits{also}")
    return str(method)


def _check_report(model: Any, report: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model if weights are missing, left over or of another shape. Tied weights are stored once."""
    name = type(model).__name__
    for key, actual, expected in report["mismatched_keys"]:
        raise ValueError(
            f"{folder}: {key} has shape {list(actual)}, but config.json describes {list(expected)}: give the model's own config.json"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{folder} is missing {len(missing)} tensors of a {name} ({missing[0]}): give a complete model")
    left = sorted(key for key in report["unexpected_keys"] if not key.endswith(_NO_WEIGHTS))
    if left:
        raise ValueError(
            f"{folder} has {len(left)} tensors that a {name} of its config.json does not have ({left[0]}): give its own config.json"
        )


def _generation_config(folder: Path) -> Any:
    import transformers

    path = folder / "generation_config.json"
    if not path.exists():
        return None
    content = read_json(path)
    with one_line(f"{path} is not a valid generation configuration"):
        return transformers.GenerationConfig.from_dict(content)


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Context without transformers' own reports, since missing tensors are refused here."""
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_tokenizer(folder: Path, **settings: Any) -> Any:
    """Load the tokenizer in a model's folder, with `settings` overriding its own.

    Raises:
        ValueError: if there is none, it requires code of the folder, or names files elsewhere.
    """
    import transformers

    config, path = read_config(folder), folder / "tokenizer_config.json"
    refuse_irregular(folder, (file.name for file in folder.iterdir() if file.suffix in _SUFFIXES))
    if path.exists():
        content = read_json(path)
        refuse_code(content, path)
        named = [name for name in _FILES if content.get(name)]
        if named:
            raise ValueError(f"{path} names files ({named[0]}: {content[named[0]]!r}): remove the entry")
    with one_line(f"{folder} has no tokenizer that transformers can load"):
        return transformers.AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False, **settings)

"""Megatron-LM's YAML file of arguments, `--yaml-cfg`, as words of a command line.

A key is a flag without hyphens in front, and with underscores or hyphens: `micro_batch_size: 2` is `--micro-batch-size 2`. Keys may be at
the top, or in Megatron-LM's sections `language_model` and `model_parallel`. `true` gives the flag, `false` its `--no-` or `--disable-` form
if there is one, a list several values; null and empty text give nothing. `${NAME}` in a text is a variable of the environment.

Megatron-LM reads fields of megatron-core's configuration from the file too. Those that are a flag by another name are in `OTHER_NAMES`, and
those without a flag in `FIELDS`, with the value that changes nothing.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron.lm.config.megatron_flags.table import closest, lines_about, names
from megatron.lm.config.megatron_flags.topics.row import spelled

SECTIONS = ("language_model", "model_parallel")
Words = list[str]

# Fields that are flags by another name: the words for a value, None for a value that has none.
OTHER_NAMES: Mapping[str, Callable[[Any], Words | None]] = MappingProxyType(
    {
        "add_bias_linear": lambda value: [] if value else ["--disable-bias-linear"],
        "layernorm_epsilon": lambda value: ["--norm-epsilon", str(value)],
        "layernorm_zero_centered_gamma": lambda value: ["--apply-layernorm-1p"] if value else [],
        "activation_func": {"swiglu": ["--swiglu"], "squaredrelu": ["--squared-relu"], "gelu": []}.get,
        "num_moe_experts": lambda value: ["--num-experts", str(value)],
        "fp8": lambda value: ["--fp8-format", str(value)] if value else [],
        "add_position_embedding": lambda value: [],  # position_embedding_type decides
        "masked_softmax_fusion": lambda value: [] if value else ["--no-masked-softmax-fusion"],
        "bias_activation_fusion": lambda value: [],  # bias_gelu_fusion and bias_swiglu_fusion, which change no number
        "fp8_wgrad": lambda value: [] if value else ["--no-fp8-wgrad"],
        "apply_rope_fusion": lambda value: [] if value else ["--no-rope-fusion"],
        "barrier_with_L1_time": lambda value: [] if value else ["--no-barrier-with-level-1-timing"],
        "enable_one_logger": lambda value: [],  # NVIDIA's own service, which the trainer does not have
        "bert_binary_head": lambda value: [] if value else ["--bert-no-binary-head"],
        "check_for_nan_in_loss_and_grad": lambda value: [] if value else ["--no-check-for-nan-in-loss-and-grad"],
        "gated_linear_unit": lambda value: [],  # activation_func and swiglu decide
        "bias_swiglu_fusion": lambda value: [],  # changes no number
        "async_tensor_model_parallel_allreduce": lambda value: [],  # changes no number
    }
)
# Megatron-LM's defaults of flags that are refused: a file that lists every default has them too.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "adlr_autoresume_interval": 1000,
        "vocab_extra_ids": 0,
    }
)
# Fields without a flag, and the values (beside null) that change nothing.
FIELDS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "rotary_interleaved": (False,),
        "memory_efficient_layer_norm": (False, True),
        "fp8_interval": (1,),
        "clone_scatter_output_in_embedding": (True, False),
        "perform_initialization": (True,),
        "tp_comm_split_ag": (True, False),
        "tp_comm_atomic_ag": (True, False),
        "tp_comm_split_rs": (True, False),
        "tp_comm_atomic_rs": (True, False),
        "tp_comm_bulk_wgrad": (True, False),
        "tp_comm_bulk_dgrad": (True, False),
        "enable_autocast": (False,),
        "variable_seq_lengths": (False,),
        "overlap_p2p_comm": (True, False),
        "batch_p2p_comm": (True, False),
        "batch_p2p_sync": (True, False),
        "use_ring_exchange_p2p": (False,),
        "deallocate_pipeline_outputs": (True, False),
        "cpu_offloading": (False,),
        "cpu_offloading_num_layers": (0,),
        "cpu_offloading_weights": (True, False),
        "cpu_offloading_activations": (True, False),
        **dict.fromkeys(
            (
                *(
                    "init_method",
                    "output_layer_init_method",
                    "use_cpu_initialization",
                    "params_dtype",
                    "timers",
                    "finalize_model_grads_func",
                ),
                *("pipeline_dtype", "grad_scale_func", "autocast_dtype", "num_microbatches_with_partial_activation_checkpoints"),
                *("no_sync_func", "grad_sync_func", "param_sync_func", "_cpu_offloading_context", "virtual_pipeline_model_parallel_size"),
                *("moe_token_dropping", "window_size", "lazy_mpu_init", "onnx_safe", "encoder_seq_length"),
                *("local_rank", "tp_comm_overlap_cfg", "spec"),
            ),
            (False,),
        ),
    }
)


def words_of(path: str, known: Collection[str]) -> Words:
    """Return the words of a file, in its order.

    Args:
        path: of the file.
        known: the trainer's own flags.

    Raises:
        ValueError: it cannot be read, is not a mapping, repeats a key, or has unknown keys or values without a flag: all in one message.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f"--yaml-cfg {path} needs the package pyyaml ({error}): pip install pyyaml") from None
    try:
        with open(path, encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=_unique_keys(yaml))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--yaml-cfg {path} cannot be read ({' '.join(str(error).split())}): give a YAML file of arguments") from None
    if not isinstance(content, dict):
        raise ValueError(f"--yaml-cfg {path} is not a mapping of arguments to values: write lines such as micro_batch_size: 2")
    words: Words = []
    problems: list[str] = []
    for key, value in _flat(content):
        try:
            words += _words(key, _with_environment(value), known)
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        lines = problems if len(problems) == 1 else [f"{len(problems)} keys are refused, nothing was started:", *problems]
        raise ValueError(f"--yaml-cfg {path}: " + "\n- ".join(lines))
    return words


def _unique_keys(yaml: Any) -> type:
    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """SafeLoader takes the last of two equal keys; this refuses them."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = sorted({str(key) for key in keys if keys.count(key) > 1})
            if twice:
                raise yaml.constructor.ConstructorError(None, None, f"the keys {', '.join(twice)} are given twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return UniqueKeys


def _flat(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, dict):
            yield from ((str(name), inner) for name, inner in value.items())
        elif key not in SECTIONS or value is not None:
            yield str(key), value


def _with_environment(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_environment(item) for item in value]
    if not isinstance(value, str):
        return value
    missing = [name for name in re.findall(r"\$\{(.*?)\}", value) if name not in os.environ]
    if missing:
        raise ValueError(f"{value}: the environment has no {', '.join(missing)}: set it, or write the value")
    return re.sub(r"\$\{(.*?)\}", lambda match: os.environ[match[1]], value)


def _words(key: str, value: Any, known: Collection[str]) -> Words:
    """Return the words of one key; ValueError for an unknown key, or a value without a flag."""
    flag = spelled(f"--{key}")

    def there(name: str) -> bool:
        return name in known or bool(lines_about(name))

    if key in FIELDS:
        if value is not None and value not in FIELDS[key]:
            raise ValueError(f"{key}: {value!r} has no flag here: drop it")
        return []
    off = next((name for name in (f"--no-{flag[2:]}", f"--disable-{flag[2:]}") if there(name)), None)
    if key not in OTHER_NAMES and not there(flag) and off is None:
        close = closest(flag, {*known, *names()})
        raise ValueError(f"unknown key {key}" + (f" (did you mean {close[2:].replace('-', '_')}?)" if close else ""))
    if value is None or value == "" or (key in DEFAULTS and value == DEFAULTS[key]):
        return []
    if key in OTHER_NAMES:
        words = OTHER_NAMES[key](value)
        if words is None:
            raise ValueError(f"{key}: {value!r} is unknown: choose swiglu, squaredrelu or gelu")
        return words
    if isinstance(value, bool):
        if not value:
            return [off] if off is not None else []
        return [flag] if there(flag) else []
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, list | dict) or item is None for item in value)):
        raise ValueError(f"{key} is nested: give one value or a list; sections are {' and '.join(SECTIONS)}")
    texts = value if isinstance(value, list) else value.split() if isinstance(value, str) and key.endswith("data_path") else [value]
    return [flag, *map(str, texts)] if texts else []

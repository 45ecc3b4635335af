"""Read `config.json` of a Hugging Face folder for transformers.

transformers trusts this file: `auto_map` names Python files to run, and numbers of layers or labels become loops before anything else is
compared with them. So the file is checked first, and only then given to the configuration class, which must be one of transformers itself.
"""

import re
from pathlib import Path
from typing import Any

from megatron.lm.hugging_face.folder import read_json
from megatron.lm.shell.exit_codes import one_line

MOST_LAYERS, MOST_LABELS = 10_000, 100_000
_LAYERS = re.compile("layer|num_blocks|num_stages")
# How transformers runs a model, not what it is; such a setting may name a kernel to download.
_RUN = re.compile("_?(attn|experts)_implementation|fusion_config|use_kernels|_name_or_path|_commit_hash")


def read_config(folder: Path, **settings: Any) -> Any:
    """Return the transformers configuration in a folder's `config.json`, with `settings` overriding it.

    Raises:
        ValueError: a missing or damaged file, custom code, a model type that transformers does not have, or numbers of layers or labels
            that no model has.
    """
    import transformers

    path = folder / "config.json"
    content = read_json(path)
    refuse_code(content, path)
    _check_numbers(content, path)
    if content.get("transformers_weights") is not None:
        raise ValueError(f"{path} names its own weights file (transformers_weights): rename it to model.safetensors, and remove the entry")
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path} has model_type {kind!r}, which the installed transformers lacks: update it, or give another model")
    described = {key: value for key, value in content.items() if key != "model_type" and not _RUN.match(key)}
    with one_line(f"{path} is not a valid configuration of a {kind}"):
        config = transformers.AutoConfig.for_model(kind, **described)
        for name, value in settings.items():
            setattr(config, name, value)
    return config


def refuse_code(content: Any, path: Path) -> None:
    """Raise a ValueError if JSON content names Python code anywhere."""
    if isinstance(content, dict):
        if content.get("auto_map") is not None:
            raise ValueError(
                f"{path} names code in the folder (auto_map), which is never run: remove auto_map if transformers has this model "
                "itself, or give another model"
            )
        content = list(content.values())
    for value in content if isinstance(content, list) else ():
        refuse_code(value, path)


def _check_numbers(content: Any, path: Path, name: str = "") -> None:
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else ((name, value) for value in content):
            _check_numbers(value, path, key)
    elif isinstance(content, int | float):
        most = MOST_LABELS if name == "num_labels" else MOST_LAYERS if _LAYERS.search(name) else None
        if most is not None and content > most:
            raise ValueError(f"{path} has {name} = {content}: expected at most {most}")

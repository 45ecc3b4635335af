"""Load tokenizers of transformers from folders that may come from anywhere; code in the folder is not run."""

from pathlib import Path
from typing import Any

from megatron.lm.hugging_face.config_file import one_line, read_config, refuse_code
from megatron.lm.hugging_face.folder import read_json, refuse_irregular

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# Arguments of tokenizer classes that name files to read; save_pretrained writes none of them.
_FILES = ("vocab", "merges", "init_inputs", "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "spm_file", "source_spm")


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

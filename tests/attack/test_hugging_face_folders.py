"""Hostile and damaged Hugging Face folders, given to evaluation and fine-tuning: one line, and nothing of the folder runs."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import post_runs
from megatron.lm.evaluation.models import opened
from megatron.lm.post import models

pytest.importorskip("transformers")
CANARY = "canary_of_a_folder"
HUGE = 10**9


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return post_runs.toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def _set(file: str, **entries: Any) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | entries))

    return attack


def _code(file: str) -> Callable[[Path], None]:
    """Of all that transformers could be asked for."""

    def attack(folder: Path) -> None:
        (folder / f"{CANARY}.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n")
        classes = {"AutoConfig": f"{CANARY}.C", "AutoModelForCausalLM": f"{CANARY}.M", "AutoTokenizer": [None, f"{CANARY}.T"]}
        _set(file, auto_map=classes, **({"model_type": "new"} if file == "config.json" else {}))(folder)

    return attack


def _weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return attack


def _elsewhere(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder.parent / "elsewhere" / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _cut(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-100]) and None


def _pipe(file: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return attack


def _half(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors)[::2]:
        del tensors[name]


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


INVALID = r"is not a valid configuration|has no model that AutoModelForCausalLM can load"
SIZES = "describes a model of .* (numbers|modules).*config.json is another model's"
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "code of a model": (_code("config.json"), r"config\.json names code in the folder \(auto_map\), which is never run"),
    "code of a tokenizer": (_code("tokenizer_config.json"), r"tokenizer_config\.json names code in the folder \(auto_map\)"),
    "another kind": (_set("config.json", model_type="new"), r"has model_type 'new', which the installed transformers lacks"),
    "an index that leaves": (
        _elsewhere,
        r"names the file '\.\./elsewhere/model\.safetensors': only \.safetensors files",
    ),
    "a name of weights": (_set("config.json", transformers_weights="a.safetensors"), "names its own weights file"),
    "files of a tokenizer": (
        _set("tokenizer_config.json", vocab_file="/etc/passwd"),
        r"names files \(vocab_file: '/etc",
    ),
    "a pickle": (_pickled, r"pickled files \(pytorch_model\.bin\) are not read"),
    "no weights": (_weights(dict.clear), r"is missing 21 tensors of a LlamaForCausalLM \(lm_head\.weight\)"),
    "half the weights": (_weights(_half), r"is missing 11 tensors of a LlamaForCausalLM"),
    "weights of more layers": (
        _set("config.json", num_hidden_layers=1),
        r"has 9 tensors that a LlamaForCausalLM of its config",
    ),
    "not finite": (_weights(_not_finite), r"model\.norm\.weight contains 1 non-finite values"),
    "cut weights": (_cut("model.safetensors"), r"model\.safetensors cannot be read \(.*\): restore it"),
    "cut configuration": (_cut("config.json"), r"config\.json is not valid JSON"),
    "cut tokenizer": (_cut("tokenizer.json"), r"has no tokenizer that transformers can load"),
    "many layers": (_set("config.json", num_hidden_layers=HUGE), r"has num_hidden_layers = 1000000000: expected at most 10000"),
    "more layers": (_set("config.json", num_hidden_layers=9000), SIZES),
    "many labels": (_set("config.json", num_labels=HUGE), r"has num_labels = 1000000000: expected at most 100000"),
    "a large vocabulary": (_set("config.json", vocab_size=10**12), SIZES),
    "wide layers": (_set("config.json", intermediate_size=HUGE), SIZES),
    "another width": (_set("config.json", intermediate_size=64), r"proj\.weight has shape \[.*\], but config\.json describes \[.*\]: give"),
    "no heads": (
        _set("config.json", num_attention_heads=0),
        INVALID,
    ),
    "a word for a number": (_set("config.json", hidden_size="x"), INVALID),
    "a list of settings": (lambda f: (f / "config.json").write_text("[1]") and None, r"config\.json contains list, not an object"),
    "quantized": (_set("config.json", quantization_config={"quant_method": "gptq"}), r"contains quantized weights .*give the model in 16"),
    "odd generation": (
        _set("generation_config.json", max_new_tokens=-1),
        r"generation_config\.json is not a valid generation",
    ),
    "a pipe as tokenizer": (_pipe("tokenizer_config.json"), r"tokenizer_config\.json is not a regular file"),
    "a pipe as generation": (_pipe("generation_config.json"), r"generation_config\.json is not a regular file"),
}


def _evaluated(folder: Path) -> None:
    with opened(folder):
        pass


def _tuned(folder: Path) -> None:
    models.load_tokenizer(folder)
    models.load_model(folder, "AutoModelForCausalLM", torch.float32, "cpu")


@pytest.mark.promise("Evaluation", "A Hugging Face folder runs no code and leads nowhere else; missing weights are refused by name.")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", [_evaluated, _tuned], ids=["evaluate", "post"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_folder_that_is_not_a_sound_model(folder: Path, name: str, reader: Callable[[Path], None]):
    attack, message = ATTACKS[name]
    attack(folder)
    with pytest.raises(ValueError, match=message) as refusal:
        reader(folder)
    assert "\n" not in str(refusal.value)
    assert not (folder / "ran").exists()
    assert CANARY not in "".join(sys.modules)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_snapshot_of_a_hub_cache_is_read(sound: Path, tmp_path: Path, sharded: bool):
    """Its files are links into `blobs`."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(sound, blobs)
    if sharded:
        tensors = load_file(blobs / "model.safetensors")
        (blobs / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, blobs / file, metadata={"format": "pt"})
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (blobs / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(f"../../blobs/{number:04x}")
        file.rename(blobs / f"{number:04x}")
    with opened(snapshot) as found, opened(sound) as expected:
        tokens = [[1, 2, 3, 4]]
        assert torch.equal(found.score(tokens, [1])[0], expected.score(tokens, [1])[0])
    _tuned(snapshot)

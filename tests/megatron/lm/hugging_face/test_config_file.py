"""config.json for transformers: what is refused before a configuration class sees it.

More is in tests/attack/test_hugging_face_folders.py.
"""

import json

import pytest

from megatron.lm.hugging_face.config_file import read_config, refuse_code
from megatron.lm.shell.exit_codes import Refused, one_line

pytest.importorskip("transformers")
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def write(folder, **entries):
    (folder / "config.json").write_text(json.dumps(LLAMA | entries))
    return folder


def test_how_a_model_is_run_is_not_taken_from_the_file(tmp_path):
    """`attn_implementation` may name a kernel to download."""
    named = {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel", "_name_or_path": "someone/else"}
    config = read_config(write(tmp_path, **named))
    assert "someone" not in str(vars(config))


@pytest.mark.parametrize("content", [{"auto_map": {}}, {"text_config": {"auto_map": {"AutoModel": "x.M"}}}, [{"a": [{"auto_map": "x.M"}]}]])
def test_code_is_refused_wherever_it_is_named(tmp_path, content):
    with pytest.raises(ValueError, match=r"c\.json names code in the folder \(auto_map\), which is never run"):
        refuse_code(content, tmp_path / "c.json")
    refuse_code({"auto_map": None, "a": [1, {"b": "auto_map"}]}, tmp_path / "c.json")


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"num_hidden_layers": 10_001}, "num_hidden_layers = 10001: expected at most 10000"),
        ({"text_config": {"n_layer": 10**12}}, "n_layer = 1000000000000"),
        ({"text_config": [{"num_layers": 1e300}]}, "num_layers = 1e[+]300"),
        ({"num_labels": 10**9}, "num_labels = 1000000000: expected at most 100000"),
    ],
)
@pytest.mark.timeout(60)
def test_numbers_that_would_become_endless_loops_are_refused(tmp_path, entries, named):
    with pytest.raises(ValueError, match=f"config.json has {named}"):
        read_config(write(tmp_path, **entries))


def test_errors_of_a_library_become_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^the file is bad \(KeyError: 'a b'\)$"), one_line("the file is bad"):
        raise KeyError("a b")
    with pytest.raises(ValueError, match=r"^the file is bad \(RuntimeError: a b\)$"), one_line("the file is bad"):
        raise RuntimeError("a\n  b")
    with pytest.raises(Refused, match=r"^as it is$"), one_line("the file is bad"):
        raise Refused("as it is")
    for kind in (MemoryError, KeyboardInterrupt):
        with pytest.raises(kind), one_line("the file is bad"):
            raise kind

"""What `import msamp` gives, and that the examples and the README need no more."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import msamp

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "Activation", "Experts", "FP8AdamW", "FP8Linear", "GradSync", "LayerNorm", "LowPrecisionOptimizer", "PrecisionGuard", "RMSNorm",
    "ScalingState", "ScalingTensor", "TransformerBlock", "ZeRO", "amp", "capture", "clip_grad_norm_", "collage_adamw", "convert",
    "exact_state_dict", "exchanges", "filters", "float_copy", "formats", "fp32_values", "fp8_state_dict", "grad_sync", "granularity",
    "initialize", "lost_updates", "plain_state_dict", "recipes", "save_plain", "scaling", "survey", "update_quality", "updates",
}  # fmt: skip


def test_what_is_public():
    assert sorted(msamp.__all__) == sorted(PUBLIC)
    assert all(hasattr(msamp, name) for name in PUBLIC)


@pytest.mark.parametrize(("room", "names"), [
    (msamp.recipes, "Recipe Cast Gemms Product StateFormats GEMMS FP32_STATES O1 O2 O3 COAT COLLAGE_PLUS register by_name names"),
    (msamp.formats, "Format FP32 BF16 FP16 E4M3 E5M2 COAT_E4M3 by_name"),
    (msamp.scaling, "Scaling Current Delayed"),
    (msamp.granularity, "Granularity Tensorwise Group Block"),
    (msamp.updates, "Update State UpdateBatch StepInputs MASTER register by_name"),
    (msamp.exchanges, "Exchange Wire Reduced register by_name names"),
    (msamp.filters, "DEFAULT exclude_names include_names min_features all_of"),
])  # fmt: skip
def test_what_an_extension_of_one_s_own_starts_from(room, names):
    assert all(hasattr(room, name) for name in names.split())


def deep_imports(source: str) -> list[str]:
    """Modules inside msamp that a source imports from, but for those of other libraries' trainers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [module for module in modules if module.startswith("msamp.") and not module.startswith("msamp.integrations.")]
    return found


def test_examples_import_nothing_from_inside():
    assert deep_imports("from msamp.nn import norm\nimport msamp.optim, msamp\nfrom msamp import recipes") == ["msamp.nn", "msamp.optim"]
    examples = list((ROOT / "examples").rglob("*.py"))
    assert examples
    assert [(path.name, found) for path in examples for found in deep_imports(path.read_text(encoding="utf-8"))] == []


def test_every_name_in_the_readme_is_public():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"from msamp\.|import msamp\.", text) == []
    named = set(re.findall(r"(?<![\w/])msamp((?:\.[A-Za-z_]\w*)+)", text))
    assert len(named) > 10
    for dotted in named:
        _, first, *rest = dotted.split(".")
        assert first in PUBLIC, dotted
        found: Any = getattr(msamp, first)
        for name in rest:
            found = getattr(found, name)


def test_the_version_is_that_of_the_package():
    """In a checkout that is not installed too: nothing but the path leads to it."""
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == msamp.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", msamp.__version__)


def test_type_hints_travel_with_the_package(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert (tmp_path / "msamp" / "py.typed").is_file()
    assert (tmp_path / "megatron" / "lm" / "pretrain.py").is_file()
    assert not (tmp_path / "megatron" / "__init__.py").exists()


def test_drop_in_layers_compute_as_torch_s():
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    pairs = ((msamp.LayerNorm(32), nn.LayerNorm(32)), (msamp.RMSNorm(32, eps=1e-6), nn.RMSNorm(32, eps=1e-6)))
    for ours, theirs in (*pairs, (msamp.Activation("gelu"), nn.GELU(approximate="tanh"))):
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)

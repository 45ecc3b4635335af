"""The finder of decisions by the name of a recipe fires on bad snippets, and on no good one."""

import ast

import pytest

from helpers.precision_names import TABLE, decisions_by_name


@pytest.mark.parametrize(
    "bad",
    [
        'if name == "O3": pass',
        'if "O3" != config.precision.name: pass',
        'x = name in ("coat", "O1", "O2")',
        'x = set(requests.values()) == {"O3"}',
        'x = "fp16-amp" in names',
        'if config.precision.name == "bf16": pass',
        'x = recipe.name not in ("fp32", "bf16")',
        'x = [row for row in rows if row["level"] == "coat"]',
        'match name:\n    case "O1" | "O2": pass',
        'match recipe.name:\n    case "bf16": pass',
        'x = facts["collage-plus"]',
        'x = facts.get("O2", None)',
        'x = recipes["bf16"]',
        'x = {"O1": 1, "O2": 2}[level]',
        'x = {"bf16": 1, "fp32": 2}[config.precision.name]',
        'x = {"bf16": 1}.get(level)',
        'x = level.startswith("bf16")',
    ],
)
def test_the_checker_fires(bad):
    assert decisions_by_name(ast.parse(bad), "megatron/lm/a.py"), bad
    assert decisions_by_name(ast.parse(bad), "tools/a.py"), bad
    assert not decisions_by_name(ast.parse(bad), TABLE)


def test_facts_by_name_belong_to_the_recipe_and_rows_of_a_tool_to_the_tool():
    table = ast.parse('FACTS = {"O1": True, "O2": False}')
    assert decisions_by_name(table, "msamp/a.py")
    assert not decisions_by_name(table, "tools/a.py")


@pytest.mark.parametrize(
    "good",
    [
        'msamp.initialize(model, optimizer, opt_level="O3")',
        'CASES = ("bf16", "O1", "O2", "O3")',
        'levels = level or "O2"',
        'x = format.name == "bf16"',
        'x = precision.grad_format in ("fp32", "bf16")',
        'x = {"bf16": 1, "fp32": 2}[dtype]',
        'x = kept == "coat"',
        'asked["--bf16"] = "bf16"',
        "x = recipe.fp8 and not recipe.shards_optimizer",
        'DTYPES = {"bf16": 2, "fp32": 4}',
        'x = recipes.by_name("O2")',
    ],
)
def test_the_checker_lets_names_be_chosen(good):
    assert not decisions_by_name(ast.parse(good), "megatron/lm/a.py")

"""A recipe says facts, and nothing asks its name: what finds comparisons with the name of a recipe and tables by it, for
`test_architecture.py`, which applies it to every file. `test_precision_names.py` proves on small snippets that it fires where it should."""

import ast
from collections.abc import Iterator

from megatron.lm.config.sections import baselines
from msamp.numerics import recipe

TABLE = "msamp/numerics/recipe.py"  # where the names stand
APEX = "msamp/fp16/"  # its O0 to O3 are Apex's levels, which say what they do in a table of their own

NAMES = {*recipe.names(), *baselines.BASELINES, "O0"}
# Also names of formats, of ways to keep an activation, and of rows measured elsewhere: judged by what they are compared with.
SHARED = {"fp32", "bf16", "coat", *baselines.BASELINES}
PRECISION = {"precision", "precisions", "recipe", "recipes", "level", "levels", "opt_level"}  # what holds the name of a recipe, or a recipe


def decisions_by_name(tree: ast.Module, path: str) -> list[str]:
    """Complaints about one file. A tool may have a table of the recipes that it chooses; it looks nothing up in it by a name."""
    if path == TABLE or path.startswith(APEX):
        return []
    remedy = f"ask the recipe for a fact, and let {TABLE} answer it for every recipe"
    return [
        f"{path}:{line} decides by the name of a recipe ({text}): {remedy}" for line, text in _decisions(tree, path.startswith("tools/"))
    ]


def _decisions(tree: ast.Module, chooses: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops) and _is_named(operands, operands):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Match):
            patterns = [p.value for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)]
            if _is_named(patterns, [node.subject]):
                yield node.lineno, f"match {ast.unparse(node.subject)}"
        elif isinstance(node, ast.Subscript) and _looks_up(node.value, node.slice):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of, method = node.func.value, node.func.attr
            begins = method in ("startswith", "endswith", "index", "count") and _is_named(node.args[:1], [of])
            if begins or (method in ("get", "pop") and _looks_up(of, node.args[0])):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not chooses and _is_named(_keys(node.value), []):
            yield node.lineno, f"{ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)}, a table by name"


def _looks_up(table: ast.expr, key: ast.expr) -> bool:
    """Whether `table[key]` has the name of a recipe as its key, or among the keys of a table written there."""
    return _is_named([key], [table]) or _is_named(_keys(table), [key])


def _keys(node: ast.expr | None) -> list[ast.expr | None]:
    return node.keys if isinstance(node, ast.Dict) else []


def _is_named(literals: list[ast.expr | None], others: list[ast.expr]) -> bool:
    """Whether one of the literals is the name of a recipe: one that nothing else has, or one beside what holds a precision's name."""
    found = {text for literal in literals if literal is not None for text in _strings(literal)} & NAMES
    return bool(found - SHARED) or (bool(found) and any(_holds_a_precision(other) for other in others))


def _strings(node: ast.expr) -> Iterator[str]:
    """Strings of a literal: alone or in a tuple, list, set or the keys of a dict."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from _strings(element)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from _strings(key) if key is not None else ()


def _holds_a_precision(node: ast.expr) -> bool:
    """`level`, `config.precision.name`, `recipe.name`, `row["level"]`; not `precision.grad_format`, which is a format's name."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return _holds_a_precision(node.value)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in PRECISION
    return (node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None) in PRECISION

"""The house rules of CONTRIBUTING.md, held by reading the source.

A checker takes parsed source and returns its complaints, each saying what to do. The upper part applies the checkers to every file,
the lower part proves on small bad snippets that each of them fires.
"""

import ast
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from helpers.precision_names import decisions_by_name
from helpers.starters import is_starter

ROOT = Path(__file__).resolve().parents[1]
# A file's code lines, without docstrings, comments and blank lines: no essay is cut, and no file is split, to pass. A function's lines.
MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_FIELDS, MAX_INIT = 400, 80, 120, 25, 40

LEVEL = {"numerics": 0, "kernels": 1, "nn": 2, "optim": 2, "comm": 2, "fp16": 2, "parallel": 3, "integrations": 4}
ASSIGNS_INTO_FOREIGN_MODULES = "megatron/lm/cpu_home.py"  # megatron-core calls CUDA by name: DESIGN's single exception
MARKS_FOREIGN_OPTIMIZERS = "msamp/fp16/api.py"  # Apex's API takes torch's own optimizers, which declare nothing of ours
SWITCHES = ("torch.backends.", "torch.utils.deterministic.")  # torch's own documented settings are attributes to assign
REGISTRATIONS = re.compile(r"torch\.serialization\.add_safe_globals|torch\.library\.\w+|\w+\.(define|impl|register_\w+)|_register\w*")
IMPURE_CALLS = re.compile(
    r"(open|print|input|exec|eval|setattr|exit)|(torch|triton|numpy|np|os|sys|subprocess|shutil|time|random|socket|threading)\..*"
    r"|.*\.(read\w*|write\w*|exists|is_file|is_dir|iterdir|r?glob|mkdir|unlink|cuda|to)"
)
DECLARING_CALLS = re.compile(r"torch\.(device|finfo|iinfo|library\.\w+)|threading\.local")  # of those roots, but harmless
FORBIDDEN = re.compile(
    r"\b(TODO|FIXME|XXX)\b|(?i:\b(stubs?|placeholders?|not yet)\b)"
    r"|(?<![\w.])/(work|root)\b|(?<!\w)\.library\b"  # paths of the machines where this was written
)
TEXT = {".py", ".md", ".toml", ".sh", ".txt", ".yml", ".yaml", ".cfg", ".json", ""}


def files(*tops: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
    """Paths relative to the root, below `tops` (folders or files), sorted."""
    found = [p for top in tops for p in ((ROOT / top).rglob("*") if (ROOT / top).is_dir() else [ROOT / top])]
    wanted = (p for p in found if p.is_file() and p.suffix in suffixes and "__pycache__" not in p.parts)
    return sorted(p.relative_to(ROOT).as_posix() for p in wanted)


SOURCE = files("msamp", "megatron", "tools")
PYTHON = [*SOURCE, *files("tests", "examples", "setup.py")]
TRACKED_TEXT = files("msamp", "megatron", "tools", "tests", "examples", ".ci", suffixes=tuple(TEXT)) + sorted(
    p.name for p in ROOT.iterdir() if p.is_file() and p.suffix in TEXT and p.name != ".git"
)
TRITON = [f for f in files("msamp/kernels/triton") if not f.endswith("__init__.py")]


# ---------------------------------------------------------------------------------------------------------------- reading


@functools.cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def parse(path: str) -> ast.Module:
    return ast.parse(read(path), path)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a name, else ''."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imported_modules(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported anywhere in the file; `from a import b` gives a.b."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


# --------------------------------------------------------------------------------------------------------------- checkers


def import_direction(tree: ast.Module, path: str) -> list[str]:
    here = module_name(path).split(".")
    bad = []
    for line, name in imported_modules(tree, path):
        parts = name.split(".")
        where = f"{path}:{line} imports {name}: "
        if parts[0] in ("tests", "examples") or (parts[0] == "tools" and here[0] != "tools"):
            bad.append(where + f"{here[0]} is a library; move what is shared into msamp or megatron.lm")
        if parts[0] == "megatron" and (here[0] == "msamp" or (len(parts) > 1 and parts[1] not in ("core", "lm"))):
            bad.append(
                where + "msamp never imports megatron, and of megatron only core and lm are used; pass what is needed as an argument"
            )
        if here[0] == "msamp" and parts[0] == "triton" and here[1:2] != ["kernels"]:
            bad.append(where + "triton belongs to msamp/kernels; call msamp.kernels.ops")
        if here[:2] == ["msamp", "numerics"] and name.startswith("torch.distributed"):
            bad.append(where + "numerics knows no ranks; do this in msamp/comm or msamp/parallel")
        if here[0] == "msamp" and len(here) > 1 and parts[0] == "msamp" and here[1] in LEVEL:
            bad += [where + text for text in _layer_complaints(here[1], parts)]
    return bad


def _layer_complaints(mine: str, parts: list[str]) -> Iterator[str]:
    other = parts[1] if len(parts) > 1 else ""
    if other not in LEVEL:
        yield "inside msamp import the defining module, not the package's public names"
    elif other != mine and LEVEL[other] >= LEVEL[mine]:
        yield (
            f"{mine} (L{LEVEL[mine]}) may import only lower layers, not {other} (L{LEVEL[other]}); move the shared part down, "
            "or pass it in from above"
        )


def sizes(tree: ast.Module, path: str) -> list[str]:
    limit = MAX_KERNEL if path.startswith("msamp/kernels/triton/") else MAX_FUNCTION
    bad = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                bad.append(f"{path}:{node.lineno} {node.name} has {length} lines, at most {limit}: split it by what its parts do")
        elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and "ClassVar" not in ast.unparse(s.annotation)]
            if len(fields) > MAX_FIELDS:
                bad.append(f"{path}:{node.lineno} {node.name} has {len(fields)} fields, at most {MAX_FIELDS}: split it by who reads them")
    return bad


def code_lines(text: str) -> int:
    """Lines on which code stands: neither blank nor all comment nor in a docstring."""
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in empty]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def file_length(text: str, path: str) -> list[str]:
    if path == "msamp/__init__.py":
        lines, limit, what = text.count("\n"), MAX_INIT, "lines"
    else:
        # Counted only where all lines are too many: it takes ten times as long as to read the file.
        lines, limit, what = (code_lines(text) if text.count("\n") > MAX_FILE else 0), MAX_FILE, "lines of code"
    return [f"{path} has {lines} {what}, at most {limit}: split it into files that each have one subject"] if lines > limit else []


def optimizer_probes(tree: ast.Module, path: str) -> list[str]:
    if path == MARKS_FOREIGN_OPTIMIZERS:
        return []
    return [
        f"{path}:{node.lineno} {ast.unparse(node)[:60]}: ask no optimizer what it has; make it part of what every optimizer here declares"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in ("hasattr", "getattr")
        and node.args
        and dotted(node.args[0]).rpartition(".")[2].lower().endswith("optimizer")
    ]


def positional_flags(tree: ast.Module, path: str) -> list[str]:
    return [
        f"{path}:{function.lineno} {function.name} takes the flag {argument.arg} by position: put it behind a `*`, calls say its name"
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("_") and not _is_device_code(function)
        for argument in (*function.args.posonlyargs, *function.args.args)
        if argument.annotation is not None and "bool" in re.findall(r"\w+", ast.unparse(argument.annotation))
    ]


def global_statements(tree: ast.Module, path: str) -> list[str]:
    return [
        f"{path}:{node.lineno} global {', '.join(node.names)}: keep the state in an object that is passed along"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]


def foreign_assignment(tree: ast.Module, path: str) -> list[str]:
    return [] if path == ASSIGNS_INTO_FOREIGN_MODULES else [f"{path}:{line}: {text}" for line, text in _foreign(tree, {})]


def _foreign(scope: ast.AST, outer: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Stores to attributes of imported names within `scope`, where `outer` maps the enclosing scopes' imported names to their origin."""
    nodes, inner = list(_own_nodes(scope)), []
    names = dict(outer)
    for node in nodes:
        if isinstance(node, ast.arg):
            names.pop(node.arg, None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.pop(node.id, None)
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            stem = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {(a.asname or a.name.split(".")[0]): stem + (a.name if a.asname or stem else a.name.split(".")[0]) for a in node.names}
    for node in nodes:
        if node is not scope and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner.append(node)
        target = node if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) else None
        if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr", "builtins.setattr") and node.args:
            target = ast.Attribute(node.args[0], "<name>", lineno=node.lineno)
        root, _, rest = dotted(target).partition(".") if target is not None else ("", "", "")
        if target is not None and root in names and not f"{names[root]}.{rest}".startswith(SWITCHES):
            yield target.lineno, f"assigns to {names[root]}.{rest}, which belongs to another module: subclass or pass an argument instead"
    for function in inner:
        yield from _foreign(function, names)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, nested functions given but not entered."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(child)


def work_at_import(tree: ast.Module, path: str) -> list[str]:
    remedy = "move it into a function, or name it among REGISTRATIONS / DECLARING_CALLS in tests/test_architecture.py if it only declares"
    return [f"{path}:{node.lineno} does work at import ({ast.unparse(node)[:60]!r}): {remedy}" for node in _work(tree.body)]


def _work(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and REGISTRATIONS.fullmatch(dotted(node.value.func)):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            calls = [] if node.value is None else [ast.unparse(n.func) for n in ast.walk(node.value) if isinstance(n, ast.Call)]
            if all(DECLARING_CALLS.fullmatch(call) or not IMPURE_CALLS.fullmatch(call) for call in calls):
                continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        if isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _work([*node.body, *node.orelse])
        elif isinstance(node, ast.Try) and all(h.type and "ImportError" in ast.unparse(h.type) for h in node.handlers):
            yield from _work([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse, *node.finalbody])
        else:
            yield node


def _is_device_code(function: ast.FunctionDef) -> bool:
    return any(re.search(r"\bjit\b", ast.unparse(d)) for d in function.decorator_list)


def public_functions(tree: ast.Module) -> set[str]:
    """Names of a kernel file's entry points: top-level, public, taking tensors, and not themselves device code."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not _is_device_code(node)
        and any(a.annotation is None or "Tensor" in ast.unparse(a.annotation) for a in node.args.args)
    }


def missing_twins(tree: ast.Module, twin: ast.Module | None, path: str) -> list[str]:
    reference = path.replace("/triton/", "/reference/")
    if twin is None:
        return [f"{path} has no reference twin: write {reference}, the same functions in plain torch"]
    missing = sorted(public_functions(tree) - public_functions(twin))
    return [f"{path}: {name} has no twin: define it in {reference}, or make it private" for name in missing]


def mirror_test(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"tests/{folder}/test_{name}"


def missing_mirror(path: str) -> list[str]:
    mirror = ROOT / mirror_test(path)
    if not mirror.is_file():
        return [f"{path} has no test: write {mirror_test(path)}"]
    holds = re.search(r"^\s*def test_", mirror.read_text(encoding="utf-8"), re.MULTILINE)
    return [] if holds else [f"{mirror_test(path)} holds no test function"]


def forbidden_text(text: str, path: str) -> list[str]:
    return [
        f"{path}:{number} contains {found.group()!r}: finish the work or open an issue, and name no machine's paths"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := FORBIDDEN.search(line))
    ]


def misplaced(path: str) -> list[str]:
    bad = []
    if path.endswith("/utils.py"):
        bad.append(f"{path}: a name that says nothing collects everything; name the file by its subject")
    if path == "megatron/__init__.py":
        bad.append(f"{path} hides NVIDIA's megatron.core: megatron is a namespace package, delete the file")
    if path.startswith("megatron/") and not path.startswith("megatron/lm/"):
        bad.append(f"{path}: only megatron/lm is ours, the rest of the namespace is NVIDIA's")
    if path.startswith("tests/") and path.endswith("__init__.py"):
        bad.append(f"{path} makes the tests shadow the packages they test: delete the file (pytest imports by path)")
    return bad


# ------------------------------------------------------------------------------------------------------- the house, checked


def complain(complaints: Iterable[str]) -> None:
    """Fail with all of them."""
    if found := list(complaints):
        pytest.fail("\n".join(found), pytrace=False)


def everywhere(check: Callable[[ast.Module, str], list[str]], paths: Iterable[str]) -> Iterator[str]:
    return (complaint for path in paths for complaint in check(parse(path), path))


def test_imports_point_down():
    complain(everywhere(import_direction, SOURCE))


def test_functions_and_dataclasses_stay_small():
    complain(everywhere(sizes, PYTHON))


def test_files_stay_short():
    complain(complaint for path in PYTHON for complaint in file_length(read(path), path))


def test_no_global_statement():
    complain(everywhere(global_statements, SOURCE))


def test_no_assignment_into_foreign_modules():
    complain(everywhere(foreign_assignment, SOURCE))


def test_no_work_at_import():
    complain(everywhere(work_at_import, SOURCE))


def test_no_optimizer_is_asked_what_it_has():
    complain(everywhere(optimizer_probes, SOURCE))


def test_flags_of_operators_are_keyword_only():
    complain(everywhere(positional_flags, files("msamp/kernels")))


def test_nothing_is_decided_by_the_name_of_a_recipe():
    complain(everywhere(decisions_by_name, SOURCE))


def test_every_triton_kernel_has_a_reference_twin():
    twins = {path: path.replace("/triton/", "/reference/") for path in TRITON}
    complain(
        complaint
        for path, twin in twins.items()
        for complaint in missing_twins(parse(path), parse(twin) if (ROOT / twin).is_file() else None, path)
    )


def test_every_source_file_has_its_mirror_test():
    tested = (path for path in SOURCE if not path.endswith("__init__.py") and not is_starter(path))
    complain(complaint for path in tested for complaint in missing_mirror(path))


def test_files_are_where_they_belong():
    complain(complaint for path in PYTHON for complaint in misplaced(path))


def test_no_unfinished_work_and_no_machine_paths():
    spelled_out = "tests/test_architecture.py"  # it spells what it forbids
    complain(complaint for path in TRACKED_TEXT if path != spelled_out for complaint in forbidden_text(read(path), path))


IMPORT_MSAMP = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "numpy", "megatron"):
            raise ModuleNotFoundError(name + " is hidden")
sys.meta_path.insert(0, Hidden())
import torch
import msamp
assert not torch.cuda.is_initialized(), "import msamp initialised CUDA"
assert not {"triton", "numpy", "megatron"} & set(sys.modules), "the import hook did not work"
"""


def test_msamp_imports_with_torch_alone_and_leaves_cuda_alone():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", IMPORT_MSAMP], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"import msamp needs only torch; import the rest where it is used:\n{done.stderr}"


# ------------------------------------------------------------------------------------------------- the checkers themselves

NUMERICS, NN, LM, KERNEL = "msamp/numerics/a.py", "msamp/nn/a.py", "megatron/lm/a.py", "msamp/kernels/triton/a.py"
LONG = "def f():\n" + "    pass\n" * MAX_FUNCTION
WIDE = "@dataclasses.dataclass(frozen=True)\nclass C:\n" + "".join(f"    x{i}: int\n" for i in range(MAX_FIELDS + 1))

BAD: list[tuple[Callable[[ast.Module, str], list[str]], str, str]] = [
    (import_direction, "import msamp.kernels.ops", NUMERICS),
    (import_direction, "def f():\n    from ..nn import linear", NUMERICS),
    (import_direction, "from msamp.optim.update import adam", NN),
    (import_direction, "from msamp import initialize", NN),
    (import_direction, "import megatron.core", NN),
    (import_direction, "from megatron import core", NN),
    (import_direction, "import triton", NN),
    (import_direction, "import torch.distributed as dist", NUMERICS),
    (import_direction, "from megatron.training import arguments", LM),
    (import_direction, "from tools import report", LM),
    (sizes, LONG, LM),
    (sizes, WIDE, LM),
    (global_statements, "def f():\n    global x\n    x = 1", LM),
    (optimizer_probes, "if hasattr(optimizer, 'wait'):\n    optimizer.wait()", LM),
    (optimizer_probes, "wait = getattr(self.training.optimizer, 'wait', None)", LM),
    (optimizer_probes, "[getattr(inner_optimizer, name) for name in names]", LM),
    (positional_flags, "def cast(x: torch.Tensor, row: bool): ...", KERNEL),
    (positional_flags, "def cast(x: torch.Tensor, row: bool | None = None, *, col: bool): ...", KERNEL),
    (foreign_assignment, "import torch\ntorch.cuda.synchronize = None", LM),
    (foreign_assignment, "import torch.nn as nn\ndef f():\n    nn.Linear.forward = None", LM),
    (foreign_assignment, "from megatron.core import parallel_state\nparallel_state.x += 1", LM),
    (foreign_assignment, "import torch\ndef f():\n    setattr(torch.cuda, 'x', 1)", LM),
    (foreign_assignment, "import torch\ndel torch.cuda", LM),
    (work_at_import, "import torch\nx = torch.zeros(3)", LM),
    (work_at_import, "print('hello')", LM),
    (work_at_import, "for i in range(3):\n    pass", LM),
    (work_at_import, "try:\n    import triton\nexcept ImportError:\n    print('slow')", LM),
    (work_at_import, "text = open('x').read()", LM),
    (work_at_import, "text = Path('x').read_text()", LM),
    (work_at_import, "SEED = int(os.environ['SEED']) if os.environ.get('SEED') else 1", LM),
]

GOOD: list[tuple[Callable[[ast.Module, str], list[str]], str, str]] = [
    (import_direction, "from msamp.numerics import scaling\nfrom . import linear_fn\nimport torch", NN),
    (import_direction, "import megatron.core.parallel_state\nfrom msamp.nn.linear import FP8Linear\nfrom megatron.lm import config", LM),
    (import_direction, "import triton", KERNEL),
    (sizes, LONG, KERNEL),
    (optimizer_probes, "getattr(p, 'main_grad', None)\nhasattr(torch, 'optimizer')\noptimizer.wait()", LM),
    (optimizer_probes, "hasattr(optimizer, 'amp')", MARKS_FOREIGN_OPTIMIZERS),
    (positional_flags, "def cast(x: torch.Tensor, *, row: bool): ...\ndef _put(row: bool): ...\n@triton.jit\ndef f(x: bool): ...", KERNEL),
    (foreign_assignment, "import torch\ntorch.backends.cudnn.benchmark = True\nclass A:\n    def f(self):\n        self.x = 1", LM),
    (foreign_assignment, "from a import config\ndef f(config):\n    config.x = 1", LM),
    (foreign_assignment, "import torch\ntorch.cuda.synchronize = None", ASSIGNS_INTO_FOREIGN_MODULES),
    (work_at_import, "from a import B\nX: int = 1\nY = B(x=frozenset({1}))\nif TYPE_CHECKING:\n    import c", LM),
    (work_at_import, "try:\n    import triton\nexcept ImportError:\n    triton = None\nif __name__ == '__main__':\n    main()", LM),
    (
        work_at_import,
        "torch.serialization.add_safe_globals([A])\nlib = torch.library.Library('a', 'DEF')\nlib.define('f(Tensor x) -> Tensor')",
        LM,
    ),
]


@pytest.mark.parametrize(("check", "source", "path"), BAD)
def test_checker_fires(check, source, path):
    assert check(ast.parse(source), path)


@pytest.mark.parametrize(("check", "source", "path"), GOOD)
def test_checker_is_quiet(check, source, path):
    assert not check(ast.parse(source), path)


def test_length_checker():
    assert file_length("x = 1\n" * (MAX_FILE + 1), LM)
    assert file_length("x = (\n" + "    1,\n" * MAX_FILE + ")\n", LM)
    assert file_length('x = """\n' + "text\n" * MAX_FILE + '"""\n', LM), "a string that is no docstring is code"
    essay = '"""Essay.\n' + "text\n" * MAX_FILE + '"""\n' + "# comment\n\n" * MAX_FILE
    assert not file_length(essay + "x = 1  # comment\n" * MAX_FILE, LM)
    assert file_length("\n" * (MAX_INIT + 1), "msamp/__init__.py")


def test_code_lines():
    assert (
        code_lines(
            '"""Essay."""\n\n# comment\nclass A:\n    """Text,\n    more."""\n\n    def f(self):\n        """Text."""\n        return 1\n'
        )
        == 3
    )


def test_complaints_come_all_together():
    with pytest.raises(pytest.fail.Exception, match=r"^one\ntwo$"):
        complain(iter(["one", "two"]))
    complain(iter([]))


def test_mirror_checker():
    assert missing_mirror("msamp/no_such_file.py")
    assert missing_mirror("msamp/kernels/ops.py") == []


def test_twin_checker():
    kernel = ast.parse("@triton.jit\ndef kernel(x): ...\ndef cast(x: torch.Tensor): ...\ndef _grid(x): ...\ndef limit(n: int): ...")
    assert missing_twins(kernel, None, KERNEL)
    assert missing_twins(kernel, ast.parse("def other(x): ..."), KERNEL)
    assert not missing_twins(kernel, ast.parse("def cast(x): ...\ndef other(x): ..."), KERNEL)


def test_text_checker():
    words = [
        "TO" + "DO: x",
        "st" + "ub",
        "Place" + "holder",
        "not " + "yet done",
        "cd /wor" + "k/main",
        "~ /roo" + "t",
        "x/.libr" + "ary/y",
    ]
    assert all(forbidden_text(word, "a.md") for word in words)
    assert not forbidden_text("stubborn framework/root torch.library.Library a/work", "a.md")


@pytest.mark.parametrize("path", ["megatron/__init__.py", "megatron/training/a.py", "tests/megatron/__init__.py", "msamp/nn/utils.py"])
def test_place_checker(path):
    assert misplaced(path)


def test_mirror_paths():
    assert mirror_test("megatron/lm/data/batch.py") == "tests/megatron/lm/data/test_batch.py"
    assert mirror_test("tools/bench/bench_step.py") == "tests/tools/bench/test_bench_step.py"

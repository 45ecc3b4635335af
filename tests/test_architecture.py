"""The house rules of CONTRIBUTING.md that neither ruff nor import-linter can check; pyproject.toml configures the others."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.precision_names import decisions_by_name

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 450  # physical lines per file
MAX_FILES = 12  # at the top of a folder of megatron/lm, whatever their kind
# Lines of Python of each package, and test cases. The goal: 28,000, 24,500, 9,500, 1,000, 62,000 and 9,000, and for msamp 1,500 of the two
# lines at the engine's speed and 500 of other people's loops.
CEILINGS = {
    "msamp": 30_398,
    "megatron": 23_464,
    "tools": 8_816,
    "examples": 1_004,
    "tests": 61_992,
    "cases": 9_000,
}
PATHS_OF_A_MACHINE = re.compile(r"(?<![\w.])/(work|root)\b|(?<!\w)\.library\b")


def files(*tops: str) -> list[str]:
    """Python files below `tops`, as paths relative to the root."""
    return sorted(path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py"))


SOURCE = files("msamp", "megatron", "tools")
PYTHON = [*SOURCE, *files("tests", "examples", "docs")]
TRITON = [path for path in files("msamp/kernels/triton") if not path.endswith("__init__.py")]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_files_stay_short():
    lengths = {path: read(path).count("\n") for path in PYTHON}
    too_long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long, f"more than {MAX_LINES} lines: split each into files with one subject"


def test_folders_of_the_trainer_stay_small():
    files_of = {d: [p for p in d.iterdir() if p.is_file() and p.suffix != ".pyc"] for d in (ROOT / "megatron/lm").glob("**/")}
    too_many = {str(folder.relative_to(ROOT)): len(found) for folder, found in files_of.items() if len(found) > MAX_FILES}
    assert not too_many, f"more than {MAX_FILES} files: split each folder into rooms with one subject"


def test_the_house_keeps_its_size(cases_collected: int):
    """An issue whose feature needs more raises a ceiling in its first commit; any other change removes as much as it adds."""
    lines = {top: sum(read(path).count("\n") for path in files(top)) for top in CEILINGS if top != "cases"}
    counts = lines | {"cases": cases_collected}  # of the files that this run collected: all of them in CI
    assert {name: count for name, count in counts.items() if count > CEILINGS[name]} == {}, f"the ceilings are {CEILINGS}"


def public_functions(path: str) -> set[str]:
    """Names of the host functions at the top level of a kernel file; device code is decorated with `triton.jit`."""
    return {
        node.name
        for node in ast.parse(read(path)).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        and "Tensor" in ast.unparse(node.args)
    }


def test_every_triton_kernel_has_a_reference_twin():
    twins = {path: path.replace("/triton/", "/reference/") for path in TRITON}
    missing = {
        twin: public_functions(path) - (public_functions(twin) if (ROOT / twin).is_file() else set()) for path, twin in twins.items()
    }
    assert not any(missing.values()), f"define the same functions in plain torch: {missing}"


def test_nothing_is_decided_by_the_name_of_a_recipe():
    assert [complaint for path in SOURCE for complaint in decisions_by_name(ast.parse(read(path)), path)] == []


def test_graphs_are_captured_where_a_failed_capture_frees_them():
    """NCCL waits for a half-captured graph with its collectives: two ranks that lacked memory never ended."""
    library = [path for path in SOURCE if path.startswith(("msamp/", "megatron/"))]
    assert [path for path in library if "torch.cuda.graph(" in read(path)] == ["msamp/kernels/cuda_graph.py"]


def test_files_are_where_they_belong():
    assert not (ROOT / "megatron/__init__.py").exists(), "it would hide NVIDIA's megatron.core: megatron is a namespace package"
    assert [path for path in PYTHON if path.startswith("megatron/") and not path.startswith("megatron/lm/")] == []
    assert [path for path in PYTHON if path.endswith("/utils.py")] == [], "name a file by its subject"
    assert files("tests") == [path for path in files("tests") if not path.endswith("__init__.py")], "tests would shadow what they test"


def test_no_paths_of_one_machine():
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.py", "*.md", "*.toml", "*.sh", "Makefile"], capture_output=True)
    found = [path for path in tracked.stdout.decode().split() if path != "tests/test_architecture.py" and (ROOT / path).is_file()]
    assert [path for path in found if PATHS_OF_A_MACHINE.search(read(path))] == []


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

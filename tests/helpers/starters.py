"""A tool of users lives in `megatron/lm/tools/`, where the wheel takes it from, and in a checkout `tools/` starts it by two lines and no
more: what `test_architecture.py` needs to know of them. `test_starters.py` holds it for every tool."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTER = '''"""Starts `python -m megatron.lm.tools.{name}`."""

from megatron.lm.tools.{name} import main

if __name__ == "__main__":
    raise SystemExit(main())
'''


def is_starter(path: str) -> bool:
    """Whether a file, relative to the root, starts the tool that has its name, and does nothing else."""
    file = ROOT / path
    return path == f"tools/{file.name}" and file.is_file() and file.read_text(encoding="utf-8") == STARTER.format(name=file.stem)


def missing_starters(tools: Path) -> list[str]:
    """Complaints about the tools in a folder."""
    named = [file.stem for file in sorted(tools.glob("*.py")) if "\ndef main(" in file.read_text(encoding="utf-8")]
    return [
        f"{name} is a tool of users, whose command in a checkout is tools/{name}.py: write the two lines of STARTER there, and no more"
        for name in named
        if not is_starter(f"tools/{name}.py")
    ]

"""Rules for Python code from FP8-LM, appendix A.3, in the paper's order.

The paper leaves some terms undefined. Here the alphanumeric rate of a comment is the fraction of letters and digits among its non-blank
characters. The rate of a file is the fraction of ASCII letters, digits, punctuation and blanks among all characters, since with letters and
digits alone no Python file reaches the paper's 0.98. The paper's list of keywords ends with "etc."; `KEYWORDS` is ours.
"""

import re
import string

COMMENT_RATE, FILE_RATE = 0.5, 0.98
FEWEST_LINES, LONGEST_LINE, AVERAGE_LINE, FEWEST_KEYWORDS = 5, 1000, 100, 3
KEYWORDS = ("import", "from", "def", "class", "if", "for", "try", "while", "with", "return", "except", "else", "elif")
_KEYWORD = re.compile(rf"\b(?:{'|'.join(KEYWORDS)})\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_COPYRIGHT = re.compile(r"copyright|\(c\)\s*\d{4}|all rights reserved", re.IGNORECASE)
_FIRST_STRING = re.compile(r"\A(?P<before>(?:\s*#[^\n]*\n|\s*\n)*)(?P<text>[rRuU]?(?:\"\"\".*?\"\"\"|'''.*?'''))[ \t]*\n?", re.DOTALL)
_ORDINARY = frozenset(string.ascii_letters + string.digits + string.punctuation + " \t\n")


def clean(text: str) -> tuple[str, str | None]:
    """Return the remaining text of a file, and why the file is dropped, or None."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n"))
    text = _without_copyright(text)
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#") or _comment_rate(line) >= COMMENT_RATE]
    text = "\n".join(lines)
    return text, _problem(text)


def _problem(text: str) -> str | None:
    lines = text.strip("\n").split("\n") if text.strip() else []
    if not text or sum(letter in _ORDINARY for letter in text) / len(text) < FILE_RATE:
        return "code: alphanumeric rate"
    if len(lines) < FEWEST_LINES:
        return "code: too few lines"
    if max(map(len, lines)) > LONGEST_LINE:
        return "code: a line too long"
    if sum(map(len, lines)) / len(lines) > AVERAGE_LINE:
        return "code: lines too long on average"
    if len(_KEYWORD.findall(text)) < FEWEST_KEYWORDS:
        return "code: too few keywords"
    return None


def _without_copyright(text: str) -> str:
    """Return the text without copyright comments and a copyright docstring at the top; a shebang line is kept."""
    first = _FIRST_STRING.match(text)
    if first is not None and _COPYRIGHT.search(first["text"]):
        text = first["before"] + text[first.end() :]
    kept: list[str] = []
    run: list[str] = []
    for line in [*text.split("\n"), None]:
        if line is not None and line.lstrip().startswith("#"):
            run.append(line)
            continue
        if _COPYRIGHT.search("\n".join(run)):
            run = [entry for entry in run[:1] if not kept and entry.startswith("#!")]
        kept += run
        run = []
        if line is not None:
            kept.append(line)
    return "\n".join(kept)


def _comment_rate(line: str) -> float:
    letters = [letter for letter in line.lstrip().lstrip("#!") if not letter.isspace()]
    return sum(letter.isalnum() for letter in letters) / len(letters) if letters else 0.0

"""Sphinx's configuration of the documentation, which `make docs` builds with warnings as errors.

Docstrings are Markdown with the sections of Google's style, and Sphinx reads reStructuredText: `as_rst` translates tables and indented
code. Single backticks are code in both, by `default_role`. The page of the trainer's flags is made from its `--help`. On a phone neither a
flag nor a number breaks in the middle: `_keep_words` marks what stays on one line, and `_static/narrow.css` keeps it there.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import msamp
from megatron.lm.config.cli import parse_args
from megatron.lm.config.megatron_flags.table import HEADING

project = "msamp"
version = release = msamp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
default_role = "code"
smartquotes_action = "qe"  # the two hyphens of a flag are no dash
nitpicky = True
# Types in signatures, of torch and of rooms without a page, lead nowhere; every other reference must resolve.
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "transformers"]  # of the extra `integrations`, which the documentation does not need

html_theme = "furo"
html_title = f"msamp {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
LINKED = ("reproduction/", "reference/hosts_matrix", "reference/faq", "reference/precisions/")
UNBROKEN = 28  # characters of a word in code, and of a cell, that a phone has room for


def as_rst(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring with Markdown's tables and indented code as reStructuredText has them."""
    text = "\n" + "\n".join(lines) + "\n"
    text = re.sub(r"(?:(?<=\n)\|[^\n]*\|\n)+", lambda table: "\n".join(_list_table(table[0].splitlines())) + "\n\n", text)
    # A block that is indented after an empty line, at the left margin's level, is code.
    text = re.sub(r"(?<=\n)(?=[^\s.])([^\n]+\n)\n(?=    \S)(?!    :|    \* -)", r"\1\n::\n\n", text)
    return [*text.strip("\n").split("\n"), ""]


def _list_table(rows: Sequence[str]) -> Iterator[str]:
    yield from (".. list-table::", "    :header-rows: 1", "")
    for row in (rows[0], *rows[2:]):
        for index, cell in enumerate(row.strip("| ").split(" | ")):
            yield f"    {'* -' if index == 0 else '  -'} {cell.strip()}"


class TrainerFlags(Directive):
    """The flags of the trainer as its `--help` lists them: a section for each group, a definition for each flag. Those of Megatron-LM have
    a page of their own."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for title, told, flags in groups_of(help_text().partition(f"\n{HEADING}")[0]):
            section = nodes.section(ids=[nodes.make_id(f"flags {title}")], names=[title])
            section += nodes.title(text=title.capitalize())
            if told:
                section += nodes.paragraph(text=told)
            items = nodes.definition_list()
            for flag, meaning in flags:
                term = nodes.term("", "", nodes.literal(text=flag), ids=[nodes.make_id(flag.split()[0])])
                items += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", "", *_with_flags(meaning))))
            section += items
            sections.append(section)
        return sections


def help_text() -> str:
    """What `msamp pretrain --help` prints on a screen that is wide enough for any line."""
    text = io.StringIO()
    wide = mock.patch.dict(os.environ, {"COLUMNS": "10000"})
    with wide, contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        parse_args(["--help"])
    return text.getvalue()


def groups_of(text: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Title, description and (flag, meaning) of each group of argparse's help."""
    for block in re.split(r"\n(?=\S[^\n]*:\n)", text)[1:]:
        title, *lines = block.splitlines()
        told = " ".join(line.strip() for line in lines if re.match(r"  [^\s-]", line))
        found = re.findall(r"^  (-\S.*?)(?:\n +|  +)(\S.*)$", block, re.MULTILINE)
        yield title.rstrip(":"), told, found


def _with_flags(text: str) -> Iterator[nodes.Node]:
    """A text in which the flags stand as code."""
    for index, part in enumerate(re.split(r"(--[a-z][a-z0-9-]*)", text)):
        yield nodes.literal(text=part) if index % 2 else nodes.Text(part)


def _keep_words(app: Sphinx, tree: nodes.document) -> None:
    """Mark code of short words, and short cells, as what is not broken into lines."""
    for code in tree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) <= UNBROKEN:
            code["classes"].append("unbroken")
    for cell in tree.findall(nodes.entry):
        if len(cell.astext()) <= UNBROKEN // 2 and "\n" not in cell.astext():
            cell["classes"].append("unbroken")


def _leave_out_of_sidebar(app: Sphinx, env: BuildEnvironment) -> None:
    """Mark pages of single tables as reached by links from their overview, not from the sidebar."""
    for page in env.found_docs:
        if page.startswith(LINKED) and page != "reproduction/reproduction":
            env.metadata[page]["orphan"] = True


def _translate(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _translate, priority=100)  # before napoleon
    app.connect("doctree-read", _keep_words)
    app.connect("env-updated", _leave_out_of_sidebar)
    app.add_directive("trainer-flags", TrainerFlags)

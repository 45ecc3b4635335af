"""Parse the names of precisions on tools' command lines: a recipe, or a recipe with other casts of its GEMMs after a plus.

O2                           --precision O2
O2+blockwise                 --precision O2 --fp8-recipe blockwise
te-delayed                   --precision te-delayed, a baseline, if it is installed
'O2 --master-format bf16'    --precision O2 --master-format bf16, for tools that accept a precision with flags

As a program it lists them: python tools/precisions.py, or python tools/precisions.py O2+blockwise
"""

import argparse
import shlex
import sys

from megatron.lm.config.sections.baselines import BASELINES
from megatron.lm.config.sections.precision import recipe_by_name
from megatron.lm.shell.arguments import Parser
from megatron.lm.shell.exit_codes import command
from msamp.numerics import recipe


def precision_flags(text: str) -> list[str]:
    """Return the flags of msamp pretrain for a tools' precision; O0 is bf16.

    Raises:
        ValueError: an unknown recipe, unknown casts, or casts for a recipe without FP8 GEMMs.
    """
    name, plus, gemm = text.partition("+")
    known = recipe_by_name(name)
    if not plus:
        return ["--precision", known.name]
    if gemm not in recipe.GEMMS:
        raise ValueError(f"precision {text}: {gemm!r} is unknown; after the plus give one of {', '.join(recipe.GEMMS)}")
    known.with_gemm(recipe.GEMMS[gemm])
    return ["--precision", known.name, "--fp8-recipe", gemm]


def case_flags(text: str) -> list[str]:
    """Return the flags of msamp pretrain for a precision followed by further flags.

    Raises:
        ValueError: as for `precision_flags`, or without a precision.
    """
    words = shlex.split(text)
    if not words:
        raise ValueError(f"precision {text!r} is empty: give a precision, followed by flags in the same quotes")
    return [*precision_flags(words[0]), *words[1:]]


def legal_case(text: str) -> str:
    """Return `text` itself: the `type` of an argparse argument, with the errors of `case_flags`."""
    try:
        case_flags(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def known() -> list[str]:
    """Return every precision that tools accept, without further flags."""
    recipes = [recipe.by_name(name) for name in recipe.names()]
    casts = [f"{one.name}+{gemm}" for one in recipes if one.fp8 for gemm in recipe.GEMMS]
    return [*(one.name for one in recipes), *casts, *BASELINES]


@command
def main(argv: list[str] | None = None) -> None:
    """Print the flags of msamp pretrain for each precision."""
    parser = Parser(description=__doc__)
    parser.add_argument("precision", nargs="*", type=legal_case, help="precisions to list (default: all)")
    for text in parser.parse_args(argv).precision or known():
        print(f"{text:<32}{shlex.join(case_flags(text))}")


if __name__ == "__main__":
    sys.exit(main())

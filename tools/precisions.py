"""How tools name a precision on their command lines: a recipe, or with a plus a recipe with GEMMs cast in another way.

O2                           --precision O2
O2+blockwise                 --precision O2 --fp8-recipe blockwise
te-delayed                   --precision te-delayed, of a peer, where it is installed
'O2 --master-format bf16'    --precision O2 --master-format bf16, where a tool takes a precision with flags
"""

import argparse
import shlex

from megatron.lm.config.precision import recipe_by_name
from msamp.numerics import recipe


def precision_flags(text: str) -> list[str]:
    """The flags of megatron.lm.pretrain for a precision as tools name it; O0 is bf16.

    Raises:
        ValueError: an unknown recipe, an unknown way to cast, or one for a recipe without FP8 GEMMs.
    """
    name, plus, gemm = text.partition("+")
    known = recipe_by_name(name)
    if not plus:
        return ["--precision", known.name]
    if gemm not in recipe.GEMMS:
        raise ValueError(f"precision {text}: {gemm!r} is unknown; after the plus give one of {', '.join(recipe.GEMMS)}")
    known.with_gemm(recipe.GEMMS[gemm])
    return ["--precision", known.name, "--fp8-recipe", gemm]


def legal_precision(text: str) -> str:
    """`text` itself: the `type` of an argument of argparse, which then says what `precision_flags` says."""
    try:
        precision_flags(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def case_flags(text: str) -> list[str]:
    """The flags of megatron.lm.pretrain for a precision and, after a space, further flags.

    Raises:
        ValueError: as `precision_flags`, and where there is no precision.
    """
    words = shlex.split(text)
    if not words:
        raise ValueError(f"precision {text!r} is empty: begin with a precision, and flags follow it in the same quotes")
    return [*precision_flags(words[0]), *words[1:]]


def legal_case(text: str) -> str:
    """`text` itself, as `legal_precision`, for an argument that takes a precision with flags."""
    try:
        case_flags(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text

"""How tools name a precision on their command lines: a recipe, or with a plus a recipe whose GEMMs are cast in another way.

O2                  --precision O2
O2+blockwise        --precision O2 --fp8-recipe blockwise
"""

import argparse

from msamp.numerics import recipe


def precision_flags(text: str) -> list[str]:
    """The flags of megatron.lm.pretrain for a precision as tools name it; O0 is bf16.

    Raises:
        ValueError: an unknown recipe, an unknown way to cast, or one for a recipe without FP8 GEMMs.
    """
    name, plus, gemm = text.partition("+")
    known = recipe.by_name(name)
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

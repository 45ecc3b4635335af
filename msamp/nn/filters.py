"""Which linear layers of a model are converted: predicates over a layer's name and shape."""

import re
from collections.abc import Callable

from torch import nn

Filter = Callable[[str, nn.Linear], bool]


def exclude_names(*patterns: str) -> Filter:
    """Refuses layers in whose dotted name one of the regular expressions is found."""
    compiled = [re.compile(p) for p in patterns]
    return lambda name, layer: not any(p.search(name) for p in compiled)


def include_names(*patterns: str) -> Filter:
    """Accepts only layers in whose dotted name one of the regular expressions is found."""
    refuse = exclude_names(*patterns)
    return lambda name, layer: not refuse(name, layer)


def min_features(size: int) -> Filter:
    """Accepts layers with at least `size` input and output features: narrower GEMMs gain nothing and are mostly padding."""
    return lambda name, layer: min(layer.in_features, layer.out_features) >= size


def all_of(*filters: Filter) -> Filter:
    """Accepts what every filter accepts."""
    return lambda name, layer: all(f(name, layer) for f in filters)


# The LM head stays in 16 bits: its gradient is the widest in range and its logits the most sensitive.
DEFAULT: Filter = all_of(exclude_names(r"(^|\.)(lm_head|output_layer|embed_out)$"), min_features(16))

"""Which linear layers of a model are converted: predicates over a layer's name and shape."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

Filter = Callable[[str, nn.Linear], bool]


@dataclass(frozen=True)
class Named:
    """A filter with a reason for what it rejects."""

    accepts: Filter
    why: str

    def __call__(self, name: str, layer: nn.Linear) -> bool:
        return self.accepts(name, layer)


@dataclass(frozen=True)
class Every:
    """Accepts a layer if all of its filters do."""

    filters: tuple[Filter, ...]

    def __call__(self, name: str, layer: nn.Linear) -> bool:
        return all(f(name, layer) for f in self.filters)


def why_refused(accept: Filter, name: str, layer: nn.Linear) -> str:
    """Return why a filter rejects a layer; "" if it accepts it."""
    if isinstance(accept, Every):
        return next((why for f in accept.filters if (why := why_refused(f, name, layer))), "")
    if accept(name, layer):
        return ""
    return accept.why if isinstance(accept, Named) else "accept= leaves it out"


def exclude_names(*patterns: str) -> Filter:
    """Reject layers whose dotted name contains a match of any of the regular expressions."""
    compiled = [re.compile(p) for p in patterns]
    return Named(lambda name, layer: not any(p.search(name) for p in compiled), "its name is excluded")


def include_names(*patterns: str) -> Filter:
    """Accept only layers whose dotted name contains a match of any of the regular expressions."""
    refuse = exclude_names(*patterns)
    return Named(lambda name, layer: not refuse(name, layer), "its name is not included")


def min_features(size: int) -> Filter:
    """Accept layers with at least `size` input and output features: narrower GEMMs gain nothing and are mostly padding."""
    return Named(lambda name, layer: min(layer.in_features, layer.out_features) >= size, f"it has fewer than {size} features")


def all_of(*filters: Filter) -> Filter:
    """Accept a layer if every filter does."""
    return Every(filters)


# The LM head stays in 16 bits: its gradient has the widest range and its logits are the most sensitive. Adapters (`lora_A`, `lora_B`) do
# too: they are small, and their library saves and merges them itself.
DEFAULT: Filter = all_of(exclude_names(r"(^|\.)(lm_head|output_layer|embed_out)$", r"(^|\.)lora_"), min_features(16))

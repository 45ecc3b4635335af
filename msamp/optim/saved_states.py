"""Taking a state_dict in the precision in which it was saved: torch's own loading casts states to the parameter's dtype."""

from collections.abc import Mapping
from typing import Any

import torch


def saved_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], option: str) -> dict[int, dict[str, torch.Tensor]]:
    """Take over the parameter groups of `state_dict`, drop the optimizer's states, and return the saved ones.

    Args:
        option: of the groups' options, that which says what the states are; it must be the optimizer's own.

    Returns:
        Number of a parameter over all groups -> its states as saved; those without any left out.

    Raises:
        ValueError: where the saved option is another, naming both; nothing has changed then.
    """
    for i, (saved, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups, strict=False)):
        if saved.get(option) != group[option]:
            raise ValueError(
                f"parameter group {i} was saved with {option} {saved.get(option)!r}, this optimizer has {group[option]!r}; "
                f"build it with the saved {option}, or start from the weights alone"
            )
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    return {place: state_dict["state"][i] for place, i in enumerate(numbers) if state_dict["state"].get(i)}

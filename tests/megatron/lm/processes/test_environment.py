"""Which process this is: what the environment says, and what it may not say."""

import pytest

from megatron.lm.processes.environment import LaunchEnvironment, launch_from_environment


def test_environment_of_torchrun():
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launch_from_environment(environment) == LaunchEnvironment(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert launch_from_environment(environment).world_size == 8
    assert launch_from_environment({}) == LaunchEnvironment()
    assert launch_from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchEnvironment(
        rank=1, world_size=2, local_rank=1, local_world_size=2
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be at least 0 and below WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=4"),
    ],
)
def test_bad_environment_names_value_and_remedy(environment: dict[str, str], named: str):
    with pytest.raises(ValueError, match="torchrun") as error:
        launch_from_environment(environment)
    assert named in str(error.value)

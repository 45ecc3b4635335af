import pytest

from helpers import shards


def test_every_file_is_in_one_part_and_no_part_is_much_longer():
    weights = {f"test_{i}.py": float(i**2) for i in range(1, 30)}
    for count in (1, 3, 4):
        parts = shards.divided(weights, count)
        assert sorted(file for part in parts for file in part) == sorted(weights)
        loads = [sum(weights[file] for file in part) for part in parts]
        assert max(loads) - min(loads) <= 29**2
    assert shards.divided(dict(reversed(weights.items())), 4) == shards.divided(weights, 4)


def test_more_parts_than_files_are_empty():
    assert shards.divided({"a": 1.0}, 3) == [{"a"}, set(), set()]


@pytest.mark.nightly(7)
def test_a_marker_says_how_long_a_test_takes(request):
    assert shards.seconds(request.node) == 7


def test_a_part_takes_the_files_that_no_other_takes(request):
    (mine,) = {shards.file_of(request.node)}
    assert mine.endswith("test_shards.py")
    assert [shards.outside([request.node], number, 2) for number in (1, 2)] == [set(), {mine}]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/", "-1/4"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="give i/n with i from 1 to n"):
        shards.part(text)


def test_a_part_is_two_numbers():
    assert shards.part("3/4") == (3, 4)

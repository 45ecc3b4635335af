"""The two versions of FP8-LM: their Table 5, and the gains that the texts state."""

from pathlib import Path

import pytest

from tools.reproduce import grids, versions
from tools.reproduce.entry import NOT_MEASURED, Task


@pytest.fixture(scope="module")
def found():
    return {finding.quantity: finding for finding in versions.compared(Task("toy", "whole", Path("text"), Path("folder")))}


def test_the_second_version_is_the_one_that_table_5_compares():
    for model, rows in versions.SECOND.items():
        assert versions.FIRST[model].keys() == rows.keys()
        for (precision, micro_batch), (memory, _, _, mfu, rate, volume) in rows.items():
            assert grids.SHARES5[model][precision, micro_batch] == (mfu, rate)
            assert volume == grids.VOLUME5[model, "BF16" if precision == "TE" else precision]
            if (precision, micro_batch) == ("FP8", 2 if model != "175b" else 1) or precision == "BF16":
                assert memory == grids.MEMORY5[model, precision]


def test_the_texts_of_both_versions_state_the_gains_of_their_tables(found):
    stated = {
        "first version, 7b: memory saved by FP8": 27,
        "first version, 175b: memory saved by FP8": 42,
        "first version, 175b: more samples per second in FP8, micro-batch 4; ours predicted": 64,
        "first version, 175b: more samples per second than TE, micro-batch 4": 17,
        "first version, 175b: memory saved against TE": 45,
        "second version, 7b: memory saved by FP8": 29,
        "second version, 175b: memory saved by FP8": 39,
        "second version, 175b: more samples per second in FP8, micro-batch 4; ours predicted": 75,
        "second version, 175b: more samples per second than TE, micro-batch 4": 37,
        "second version, 175b: memory saved against TE": 42,
    }
    assert {name: round(found[name].paper) for name in stated} == stated
    weights = found["RLHF, weights: Table 4 of both versions, and the introduction of the first"]
    assert (round(weights.ours), weights.paper) == (-32, -46.0)


def test_what_changed_is_counted(found):
    assert found["numbers of Table 5"].ours == 72
    assert found["numbers of Table 5 that the second version changed"].ours == 58
    assert found["volume, GB: largest change, second version from first"].ours == 0
    assert found["first version, 7b: memory saved against TE"].ours == NOT_MEASURED
    both = [found[f"{version} version, 7b: memory saved by FP8"].ours for version in ("first", "second")]
    assert both[0] == both[1] > 40

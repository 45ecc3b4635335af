import pytest

from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.recipe import O2, O3
from msamp.optim import updates
from msamp.optim.updates import MASTER, format_names, formats_of, named_formats


def test_a_master_is_kept_beside_weights_of_another_format_alone():
    names = format_names(O3.states)
    assert MASTER.format_beside(E4M3, names) is FP16
    assert MASTER.format_beside(FP16, names) is None
    moment = updates.by_name("fp32").states[1]
    assert moment.format_beside(E4M3, names) is E4M3


def test_formats_of_a_group_are_one_for_all_or_one_for_each():
    names = format_names(O2.states)
    assert named_formats(O2.states, 3) == names
    assert named_formats([O2.states] * 2, 2) == names
    both = named_formats([O2.states, O3.vectors], 2)
    assert formats_of({"params": [1, 2], "formats": both}) == both == [names, format_names(O3.vectors)]
    assert formats_of({"params": [1, 2], "formats": names}) == [names, names]
    with pytest.raises(ValueError, match="2 formats were passed for 3 parameters"):
        named_formats([O2.states] * 2, 3)

import pytest
import torch

from msamp.optim.saved_states import saved_states


def trained(**options) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, momentum=0.9, **options)
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_states_come_back_as_they_were_saved_by_number_of_parameter_and_the_groups_are_taken_over():
    saved = trained().state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full((3,), 1.001)  # FP32 beside a BF16 parameter
    saved["param_groups"][1]["lr"] = 0.5
    optimizer = trained()
    found = saved_states(optimizer, saved, "momentum")
    assert list(found) == [0, 2]
    assert found[0]["momentum_buffer"] is saved["state"][0]["momentum_buffer"]
    assert not optimizer.state
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_another_option_is_refused_before_anything_changes():
    optimizer, saved = trained(), trained(nesterov=True).state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    message = "parameter group 0 was saved with nesterov True, this optimizer has False; build it with the saved nesterov, or"
    with pytest.raises(ValueError, match=message):
        saved_states(optimizer, saved, "nesterov")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 2
    del saved["param_groups"][0]["nesterov"]
    with pytest.raises(ValueError, match="saved with nesterov None"):
        saved_states(optimizer, saved, "nesterov")

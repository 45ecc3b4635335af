"""What runs where, from rows."""

import pytest

from tools.docs import hardware


def of(name: str) -> hardware.Device:
    return next(device for device in hardware.DEVICES if name in device.name)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("H200", "NVIDIA H200"), ("H100", "NVIDIA H100 80GB HBM3"), ("Ada", "NVIDIA L4"), ("Ada", "NVIDIA GeForce RTX 4090"),
     ("Blackwell", "NVIDIA B200"), ("Blackwell", "NVIDIA GB200"), ("A100", "NVIDIA A100-SXM4-80GB")],
)  # fmt: skip
def test_a_row_belongs_to_one_kind_of_device(name, gpu):
    assert [device.name for device in hardware.DEVICES if hardware.rows_of(device, [{"gpu": gpu}])] == [of(name).name]


@pytest.mark.parametrize(
    ("gpus", "told"), [([None], "measured on 1 GPU"), (["1"], "measured on 1 GPU"), (["4", "1", "2"], "measured on 1, 2 and 4 GPUs")]
)
def test_a_state_counts_the_gpus_of_the_rows(gpus, told):
    rows = [{"gpu": "NVIDIA H100 80GB HBM3", "gpus": count} for count in gpus]
    assert hardware.state(of("H100"), rows) == told
    assert hardware.state(of("H200"), rows) == "untested"


def test_the_table_has_every_device_and_the_builds_of_the_measured():
    table = hardware.support()
    assert [cells[0] for cells in table.cells] == [device.name for device in hardware.DEVICES]
    assert {row["torch"] for row in hardware.measured_rows() if row["gpu"] == "NVIDIA H200" and row.get("torch")} <= {
        word.rstrip(".,;") for word in table.footer.split()
    }

"""Tables of addresses: what they say, and that they stay where they are."""

from typing import NamedTuple

import pytest
import torch

from msamp.kernels.cuda_graph import HostReads
from msamp.kernels.tables import Tables, numbered, rows_of

ROWS = [(100, 32, 8, 7), (64, 16, 48, 5), (0, 0, 0, 1), (32, 160, 16, 9), (48, 80, 0, 3)]


class Row(NamedTuple):
    numel: int
    address: int


def test_a_packer_and_a_kernel_know_columns_by_the_same_names():
    rows = rows_of(Row, address=[160, 320], numel=[10, 20])
    table, _ = Tables(torch.device("cpu")).lay_out("a", rows, 1, 32)
    assert numbered(Row) == Row(numel=1, address=2)
    assert table[:, numbered(Row).address].tolist() == [160, 320]
    assert numbered(Row, 5).address == 6
    with pytest.raises(ValueError, match="zip"):
        rows_of(Row, address=[160], numel=[10, 20])
    with pytest.raises(TypeError, match="length"):
        rows_of(Row, address=[160], numel=[10], length=[3])


def test_every_element_of_every_tensor_has_one_program_and_even_tensors_come_first(device):
    table, parts = Tables(device).lay_out("a", ROWS, 2, 32)
    assert table.device.type == device.type
    assert table.tolist() == [[0, 64, 16, 48, 5], [2, 0, 0, 0, 1], [2, 32, 160, 16, 9], [3, 48, 80, 0, 3], [5, 100, 32, 8, 7]]
    assert [(owners.tolist(), even) for owners, even in parts] == [([0, 0, 2, 3, 3], True), ([4, 4, 4, 4], False)]
    assert {owners.dtype for owners, _ in parts} == {torch.int32}


def test_no_part_without_programs():
    assert [even for _, even in Tables(torch.device("cpu")).lay_out("a", ROWS[:1], 2, 32)[1]] == [False]
    assert Tables(torch.device("cpu")).lay_out("a", ROWS[2:3], 2, 32)[1] == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_table_is_sent_where_it_has_changed_and_keeps_its_memory(dtype, device):
    tables = Tables(device)
    first = tables.send("a", [1, 2], dtype)
    assert first.dtype == dtype
    version = first._version
    assert tables.send("a", [1, 2], dtype) is first
    assert first._version == version
    other = tables.send("b", [1, 2], dtype)
    assert tables.send("a", [3, 4], dtype) is first
    assert (first.tolist(), other.tolist()) == ([3, 4], [1, 2])
    assert tables.send("a", [5], dtype).tolist() == [5]


def test_a_launch_that_follows_another_takes_its_table(device):
    tables = Tables(device)
    first = tables.lay_out("a", ROWS, 2, 32, again=True)  # it follows none
    assert tables.lay_out("a", ROWS, 2, 32, again=True) is first
    assert tables.lay_out("a", list(ROWS), 2, 32) is first  # unless a capture owns it
    other = tables.lay_out("a", ROWS[:2], 2, 32, again=True)
    assert other[0].tolist() == Tables(device).lay_out("a", ROWS[:2], 2, 32)[0].tolist()
    assert tables.lay_out("b", ROWS, 2, 32, again=True)[0].tolist() == first[0].tolist()


def test_a_layout_within_a_capture_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with HostReads():
        Tables(torch.device("cpu")).lay_out("a", ROWS, 2, 32)


@pytest.mark.gpu
def test_two_launches_of_a_capture_copy_their_table_once():
    tables, out = Tables(torch.device("cuda", 0)), torch.zeros(2, dtype=torch.int64, device="cuda")
    tables.lay_out("a", [(16, 0)], 1, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = tables.lay_out("a", [(32, 0)], 1, 32)
        assert tables.lay_out("a", [(32, 0)], 1, 32, again=True) is first
        out.copy_(first[0][0, :2])
    graph.replay()
    assert out.tolist() == [0, 32]


@pytest.mark.gpu
def test_every_graph_reads_what_its_tables_said_when_it_was_captured():
    tables, out = Tables(torch.device("cuda", 0)), torch.zeros(2, dtype=torch.int64, device="cuda")
    rows = [[(16 * i, 0)] for i in range(4)]

    def launch(number: int) -> None:
        table, _ = tables.lay_out("a", rows[number], 1, 32)
        out.copy_(table[0, 1] + tables.send("b", [7])[0])

    launch(0)
    graphs = []
    for number in (0, 1, 2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            launch(number)
    launch(3)
    for number in (2, 0, 1, 2):
        out.zero_()
        graphs[number].replay()
        assert out.tolist() == [16 * number + 7] * 2

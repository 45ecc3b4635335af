"""Files written aside."""

import pytest

from megatron.lm.durable import written_aside


def test_written_aside_is_whole_or_not_there(tmp_path):
    path = tmp_path / "note"
    with written_aside(path) as stream:
        stream.write(b"first")
        assert not path.exists()
    with pytest.raises(TypeError), written_aside(path) as stream:
        stream.write("no bytes")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["note"]

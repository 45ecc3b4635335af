"""Single numbers of a checkpoint, and second components in the formats of a run; whole checkpoints: test_loading.py and test_levels.py."""

from pathlib import Path

import pytest
import torch

from helpers import tiny
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.storage import Item, Stored
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.tensor_reader import TensorReader
from msamp.numerics import mcf
from msamp.numerics.formats import BF16, REMAINDER_E4M3


@pytest.mark.parametrize(("key", "first_key"), [("weight_remainder", "model"), ("exp_avg_sq_remainder", "exp_avg_sq")])
def test_a_remainder_is_rounded_once_from_the_stored_pair(tmp_path: Path, key: str, first_key: str):
    """BF16 to 8 bits is not by way of the pair's sum, which FP32 would round; 8 bits to BF16 is exact; else bits stay."""
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = values.bfloat16()
    wide = (values - first.double()).bfloat16() * 2.0**-12  # so small beside the first that FP32 has no room for all digits
    narrow = mcf.remainder_payload((first, wide), REMAINDER_E4M3.dtype)
    where = [Place(name="w", shape=(6, 5), offset=(0, 0), start=0, sizes=(6, 5), first=True)]
    for number, (stored, fmt, expected) in enumerate(
        [
            (wide, REMAINDER_E4M3, narrow),
            (narrow, BF16, mcf.load_pair(first, narrow)[1]),
            (narrow, REMAINDER_E4M3, narrow),
            (wide, BF16, wide),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        storage.write(folder, [Item(f"{first_key}/w", first, (6, 5), (0, 0)), Item(f"{key}/w", stored, (6, 5), (0, 0))])
        reader = TensorReader(Stored(folder), 5, set())
        got = reader.remainder(key, where, torch.Size((6, 5)), fmt)
        assert tiny.same(tiny.bits([got]), tiny.bits([expected]))
        assert reader.requantised == (set() if stored.dtype == fmt.dtype else {f"{key}/w"})

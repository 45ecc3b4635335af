"""From stored chunks to local tensors: when bits stay, what a requantisation costs at most, and a vocabulary padded otherwise."""

from pathlib import Path

import pytest
import torch

from helpers import tiny
from helpers.choices import every_pair
from helpers.stored_tensors import chunk, draw, one, place, quantized, stored
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.storage import Item, Stored
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.tensor_reader import TensorReader
from megatron.lm.checkpoint.values import find, find_whole
from msamp.numerics import mcf
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, REMAINDER_E4M3, Format
from msamp.numerics.tensor import ScalingTensor

SCALED = [E4M3, E5M2, FP16]
VOCABULARY = 5
EMBEDDING = "embedding.word_embeddings.weight"


# Another cut


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pairs_stand_for_their_sum_over_any_cut(tmp_path: Path, dtype: torch.dtype):
    """The remainder in 8 bits has no scale: its unit comes from the first component, cut alike."""
    x = draw(8, 6)
    first = x.bfloat16()
    rest = mcf.remainder_payload((first, x - first.float()), dtype)
    keys = {"exp_avg_sq/w": first, "exp_avg_sq_remainder/w": rest}
    there = stored(
        tmp_path, *(chunk(t[rows], (rows.start, 0), (8, 6), key) for key, t in keys.items() for rows in (slice(0, 5), slice(5, 8)))
    )
    values = first.float() + mcf.load_pair(first, rest)[1].float()
    for offset, sizes in [((0, 0), (8, 6)), ((3, 2), (4, 3))]:
        found = find_whole(there, "exp_avg_sq", [place(offset, sizes, (8, 6))], sizes, VOCABULARY)
        region = tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))
        assert found.values().equal(values[region])
        kept = find(there, "exp_avg_sq_remainder", [place(offset, sizes, (8, 6))], sizes, VOCABULARY).payload
        assert tiny.same(tiny.bits([kept]), tiny.bits([rest[region]]))


@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_chunks_of_one_scale_keep_their_bits_over_any_cut(tmp_path: Path, fmt: Format):
    x = draw(8, 6)
    whole = quantized(x, fmt, 16.0)
    parts = [quantized(x[:5], fmt, 16.0), quantized(x[5:], fmt, 16.0)]
    there = stored(tmp_path, chunk(parts[0], (0, 0), (8, 6)), chunk(parts[1], (5, 0), (8, 6)))
    for offset, sizes in [((0, 0), (8, 6)), ((3, 0), (4, 6)), ((0, 2), (8, 3)), ((4, 1), (2, 2)), ((6, 0), (2, 6))]:
        found = find(there, "model", [place(offset, sizes, (8, 6))], sizes, VOCABULARY)
        region = tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))
        assert found.keeps_bits(fmt)
        kept = found.to(fmt)
        assert isinstance(kept, ScalingTensor)
        assert tiny.same(tiny.bits([kept]), tiny.bits([ScalingTensor(whole.payload[region].clone(), whole.scale_inv, torch.float32)]))


@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_a_cut_inside_one_chunk_does_not_see_the_scales_of_others(tmp_path: Path, fmt: Format):
    parts = [quantized(draw(4, 6), fmt, 8.0), quantized(draw(4, 6), fmt, 64.0)]
    there = stored(tmp_path, chunk(parts[0], (0, 0), (8, 6)), chunk(parts[1], (4, 0), (8, 6)))
    for number, offset in enumerate([(0, 0), (4, 0)]):
        found = find(there, "model", [place(offset, (4, 6), (8, 6))], (4, 6), VOCABULARY)
        assert found.keeps_bits(fmt)
        assert tiny.same(tiny.bits([found.to(fmt)]), tiny.bits([parts[number]]))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_chunks_of_several_scales_take_the_coarsest(tmp_path: Path, fmt: Format, dim: int):
    """What is stated: powers of two apart, only what falls below the coarsest scale's smallest subnormal is rounded, by half of it."""
    # Magnitudes over all of the finer scale's range, so that some fall below the coarser one's.
    fine = draw(6, 6) * torch.logspace(-30, 0, 36, base=2.0).view(6, 6)
    coarse = 1000 * draw(6, 6)
    scales = [0.5 * fmt.max / 4, 0.5 * fmt.max / 4096]
    scales = [2.0 ** int(torch.tensor(s).log2().floor()) for s in scales]
    parts = [quantized(fine, fmt, scales[0]), quantized(coarse, fmt, scales[1])]
    shape = (12, 6) if dim == 0 else (6, 12)
    offset = (6, 0) if dim == 0 else (0, 6)
    there = stored(tmp_path, chunk(parts[0], (0, 0), shape), chunk(parts[1], offset, shape))
    found = find(there, "model", [place((0, 0), shape, shape)], shape, VOCABULARY)
    before = torch.cat([part.dequantize() for part in parts], dim)
    assert torch.equal(found.values(), before)
    assert found.scale_inv is None
    assert not found.keeps_bits(fmt)

    after = found.to(fmt)
    assert isinstance(after, ScalingTensor)
    assert float(after.scale_inv) == 1 / scales[1]
    error, step = (after.dequantize() - before).abs(), fmt.smallest / scales[1]
    assert 0 < error.max() <= step / 2
    assert torch.equal(after.dequantize().narrow(dim, 6, 6), parts[1].dequantize())
    assert not error[before.abs() >= fmt.tiny / scales[1]].any()


# Another format


@pytest.mark.parametrize("target", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
def test_formats(source: Format, target: Format):
    x = draw(16, 16)
    found = one(quantized(x, source, 4.0) if source.scaled else x.to(source.dtype))
    values, after = found.values(), found.to(target, torch.bfloat16)
    assert found.keeps_bits(target) == (source == target)
    assert isinstance(after, ScalingTensor) == target.scaled
    if isinstance(after, ScalingTensor):
        assert (after.format, after.dtype) == (target, torch.bfloat16)
    if source == target:
        assert tiny.same(tiny.bits([after]), tiny.bits([quantized(x, source, 4.0) if source.scaled else x.to(source.dtype)]))
    elif target.scaled:
        assert tiny.same(tiny.bits([after]), tiny.bits([ScalingTensor.quantize(values, target, dtype=torch.bfloat16)]))
    else:
        assert torch.equal(after, values.to(target.dtype))
    if target.mantissa_bits >= source.mantissa_bits:
        assert torch.equal(one(after).values(), values)


# A vocabulary that is padded to another number of rows


def embedding(offset: int, rows: int, whole: int) -> Place:
    return place((offset, 0), (rows, 4), (whole, 4), name=EMBEDDING)


@every_pair
@pytest.mark.parametrize("name", [EMBEDDING, "output_layer.weight"])
@pytest.mark.parametrize("prefix", ["model", "master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(("saved", "now"), [(8, 6), (6, 9), (5, 7), (7, 5)])
def test_padding_rows_go_or_are_made(tmp_path: Path, saved: int, now: int, prefix: str, name: str):
    """What a row that never was gets: a copy of the last padding row; without one, weights the mean of the rows before it (whose logit
    is no outlier), moments zeros."""
    x = draw(saved, 4)
    there = stored(tmp_path, chunk(x, (0, 0), (saved, 4), f"{prefix}/{name}"))
    found = find(there, prefix, [place((0, 0), (now, 4), (now, 4), name=name)], (now, 4), VOCABULARY).payload
    both = min(saved, now)
    assert torch.equal(found[:both], x[:both])
    made = torch.zeros(4) if prefix.startswith("exp") else x.mean(0)
    assert torch.equal(found[both:], (x[-1] if saved > VOCABULARY else made).expand(now - both, 4))


# Where local tensors stand in the whole model, on one process; that the ranks of a grid have all of it is in test_resharding.


def rows_of(start: int, count: int, offset: int = 100) -> Place:
    """Local rows `start` to `start + count` of a tensor of 4 columns that stand from row `offset` on."""
    return Place(name="w", shape=(200, 8), offset=(offset, 4), start=start, sizes=(count, 4), first=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (None, (slice(10, 16), (100, 4))),
        (slice(0, 64), (slice(10, 16), (100, 4))),
        (slice(10, 16), (slice(0, 6), (100, 4))),
        (slice(12, 64), (slice(0, 4), (102, 4))),  # counted from the first of the rows
        (slice(8, 13), (slice(2, 5), (100, 4))),
        (slice(12, 14), (slice(0, 2), (102, 4))),
        (slice(0, 10), None),
        (slice(16, 20), None),
    ],
    ids=str,
)
def test_rows_within_a_place(rows: slice | None, expected: tuple[slice, tuple[int, ...]] | None):
    assert rows_of(10, 6).within(rows) == expected


# Single numbers of a checkpoint, and second components in the formats of a run; whole checkpoints: test_loading.py and test_levels.py.


@pytest.mark.parametrize(("key", "first_key"), [("weight_remainder", "model"), ("exp_avg_sq_remainder", "exp_avg_sq")])
def test_a_remainder_is_rounded_once_from_the_stored_pair(tmp_path: Path, key: str, first_key: str):
    """BF16 to 8 bits is not by way of the pair's sum, which FP32 would round; 8 bits to BF16 is exact; else bits stay."""
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = values.bfloat16()
    wide = (values - first.double()).bfloat16() * 2.0**-12  # so small beside the first that FP32 has no room for all digits
    narrow = mcf.remainder_payload((first, wide), REMAINDER_E4M3.dtype)
    where = [Place(name="w", shape=(6, 5), offset=(0, 0), start=0, sizes=(6, 5), first=True)]
    for number, (rest, fmt, expected) in enumerate(
        [
            (wide, REMAINDER_E4M3, narrow),
            (narrow, BF16, mcf.load_pair(first, narrow)[1]),
            (narrow, REMAINDER_E4M3, narrow),
            (wide, BF16, wide),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        storage.write(folder, [Item(f"{first_key}/w", first, (6, 5), (0, 0)), Item(f"{key}/w", rest, (6, 5), (0, 0))])
        reader = TensorReader(Stored(folder), 5, set())
        got = reader.remainder(key, where, torch.Size((6, 5)), fmt)
        assert tiny.same(tiny.bits([got]), tiny.bits([expected]))
        assert reader.requantised == (set() if rest.dtype == fmt.dtype else {f"{key}/w"})

"""From stored chunks to local tensors: when bits stay, what a requantisation costs at most, and a vocabulary padded otherwise."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import tiny
from helpers.stored_tensors import chunk, draw, one, place, quantized, stored
from megatron.lm.checkpoint.content import scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.values import StoredTensor, check_agree, chunk_offsets, find, find_whole, scalar
from msamp.numerics import mcf
from msamp.numerics.formats import BF16, COAT_E4M3, E4M3, E5M2, FP16, FP32, Format
from msamp.numerics.range_expand import quantize_expanded
from msamp.numerics.scaling import inverse
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


def test_swiglu_takes_its_rows_from_two_places(tmp_path: Path):
    """A tensor-parallel rank has rows of the gate and rows of the linear half, each of which may come with another scale."""
    parts = [quantized(draw(8, 4), E4M3, 8.0), quantized(draw(8, 4), E4M3, 2.0)]  # of tensor-parallel ranks before: all of one half each
    there = stored(tmp_path, chunk(parts[0], (0, 0), (16, 4)), chunk(parts[1], (8, 0), (16, 4)))
    where = [place((2, 0), (3, 4), (16, 4)), place((10, 0), (3, 4), (16, 4), start=3)]
    found = find(there, "model", where, (6, 4), VOCABULARY)
    assert torch.equal(found.values(), torch.cat([parts[0].dequantize()[2:5], parts[1].dequantize()[2:5]]))
    assert [(part[0], float(scale)) for part, scale in found.scales] == [(slice(0, 3), 1 / 8), (slice(3, 6), 1 / 2)]


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


def test_a_plain_payload_of_a_scaled_format_gets_a_scale():
    found = one(draw(4, 4).half())  # weights written by tools are stored as they come
    assert not found.keeps_bits(FP16)
    after = found.to(FP16)
    assert isinstance(after, ScalingTensor)
    assert torch.equal(after.dequantize(), found.payload.float())


# What is refused


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float8_e4m3fn, "nan"), *((dtype, value) for dtype in DTYPES for value in ("nan", "inf"))], ids=str
)
def test_values_that_are_not_finite(dtype: torch.dtype, value: str):
    payload = torch.ones(4, dtype=dtype)
    one(payload).check("here")
    # Not by a cast, which saturates in some versions of torch: E5M2 is the upper half of FP16.
    bad = (
        torch.tensor([float(value)]).half().view(torch.uint8)[1:] if dtype is torch.float8_e5m2 else torch.tensor([float(value)]).to(dtype)
    )
    payload[1] = payload[3] = bad.view(dtype)[0]
    with pytest.raises(ValueError, match=r"here: model/w has 2 values that are NaN or infinite; load an older checkpoint"):
        one(payload).check("here")


@pytest.mark.parametrize("scale", [0.0, -0.5, 0.75, 2.0**127, 2.0**-127, float("inf"), float("nan")])
def test_a_scale_that_no_amax_gives(scale: float):
    x = quantized(draw(4, 4), E4M3, 4.0)
    one(x).check("here")
    x.scale_inv.fill_(scale)
    with pytest.raises(ValueError, match=r"here: model/w has scale_inv .*, which is not a power of two in .*; load an older checkpoint"):
        one(x).check("here")


def test_a_scale_with_which_values_overflow():
    x = ScalingTensor(torch.full((3,), 60_000.0).half(), torch.tensor(2.0**120), torch.float32)
    with pytest.raises(ValueError, match=r"here: model/w has the value 7\.97.*; no run can use values above 2\^64; load an older"):
        one(x).check("here")


def test_whole_numbers_are_no_weights():
    with pytest.raises(ValueError, match=r"model/w is torch\.int64, which is not a format of weights; load an older checkpoint"):
        one(torch.tensor(5)).check("here")


@pytest.mark.parametrize("fmt", [FP32, BF16, E4M3, COAT_E4M3], ids=str)
def test_a_mean_of_squares_is_not_negative(fmt: Format):
    x = draw(4, 128).square()
    for values, fine in [(x, True), (x.index_fill(1, torch.tensor([3]), -0.5), False)]:
        if fmt.group:
            coat = quantize_expanded(values, fmt)
            found = StoredTensor("exp_avg_sq/w", coat.payload, [], (coat.max.expand(4, 128), coat.k.expand(4, 128)))
        else:
            found = one(quantized(values, fmt, 16.0) if fmt.scaled else values.to(fmt.dtype))
        found.check("here")
        if fine:
            found.check("here", non_negative=True)
        else:
            with pytest.raises(ValueError, match=r", a mean of squares, has 4 negative values, such as -.*; load an older checkpoint"):
                found.check("here", non_negative=True)


# A weight and its master


MASTERS = {"FP32": lambda x: x, "FP16 with a scale": lambda x: ScalingTensor.quantize(x, FP16)}
WEIGHTS = {
    "FP16": lambda x: x.half(),
    "BF16": lambda x: x.bfloat16(),
    "E4M3": lambda x: ScalingTensor.quantize(x, E4M3),
    "E4M3, a scale of twice the amax": lambda x: ScalingTensor.quantize(x, E4M3, inverse(2 * ScalingTensor.quantize(x, E4M3).scale_inv)),
    "E5M2": lambda x: ScalingTensor.quantize(x, E5M2),
}


def cast(values: Tensor, weight: str, master: str, late: bool) -> tuple[StoredTensor, StoredTensor]:
    """A weight and its master, cast from it; `late`: both from the same values, as at the start of a run."""
    copy = MASTERS[master](values)
    return one(WEIGHTS[weight](values if late else one(copy).values())), one(copy)


@pytest.mark.promise("Checkpoints", "A weight that is its rounded master is accepted, down to the smallest subnormals.")
@pytest.mark.parametrize("late", [False, True], ids=["cast from the master", "from the same values"])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("reach", [1.0, 1e-3, 2e-7, 6e-8, 0.0])
def test_a_weight_agrees_with_the_master_it_was_cast_from(weight: str, master: str, late: bool, reach: float):
    """Down to the subnormals of FP16 that a bias has in early warm-up, where a rounding is larger than the value."""
    check_agree(*cast(draw(64, 64) * reach, weight, master, late), "here")


def test_a_weight_that_saturates_agrees():
    values = torch.linspace(-4.0, 4.0, 65)
    check_agree(one(quantized(values, E4M3, 224.0)), one(values), "here")
    check_agree(one(torch.tensor([65504.0]).half()), one(torch.tensor([7e4])), "here")


@pytest.mark.promise("Checkpoints", "A weight that is not its rounded master is refused: a stale scale, another layer's weight.")
@pytest.mark.parametrize("wrong", ["the weight's scale", "the master's scale", "another layer", "another step", "one value"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_that_is_not_its_master_rounded_is_found(weight: str, wrong: str):
    mine, theirs = cast(draw(64, 64), weight, "FP16 with a scale", late=False)
    if wrong == "the weight's scale":
        if not mine.scales:
            return
        for factor in (0.5, 2.0, 2.0**40):
            stale = StoredTensor(mine.key, mine.payload, [(part, scale * factor) for part, scale in mine.scales])
            with pytest.raises(ValueError, match="one of their scales is stale"):
                check_agree(stale, theirs, "here")
        return
    if wrong == "the master's scale":
        for factor in (0.25, 0.5, 2.0, 2.0**40, 2.0**-40):
            stale = StoredTensor(theirs.key, theirs.payload, [(part, scale * factor) for part, scale in theirs.scales])
            with pytest.raises(ValueError, match="one of their scales is stale"):
                check_agree(mine, stale, "here")
        return
    other = {"another layer": draw(64, 64).T.contiguous(), "another step": draw(64, 64) * 1.5, "one value": draw(64, 64)}[wrong]
    if wrong == "one value":
        other[3, 5] += 0.5
    with pytest.raises(ValueError, match=r"here: model/w is .* but its master is .*; load an older checkpoint"):
        check_agree(cast(other, weight, "FP32", late=False)[0], theirs, "here")


def test_a_weight_and_a_master_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"here: model/w is \(2, 3\), but its master is \(3, 3\); load an older checkpoint"):
        check_agree(one(draw(2, 3).bfloat16()), one(draw(3, 3)), "here")


def test_padding_rows_that_were_made_need_not_agree(tmp_path: Path):
    """The mean of rounded rows is not the rounded mean of the rows."""
    x, shape = draw(VOCABULARY, 4), (VOCABULARY, 4)
    keys = (f"model/{EMBEDDING}", f"master/{EMBEDDING}")
    there = stored(tmp_path, chunk(quantized(x, E5M2, 8.0), (0, 0), shape, keys[0]), chunk(x, (0, 0), shape, keys[1]))
    mine, theirs = (find(there, prefix, [embedding(0, 9, 9)], (9, 4), VOCABULARY) for prefix in ("model", "master"))
    assert mine.rows == VOCABULARY
    before = theirs.payload.clone()
    check_agree(mine, theirs, "here")
    assert torch.equal(theirs.payload, before)
    theirs.payload[0] += 1
    with pytest.raises(ValueError, match="differ from the master"):
        check_agree(mine, theirs, "here")


@pytest.mark.parametrize("bad", [torch.ones(2), torch.ones((), dtype=torch.float64)], ids=["two numbers", "FP64"])
def test_a_scale_that_is_not_one_fp32_number_is_refused(tmp_path: Path, bad: Tensor):
    x = quantized(draw(8, 6), E4M3, 4.0)
    there = stored(tmp_path, [Item("model/w", x.payload, (8, 6), (0, 0)), Item.whole(scale_key("model/w", (0, 0)), bad)])
    with pytest.raises(ValueError, match=r"model/w\.scale_inv@0,0 is .*, not \(\) FP32; load an older checkpoint"):
        find(there, "model", [place((0, 0), (8, 6), (8, 6))], (8, 6), VOCABULARY)


def test_a_tensor_that_is_missing_or_of_another_shape(tmp_path: Path):
    there = stored(tmp_path, chunk(draw(8, 6), (0, 0), (8, 6)))
    with pytest.raises(ValueError, match=r"is damaged: it has no master/w; load an older checkpoint"):
        find(there, "master", [place((0, 0), (8, 6), (8, 6))], (8, 6), VOCABULARY)
    for shape in [(9, 6), (8, 5), (8,)]:
        with pytest.raises(ValueError, match=r"is damaged: model/w is \(8, 6\), but the model requires .*; load an older checkpoint"):
            find(there, "model", [place((0,) * len(shape), shape, shape)], shape, VOCABULARY)


# A vocabulary that is padded to another number of rows


def embedding(offset: int, rows: int, whole: int) -> Place:
    return place((offset, 0), (rows, 4), (whole, 4), name=EMBEDDING)


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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("saved", [5, 6])
def test_padding_keeps_scales_and_bits_on_every_tensor_parallel_rank(tmp_path: Path, saved: int, rank: int):
    """Cut in halves of 6 the second holds what was stored, or padding alone; it has a scale either way."""
    parts = [quantized(draw(3, 4), E4M3, 16.0), quantized(draw(saved - 3, 4), E4M3, 16.0)]
    shape, key = (saved, 4), f"exp_avg/{EMBEDDING}"
    there = stored(tmp_path, chunk(parts[0], (0, 0), shape, key), chunk(parts[1], (3, 0), shape, key))
    found = find(there, "exp_avg", [embedding(6 * rank, 6, 12)], (6, 4), VOCABULARY)
    assert found.keeps_bits(E4M3)
    rows = torch.cat([part.payload.view(torch.uint8) for part in parts])
    padding = torch.zeros(1, 4, dtype=torch.uint8) if saved == VOCABULARY else rows[-1:]
    rows = torch.cat([rows, padding.expand(12 - saved, 4)])
    assert torch.equal(found.payload.view(torch.uint8), rows[6 * rank : 6 * rank + 6])
    assert float(found.to(E4M3).scale_inv) == 1 / 16  # type: ignore[union-attr]


def test_fp8_without_its_scale_is_refused(tmp_path: Path):
    x = quantized(draw(8, 6), E4M3, 4.0)
    there = stored(tmp_path, [Item("model/w", x.payload, (8, 6), (0, 0))])
    with pytest.raises(ValueError, match=r"has no model/w\.scale_inv@0,0"):
        find(there, "model", [place((0, 0), (8, 6), (8, 6))], (8, 6), VOCABULARY)


@pytest.mark.parametrize(("saved", "now"), [(8, 12), (12, 8)], ids=["grown", "cut"])
@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_a_part_without_the_last_rows_takes_no_scale_of_theirs(tmp_path: Path, fmt: Format, saved: int, now: int):
    """Owners had halves of the rows, each with a scale; the first tensor-parallel rank's last row is no copy of the last one."""
    values = draw(saved, 4)
    halves = [quantized(values[: saved // 2], fmt, 8.0), quantized(values[saved // 2 :], fmt, 64.0)]
    key = f"master/{EMBEDDING}"
    there = stored(tmp_path, *(chunk(half, (i * saved // 2, 0), (saved, 4), key) for i, half in enumerate(halves)))
    rows = min(saved // 2, now // 2)
    found = find(there, "master", [place((0, 0), (rows, 4), (now, 4), name=EMBEDDING)], (rows, 4), VOCABULARY)
    assert found.values().equal(halves[0].dequantize()[:rows])
    assert found.keeps_bits(fmt)


def test_a_vocabulary_is_never_cut_below_its_size(tmp_path: Path):
    there = stored(tmp_path, chunk(draw(8, 4), (0, 0), (8, 4), f"model/{EMBEDDING}"))
    with pytest.raises(ValueError, match=r"is \(8, 4\), but the model requires \(4, 4\)"):
        find(there, "model", [embedding(0, 4, 4)], (4, 4), VOCABULARY)


# Scalars


def test_scalars_and_the_chunks_a_local_tensor_comes_from(tmp_path: Path):
    chunks = [chunk(draw(4, 6), (row, 0), (12, 6)) for row in (0, 4, 8)]
    there = stored(tmp_path, [Item.whole("step/w", torch.tensor(7.0))], *chunks)
    here = place((3, 0), (4, 6), (12, 6))
    step = scalar(there, "step", here)
    assert step is not None
    assert float(step) == 7
    assert scalar(there, "elsewhere", here) is None
    assert [(found, tuple(offset)) for found, offset in chunk_offsets(there, [here])] == [(here, (0, 0)), (here, (4, 0))]

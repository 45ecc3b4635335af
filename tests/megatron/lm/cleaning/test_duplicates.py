"""Which documents count as one."""

import pytest

from helpers import hosts, texts
from megatron.lm.cleaning.duplicates import Seen, exact_key, signature


def test_blanks_and_capitals_make_no_other_text():
    assert exact_key("A  free\npeople ") == exact_key("a free people")
    assert exact_key("a free people") != exact_key("a free people.")


def test_the_first_stays():
    seen = Seen(None)
    assert [seen.duplicate(exact_key(text), None) for text in ("a", "b", "A", "b")] == [None, None, "duplicate: exact", "duplicate: exact"]


def test_near_copies_are_found_by_their_similarity():
    hosts.need("datasketch", "data")
    words = texts.SPEECH.split(" ")
    near, other = " ".join([*words[:-1], "Indeed."]), " ".join(reversed(words))
    shares = [sum(a == b for a, b in zip(signature(texts.SPEECH), signature(text), strict=True)) / 128 for text in (near, other)]
    assert shares[0] > 0.85
    assert shares[1] < 0.1
    seen = Seen(0.8)
    found = [seen.duplicate(exact_key(text), signature(text)) for text in (texts.SPEECH, near, other, texts.SPEECH)]
    assert found == [None, "duplicate: near", None, "duplicate: exact"]


def test_a_signature_is_the_same_everywhere():
    hosts.need("datasketch", "data")
    assert signature("one two") == signature("One, two!")
    assert signature("a b c d e f")[:2] == signature("a b c d e f")[:2]
    assert len(signature("")) == 128
    assert all(0 <= value < 2**32 for value in signature(texts.SPEECH))


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, 2.0])
def test_a_threshold_out_of_range_is_refused(threshold: float):
    with pytest.raises(ValueError, match=f"threshold {threshold} must be between 0 and 1"):
        Seen(threshold)

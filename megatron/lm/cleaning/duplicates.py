"""Duplicates: the same text but for blanks and capitals, and text that shares most of its word 5-grams (MinHash, by datasketch).

The first of the duplicates in the order of the input stays. Workers make signatures, and one process compares them in that order, so that
the result does not depend on the number of workers.
"""

import hashlib
import re
from typing import Any

import numpy as np

GRAM = 5  # words that make one element of a document's set [Lee et al. 2022]
PERMUTATIONS = 128
SEED = 1
SCHEME = "affine32"  # datasketch's name for how it permutes: a signature means something with it alone


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def exact_key(text: str) -> str:
    """Key that is equal for texts that differ in blanks and capitals alone."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()


def signature(text: str) -> list[int]:
    """MinHash signature of the text's set of word 5-grams (a shorter text's is of all its words), [128] below 2^32."""
    from datasketch import MinHash

    words = _words(text)
    grams = {" ".join(words[i : i + GRAM]) for i in range(max(1, len(words) - GRAM + 1))}
    made = MinHash(num_perm=PERMUTATIONS, seed=SEED, scheme=SCHEME)
    made.update_batch([gram.encode() for gram in sorted(grams)])
    return [int(value) for value in made.hashvalues]


class Seen:
    """The documents kept so far.

    Args:
        threshold: Jaccard similarity of the sets of 5-grams from which on two documents count as one; None looks for exact ones alone.

    Raises:
        ValueError: threshold outside 0 to 1.
    """

    def __init__(self, threshold: float | None) -> None:
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"threshold {threshold} must lie between 0 and 1: 0.8 finds near copies")
        self._keys: set[str] = set()
        self._threshold = threshold
        self._near: Any = None
        self._signatures: list[np.ndarray] = []
        if threshold is not None:
            from datasketch import MinHashLSH

            self._near = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)

    def duplicate(self, key: str, minhash: list[int] | None) -> str | None:
        """Why a document is dropped; None for one that is kept, which is remembered."""
        if key in self._keys:
            return "duplicate: exact"
        if self._near is not None and minhash is not None:
            from datasketch import MinHash

            values = np.array(minhash, dtype=np.uint64)
            made = MinHash(num_perm=PERMUTATIONS, seed=SEED, scheme=SCHEME, hashvalues=values)
            # Those that share a band are candidates: their whole signatures decide.
            if any(np.mean(self._signatures[other] == values) >= self._threshold for other in self._near.query(made)):
                return "duplicate: near"
            self._near.insert(len(self._signatures), made)
            self._signatures.append(values)
        self._keys.add(key)
        return None

"""Deduplication: texts that are equal up to blanks and case, and texts that share most of their word 5-grams (MinHash from datasketch).

The first duplicate in input order is kept. Workers compute signatures, and one process compares them in input order, so the result does not
depend on the number of workers.
"""

import hashlib
import re
from typing import Any

import numpy as np

GRAM = 5  # words per element of a document's set [Lee et al. 2022]
PERMUTATIONS = 128
SEED = 1
SCHEME = "affine32"  # datasketch's permutation scheme: signatures are only comparable with the same one


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def exact_key(text: str) -> str:
    """Return a key that is equal for texts that only differ in blanks and case."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()


def signature(text: str) -> list[int]:
    """Return the MinHash signature of the text's word 5-grams (all words together for a shorter text): 128 values below 2^32."""
    from datasketch import MinHash

    words = _words(text)
    grams = {" ".join(words[i : i + GRAM]) for i in range(max(1, len(words) - GRAM + 1))}
    minhash = MinHash(num_perm=PERMUTATIONS, seed=SEED, scheme=SCHEME)
    minhash.update_batch([gram.encode() for gram in sorted(grams)])
    return [int(value) for value in minhash.hashvalues]


class Seen:
    """The documents kept so far.

    Args:
        threshold: minimum Jaccard similarity of 5-gram sets for two documents to be duplicates; None finds only exact duplicates.

    Raises:
        ValueError: if the threshold is not in 0 to 1.
    """

    def __init__(self, threshold: float | None) -> None:
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"threshold {threshold} must be between 0 and 1, such as 0.8 for near duplicates")
        self._keys: set[str] = set()
        self._threshold = threshold
        self._near: Any = None
        self._signatures: list[np.ndarray] = []
        if threshold is not None:
            from datasketch import MinHashLSH

            self._near = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)

    def duplicate(self, key: str, minhash: list[int] | None) -> str | None:
        """Return why a document is dropped, or None if it is kept, which adds it to the documents seen."""
        if key in self._keys:
            return "duplicate: exact"
        if self._near is not None and minhash is not None:
            from datasketch import MinHash

            values = np.array(minhash, dtype=np.uint64)
            entry = MinHash(num_perm=PERMUTATIONS, seed=SEED, scheme=SCHEME, hashvalues=values)
            # Documents that share a band are candidates; the whole signatures decide.
            if any(np.mean(self._signatures[other] == values) >= self._threshold for other in self._near.query(entry)):
                return "duplicate: near"
            self._near.insert(len(self._signatures), entry)
            self._signatures.append(values)
        self._keys.add(key)
        return None

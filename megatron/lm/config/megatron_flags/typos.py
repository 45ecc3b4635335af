"""The flag that a misspelt one was meant to be: only where a slip or two of the fingers lie between them.

`--trian-iters` is `--train-iters` with two letters exchanged. `--mock-data` is no misspelling of `--override-data`, though half of their
letters agree.
"""

from collections.abc import Iterable

LONG = 12  # characters from which on a second slip is forgiven


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known spelling within one slip of `word`, within two of a long one; None where none is so close. A slip is a letter that is
    left out, added, replaced, or exchanged with the next."""
    most = 2 if len(word) >= LONG else 1
    slips = {name: distance for name in known if (distance := distance_of(word, name, most)) <= most}
    return min(slips, key=lambda name: (slips[name], name)) if slips else None


def distance_of(one: str, other: str, most: int) -> int:
    """Slips between two words (the optimal string alignment distance), or `most` + 1 where there are more."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last = row, before
        row = [i]
        for j, there in enumerate(other, 1):
            slips = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != there))
            if i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], there):
                slips = min(slips, last[j - 2] + 1)
            row.append(slips)
        if min(row) > most:
            return most + 1
    return row[-1]

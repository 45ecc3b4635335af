"""Quality rules for text from Gopher [Rae et al. 2021, appendix A.1.1], which need no model."""

import re

FEWEST_WORDS, MOST_WORDS = 50, 100_000
WORD_LENGTH = 3, 10  # mean, in characters
SYMBOLS_A_WORD = 0.1  # hash signs, ellipses
BULLETS, ELLIPSES = 0.9, 0.3  # fractions of the lines
WITH_A_LETTER = 0.8  # fraction of the words
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
FEWEST_STOP_WORDS = 2


def problem(text: str, *, english: bool = True) -> str | None:
    """Return why a document is dropped, or None. `english`: also require two of the stop words, which are English."""
    words = text.split()
    if not FEWEST_WORDS <= len(words) <= MOST_WORDS:
        return "quality: too few words" if len(words) < FEWEST_WORDS else "quality: too many words"
    if not WORD_LENGTH[0] <= sum(map(len, words)) / len(words) <= WORD_LENGTH[1]:
        return "quality: mean length of words"
    if text.count("#") / len(words) > SYMBOLS_A_WORD or (text.count("...") + text.count("\u2026")) / len(words) > SYMBOLS_A_WORD:
        return "quality: symbols"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.startswith(("\u2022", "-", "*")) for line in lines) / len(lines) > BULLETS:
        return "quality: bullet points"
    if sum(line.endswith(("...", "\u2026")) for line in lines) / len(lines) > ELLIPSES:
        return "quality: ellipses"
    if sum(any(letter.isalpha() for letter in word) for word in words) / len(words) < WITH_A_LETTER:
        return "quality: words without a letter"
    if english and len(STOP_WORDS & set(re.findall(r"[a-z]+", text.lower()))) < FEWEST_STOP_WORDS:
        return "quality: stop words"
    return None

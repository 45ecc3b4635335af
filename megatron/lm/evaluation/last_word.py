"""Last-word prediction on any text: passages whose last word occurs in the sentences before it [after LAMBADA, Paperno et al. 2016].

The last sentence alone should not determine the word, but the three sentences before it should. People chose LAMBADA's passages, and a rule
chooses these, so results are comparable with each other but not with results on LAMBADA.
"""

import re
from collections.abc import Iterable, Iterator

BEFORE = 3  # sentences of context
SHORTEST = 4  # letters of the word
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_LAST = re.compile(rf"^(?P<context>.*\s)(?P<word>[A-Za-z]{{{SHORTEST},}})[.!?]$", re.DOTALL)


def passages(documents: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield {"context", "word"} of each passage, in the order of the texts; no two share a sentence.

    `context` ends before the space in front of the word.
    """
    for text in documents:
        for paragraph in re.split(r"\n\s*\n", text):
            sentences = [re.sub(r"\s+", " ", sentence).strip() for sentence in _SENTENCE_END.split(paragraph)]
            free = 0
            for at, sentence in enumerate(sentences):
                match = _LAST.match(sentence)
                if at < free + BEFORE or match is None:
                    continue
                before = " ".join(sentences[at - BEFORE : at])
                if match["word"].lower() in (word.lower() for word in re.findall(r"[A-Za-z]+", before)):
                    yield {"context": f"{before} {match['context'].strip()}", "word": match["word"]}
                    free = at + 1

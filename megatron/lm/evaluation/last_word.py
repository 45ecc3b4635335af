"""Last words of any text: passages with a last word that has been named in the sentences before it [after LAMBADA, Paperno et al. 2016].

Where a reader of the last sentence alone could only guess, three sentences before it tell. LAMBADA's passages were chosen by people, these
by a rule: so a result compares models with each other, not with LAMBADA's.
"""

import re
from collections.abc import Iterable, Iterator

BEFORE = 3  # sentences of context
SHORTEST = 4  # letters of the word
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_LAST = re.compile(rf"^(?P<context>.*\s)(?P<word>[A-Za-z]{{{SHORTEST},}})[.!?]$", re.DOTALL)


def passages(documents: Iterable[str]) -> Iterator[dict[str, str]]:
    """{"context", "word"} of each passage, in the order of the texts; no two of them share a sentence.

    `context` ends before the space that the word follows.
    """
    for text in documents:
        for paragraph in re.split(r"\n\s*\n", text):
            sentences = [re.sub(r"\s+", " ", sentence).strip() for sentence in _SENTENCE_END.split(paragraph)]
            free = 0
            for at, sentence in enumerate(sentences):
                found = _LAST.match(sentence)
                if at < free + BEFORE or found is None:
                    continue
                before = " ".join(sentences[at - BEFORE : at])
                if found["word"].lower() in (word.lower() for word in re.findall(r"[A-Za-z]+", before)):
                    yield {"context": f"{before} {found['context'].strip()}", "word": found["word"]}
                    free = at + 1

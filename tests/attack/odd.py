"""Values that nobody expects, and ways to damage bytes and JSON, drawn from a `random.Random`."""

import json
import random
from typing import Any

HUGE = 2**31 - 1, 2**31, 2**32, 10**8, 10**12, 2**63 - 1, 2**63, 10**20, 10**30
INTEGERS = (-(10**20), -(2**31), -2, -1, 0, 1, 2, 3, 5, 7, 8, 63, 64, 65, 1000, 65536, *HUGE)
FLOATS = (0.0, -0.0, -1.0, 5e-324, 1e-45, 1e-38, 1e-7, 0.5, 1.0, 2.0, 3.5e38, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"))
JSON_WORDS = ("", "x", "x" * 5000, "../canary/secret.distcp", "/etc/passwd", "a\x00b", "\ud800", "..", "torch.float32", "os.system")


def value(draw: random.Random) -> Any:
    """A value of JSON, or of what Python takes for JSON."""
    deep: Any = 1
    for _ in range(draw.choice((1, 3, 200))):
        deep = [deep]
    kinds = (
        None,
        True,
        False,
        draw.choice(INTEGERS),
        draw.choice(FLOATS),
        draw.choice(JSON_WORDS),
        [],
        {},
        deep,
        [0] * 1000,
        {"a": {"b": []}},
    )
    return draw.choice(kinds)


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def twisted(content: Any, draw: random.Random, times: int = 1) -> Any:
    """A copy of JSON content with some of its values replaced, moved, renamed or gone."""
    content = json.loads(json.dumps(content))
    for _ in range(times):
        places = _places(content)
        if not places:
            return value(draw)
        *way, last = draw.choice(places)
        inside = content
        for key in way:
            inside = inside[key]
        what = draw.randrange(6)
        if what == 0:
            del inside[last]
        elif what == 1 and isinstance(inside, dict):
            inside[draw.choice(JSON_WORDS)] = inside.pop(last)
        elif what == 2 and isinstance(inside[last], int | float):
            inside[last] = draw.choice((-inside[last], inside[last] + 1, inside[last] * 1000, str(inside[last]), float(inside[last])))
        elif what == 3:
            *other, end = draw.choice(places)
            there = content
            for key in other:
                there = there[key]
            inside[last] = json.loads(json.dumps(there[end]))
        else:
            inside[last] = value(draw)
    return content


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes with some flipped, cut off, doubled, zeroed or made up."""
    found, at = bytearray(data), draw.randrange(max(1, len(data)))
    what = draw.randrange(7)
    if what == 0:
        return bytes(found[:at])
    if what == 1:
        return b""
    if what == 2:
        return bytes(found) + draw.randbytes(draw.choice((1, 8, 4096)))
    if what == 3:
        return bytes(len(found))
    if what == 4:
        found[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little")))
    elif what == 5:
        return draw.randbytes(len(found))
    else:
        for _ in range(draw.choice((1, 1, 4, 64))):
            if found:
                found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)

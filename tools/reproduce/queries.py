"""Findings that SQL gives over recorded rows: the queries of `findings.toml`."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tools.docs.tables import select, specifications
from tools.reproduce.entry import Finding, paper
from tools.reproduce.keep import PLACE

QUERIES = tomllib.loads((Path(__file__).parent / "findings.toml").read_text(encoding="utf-8"))
PARTS = {**{name: one["text"] for name, one in reversed(QUERIES.items()) if "text" in one}, **specifications()["templates"]}


def findings(*names: str, **values: str) -> Iterator[Finding]:
    """Yield the findings of the queries with these names.

    Words in braces are replaced by the parts of these names, which may contain parts above them and templates of tables.toml, by the other
    values of the query's table and by `values`; `{paper NAME}` and `{json NAME}` by a number of `papers.toml`, and by all numbers below
    that name. A mean of several seeds is followed by the half width of its interval.
    """
    for one, query in ((QUERIES[name], query) for name in names for query in QUERIES[name]["queries"]):
        for key, value in {**PARTS, **values, **one}.items():
            query = query.replace("{" + key + "}", str(value))
        query = re.sub(r"\{paper ([\w.-]+)\}", lambda match: repr(paper(match[1])), query)
        found = select(re.sub(r"\{json ([\w.-]+)\}", lambda match: "'" + json.dumps(paper(match[1])) + "'", query))
        for row in (dict(zip(found.columns, cells, strict=True)) for cells in found.cells):
            get = {key: float(row[key]) if row.get(key) else None for key in ("ours", "paper", "x", "seed", "half_width")}
            where = {key: row[key] for key in PLACE if key in row}
            assert get["ours"] is not None
            seed = None if get["seed"] is None else int(get["seed"])
            yield Finding(row["quantity"], get["ours"], get["paper"], row.get("unit", ""), get["x"], seed, where)
            if get["half_width"] is not None:
                yield Finding(
                    f"{row['quantity']}: half width of the 95 % interval", get["half_width"], unit=row.get("unit", ""), where=where
                )

"""Rules for combinations of settings, by subject. A rule yields messages, each with the value, what is allowed and the fix.

`rules.toml` lists what settings require of each other and what excludes each other, and `table` applies it. Rules that compute with values
are functions in the other files, each of which ends with its `RULES`: rule -> the sections that it reads. A rule gets only sections with
legal single values, so it may divide by them. The modules that read files validate their contents (data/datasets.py,
data/tokenizers/tokenizer.py, checkpoint/).
"""

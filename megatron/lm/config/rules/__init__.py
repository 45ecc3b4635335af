"""Rules for several settings together, by subject. A rule is a generator of messages, each with the value, what is legal and the remedy.

Every file ends with its `RULES`: rule -> the sections that it reads. A rule sees only sections with legal single values, so it may divide
by them. The modules that read files judge their contents (data/datasets.py, data/tokenizer.py, checkpoint/).
"""

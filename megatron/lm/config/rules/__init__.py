"""Settings judged together, by subject. A rule is a generator of messages, each with the value, what is legal and the remedy.

Every file ends with its `RULES`: rule -> the sections that it reads. A rule sees only sections whose single values passed, so it may divide
by them. What the files contain is judged by those who read them (data/datasets.py, data/tokenizer.py, checkpoint/).
"""

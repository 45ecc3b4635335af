"""The data pipeline, from text on disk to micro-batches on the device.

`tokenizers` turn text into token ids. `preprocessing` writes indexed datasets; `reading` opens them, fixes the order of samples and
verifies that it stays the same. The files here combine them: `datasets` builds the train, valid and test sets, `masked` and `documents` add
what masked language modeling and packed documents need, `batch` cuts micro-batches.
"""

"""What the trainer does with each flag of Megatron-LM: one table, and the code that applies it to a command line.

`topics` contains the lines of the table, a file for each subject, and defines a line and the four treatments in `row`; `table` collects
the lines, looks a flag up and finds close spellings. `in_context` judges the few flags whose meaning depends on others, `apply` translates
a command line, and `listing` prints the table for `--help` and the documentation. The flags are from Megatron-LM core_v0.16.1, and some
of older versions that scripts still use.
"""

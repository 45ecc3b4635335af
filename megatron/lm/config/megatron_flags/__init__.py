"""What the trainer does with each flag of Megatron-LM: one table, and the code that applies it to a command line.

`row` defines a line of the table and the four treatments; a file for each subject lists its lines; `table` collects them, looks a flag
up and finds close spellings. `in_context` judges the few flags whose meaning depends on others, `apply` translates a command line, and
`listing` prints the table for `--help` and the documentation. The flags are those of Megatron-LM core_v0.16.1, and some of older versions
that scripts still use.
"""

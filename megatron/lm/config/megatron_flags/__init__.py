"""What the trainer does with each flag of Megatron-LM: the rows of `flags.toml`, and the code that applies them to a command line.

`table` reads the rows and looks a flag up, and `apply` translates a command line.
"""

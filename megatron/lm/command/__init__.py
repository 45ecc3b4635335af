"""The command `msamp`: the trainer and its tools under one name."""

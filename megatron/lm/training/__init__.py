"""The training state around the model: optimizer and schedule, gradient all-reduce, and what checkpoints record of a run."""

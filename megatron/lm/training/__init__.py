"""The training state around the model: optimizer and schedule, gradient all-reduce, health and identity of a run."""

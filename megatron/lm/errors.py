"""The errors of the trainer that are no ValueError."""


class RunStopped(RuntimeError):
    """A run that cannot go on; says why, and what to do."""

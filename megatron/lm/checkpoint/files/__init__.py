"""The files of a checkpoint: versions, index, data files, lock, and atomic publication."""

"""The folder of a checkpoint on disk: its versions, index, data files, lock and publication."""

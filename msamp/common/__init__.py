"""The folder of this name is Microsoft's MS-AMP's. Importing it raises an ImportError that says what this package has instead."""

raise ImportError(
    "msamp.common is part of Microsoft's MS-AMP, and this is another package: docs/guide/moving.md has what replaces its names, and its "
    "checkpoints open with torch.load(path), that is with weights_only=True, after import msamp"
)

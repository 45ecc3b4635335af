"""The module of this name is Microsoft's MS-AMP's. Importing it raises an ImportError that says what this package has instead."""

raise ImportError(
    "msamp.nn.parameter is part of Microsoft's MS-AMP, and this is another package: its ScalingTensor is msamp.ScalingTensor, and its "
    "checkpoints open with torch.load(path), that is with weights_only=True, after import msamp"
)

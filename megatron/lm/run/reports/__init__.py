"""Reports of a run: metrics, the precision record, lost updates, and scales that one large amax holds down."""

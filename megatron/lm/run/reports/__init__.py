"""What a run reports: metrics, the precision record, lost updates, and scales held down by one large amax."""

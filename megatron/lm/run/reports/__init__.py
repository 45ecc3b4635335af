"""What a run reports: its metrics, the precision record, lost updates and amaxes that grow out of range."""

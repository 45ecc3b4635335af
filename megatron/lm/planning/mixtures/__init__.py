"""Layers with experts: what they keep for backward (`experts`), and how long they take (`expert_time`)."""

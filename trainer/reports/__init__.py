"""What a run reports: metrics and where they go, the split of its time, its summary and its plots."""

"""Training runs: the loop, one update, the schedule, checkpoints and reports."""

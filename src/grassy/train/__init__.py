"""What `grassy train` does: the loop, its update, schedule, checkpoints and reports."""

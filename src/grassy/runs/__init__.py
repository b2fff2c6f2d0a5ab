"""A run on disk: its weights, state to resume from, folder and records."""

"""A run on disk: its recipe, weights, state to resume from, folder and records."""

"""What a run is on disk: recipe, weights, state to resume from, folder, records."""

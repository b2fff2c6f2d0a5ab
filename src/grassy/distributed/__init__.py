"""One process of a run, or one of many."""

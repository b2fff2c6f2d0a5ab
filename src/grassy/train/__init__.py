"""Training by recipes: what `grassy train`, `validate`, `predict` and `export` do."""

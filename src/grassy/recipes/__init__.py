"""Recipes: the settings of a training run, the files of the package in `library`, and changes to them."""

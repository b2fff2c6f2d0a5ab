"""What a run looks like: its numbers as analysis.json, pictures of them, and one page to explore them with.

- `analyze`: the measures of `grassy.analysis` for the folder of a run, written beside its weights
- `pictures` and `toy`: figures of matplotlib, as the paper has them
- `page`: one HTML file of several runs, which opens from disk with nothing fetched
"""

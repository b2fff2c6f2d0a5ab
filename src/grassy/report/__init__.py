"""Reports on runs: measures as analysis.json, figures, and one HTML page to explore runs with.

- `analyze`: the measures of `grassy.analysis` for a run, written beside its weights
- `pictures`: matplotlib figures like those of the paper
- `page`: one HTML file about one or several runs, which opens from disk without a network
"""

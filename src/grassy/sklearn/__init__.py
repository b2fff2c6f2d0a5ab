"""A scikit-learn estimator with class subspaces, for given features and without a training loop."""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("grassy.sklearn needs scikit-learn: pip install 'grassy[sklearn]'") from error

from grassy.sklearn.classifier import GrassmannClassifier

__all__ = ["GrassmannClassifier"]

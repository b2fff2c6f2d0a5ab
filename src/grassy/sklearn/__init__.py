"""Class subspaces for people with features and no training loop: an estimator of scikit-learn's kind."""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("grassy.sklearn needs scikit-learn: pip install 'grassy[sklearn]'") from error

from grassy.sklearn.classifier import GrassmannClassifier

__all__ = ["GrassmannClassifier"]

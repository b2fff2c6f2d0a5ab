"""How good features are elsewhere: linear SVM, nearest neighbours and logistic regression on top of them.

Each has `fit`, `predict` and `score`, and a search for its one parameter by stratified cross-validation.
"""

from grassy.transfer.solvers.knn import KNN, search_knn
from grassy.transfer.solvers.probe import LogisticProbe, search_probe
from grassy.transfer.solvers.svm import LinearSVM, search_svm

__all__ = ["KNN", "LinearSVM", "LogisticProbe", "search_knn", "search_probe", "search_svm"]

"""Transfer of features: linear SVM, nearest neighbours and logistic regression on frozen features.

Each classifier has `fit`, `predict` and `score`. A `search_*` function chooses its one parameter by stratified
cross-validation.
"""

from grassy.transfer.solvers.knn import KNN, search_knn
from grassy.transfer.solvers.probe import LogisticProbe, search_probe
from grassy.transfer.solvers.svm import LinearSVM, search_svm

__all__ = ["KNN", "LinearSVM", "LogisticProbe", "search_knn", "search_probe", "search_svm"]

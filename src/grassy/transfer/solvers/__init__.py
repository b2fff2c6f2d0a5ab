"""Linear SVM, nearest neighbours and logistic probe; no grassy module outside this folder is imported."""

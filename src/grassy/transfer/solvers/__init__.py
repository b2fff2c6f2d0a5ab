"""Linear SVM, nearest neighbours and logistic probe. This folder imports no grassy module outside itself."""

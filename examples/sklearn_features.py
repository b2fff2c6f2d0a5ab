"""Features in NumPy arrays, and no training loop: `GrassmannClassifier` in a pipeline and a grid search.

python examples/sklearn_features.py
"""

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from grassy.sklearn import GrassmannClassifier

features, labels = load_digits(return_X_y=True)  # here the features of your model
train, test, y, y_test = train_test_split(features, labels, random_state=0)
pipeline = make_pipeline(MinMaxScaler(), GrassmannClassifier())
search = GridSearchCV(pipeline, {"grassmannclassifier__k": [2, 4, 8]}, cv=3).fit(train, y)
accuracy = search.score(test, y_test)
linear = make_pipeline(MinMaxScaler(), LogisticRegression(max_iter=1000)).fit(train, y).score(test, y_test)
print(f"accuracy {accuracy:.3f} with {search.best_params_}; logistic regression {linear:.3f}")

fitted = search.best_estimator_
strange = fitted[-1].outlier_score(fitted[:-1].transform(test[:, ::-1]))  # digits with their pixels in reverse order
usual = fitted[-1].outlier_score(fitted[:-1].transform(test))
print(f"outlier score: digits {usual.mean():.2f}, upside down {strange.mean():.2f}")

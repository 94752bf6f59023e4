"""Replay as scikit-learn estimators: `partial_fit` on each new portion of a stream, `predict` on all of it.

Needs the extra `sklearn`.
"""

from holdfast.errors import needing

with needing("sklearn", "the estimators need scikit-learn 1.6 or newer"):
    from sklearn.utils.validation import validate_data  # noqa: F401

from holdfast.estimators.classifier import ReplayClassifier
from holdfast.estimators.regressor import ReplayRegressor

__all__ = ["ReplayClassifier", "ReplayRegressor"]

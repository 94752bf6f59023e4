"""Story: rows of numbers arrive class by class, and one calls partial_fit with whatever has come in."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from holdfast.estimators import ReplayClassifier


@pytest.fixture(scope="module")
def digits():
    """Eight by eight pixels as 64 features in 0..1: 1347 rows to learn from, 450 to be tested on."""
    x, y = load_digits(return_X_y=True)
    return train_test_split(x / 16, y, test_size=0.25, stratify=y, random_state=0)


def portions(x, y):
    """The stream: digits 0 and 1 in four portions, then 2 and 3, and so on."""
    for first in range(0, 10, 2):
        rows = np.flatnonzero(np.isin(y, [first, first + 1]))
        for part in np.array_split(rows, 4):
            yield x[part], y[part]


def learned(digits, **settings):
    """The share of right answers on all ten digits after the stream, and on the first two."""
    train_x, test_x, train_y, test_y = digits
    network = ReplayClassifier(batch_size=8, lr=0.005, random_state=0, **settings)
    for x, y in portions(train_x, train_y):
        network.partial_fit(x, y, classes=range(10))
    early = test_y < 2
    return network.score(test_x, test_y), network.score(test_x[early], test_y[early])


def test_what_came_first_is_still_known_at_the_end(digits):
    alone, alone_early = learned(digits, buffer_size=None)
    replayed, replayed_early = learned(digits, buffer_size=200, regularizer=None)
    consistent, consistent_early = learned(digits, buffer_size=200, regularizer="mse")
    # The same network without a memory knows the last two digits only.
    assert alone < 0.25
    assert alone_early < 0.05
    assert replayed > alone + 0.5
    assert consistent > alone + 0.6
    assert min(replayed_early, consistent_early) > 0.7

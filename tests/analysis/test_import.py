from __future__ import annotations

import holdfast.analysis


def test_everything_announced_is_there() -> None:
    assert all(hasattr(holdfast.analysis, name) for name in holdfast.analysis.__all__)

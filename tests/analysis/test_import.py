from __future__ import annotations

import subprocess
import sys

import holdfast.analysis


def test_everything_announced_is_there() -> None:
    assert all(hasattr(holdfast.analysis, name) for name in holdfast.analysis.__all__)


def test_the_import_is_light() -> None:
    program = "import sys, holdfast.analysis; print({'PIL', 'scipy', 'matplotlib', 'torchmetrics'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"

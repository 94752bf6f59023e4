"""For all tests: one thread, so that several test processes on a small machine do not spin on each other's cores."""

from importlib.util import find_spec

import torch

torch.set_num_threads(1)

# Doctests import every module; one that is about a package which is not installed cannot be.
collect_ignore = [] if find_spec("lightning") else ["src/holdfast/integrations/lightning.py"]

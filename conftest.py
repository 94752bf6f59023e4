"""For all tests: one thread, so that several test processes on a small machine do not spin on each other's cores."""

import torch

torch.set_num_threads(1)

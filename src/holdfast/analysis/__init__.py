"""Can a continually trained model be trusted? Calibration, recency bias, robustness, transfer: results -> numbers.

>>> import torch
>>> from holdfast import analysis
>>> analysis.calibration(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])).ece < 12  # percent
True
"""

from holdfast.analysis.calibration import Calibration, calibration
from holdfast.analysis.corruptions import (
    BENCHMARK_CORRUPTIONS,
    CATEGORIES,
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
    Corruption,
    contact_sheet,
    corrupt,
    corruption,
)
from holdfast.analysis.overview import Gains, Scores, gains, overview
from holdfast.analysis.recency import Recency, recency
from holdfast.analysis.robustness import CorruptedImages, PublishedCorruptions, Robustness, robustness
from holdfast.analysis.transfer import Estimate, Transfer, transfer

__all__ = ["BENCHMARK_CORRUPTIONS", "CATEGORIES", "CORRUPTIONS", "EXTRA_CORRUPTIONS", "SEVERITIES"]
__all__ += ["Calibration", "CorruptedImages", "Corruption", "Estimate", "Gains", "PublishedCorruptions"]
__all__ += ["Recency", "Robustness", "Scores", "Transfer", "calibration", "contact_sheet", "corrupt"]
__all__ += ["corruption", "gains", "overview", "recency", "robustness", "transfer"]

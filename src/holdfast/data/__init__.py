"""Files -> uint8 tensors: published data sets, verified by checksum, downloaded if necessary."""

from holdfast.data import cifar, cifar10c, mnist, tinyimagenet  # noqa: F401 - importing one registers it
from holdfast.data.catalogue import DATASETS, Dataset, ImageSet, Source, Status, fetch, load, reporting, status
from holdfast.data.files import data_root

__all__ = ["DATASETS", "Dataset", "ImageSet", "Source", "Status", "data_root", "fetch", "load", "reporting", "status"]

"""Images of torchvision's datasets."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from grassy.data.decode import Crop, crop_of, read_rgb, to_rgb


class TorchvisionImages:
    """Images of a torchvision dataset, in files or in memory.

    torchvision would open files of any format that Pillow knows, and some of these start other programs. So it only
    says which file an image is in.

    Args:
        dataset: The dataset, without transforms.
        where: Where the images come from, for messages.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        self.dataset, self.where = dataset, where
        if hasattr(dataset, "loader"):
            dataset.loader = os.fspath
        # ImageNet's classes have several names each, and two pairs of classes share one.
        numbers = getattr(dataset, "wnid_to_idx", None) or getattr(dataset, "class_to_idx", None)
        self.class_names: Sequence[str] | None = sorted(numbers, key=numbers.__getitem__) if numbers else None

    def __len__(self) -> int:
        return len(self.dataset)

    def _item(self, index: int) -> tuple[Any, int]:
        """The path of an image, or the image itself if it is in no file, and its label."""
        if hasattr(self.dataset, "_images"):  # OxfordIIITPet has no `loader`
            return os.fspath(self.dataset._images[index]), int(self.dataset._labels[index])
        image, label = self.dataset[index]
        return image, int(label)

    def load(self, index: int, crop: Crop | None = None) -> tuple[np.ndarray, int]:
        image, label = self._item(index)
        pixels = read_rgb(image, crop) if isinstance(image, str) else crop_of(np.array(to_rgb(image)), crop)
        return pixels, label

    def name(self, index: int) -> str:
        image, _ = self._item(index)
        return image if isinstance(image, str) else f"{self.where}[{index}]"

    def labels(self) -> np.ndarray | None:
        known = getattr(self.dataset, "targets", getattr(self.dataset, "_labels", None))
        if known is None and isinstance(self._item(0)[0], str):  # the paths and labels of all cost little
            known = [self._item(index)[1] for index in range(len(self))]
        return None if known is None else np.asarray(known, dtype=np.int64)

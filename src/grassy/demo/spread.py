"""How the features of a class spread: a view along its strongest direction, as a map is centred on a pole."""

import base64
import io
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

PICTURE = 24  # pixels of its width and of its height


class Spread(NamedTuple):
    """The images of one class, placed by their features."""

    name: str
    places: list[tuple[float, float]]
    """In degrees. The distance from the centre is the angle to the strongest direction of the class."""
    pictures: list[str]
    """Data URIs: the ink of each image on a transparent ground."""

    @property
    def mean_angle(self) -> float:
        return float(np.hypot(*np.transpose(self.places)).mean())


def spread_of(features: Tensor, images: Tensor, labels: Tensor, names: list[str]) -> list[Spread]:
    """One view per class, of features (B, N) of length 1 and images (B, 1, H, W).

    The second and third strongest directions of a class say on which side of the centre an image lies.
    """
    found = []
    for label, name in enumerate(names):
        own = features[labels == label].double()
        along = own @ torch.linalg.svd(own, full_matrices=False).Vh[:3].T
        along *= along.sum(0).sign()
        places = along[:, :1].clamp(-1, 1).acos().rad2deg() * nn.functional.normalize(along[:, 1:], dim=-1)
        pictures = [ink(image) for image in images[labels == label]]
        found.append(Spread(name, [(float(x), float(y)) for x, y in places], pictures))
    return found


def ink(image: Tensor) -> str:
    """A digit (1, H, W) between 0 and 1 as a data URI: black, and transparent where there is no ink."""
    alpha = Image.fromarray((255 * image.squeeze(0)).round().to(torch.uint8).numpy())
    alpha = alpha.resize((PICTURE, PICTURE), Image.Resampling.BICUBIC)
    black = Image.new("L", alpha.size)
    file = io.BytesIO()
    Image.merge("LA", (black, alpha)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

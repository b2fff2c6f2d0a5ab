"""A head in place of a 1x1 convolution, whose logits have the classes second."""

from torch import Tensor, nn

from grassy.heads.base import Head, as_one_operation


class HeadOnMap(nn.Module):
    """Applies a head at every location of a map (B, N, ...), as a 1x1 convolution does: logits (B, C, ...).

    The target of `classification_loss` holds one label for each image, or one for each location (B, ...).
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        if (traced := as_one_operation(self, features)) is not None:
            return traced
        channels_last = features.movedim(1, -1)
        size = features.shape[2:]
        request = self.head.loss_request
        each_location = request is not None and request.target.shape[: features.ndim - 1] == channels_last.shape[:-1]
        if request is None or (each_location and not self.head.answers_with_loss(request)):
            return self.head(channels_last).movedim(-1, 1)
        if self.head.answers_with_loss(request):
            if size.numel() > 1 and not each_location:
                name = type(self.head).__name__
                raise ValueError(f"{name} has a loss of its own, on one feature an image, but got a map {tuple(size)}")
            loss = self.head(channels_last if each_location else channels_last.flatten(0, -2))
            return loss.reshape([1] * features.ndim)  # what flattens logits after this takes it
        # The target of an image is the target of each of its locations.
        target = request.target.repeat_interleave(size.numel(), dim=0)
        logits = self.head.logits(self.head.prepare(channels_last.flatten(0, -2)), target)
        return logits.unflatten(0, channels_last.shape[:-1]).movedim(-1, 1)

"""A head that replaces a 1x1 convolution: the classes are dimension 1 of its logits."""

from torch import Tensor, nn

from grassy.heads.base import Head, as_one_operation


class HeadOnMap(nn.Module):
    """Applies a head at every location of a feature map (B, N, ...), as a 1x1 convolution does.

    The logits have shape (B, C, ...). The target of `classification_loss` holds one label per image (B,) or one per
    location (B, ...).

    Args:
        head: The head to apply.
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
                raise ValueError(f"{name} computes its loss from one feature per image, but got a map {tuple(size)}")
            loss = self.head(channels_last if each_location else channels_last.flatten(0, -2))
            size_of_batch = 1 if loss.ndim == 0 else len(loss)
            return loss.reshape(size_of_batch, -1, *[1] * (features.ndim - 2))  # so that a following nn.Flatten works
        # Every location has the target of its image.
        target = request.target.repeat_interleave(size.numel(), dim=0)
        logits = self.head.logits(self.head.prepare(channels_last.flatten(0, -2)), target)
        return logits.unflatten(0, channels_last.shape[:-1]).movedim(-1, 1)

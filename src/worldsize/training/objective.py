"""What training minimizes: one function from pixels to losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.training.losses import Criterion
from worldsize.training.precision import Precision


class Objective(nn.Module):
    """A network, what comes before it and what comes after it, as one module, so that all of it is compiled together.

    Its ``forward`` maps pixels uint8 (n, H, W, 3) and labels to the losses (n,) and the logits (n, classes). Labels are
    int64 (n,), or uint8 (n, classes) if images have several. With a ``mix`` (see
    `data.augmentation.mixing`), images and labels are first mixed with their partners.

    Args:
        class_weights: see `Criterion`.
        teacher: a network for the same images and classes; its probabilities are part of the target. It is not trained.
    """

    def __init__(
        self,
        network: nn.Module,
        normalise: Normalise,
        precision: Precision,
        recipe: Recipe,
        class_weights: torch.Tensor | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.normalise = normalise
        self.precision = precision
        self.criterion = Criterion(recipe, class_weights)
        self._teachers = () if teacher is None else (teacher.eval(),)  # hidden: not a part of what is trained and sent
        self._share, self._temperature = recipe.loss.teacher_share, recipe.loss.temperature
        self._micro_batch = recipe.micro_batch

    def forward(
        self, pixels: torch.Tensor, labels: torch.Tensor, mix: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.precision.autocast():
            images = self._images(pixels, mix)
            logits = self.network(images)
            losses = self.losses(logits, labels, mix)
            for teacher in self._teachers:
                losses = (1 - self._share) * losses + self._share * self._distance(logits, teacher, images)
            return losses, logits

    def _distance(self, logits: torch.Tensor, teacher: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """The divergence from the teacher's probabilities (n,), times the square of the temperature (Hinton et al. 2015)."""
        with torch.no_grad():
            taught = self._log_probabilities(teacher(images))
        own = self._log_probabilities(logits)
        return functional.kl_div(own, taught, reduction="none", log_target=True).sum(1) * self._temperature**2

    def _log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """At the temperature; at least in fp32, because the divergence is a small difference of them.

        Autocast computes them in fp32 on GPUs only.
        """
        return functional.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature, 1)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor, mix: torch.Tensor | None) -> torch.Tensor:
        """The loss of each sample (n,) for logits (n, classes), without a teacher's part."""
        if mix is None:
            return self.criterion(logits, labels)
        return self.criterion(logits, labels, self._partners(labels), mix.to(labels.device, non_blocking=True)[:, :1])

    def correct(self, logits: torch.Tensor, labels: torch.Tensor, mix: torch.Tensor | None) -> torch.Tensor:
        """Whether the class with the highest logit is a label of the image, or of the larger part of a mix; bool (n,)."""
        likeliest = self.likeliest(labels, mix)
        if labels.ndim == 2:
            return likeliest.gather(1, logits.argmax(1, keepdim=True))[:, 0] > 0
        return logits.argmax(1) == likeliest

    def values(
        self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, mix: torch.Tensor | None
    ) -> torch.Tensor:
        """For each sample its loss, whether it is correct (see `correct`) and its margin, float64 (n, 3).

        The margin is the logit of the label minus the largest other logit; 0 if images have several labels.
        """
        correct = self.correct(logits, labels, mix)
        margins = torch.zeros_like(losses) if labels.ndim == 2 else margin(logits, labels)
        return torch.stack([losses.double(), correct.double(), margins.double()], dim=1)

    def likeliest(self, labels: torch.Tensor, mix: torch.Tensor | None) -> torch.Tensor:
        """The labels of the larger part of each mixed image, in the form of ``labels``."""
        if mix is None:
            return labels
        own = mix.to(labels.device, non_blocking=True)[:, 0] >= 0.5
        return torch.where(own[:, None] if labels.ndim == 2 else own, labels, self._partners(labels))

    def _partners(self, values: torch.Tensor) -> torch.Tensor:
        """For each sample, the value of the one before it in its micro-batch."""
        return values.unflatten(0, (-1, min(self._micro_batch, len(values)))).roll(1, 1).flatten(0, 1)

    def mixed_pixels(self, pixels: torch.Tensor, mix: torch.Tensor | None) -> torch.Tensor:
        """The images as the network sees them, but for the normalization, uint8 (n, H, W, 3): mixed with their partners."""
        if mix is None:
            return pixels
        share = _shares(mix.to(pixels.device), pixels.shape[1:3]).permute(0, 2, 3, 1)
        return (pixels * share + self._partners(pixels) * (1 - share)).round().to(torch.uint8)

    def _images(self, pixels: torch.Tensor, mix: torch.Tensor | None) -> torch.Tensor:
        if mix is None:
            return self.normalise(pixels)
        images = self.normalise(pixels)
        share = _shares(mix.to(images.device, non_blocking=True), images.shape[2:]).to(images.dtype)
        return images * share + self.normalise(self._partners(pixels)) * (1 - share)


def _shares(mix: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The share of the own image in each pixel of images of ``size`` (H, W): (n, 1, H, W)."""
    rows, columns = (torch.arange(n, device=mix.device) for n in size)
    top, left, bottom, right = (mix[:, i, None, None, None] for i in range(2, 6))
    inside = (rows[:, None] >= top) & (rows[:, None] < bottom) & (columns >= left) & (columns < right)
    return mix[:, 1, None, None, None].masked_fill(inside, 0.0)


def margin(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The logit of the label minus the largest other logit (n,), for logits (n, classes) and int64 labels (n,)."""
    places = labels[:, None]
    return logits.gather(1, places)[:, 0] - logits.scatter(1, places, -torch.inf).amax(1)

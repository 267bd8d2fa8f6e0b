"""`worldsize.load`: a trained network as a Python object."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from worldsize.config.recipe import Recipe
from worldsize.config.wording import count
from worldsize.data.images.pillow import BrokenImage, to_rgb
from worldsize.data.loading.prepare import Preparation
from worldsize.data.samples import Read, as_image
from worldsize.distributed.batch_plan import evaluation_batch
from worldsize.distributed.world import no_gpu
from worldsize.errors import DataError, UserError, as_path, own_errors
from worldsize.inference import opening, trained
from worldsize.inference.predict import top
from worldsize.training import precision
from worldsize.training.evaluation import highest, view_logits

# One image: a path, its encoded bytes, a PIL image, or uint8 (height, width, 3).
ImageLike = str | os.PathLike[str] | bytes | Image.Image | NDArray[np.uint8]

_first_loaded_in: list[int] = []  # the process, which forked ones remember, too


@dataclass(frozen=True)
class Prediction:
    """The most probable classes, the best first; probabilities are 0 to 1, ``indices`` numbers in `Model.classes`."""

    labels: tuple[str, ...]
    probabilities: tuple[float, ...]
    indices: tuple[int, ...]

    @property
    def label(self) -> str:
        """The best class."""
        return self.labels[0]


class Model:
    """A trained network that takes images as they come, with exactly the preprocessing of its run's evaluation.

    All methods are thread-safe. ``classes`` has the names of the classes in the order of the logits.

    Example:
        >>> model = worldsize.load("runs/digits-1")
        >>> model.predict("image.png").label
        >>> model.logits([first, second])  # float32 (2, classes)
    """

    def __init__(self, found: trained.Trained) -> None:
        self._found = found
        self._preparation = Preparation()
        self.classes = found.classes

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self._found.recipe

    @property
    def size(self) -> int:
        """Side of the images that the network sees, pixels."""
        return self.recipe.data.val_crop_size

    def predict(self, image: ImageLike, topk: int = 5) -> Prediction:
        """The ``topk`` best classes of one image.

        Raises:
            UserError: ``topk`` is not a whole number of at least 1. More errors as in `logits`.
        """
        return self.predict_all([image], topk)[0]

    def predict_all(self, images: Iterable[ImageLike] | torch.Tensor, topk: int = 5) -> list[Prediction]:
        """The same for several images, which are computed together."""
        if isinstance(topk, bool) or not isinstance(topk, Integral) or topk < 1:
            raise UserError(f"topk={topk!r}: must be a whole number, at least 1")
        logits = self.logits(images)
        best = highest(logits, topk)  # of probabilities, several may round to 1 or 0
        values = top.probabilities(logits, self.recipe.data.multilabel).gather(1, best)
        rows = zip(best.tolist(), values.tolist(), strict=True)
        return [Prediction(tuple(self.classes[i] for i in row), tuple(p), tuple(row)) for row, p in rows]

    def logits(self, images: Iterable[ImageLike] | torch.Tensor) -> torch.Tensor:
        """The logits of n images, float32 (n, classes) on the CPU.

        Args:
            images: n images, or a tensor: uint8 (n, 3, height, width) is preprocessed like other images, floating-point
                (n, 3, size, size) is taken as normalized; mirror images are averaged like those of other images.

        Raises:
            DataError: an image cannot be read or decoded; the message names it.
            UserError: an image or the tensor has another type or shape, ``images`` are none, or a path cannot be one.
        """
        _stay_alone_after_fork()
        device = self._found.precision.device
        with torch.inference_mode(), self._found.precision.applied():
            if isinstance(images, torch.Tensor) and images.is_floating_point():
                return self._normalized(images.to(device)).float().cpu()
            batch = evaluation_batch(self.recipe, device.type)
            images = _several(images)
            if self._found.takes_complete:
                return self._complete(images).float()
            parts = [images[start : start + batch] for start in range(0, len(images), batch)]
            logits = [self._found.logits(self._views(part)).float().cpu() for part in parts]
        return torch.cat(logits) if logits else torch.empty(0, len(self.classes))

    def preprocess(self, image: ImageLike) -> NDArray[np.uint8]:
        """What the network sees of an image before normalization, uint8 (size, size, 3). Errors as in `logits`."""
        crop = self._found.crops[-1]  # the center one
        out = np.empty((1, crop.size, crop.size, 3), np.uint8)
        self._fill(crop, [image], out)
        return out[0]

    def _complete(self, images: Sequence[ImageLike] | torch.Tensor) -> torch.Tensor:
        """The logits of a network that takes decoded images of any size, one by one."""
        found = []
        for number, image in enumerate(_read(images)):
            try:
                if isinstance(image, BrokenImage):
                    raise image
                found.append(self._found.complete(np.asarray(as_image(image))))
            except BrokenImage as error:
                raise DataError(f"{_name(images[number], number)}: {error}") from None
        return torch.stack(found) if found else torch.empty(0, len(self.classes))

    def _views(self, images: Sequence[ImageLike] | torch.Tensor) -> list[torch.Tensor]:
        found = []
        for crop in self._found.crops:
            out = np.empty((len(images), crop.size, crop.size, 3), np.uint8)
            self._fill(crop, images, out)
            found.append(torch.from_numpy(out))
        return found

    def _fill(self, crop: Any, images: Sequence[ImageLike] | torch.Tensor, out: NDArray[np.uint8]) -> None:
        stored = _read(images)
        draws = np.ones((len(stored), crop.draws))
        for number, reason in enumerate(self._preparation.fill(crop, stored, draws, out)):
            if reason is not None:
                raise DataError(f"{_name(images[number], number)}: {reason}")

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        if self._found.takes_complete:
            raise UserError("this export normalizes images itself: pass images, not normalized tensors")
        if self.recipe.data.val_ten_crop:
            raise UserError("this run evaluates ten crops of an image: pass images, not normalized tensors")
        if tuple(images.shape[1:]) != (3, self.size, self.size):
            raise UserError(f"a normalized batch must be (n, 3, {self.size}, {self.size}), not {_shape(images)}")
        with self._found.precision.autocast():
            return view_logits(self._found.network, images.to(self._found.precision.weights), self.recipe.data.val_mirror)


def _several(images: Iterable[ImageLike] | torch.Tensor) -> Sequence[ImageLike] | torch.Tensor:
    """The images, in a form that has a length."""
    if isinstance(images, (str, os.PathLike, bytes, Image.Image)):
        raise UserError("several images must be a list or a tensor; pass [image], or call predict(image)")
    if isinstance(images, (torch.Tensor, Sequence)):
        return images
    try:
        each = iter(images)
    except TypeError:  # a number, None, an array of no dimension
        raise UserError(f"several images must be a list or a tensor, not {type(images).__name__}") from None
    return list(each)


def _stay_alone_after_fork() -> None:
    """Compute with one thread in a process that was forked from one that has loaded a network.

    The threads of OpenMP stay behind in the parent, and a computation with several would wait for them forever.
    """
    if not _first_loaded_in:
        _first_loaded_in.append(os.getpid())
    elif _first_loaded_in[0] != os.getpid():
        torch.set_num_threads(1)


@own_errors()
def load(path: str | os.PathLike[str], device: str = "auto", raw: bool = False) -> Model:
    """The network of a run's newest checkpoint, of one checkpoint, or of an export, ready to classify images.

    Args:
        path: the folder of the run, of the checkpoint or of the export.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` is the GPU if there is one.
        raw: take the weights themselves, of a run that also saved their average.

    Raises:
        UserError: neither a run nor a checkpoint nor an export; or this machine has no such device, or it is no text.
        CheckpointError: it is damaged, or the run has none.
        StoreUnreachable: its disk does not answer.
    """
    _stay_alone_after_fork()
    source = opening.find(as_path(path, "path"))
    recipe = source.recipe
    number_format = precision.resolve(recipe, _device(device, recipe))
    return Model(source.load(recipe, number_format, raw))


def _device(choice: object, recipe: Recipe) -> torch.device:
    if not isinstance(choice, str):
        raise UserError(f"device={choice!r}: must be text, such as 'cpu' or 'cuda:1'")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "auto":
        return torch.device("cuda" if recipe.device != "cpu" and gpus else "cpu")
    if choice == "cpu":
        return torch.device(choice)
    if re.fullmatch(r"cuda(:[0-9]+)?", choice) is None:
        raise UserError(f'device="{choice}": must be auto, cpu, cuda, or one GPU, such as cuda:1')
    if not gpus:
        raise no_gpu(f'device="{choice}"', 'device="cpu"')
    if int(choice.partition(":")[2] or 0) >= gpus:
        raise UserError(f'device="{choice}": this machine has {count(gpus, "GPU")}, counted from cuda:0')
    return torch.device(choice)


def _read(images: Sequence[ImageLike] | torch.Tensor) -> list[Read]:
    return _arrays(images) if isinstance(images, torch.Tensor) else [_stored(image) for image in images]


def _name(image: Any, number: int) -> str:
    if isinstance(image, (str, os.PathLike)):
        return str(image)
    opened = getattr(image, "filename", "")  # of an image that Pillow opened
    return f"image {number} ({opened})" if opened else f"image {number}"


def _stored(image: Any) -> Read:
    if isinstance(image, (str, os.PathLike)):
        try:
            if not os.fspath(image):  # which Path takes for the current folder
                raise UserError("an image's path is empty")
            return Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"{os.fspath(image)}: {error.strerror}") from None
        except (TypeError, ValueError) as error:  # of bytes, or with a NUL character
            raise UserError(f"{image!r} cannot be the path of an image: {error}") from None
    if isinstance(image, Image.Image):
        _require_pixels(image.height, image.width)
        return _pixels(image)
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        _require_pixels(*image.shape[:2])
        return np.ascontiguousarray(image)
    what = f"{image.dtype} {_shape(image)}" if isinstance(image, np.ndarray) else type(image).__name__
    raise UserError(f"an image must be a path, bytes, a PIL image or uint8 (height, width, 3), not {what}")


def _pixels(image: Image.Image) -> Read:
    """The pixels of an image, or why it has none: Pillow reads the file of an opened image only now."""
    try:
        return np.asarray(to_rgb(image))
    except BrokenImage as error:
        return error
    except Exception as error:  # damaged files make decoders raise exceptions of many types
        return BrokenImage(f"{type(error).__name__}: {error}")


def _require_pixels(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise UserError(f"an image must have at least one row and one column of pixels, not {height} x {width}")


def _arrays(images: torch.Tensor) -> list[Read]:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise UserError(f"a tensor of images must be uint8 (n, 3, height, width), not {images.dtype} {_shape(images)}")
    _require_pixels(*images.shape[2:])
    return list(images.permute(0, 2, 3, 1).contiguous().cpu().numpy())


def _shape(array: torch.Tensor | NDArray[Any]) -> str:
    return f"({', '.join(map(str, array.shape))})"

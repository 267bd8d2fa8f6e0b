"""Whether a dataset has too many broken images to train on, or to evaluate on."""

from __future__ import annotations

from collections.abc import Mapping

from worldsize.errors import DataError

_SPLIT = {"train": "training", "val": "validation"}


def require_few(broken: Mapping[str, tuple[int, int]], most: float, remedy: str) -> None:
    """Check each split on its own, as training does: it stops at the split that has too many.

    Args:
        broken: by split, the number of broken images and of all images.
        most: maximum share of broken images, 0 to 1.
        remedy: the end of the message.

    Raises:
        DataError: a split has more.
    """
    for split, (number, total) in broken.items():
        if number > most * total:
            share = f"{number:,} of {total:,} {_SPLIT[split]} images are broken"
            raise DataError(f"{share}, more than --max-broken {most:g} allows: {remedy}")


def refuse_many(broken: int, total: int, most: float, names: str) -> None:
    """Check one split that training or an evaluation reads.

    Args:
        broken: number of its images that cannot be decoded.
        total: number of its images.
        most: maximum share of broken images, 0 to 1.
        names: where their names are.

    Raises:
        DataError: it has more.
    """
    if broken > most * total:
        raise DataError(
            f"{broken} of {total:,} images cannot be decoded, more than the allowed {most:.2%}; see {names} for their "
            "names. Fix them or raise --data.max-broken."
        )

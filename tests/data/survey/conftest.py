"""A folder with broken and odd images, and what verify finds in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from packing import encode, odd_folder
from trees import opened, put
from worldsize.data.survey import verify_report
from worldsize.data.survey.verify import verify


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """`odd_folder`, plus a duplicate, an image in both splits, and an image with two labels."""
    root = odd_folder(tmp_path_factory.mktemp("originals") / "root")
    train = root / "train"
    put(train / "plain" / "again.jpg", (train / "plain" / "1.jpg").read_bytes())
    put(train / "plain" / "sample.webp", (train / "__odd.ones__" / "alpha.webp").read_bytes())
    put(root / "val" / "plain" / "leak.jpg", (train / "plain" / "3.jpg").read_bytes())
    put(train / "plain" / "large.png", encode(Image.new("1", (6000, 5000)), "PNG"))
    return root


@pytest.fixture(scope="module")
def page(root, tmp_path_factory) -> dict:
    dataset = opened(root, cache=tmp_path_factory.mktemp("cache"))
    return verify_report.report(dataset, verify(dataset, 2))

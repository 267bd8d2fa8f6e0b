"""Write the fuzzing corpus, small JPEGs of every kind, intact and damaged: corpus.py FOLDER."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDES = [(1, 1), (1, 40), (40, 1), (7, 9), (16, 16), (17, 33), (50, 61), (90, 64)]


def images() -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    encoded = []
    for height, width in SIDES:
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.LANCZOS, (0, 0, width / 2, height / 2))
        for mode in ("RGB", "L", "CMYK"):
            for sampling in ("4:4:4", "4:2:2", "4:2:0") if mode == "RGB" else ("4:4:4",):
                for options in ({}, {"progressive": True}, {"restart_marker_blocks": 2}, {"optimize": True, "quality": 30}):
                    out = io.BytesIO()
                    smooth.convert(mode).save(out, "JPEG", subsampling=sampling, **options)
                    name = f"{height}x{width}-{mode}-{sampling.replace(':', '')}-{'-'.join(options) or 'plain'}"
                    encoded.append((name, out.getvalue()))
    return encoded


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for name, data in images():
        (folder / f"{name}.jpg").write_bytes(data)
        (folder / f"{name}-truncated.jpg").write_bytes(data[: int(len(data) * rng.random())])
        flipped = bytearray(data)
        for position in rng.integers(0, len(data), 4):
            flipped[position] ^= 1 << int(rng.integers(8))
        (folder / f"{name}-flipped.jpg").write_bytes(bytes(flipped))


if __name__ == "__main__":
    main()

"""Compares the native decoder with other decoders: JPEG bytes to a random resized crop of 224 px, one thread.

    python benchmarks/decoder.py FOLDER [ROUNDS]

FOLDER holds JPEGs, at any depth; up to 1,000 are used. All decoders use the same boxes and run once per round, interleaved.
Decoders that are not installed are skipped. The time is CPU time of all threads of this process, so that other programs on
the machine matter less. The lower bound is entropy decoding alone (native/bench/entropy.c), which every decoder must do.
Prints a table in Markdown.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", RAYON_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # read at import

import numpy as np
from PIL import Image

from worldsize.data.images import native
from worldsize.data.images.crops import random_boxes

SIZE = 224
CHUNK = 8
NATIVE = Path(__file__).parent.parent / "native"

Boxes = np.ndarray
Decoder = Callable[[list[bytes], Boxes, np.ndarray], object]


def ours(images: list[bytes], boxes: Boxes, flips: np.ndarray) -> object:
    library = native.load()
    assert library is not None
    cuts = np.zeros((len(images), 8), np.int32)
    cuts[:, :4], cuts[:, 4:6] = boxes, SIZE
    out = np.empty((CHUNK, SIZE, SIZE, 3), np.uint8)
    for i in range(0, len(images), CHUNK):
        part = slice(i, min(i + CHUNK, len(images)))
        assert library.cut(images[part], cuts[part], flips[part], SIZE, out[: part.stop - i]).all()
    return out


def pillow(images: list[bytes], boxes: Boxes, flips: np.ndarray) -> object:
    for data, (top, left, h, w), flip in zip(images, boxes.tolist(), flips, strict=True):
        part = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, left + w, top + h))
        pixels = np.asarray(part.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        pixels = np.ascontiguousarray(pixels[:, ::-1] if flip else pixels)
    return pixels


def torchvision() -> Decoder:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    return _tensors(lambda data: decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB))


def torchcodec() -> Decoder:
    from torchcodec.decoders import decode_jpeg

    return _tensors(decode_jpeg)


def _tensors(decode: Callable) -> Decoder:
    """A decoder followed by torchvision's antialiased resize, which has AVX2 code for uint8."""
    import torch
    from torchvision.transforms.v2 import functional as F

    torch.set_num_threads(1)

    def run(images: list[bytes], boxes: Boxes, flips: np.ndarray) -> object:
        for data, (top, left, h, w), flip in zip(images, boxes.tolist(), flips, strict=True):
            pixels = F.resized_crop(decode(data), top, left, h, w, [SIZE, SIZE], antialias=True)
            pixels = F.horizontal_flip(pixels) if flip else pixels
            pixels = pixels.permute(1, 2, 0).contiguous()
        return pixels

    return run


def simplejpeg(name: str) -> Decoder:
    import cv2
    from simplejpeg import decode_jpeg

    cv2.setNumThreads(1)
    return _arrays(decode_jpeg, lambda part: cv2.resize(part, (SIZE, SIZE), interpolation=getattr(cv2, name)))


def kornia() -> Decoder:
    import kornia_rs

    def resize(part: np.ndarray) -> np.ndarray:
        return kornia_rs.resize(np.ascontiguousarray(part), (SIZE, SIZE), "bilinear")

    decoder = kornia_rs.io.ImageDecoder()
    return _arrays(decoder.decode, resize)


def _arrays(decode: Callable, resize: Callable) -> Decoder:
    def run(images: list[bytes], boxes: Boxes, flips: np.ndarray) -> object:
        for data, (top, left, h, w), flip in zip(images, boxes.tolist(), flips, strict=True):
            pixels = resize(decode(data)[top : top + h, left : left + w])
            pixels = np.ascontiguousarray(pixels[:, ::-1] if flip else pixels)
        return pixels

    return run


def dali() -> Decoder:
    from nvidia.dali import fn, pipeline_def, types

    batch = 50
    feed: dict[str, list[np.ndarray]] = {}

    @pipeline_def(batch_size=batch, num_threads=1, device_id=None, exec_pipelined=False, exec_async=False)
    def graph() -> object:
        data, start, shape, mirror = fn.external_source(
            lambda: (feed["data"], feed["start"], feed["shape"], feed["mirror"]), num_outputs=4
        )
        pixels = fn.decoders.image_slice(data, start, shape, axes=(0, 1), normalized_anchor=False, normalized_shape=False)
        pixels = fn.resize(pixels, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(pixels, horizontal=mirror)

    built = graph()
    built.build()

    def run(images: list[bytes], boxes: Boxes, flips: np.ndarray) -> object:
        for i in range(0, len(images) - batch + 1, batch):
            part = slice(i, i + batch)
            feed["data"] = [np.frombuffer(data, np.uint8) for data in images[part]]
            feed["start"], feed["shape"] = list(boxes[part, :2]), list(boxes[part, 2:])
            feed["mirror"] = list(flips[part].astype(np.int32))
            out = built.run()
        return out

    return run


PEERS: dict[str, Callable[[], Decoder]] = {
    "worldsize, native": lambda: ours,
    "Pillow": lambda: pillow,
    "torchvision decode_jpeg + v2 resize": torchvision,
    "TorchCodec decode_jpeg + v2 resize": torchcodec,
    "simplejpeg + OpenCV INTER_AREA": lambda: simplejpeg("INTER_AREA"),
    "simplejpeg + OpenCV INTER_LINEAR (no antialiasing)": lambda: simplejpeg("INTER_LINEAR"),
    "kornia-rs decode + resize bilinear": kornia,
    "DALI CPU image_slice + resize": dali,
}
OURS, BOUND = "worldsize, native", "lower bound: entropy decoding alone"


def entropy(files: list[Path]) -> Callable[[], float]:
    subprocess.run(["make", "-s", "-C", str(NATIVE), "build/entropy"], check=True)
    names = "".join(f"{file}\n" for file in files)
    child = subprocess.Popen([NATIVE / "build" / "entropy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(names)

    def seconds() -> float:
        print("go", file=child.stdin, flush=True)
        return float(child.stdout.readline()) / 1e6

    return seconds


def cpu_seconds(decoder: Decoder, *arguments) -> float:
    start = time.process_time()
    decoder(*arguments)
    return time.process_time() - start


def installed() -> dict[str, Decoder]:
    decoders = {}
    for name, make in PEERS.items():
        try:
            decoders[name] = make()
        except (ImportError, RuntimeError) as error:
            print(f"skipped {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return decoders


def measure(files: list[Path], rounds: int) -> dict[str, list[float]]:
    """Images per second of each decoder, one number per round."""
    library = native.load()
    if library is None:
        sys.exit(f"no native decoder: {native.reason_missing()}")
    images = [file.read_bytes() for file in files]
    heights, widths, _ = library.headers(images)
    rng = np.random.default_rng(0)
    boxes = random_boxes(heights, widths, rng.random((len(files), 40)), (0.08, 1.0), (3 / 4, 4 / 3))
    flips = rng.random(len(files)) < 0.5
    decoders, entropy_seconds = installed(), entropy(files)
    for decoder in decoders.values():
        decoder(images[:100], boxes[:100], flips[:100])  # warmup
    rates: dict[str, list[float]] = {name: [] for name in (*decoders, BOUND)}
    for _ in range(rounds):
        for name, decoder in decoders.items():
            rates[name].append(len(files) / cpu_seconds(decoder, images, boxes, flips))
        rates[BOUND].append(len(files) / entropy_seconds())
    return rates


def supported_natively(files: list[Path]) -> list[Path]:
    library = native.load()
    return [file for file in files if library is None or library.headers([file.read_bytes()])[2].all()]


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    suffixes = {".jpg", ".jpeg"}
    files = sorted(path for path in Path(sys.argv[1]).rglob("*") if path.suffix.lower() in suffixes)[:1000]
    files = supported_natively(files)
    files = files[: len(files) // 50 * 50]  # DALI needs complete batches
    rates = measure(files, int(sys.argv[2]) if len(sys.argv) == 3 else 5)
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    library = native.load()
    assert library is not None
    print(f"{processor.split(':')[1].strip()}; {library.version}; {len(files)} images, {len(rates[OURS])} rounds\n")
    print(
        "| one thread, JPEG bytes to RandomResizedCrop 224 | images/s (median) | speedup of worldsize (median of rounds) |"
    )
    print("| --- | ---: | ---: |")
    for name, own in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates[OURS], own, strict=True))
        print(f"| {name} | {statistics.median(own):.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

"""Images inside tar (also WebDataset's), zip and Parquet files (also Hugging Face's), written to files of their own."""

from __future__ import annotations

import csv
import json
import os
import posixpath
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from worldsize.data.complete_tar import CompleteEntry
from worldsize.data.datasets.file_index import has_image_extension
from worldsize.data.images.pillow import looks_like_image
from worldsize.data.layouts import inventory
from worldsize.data.layouts.tables import EXTENSIONS
from worldsize.distributed.stop_signals import ends_at_once
from worldsize.errors import DataError, UserError

_TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
FORMATS = (*_TARS, ".zip", ".parquet")
_COPIED = 50_000_000  # bytes: larger texts are no names of classes
_BATCH = 64  # rows
_CHUNK = 1 << 20


def unpack(root: Path, out: Path) -> None:
    """Write the images in the archives of ``root``, and what is next to them, into the new folder ``out``.

    Each archive becomes a folder. The columns of Parquet files other than the images become a table next to them.

    Raises:
        UserError: ``out`` exists, ``root`` has image files or no archives, or Parquet files need a package.
        DataError: an archive is damaged, or names files outside of its folder.
    """
    if out.exists():
        raise UserError(f"--unpack {out} already exists: pass a new folder, or run worldsize init {out}")
    found = inventory.take(root)
    archives = [other for other in found.others if other.lower().endswith(FORMATS)]
    if found.images or not archives:
        what = "has image files already" if found.images else f"has no archives ({', '.join(FORMATS)})"
        raise UserError(f"--unpack {out}: {root} {what}")
    temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")

    def clean() -> None:
        shutil.rmtree(temporary, ignore_errors=True)

    try:
        with ends_at_once("nothing was unpacked", first=clean):
            for archive in archives:
                _one(root / archive, temporary / _folder(archive))
            for other in found.others:
                if other.lower().endswith(EXTENSIONS) and (root / other).stat().st_size <= _COPIED:
                    (temporary / other).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(root / other, temporary / other)
            temporary.rename(out)
    except OSError as error:
        raise UserError(f"--unpack {out}: {error.strerror or error}") from None
    finally:
        clean()


def _folder(archive: str) -> str:
    """The folder of an archive: called part if it has only a number, which would look like a class."""
    extension = next(one for one in sorted(FORMATS, key=len, reverse=True) if archive.lower().endswith(one))
    folder, name = posixpath.split(archive[: -len(extension)])
    return posixpath.join(folder, f"part_{name}" if name.isdecimal() else name)


def _one(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.suffix.lower() == ".parquet":
            _parquet(archive, folder)
            return
        for name, size, source in _zip(archive) if archive.suffix.lower() == ".zip" else _tar(archive):
            target = folder / name
            if posixpath.isabs(name) or ".." in name.split("/"):
                raise DataError(f"{archive} names a file outside of its folder: {name}")
            if size > (free := shutil.disk_usage(folder).free):  # a few megabytes can stand for terabytes
                raise UserError(f"not enough space to unpack {name} of {archive}: {size:,} bytes, and {free:,} are free")
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, _CHUNK)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError) as error:  # RuntimeError: a password
        raise DataError(f"{archive} is damaged: {error}") from None


def _tar(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """The name of each file in it, its size in bytes, and its content."""
    with tarfile.open(archive, tarinfo=CompleteEntry) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                yield posixpath.normpath(member.name), member.size, file


def _zip(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """The same."""
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            if not member.is_dir():
                yield posixpath.normpath(member.filename), member.file_size, opened.open(member)


# Parquet ------------------------------------------------------------------------------------------------------------------


def _parquet(source: Path, folder: Path) -> None:
    """Write each row's image as ROW.EXTENSION, and the other columns into metadata.csv."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source} needs pyarrow: pip install 'worldsize[parquet]'") from None
    try:
        table = pyarrow.parquet.ParquetFile(source)
        names = _class_names(table.schema_arrow.metadata or {})
        records = (row for batch in table.iter_batches(batch_size=_BATCH) for row in batch.to_pylist())
        _write_rows(records, names, source, folder)
    except pyarrow.ArrowException as error:
        raise DataError(f"{source} is damaged: {error}") from None


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The names of the classes of each column, as Hugging Face's datasets stores them."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    found = {}
    for column, feature in features.items():
        inner = feature.get("feature", feature) if isinstance(feature, dict) else {}
        if isinstance(inner, dict) and isinstance(inner.get("names"), list):
            found[column] = inner["names"]
    return found


def _write_rows(records: Iterator[dict[str, Any]], names: dict[str, list[str]], source: Path, folder: Path) -> None:
    with open(folder / "metadata.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        columns: list[str] | None = None
        for number, record in enumerate(records):
            images = {column: data for column, value in record.items() if (data := _image(value)) is not None}
            if len(images) != 1:
                raise UserError(f"{source}, row {number + 1}: expected one column with an image, found {len(images)}")
            [(column, data)] = images.items()
            path = record[column].get("path") if isinstance(record[column], dict) else None
            extension = posixpath.splitext(path or "")[1]
            name = f"{number}{extension if has_image_extension(f'x{extension}') else _extension(data)}"
            (folder / name).write_bytes(data)
            if columns is None:
                columns = [one for one in record if one != column]
                rows.writerow(["file_name", *columns])
            rows.writerow([name, *(_text(record[one], names.get(one)) for one in columns)])


def _image(value: object) -> bytes | None:
    data = value.get("bytes") if isinstance(value, dict) else value
    return data if isinstance(data, bytes) and looks_like_image(data[:16]) else None


def _extension(data: bytes) -> str:
    signatures = {b"\x89P": ".png", b"\xff\xd8": ".jpg", b"GI": ".gif", b"RI": ".webp", b"BM": ".bmp"}
    return signatures.get(data[:2], ".tif" if data[:2] in (b"II", b"MM") else ".ppm")


def _text(value: object, names: list[str] | None) -> str:
    """A cell; numbers of classes as their names, several as a JSON list."""
    if isinstance(value, list):
        return json.dumps([_text(one, names) for one in value], ensure_ascii=False)
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return "" if value is None else str(value)

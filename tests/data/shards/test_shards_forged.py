"""An index with values that no shard has, and with the identity of its shard: the error names the shard."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packing import packed
from trees import two_classes
from worldsize import cli
from worldsize.data import shards
from worldsize.data.shards.format import RECORD, Encoding, identity
from worldsize.errors import DataError


@pytest.fixture
def made(tmp_path) -> Path:
    packed(two_classes(tmp_path / "originals"), tmp_path / "shards")
    return tmp_path / "shards"


def forge(folder: Path, **values: int) -> None:
    """Change the first record of the training split, and the identity of its shard."""
    records = np.frombuffer((folder / "train.index").read_bytes(), RECORD).copy()
    for field, value in values.items():
        records[field][0] = value
    (folder / "train.index").write_bytes(records.tobytes())
    content = json.loads((folder / "index.json").read_text())
    [shard] = content["splits"]["train"]["shards"]
    before, shard[2] = shard[2], identity("train", records.tobytes())
    (folder / "index.json").write_text(json.dumps(content))
    path = folder / "train-00000.tar"
    path.write_bytes(path.read_bytes().replace(before.encode(), shard[2].encode()))


@pytest.mark.parametrize(
    "values",
    [
        *({"offset": value} for value in (2**63, 2**62, 0)),
        *({"length": value} for value in (2**31, 2**32 - 1)),
        *({"label": value} for value in (-1, 2, 2**30)),
        {"head": 2**32 - 1},
        {"kind": 99},
        *({"kind": Encoding.RAW, "height": value, "width": value} for value in (8, 2**32 - 1)),
    ],
)
def test_records_that_do_not_fit_are_refused(made, values, capfd):
    forge(made, **values)
    message = f"{made}/train.index is damaged in the part for train-00000.tar"
    with pytest.raises(DataError, match=message):
        shards.open_dataset(made).train.encoded(0)
    for command in (["info", made], ["verify", made], ["pack", made, "--out", made.with_name("again")]):
        assert cli.main(["data", *map(str, command)]) == 65
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e400"])
@pytest.mark.parametrize("field", [0, 1])
def test_sizes_that_are_no_numbers_are_refused(made, field, value):
    content = json.loads((made / "index.json").read_text())
    content["splits"]["train"]["shards"][0][field] = "VALUE"
    (made / "index.json").write_text(json.dumps(content).replace('"VALUE"', value))
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        shards.open_dataset(made)


def test_an_index_json_with_too_deep_lists_is_refused(made):
    (made / "index.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        shards.open_dataset(made)

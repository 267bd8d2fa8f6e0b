"""A file that changes while a run reads it is named, on the rank that read it or on another one."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trees import put
from worldsize.data.file_contents import FileContents
from worldsize.data.file_samples import FileSamples
from worldsize.errors import DataChanged, WorldsizeError


@pytest.fixture
def samples(tmp_path):
    """samples(): four files in a folder, opened as another process would."""
    names = [f"{i}.png" for i in range(4)]
    for name in names:
        put(tmp_path / "a" / name, name.encode() * 10)
    ends = np.cumsum([len(name) for name in names])
    return lambda: FileSamples(tmp_path, ("a",), "".join(names).encode(), ends, np.zeros(4, np.int32), ("a",))


class Worlds:
    """A world of two ranks, whose collective operation waits for both."""

    def __init__(self) -> None:
        self.given: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(2)

    def of(self, rank: int) -> SimpleNamespace:
        def maximum(tensor: torch.Tensor) -> None:
            self.given[rank] = tensor.clone()
            self.barrier.wait()
            tensor[:] = torch.maximum(self.given[0], self.given[1])
            self.barrier.wait()

        return SimpleNamespace(rank=rank, maximum=maximum)


def shared(*ranks: FileSamples) -> list[str]:
    """The messages of the ranks that refuse what another one has read."""
    worlds, messages = Worlds(), []

    def share(rank: int) -> None:
        try:
            ranks[rank].share(worlds.of(rank))
        except WorldsizeError as error:
            messages.append(str(error))

    threads = [threading.Thread(target=share, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return messages


def test_the_same_content_may_be_written_again(tmp_path, samples):
    one = samples()
    first = one.encoded(1)
    (tmp_path / "a" / "1.png").unlink()
    put(tmp_path / "a" / "1.png", first)
    assert one.encoded(1) == first


@pytest.mark.parametrize(("content", "sizes"), [(b"2.png" * 10, ""), (b"", r" \(50 bytes then, 0 now\)")])
def test_another_content_is_named(tmp_path, samples, content, sizes):
    one = samples()
    one.encoded(1)
    (tmp_path / "a" / "1.png").write_bytes(content)
    with pytest.raises(DataChanged, match=rf"a/1\.png is not what this run first read there{sizes}: it changed, or"):
        one.encoded(1)
    assert samples().encoded(1) == content  # another run may read it


def test_a_file_that_changes_between_two_reads_of_one_call_is_named():
    contents, twice = FileContents(3), np.array([1, 2, 1])
    with pytest.raises(DataChanged, match=r"number 1 is not what this run first read there \(6 bytes then, 5 now\)"):
        contents.check_all(twice, np.array([5, 5, 6]), np.array([7, 7, 8]), lambda index: Path(f"number {index}"))
    contents = FileContents(3)
    contents.check_all(twice, np.array([5, 6, 5]), np.array([7, 8, 7]), lambda index: Path(f"number {index}"))


def test_a_deleted_file_is_named_not_replaced(tmp_path, samples):
    one = samples()
    one.encoded(1)
    (tmp_path / "a" / "1.png").unlink()
    with pytest.raises(DataChanged, match=r"a/1\.png was deleted since this run first read it"):
        one.encoded(1)


def test_a_rank_knows_what_another_one_has_read(tmp_path, samples):
    one, other = samples(), samples()
    one.encoded(1)
    assert shared(one, other) == []
    (tmp_path / "a" / "1.png").write_bytes(b"new")
    with pytest.raises(DataChanged, match=r"a/1\.png is not what"):
        other.encoded(1)


def test_ranks_that_have_read_different_contents_notice_it(tmp_path, samples):
    one, other = samples(), samples()
    one.encoded(1)
    (tmp_path / "a" / "1.png").write_bytes(b"new")
    other.encoded(1)
    [message] = shared(one, other)
    assert "a/1.png has different content on rank" in message


def test_what_all_ranks_know_is_not_sent_again(samples):
    one, other = samples(), samples()
    for index in range(4):
        (one, other)[index % 2].encoded(index)
    assert shared(one, other) == []
    one.share(SimpleNamespace(maximum=None))

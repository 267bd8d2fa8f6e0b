"""Fetching that is interrupted: connections that break, servers and stores that refuse, and processes that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fetching import contents, fetched, pack, start, state, until
from trees import put, two_classes
from webserver import Server
from worldsize.data.fetching import Interrupted, download, unpack
from worldsize.data.fetching.state import FOLDER, State, locked
from worldsize.errors import DataError, Stopped, UserError


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, Path]:
    """Some thousand files, which take a while to unpack, and an archive of them."""
    folder = tmp_path_factory.mktemp("large")
    tree = two_classes(folder / "tree")
    for i in range(3000):
        put(tree / f"train/cat/{i:04}.png", os.urandom(100 + i % 50))
    return tree, pack(tree, folder / "large.zip")


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """A second before the next attempt is long for a test."""
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)


# A server that breaks ------------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_taken_up_where_it_broke(large, tmp_path, capsys):
    tree, archive = large
    data = archive.read_bytes()
    with Server(data, breaks=[100_000, 0, 300_000]) as server:
        fetched(server.url, tmp_path / "there")
    assert [span for span, _ in server.asked] == [None, "bytes=100000-", "bytes=100000-", "bytes=400000-"]
    assert server.sent == len(data)
    assert contents(tmp_path / "there") == contents(tree)
    assert "the connection ended early; trying again in 0 s" in capsys.readouterr().err


def test_a_server_without_ranges_is_asked_for_all_again(archive, tree, tmp_path):
    with Server(archive.read_bytes(), breaks=[200], ranges=False) as server:
        fetched(server.url, tmp_path / "there")
    assert server.sent == 200 + archive.stat().st_size
    assert contents(tmp_path / "there") == contents(tree)


def test_a_file_that_changes_meanwhile_is_begun_anew(archive, large, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PATIENCE_S", 0.0)
    with Server(large[1].read_bytes(), breaks=[5000, 0, 0]) as server:
        with pytest.raises(Interrupted, match="does not answer"):
            fetched(server.url, tmp_path / "there")
        server.data, server.etag, server.breaks = archive.read_bytes(), '"two"', []
        fetched(server.url, tmp_path / "there")
    assert server.asked[-1] == ("bytes=5000-", '"one"')
    assert contents(tmp_path / "there") == contents(tree)


def test_a_server_that_does_not_say_how_much_there_is(archive, tree, tmp_path):
    with Server(archive.read_bytes(), tell_length=False) as server:
        fetched(server.url, tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tree)


def test_a_server_that_is_overloaded_is_asked_again(archive, tmp_path, capsys):
    with Server(archive.read_bytes(), statuses=[503, 429]) as server:
        assert fetched(server.url, tmp_path / "there") == 0
    assert "the server says 503 Service Unavailable; trying again" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_server_that_refuses(archive, tmp_path, status):
    with Server(archive.read_bytes(), statuses=[status] * 3) as server:
        with pytest.raises(UserError, match=rf"/pictures.zip: the server says {status} .*check the address") as caught:
            fetched(f"{server.url}?signature=secret", tmp_path / "there")
        assert len(server.asked) == 1
    assert "secret" not in str(caught.value)


def test_what_a_signed_address_is_signed_with_stays_out_of_the_state(archive, tmp_path):
    with Server(archive.read_bytes()) as server:
        fetched(f"{server.url}?signature=secret", tmp_path / "there")
        fetched(f"{server.url}?signature=another", tmp_path / "there")
    assert "secret" not in (tmp_path / "there" / FOLDER / "state.json").read_text()


def test_nobody_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PATIENCE_S", 0.0)
    with Server(b"") as server:
        pass
    with pytest.raises(Interrupted, match=r"127.0.0.1 cannot be reached \(.*refused\).*same command") as caught:
        fetched(server.url, tmp_path / "there")
    assert caught.value.exit_code == 75


def test_any_store_that_fsspec_knows(archive, tree, tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/bucket/pictures.zip", archive.read_bytes())
    part = tmp_path / "there" / FOLDER / "archive.part"
    put(part, archive.read_bytes()[:1000])
    begun = State(tmp_path / "there", "folder", "memory://bucket/pictures.zip", archive.stat().st_size)
    begun.validator = store.ukey("/bucket/pictures.zip")
    begun.save()
    opener = download.from_store("memory://bucket/pictures.zip")
    assert opener(1000, begun.validator).start == 1000
    assert opener(1000, "of another version").start == 0
    fetched("memory://bucket/pictures.zip", tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tree)
    for address, says in {
        "memory://bucket/nothing.zip": "no such file",
        "memory://bucket": "is a folder",
        "carrier-pigeon://coop/pictures.zip": "carrier-pigeon",
    }.items():
        with pytest.raises(UserError, match=says):
            fetched(address, tmp_path / "other")


def test_a_store_that_does_not_answer_is_tried_again(monkeypatch):
    import fsspec

    def fails(error: Exception):
        def info(*_, **__):
            raise error

        monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)

    fails(RuntimeError("Could not connect to the endpoint URL"))  # botocore's is no OSError
    with pytest.raises(download.Lost, match=r"memory://bucket/a\.zip: RuntimeError: Could not connect"):
        download.from_store("memory://bucket/a.zip")(0, "")
    fails(ValueError("Invalid endpoint"))
    with pytest.raises(UserError, match="Invalid endpoint"):
        download.from_store("memory://bucket/a.zip")(0, "")


# Interrupted ---------------------------------------------------------------------------------------------------------


def test_killed_while_unpacking(large, tmp_path):
    tree, archive = large
    to = tmp_path / "there"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files")
    process.kill()
    process.communicate()
    done = state(to)["unpacked"]
    assert 0 < done < 3005, "the test came too late"
    inodes = {path: path.stat().st_ino for path in to.rglob("*.png") if FOLDER not in path.parts}
    assert len(inodes) >= done
    for path in inodes:
        assert path.read_bytes() == (tree / path.relative_to(to)).read_bytes(), "a file that was not whole"
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)
    again = sum(path.stat().st_ino != inode for path, inode in inodes.items())
    assert again <= len(inodes) - done <= unpack.BATCH, "what was done is not done again"
    assert not (to / FOLDER / "unpacking").exists()


def test_killed_while_downloading(large, tmp_path):
    tree, archive = large
    with Server(archive.read_bytes(), breaks=[100_000]) as server:
        server.stalls.set()
        process = start(server.url, tmp_path / "there")
        part = tmp_path / "there" / FOLDER / "archive.part"
        until(lambda: part.exists() and part.stat().st_size > 50_000, "the first bytes")
        process.kill()
        process.communicate()
        server.stalls.clear()
        have = part.stat().st_size
        fetched(server.url, tmp_path / "there")
    assert server.asked[-1] == (f"bytes={have}-", '"one"')
    assert contents(tmp_path / "there") == contents(tree)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_the_same_command_goes_on(large, tmp_path, number):
    tree, archive = large
    to = tmp_path / "there"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files")
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "stopped; the same command goes on from here" in said
    assert state(to)["unpacked"] < 3005
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)


def test_files_that_did_not_reach_the_disk_are_written_again(large, tmp_path):
    tree, archive = large
    to = tmp_path / "there"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files")
    process.kill()
    process.communicate()
    # As after a power cut: noted as done, and gone.
    lost = sorted((to / "train" / "cat").iterdir())[:3]
    lost[0].unlink()
    lost[1].write_bytes(b"")
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)


def test_an_archive_that_is_another_one_the_next_time(challenge, tmp_path):
    archive = pack(challenge, tmp_path / "a.zip")
    with pytest.raises(DataError, match="--subset"):
        fetched(archive, tmp_path / "there", "imagenet")
    for path in challenge.rglob("*.JPEG"):
        path.write_bytes(bytes(20_000))
    pack(challenge, archive)
    fetched(archive, tmp_path / "there", "imagenet", subset=True)
    assert contents(tmp_path / "there") == contents(challenge)


def test_two_at_once(archive, tmp_path):
    with locked(tmp_path / "there"), pytest.raises(Stopped, match=r"another fetch is at work in .*there: wait"):
        fetched(archive, tmp_path / "there")
    assert fetched(archive, tmp_path / "there") == 0

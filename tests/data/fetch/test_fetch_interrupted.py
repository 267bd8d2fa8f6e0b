"""Interrupted fetching: broken connections, servers and stores that reject requests, and killed processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fetching import contents, fetched, pack, start, state
from trees import put, two_classes
from waiting import until
from webserver import Server
from worldsize.data.fetch import Interrupted, download, unpack
from worldsize.data.fetch.state import FOLDER, FetchState, locked
from worldsize.errors import DataError, Stopped, UserError


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, Path]:
    """Four batches of files, enough to interrupt unpacking, and an archive of them."""
    folder = tmp_path_factory.mktemp("large")
    tree = two_classes(folder / "tree")
    for i in range(4 * unpack.BATCH - 10):
        put(tree / f"train/cat/{i:04}.png", os.urandom(600 + i % 50))
    return tree, pack(tree, folder / "large.zip")


@pytest.fixture(autouse=True)
def no_retry_pause(monkeypatch):
    """Do not wait a second before each retry."""
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)


# Broken connections and server errors --------------------------------------------------------------------------------


def test_download_resumes_where_the_connection_broke(large, tmp_path, capsys):
    tree, archive = large
    data = archive.read_bytes()
    with Server(data, breaks=[100_000, 0, 300_000]) as server:
        fetched(server.url, tmp_path / "dataset")
    assert [span for span, _ in server.requests] == [None, "bytes=100000-", "bytes=100000-", "bytes=400000-"]
    assert server.sent == len(data)
    assert contents(tmp_path / "dataset") == contents(tree)
    assert "the connection ended early; retrying in 0 s" in capsys.readouterr().err


def test_without_range_support_the_download_restarts(archive, tree, tmp_path):
    with Server(archive.read_bytes(), breaks=[200], ranges=False) as server:
        fetched(server.url, tmp_path / "dataset")
    assert server.sent == 200 + archive.stat().st_size
    assert contents(tmp_path / "dataset") == contents(tree)


def test_a_file_that_changes_meanwhile_is_downloaded_from_the_start(archive, large, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "GIVE_UP_AFTER_S", 0.0)
    with Server(large[1].read_bytes(), breaks=[5000, 0, 0]) as server:
        with pytest.raises(Interrupted, match="does not respond"):
            fetched(server.url, tmp_path / "dataset")
        server.data, server.etag, server.breaks = archive.read_bytes(), '"two"', []
        fetched(server.url, tmp_path / "dataset")
    assert server.requests[-1] == ("bytes=5000-", '"one"')
    assert contents(tmp_path / "dataset") == contents(tree)


def test_a_server_that_sends_no_length(archive, tree, tmp_path):
    with Server(archive.read_bytes(), send_length=False) as server:
        fetched(server.url, tmp_path / "dataset")
    assert contents(tmp_path / "dataset") == contents(tree)


def test_an_overloaded_server_is_retried(archive, tmp_path, capsys):
    with Server(archive.read_bytes(), statuses=[503, 429]) as server:
        assert fetched(server.url, tmp_path / "dataset") == 0
    assert "the server responded 503 Service Unavailable; retrying" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_server_that_rejects_the_request(archive, tmp_path, status):
    with Server(archive.read_bytes(), statuses=[status] * 3) as server:
        with pytest.raises(UserError, match=rf"/images.zip: the server responded {status} .*check the URL") as caught:
            fetched(f"{server.url}?signature=secret", tmp_path / "dataset")
        assert len(server.requests) == 1
    assert "secret" not in str(caught.value)


def test_the_signature_of_a_url_is_not_saved_in_the_state(archive, tmp_path):
    with Server(archive.read_bytes()) as server:
        fetched(f"{server.url}?signature=secret", tmp_path / "dataset")
        fetched(f"{server.url}?signature=another", tmp_path / "dataset")
    assert "secret" not in (tmp_path / "dataset" / FOLDER / "state.json").read_text()


def test_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "GIVE_UP_AFTER_S", 0.0)
    with Server(b"") as server:
        pass
    with pytest.raises(Interrupted, match=r"127.0.0.1 cannot be reached \(.*refused\).*to resume, rerun") as caught:
        fetched(server.url, tmp_path / "dataset")
    assert caught.value.exit_code == 75


def test_any_store_that_fsspec_knows(archive, tree, tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/bucket/images.zip", archive.read_bytes())
    part = tmp_path / "dataset" / FOLDER / "archive.part"
    put(part, archive.read_bytes()[:1000])
    partial = FetchState(tmp_path / "dataset", "folder", "memory://bucket/images.zip", archive.stat().st_size)
    partial.validator = store.ukey("/bucket/images.zip")
    partial.save()
    opener = download.from_store("memory://bucket/images.zip")
    assert opener(1000, partial.validator).start == 1000
    assert opener(1000, "of another version").start == 0
    fetched("memory://bucket/images.zip", tmp_path / "dataset")
    assert contents(tmp_path / "dataset") == contents(tree)
    for url, message in {
        "memory://bucket/nothing.zip": "nothing.zip does not exist",
        "memory://bucket": "is a folder",
        "carrier-pigeon://coop/images.zip": "carrier-pigeon",
    }.items():
        with pytest.raises(UserError, match=message):
            fetched(url, tmp_path / "other")


def test_a_store_that_does_not_respond_is_retried(monkeypatch):
    import fsspec

    def fails(error: Exception):
        def info(*_, **__):
            raise error

        monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)

    fails(RuntimeError("Could not connect to the endpoint URL"))  # like botocore's, not an OSError
    with pytest.raises(download.ConnectionLost, match=r"memory://bucket/a\.zip: RuntimeError: Could not connect"):
        download.from_store("memory://bucket/a.zip")(0, "")
    fails(ValueError("Invalid endpoint"))
    with pytest.raises(UserError, match="Invalid endpoint"):
        download.from_store("memory://bucket/a.zip")(0, "")


# Interrupted processes -----------------------------------------------------------------------------------------------


def test_killed_while_unpacking(large, tmp_path):
    tree, archive = large
    to = tmp_path / "dataset"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files are there", every=0.002)
    process.kill()
    process.communicate()
    done = state(to)["unpacked"]
    assert 0 < done < len(contents(tree))
    inodes = {path: path.stat().st_ino for path in to.rglob("*.png") if FOLDER not in path.parts}
    assert len(inodes) >= done
    for path in inodes:
        assert path.read_bytes() == (tree / path.relative_to(to)).read_bytes(), "incomplete file"
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)
    rewritten = sum(path.stat().st_ino != inode for path, inode in inodes.items())
    assert rewritten <= len(inodes) - done <= unpack.BATCH, "files recorded as unpacked were written again"
    assert not (to / FOLDER / "unpacking").exists()


def test_killed_while_downloading(large, tmp_path):
    tree, archive = large
    with Server(archive.read_bytes(), breaks=[100_000]) as server:
        server.stalls.set()
        process = start(server.url, tmp_path / "dataset")
        part = tmp_path / "dataset" / FOLDER / "archive.part"
        until(lambda: part.exists() and part.stat().st_size > 50_000, "the first bytes are there")
        process.kill()
        process.communicate()
        server.stalls.clear()
        downloaded = part.stat().st_size
        fetched(server.url, tmp_path / "dataset")
    assert server.requests[-1] == (f"bytes={downloaded}-", '"one"')
    assert contents(tmp_path / "dataset") == contents(tree)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_and_the_same_command_resumes(large, tmp_path, number):
    tree, archive = large
    to = tmp_path / "dataset"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files are there", every=0.002)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 75
    assert "stopped; rerun the same command to resume" in stderr
    assert state(to)["unpacked"] < len(contents(tree))
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)


def test_files_that_did_not_reach_the_disk_are_written_again(large, tmp_path):
    tree, archive = large
    to = tmp_path / "dataset"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files are there", every=0.002)
    process.kill()
    process.communicate()
    # As after a power failure: recorded as done, but lost.
    lost = sorted((to / "train" / "cat").iterdir())[:3]
    lost[0].unlink()
    lost[1].write_bytes(b"")
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)


def test_a_local_archive_that_changes_between_calls(challenge, tmp_path):
    archive = pack(challenge, tmp_path / "a.zip")
    with pytest.raises(DataError, match="--subset"):
        fetched(archive, tmp_path / "dataset", "imagenet")
    for path in challenge.rglob("*.JPEG"):
        path.write_bytes(bytes(20_000))
    pack(challenge, archive)
    fetched(archive, tmp_path / "dataset", "imagenet", subset=True)
    assert contents(tmp_path / "dataset") == contents(challenge)


def test_two_fetches_at_once(archive, tmp_path):
    with locked(tmp_path / "dataset"), pytest.raises(Stopped, match=r"another fetch is running in .*dataset; wait"):
        fetched(archive, tmp_path / "dataset")
    assert fetched(archive, tmp_path / "dataset") == 0

"""Files on a volume: the transfer between two processes, one of them started as in a pod."""

from __future__ import annotations

import hashlib
import io
import os
import random
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trees import snapshot
from two_ends import download, other_end, upload
from worldsize.cluster.api.errors import Unreachable
from worldsize.cluster.storage import files, transfer

NAMES = st.binary(min_size=1, max_size=120).filter(lambda name: not set(name) & set(b"/\0") and name not in (b".", b".."))
FILES = st.tuples(st.binary(max_size=3000), st.sampled_from([0o600, 0o644, 0o755, 0o640]))
TREES = st.recursive(FILES, lambda inside: st.dictionaries(NAMES, inside, max_size=4), max_leaves=12)


def write_tree(tree, path: Path) -> None:
    if isinstance(tree, dict):
        path.mkdir()
        for name, inside in tree.items():
            write_tree(inside, path / os.fsdecode(name))
        return
    path.write_bytes(tree[0])
    path.chmod(tree[1])


@settings(max_examples=15)
@given(tree=TREES)
def test_a_tree_is_identical_after_upload_and_download(tree):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "volume").mkdir()
        write_tree(tree, root / "mine")
        upload(root / "mine", root / "volume", "/sub/folder/")
        download(root / "volume", "/sub/folder/mine", root / "back")
        assert snapshot(root / "back") == snapshot(root / "mine")
        assert sorted(os.listdir(root)) == ["back", "mine", "volume"]
        assert os.listdir(root / "volume/sub/folder") == ["mine"]


def test_only_links_that_point_inside_the_tree_are_kept(tmp_path):
    tree = tmp_path / "volume/tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/file").write_text("x")
    good = {"a/b/up": "../file", "a/b/top": "../../a", "same": "a", "gone": "nowhere"}
    bad = {
        "absolute": "/etc/passwd",
        "out": "../other",
        "a/b/far": "../../../x",
        "round": "a/../a/file",
        "a/round": "b/../..",
    }
    for name, link in (good | bad).items():
        (tree / name).symlink_to(link)
    os.mkfifo(tree / "pipe")
    result = download(tmp_path / "volume", "/tree", tmp_path / "back")
    links = {name: str((tmp_path / "back" / name).readlink()) for name in good}
    assert links == good
    assert not any(os.path.lexists(tmp_path / "back" / name) for name in [*bad, "pipe"])
    assert sorted(text.split(" (")[0] for text in result["skipped"]) == sorted([*bad, "pipe"])


STEPS = st.lists(st.sampled_from(["..", "a", "b", "l", "m"]), min_size=1, max_size=5).map("/".join)


@given(links=st.dictionaries(st.sampled_from(["l", "m", "a/l", "a/b/m", "b/l"]), STEPS, min_size=1))
def test_accepted_links_point_inside_in_combination(links):
    kept = {name: link for name, link in links.items() if transfer.points_inside(name, link)}
    assume(kept)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "x/y/root"
        (root / "a/b").mkdir(parents=True)
        (root / "b").mkdir()
        for name, link in kept.items():
            (root / name).symlink_to(link)
        for name in kept:
            # Where the operating system resolves it to; a loop resolves to nothing.
            assert os.path.realpath(root / name).startswith(str(root))


def stream_of(*entries: tarfile.TarInfo) -> list:
    """Messages of a possibly hostile sender."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w|") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(b"evil"[: entry.size]))
    return [data.getvalue(), {"sha256": hashlib.sha256(data.getvalue()).hexdigest()}]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o777
    info.size = 4 if kind == tarfile.REGTYPE else 0
    return info


ROOT = entry(".", tarfile.DIRTYPE)


@pytest.mark.parametrize(
    "entries",
    [
        (ROOT, entry("../evil")),
        (ROOT, entry("a/../../evil")),
        (ROOT, entry("/tmp/worldsize-evil")),
        (ROOT, entry("l", tarfile.SYMTYPE, "..")),
        (ROOT, entry("l", tarfile.SYMTYPE, "/tmp")),
        (ROOT, entry("d", tarfile.DIRTYPE), entry("d/l", tarfile.SYMTYPE, "../d/../../..")),
        (ROOT, entry("././l", tarfile.SYMTYPE, "../../evil")),
        (ROOT, entry("d", tarfile.SYMTYPE, "."), entry("d/d/l", tarfile.SYMTYPE, "../../evil")),
        (entry(".", tarfile.SYMTYPE, "evil"),),
        (ROOT, entry("l", tarfile.LNKTYPE, "/etc/passwd")),
        (ROOT, entry("null", tarfile.CHRTYPE)),
        (ROOT, entry("pipe", tarfile.FIFOTYPE)),
    ],
)
def test_entries_outside_the_target_are_refused(tmp_path, entries):
    (tmp_path / "in").mkdir()
    with pytest.raises(transfer.Failed, match="refused"):
        transfer.unpack(iter(stream_of(*entries)).__next__, tmp_path / "in/target", False)
    assert os.listdir(tmp_path / "in") == []
    assert os.listdir(tmp_path) == ["in"]


def test_nothing_is_written_through_a_link(tmp_path):
    entries = (ROOT, entry("d", tarfile.DIRTYPE), entry("l", tarfile.SYMTYPE, "d"), entry("l/evil"))
    with pytest.raises((transfer.Failed, OSError)):
        transfer.unpack(iter(stream_of(*entries)).__next__, tmp_path / "target", False)
    assert os.listdir(tmp_path) == []


def test_setuid_bit_is_dropped(tmp_path):
    info = entry(".")
    info.mode = 0o4755
    transfer.unpack(iter(stream_of(info)).__next__, tmp_path / "target", False)
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o755


@given(data=st.data())
def test_a_stream_cut_anywhere_leaves_nothing(data):
    stream = stream_of(ROOT, *(entry(name) for name in "abc"))[0]
    messages = iter([stream[: data.draw(st.integers(0, len(stream)))]])

    def receive():
        try:
            return next(messages)
        except StopIteration:
            raise Unreachable("cut") from None

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(Unreachable):
            transfer.unpack(receive, Path(folder, "target"), False)
        assert os.listdir(folder) == []


def test_a_damaged_stream_leaves_nothing(tmp_path):
    data, end = stream_of(ROOT, entry("a"))
    damaged = data.replace(b"evil", b"evil!"[1:])
    with pytest.raises(transfer.Failed, match="checksum of the received data does not match"):
        transfer.unpack(iter([damaged, end]).__next__, tmp_path / "target", False)
    assert os.listdir(tmp_path) == []


def test_replacing_keeps_other_files_and_checks_before_the_first_write(tmp_path):
    volume = tmp_path / "volume"
    (volume / "run/sub").mkdir(parents=True)
    (volume / "run/a").write_text("new")
    (volume / "run/sub/b").write_text("new")
    (tmp_path / "run/sub").mkdir(parents=True)
    (tmp_path / "run/a").write_text("old")
    (tmp_path / "run/mine").write_text("mine")
    with pytest.raises(transfer.Failed, match="already exists"):
        download(volume, "/run", tmp_path / "run")
    download(volume, "/run", tmp_path / "run", force=True)
    assert [(tmp_path / "run" / name).read_text() for name in ("a", "mine", "sub/b")] == ["new", "mine", "new"]

    (tmp_path / "run/sub/b").unlink()
    (tmp_path / "run/sub/b").mkdir()
    (tmp_path / "run/a").write_text("old")
    with pytest.raises(transfer.Failed, match="sub/b: cannot replace a folder with a file"):
        download(volume, "/run", tmp_path / "run", force=True)
    assert (tmp_path / "run/a").read_text() == "old"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"do": "ls", "path": "/runs/nix"}, "/runs/nix does not exist; /runs contains: one, two"),
        ({"do": "get", "path": "/nix/nix", "skip": 0}, "/nix/nix does not exist; / contains: out, runs"),
        ({"do": "get", "path": "/out", "skip": 0}, "points outside the volume"),
        ({"do": "get", "path": "/runs/pipe/../two", "skip": 0}, "neither a file nor a folder"),
        (
            {"do": "put", "path": "/runs", "name": "one", "run": None, "replace": False, "bytes": 1},
            "/runs/one already exists",
        ),
        (
            {"do": "put", "path": "/out/x", "name": "x", "run": None, "replace": False, "bytes": 1},
            "points outside the volume",
        ),
        ({"do": "put", "path": "/new", "name": "x", "run": None, "replace": False, "bytes": 1 << 60}, "not enough space"),
    ],
)
def test_other_end_reports_impossible_requests(tmp_path, request_, message):
    volume = tmp_path / "volume"
    (volume / "runs/one").mkdir(parents=True)
    os.mkfifo(volume / "runs/two")
    (volume / "out").symlink_to("/etc")
    with other_end(root=str(volume), **request_) as messages, pytest.raises(transfer.Failed, match=message) as caught:
        list(iter(messages.receive, None))
    assert caught.value.user_error


def test_error_of_the_other_end_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    request = {"do": "put", "path": "/file/x", "name": "x", "run": None, "replace": False, "bytes": 1}
    with other_end(root=str(tmp_path), **request) as messages, pytest.raises(transfer.Failed, match=r"^/file: ") as caught:
        messages.receive_fields()
    assert not caught.value.user_error


def test_stream_resumes_after_a_broken_connection(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_RETRY_PAUSES_S", (0.01,) * 3)
    tree = tmp_path / "volume/tree"
    tree.mkdir(parents=True)
    draw = random.Random(1)
    for name in "abc":
        (tree / name).write_bytes(draw.randbytes(700_001))
    offsets = []

    def open_at(skip):
        """A connection that breaks after a few messages."""
        offsets.append(skip)
        sent: list = []

        class Collected(transfer.Messages):
            def send_chunk(self, chunk, kind=b"D"):
                sent.append(chunk)

        end = transfer.pack(tree, Collected(None, None), skip=skip)
        replies = iter([{"scanned": False}, {"scanned": True}, *sent, end][: 4 if len(offsets) < 4 else None])

        class Broken(transfer.Messages):
            def receive(self):
                for reply in replies:
                    return reply
                raise Unreachable("broken")

        return Broken(None, None)

    stream = files.ResumingStream(open_at)
    transfer.unpack(stream.receive, tmp_path / "back", False)
    assert snapshot(tmp_path / "back") == snapshot(tree)
    assert len(offsets) == 4 and offsets == sorted(set(offsets))
    assert "retrying" in capsys.readouterr().err


def test_a_connection_that_stays_broken_is_given_up(monkeypatch):
    monkeypatch.setattr(files, "_RETRY_PAUSES_S", (0.01,) * 3)
    attempts = []

    class Broken(transfer.Messages):
        def receive(self):
            attempts.append(1)
            if len(attempts) == 1:
                return {"scanned": True}
            raise Unreachable("broken")

    stream = files.ResumingStream(lambda skip: Broken(None, None))
    with pytest.raises(Unreachable):
        stream.receive()
    assert len(attempts) == 1 + 4

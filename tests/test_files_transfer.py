"""Files on a volume: the transfer between two processes, one of them started as a pod starts it."""

from __future__ import annotations

import hashlib
import io
import os
import random
import select
import stat
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trees import picture
from worldsize.launch import files, transfer
from worldsize.launch.cluster import Unreachable

PROGRAM = Path(transfer.__file__).read_bytes()


@contextmanager
def other_end(**request):
    """Messages with the program that a pod runs, started as a pod starts it, once it has had the request."""
    command = [sys.executable, "-c", transfer.LOADER, str(len(PROGRAM))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", bufsize=0) as process:

        def write(content):
            while content:
                content = content[process.stdin.write(content) :]

        def read(count):
            content = b""
            while len(content) < count:
                assert select.select([process.stdout], [], [], 10)[0], "it says nothing"
                content += process.stdout.read(count - len(content)) or pytest.fail("it is gone")
            return content

        messages = transfer.Messages(read, write)
        write(PROGRAM)
        messages.tell(**request)
        yield messages
        # It stays until its last words were read, for a container's may be lost.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.stdin.close()
        assert process.wait(20) == 0


def fetch(volume: Path, path: str, target: Path, force: bool = False) -> dict:
    with other_end(root=str(volume), do="get", path=path, skip=0) as messages:
        assert messages.facts()["surveyed"]
        return transfer.unpack(messages.hear, target, force)


def bring(local: Path, volume: Path, path: str, force: bool = False) -> dict:
    size = transfer.survey(local)["bytes"]
    with other_end(root=str(volume), do="put", path=path, name=local.name, replace=force, bytes=size) as messages:
        messages.facts()
        messages.tell(**transfer.pack(local, messages))
        return messages.facts()


NAMES = st.binary(min_size=1, max_size=120).filter(lambda name: not set(name) & set(b"/\0") and name not in (b".", b".."))
FILES = st.tuples(st.binary(max_size=3000), st.sampled_from([0o600, 0o644, 0o755, 0o640]))
TREES = st.recursive(FILES, lambda inside: st.dictionaries(NAMES, inside, max_size=4), max_leaves=12)


def plant(tree, path: Path) -> None:
    if isinstance(tree, dict):
        path.mkdir()
        for name, inside in tree.items():
            plant(inside, path / os.fsdecode(name))
        return
    path.write_bytes(tree[0])
    path.chmod(tree[1])


@settings(max_examples=15)
@given(tree=TREES)
def test_a_tree_is_the_same_after_both_ways(tree):
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "volume").mkdir()
        plant(tree, here / "mine")
        bring(here / "mine", here / "volume", "/sub/folder/")
        fetch(here / "volume", "/sub/folder/mine", here / "back")
        assert picture(here / "back") == picture(here / "mine")
        assert sorted(os.listdir(here)) == ["back", "mine", "volume"]
        assert os.listdir(here / "volume/sub/folder") == ["mine"]


def test_links_stay_where_they_lead_inside(tmp_path):
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
    told = fetch(tmp_path / "volume", "/tree", tmp_path / "back")
    links = {name: str((tmp_path / "back" / name).readlink()) for name in good}
    assert links == good
    assert not any(os.path.lexists(tmp_path / "back" / name) for name in [*bad, "pipe"])
    assert sorted(text.split(" (")[0] for text in told["left_out"]) == sorted([*bad, "pipe"])


STEPS = st.lists(st.sampled_from(["..", "a", "b", "l", "m"]), min_size=1, max_size=5).map("/".join)


@given(links=st.dictionaries(st.sampled_from(["l", "m", "a/l", "a/b/m", "b/l"]), STEPS, min_size=1))
def test_links_that_are_let_through_lead_inside_together_too(links):
    kept = {name: link for name, link in links.items() if transfer.leads_inside(name, link)}
    assume(kept)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "x/y/root"
        (root / "a/b").mkdir(parents=True)
        (root / "b").mkdir()
        for name, link in kept.items():
            (root / name).symlink_to(link)
        for name in kept:
            # The system's own idea of where it leads; a loop leads nowhere.
            assert os.path.realpath(root / name).startswith(str(root))


def stream_of(*entries: tarfile.TarInfo) -> list:
    """Messages of a sender that may be hostile."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w|") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(b"evil"[: entry.size]))
    return [text.getvalue(), {"sha256": hashlib.sha256(text.getvalue()).hexdigest()}]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    one.type, one.linkname, one.mode = kind, link, 0o777
    one.size = 4 if kind == tarfile.REGTYPE else 0
    return one


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
        (ROOT, entry("l", tarfile.LNKTYPE, "/etc/passwd")),
        (ROOT, entry("null", tarfile.CHRTYPE)),
        (ROOT, entry("pipe", tarfile.FIFOTYPE)),
    ],
)
def test_what_would_be_written_elsewhere_is_refused(tmp_path, entries):
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


def test_a_setuid_bit_does_not_come_along(tmp_path):
    one = entry(".")
    one.mode = 0o4755
    transfer.unpack(iter(stream_of(one)).__next__, tmp_path / "target", False)
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o755


@given(data=st.data())
def test_a_stream_cut_anywhere_leaves_nothing(data):
    whole = stream_of(ROOT, *(entry(name) for name in "abc"))
    cut = data.draw(st.integers(0, len(whole[0])))
    messages = iter([whole[0][:cut]])

    def hear():
        try:
            return next(messages)
        except StopIteration:
            raise Unreachable("cut") from None

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(Unreachable):
            transfer.unpack(hear, Path(folder, "target"), False)
        assert os.listdir(folder) == []


def test_a_damaged_stream_leaves_nothing(tmp_path):
    text, end = stream_of(ROOT, entry("a"))
    damaged = text.replace(b"evil", b"evil!"[1:])
    with pytest.raises(transfer.Failed, match="checksums differ"):
        transfer.unpack(iter([damaged, end]).__next__, tmp_path / "target", False)
    assert os.listdir(tmp_path) == []


def test_replacing_keeps_the_others_and_refuses_before_the_first(tmp_path):
    volume = tmp_path / "volume"
    (volume / "run/sub").mkdir(parents=True)
    (volume / "run/a").write_text("new")
    (volume / "run/sub/b").write_text("new")
    (tmp_path / "run/sub").mkdir(parents=True)
    (tmp_path / "run/a").write_text("old")
    (tmp_path / "run/mine").write_text("mine")
    with pytest.raises(transfer.Failed, match="exists already"):
        fetch(volume, "/run", tmp_path / "run")
    fetch(volume, "/run", tmp_path / "run", force=True)
    assert [(tmp_path / "run" / name).read_text() for name in ("a", "mine", "sub/b")] == ["new", "mine", "new"]

    (tmp_path / "run/sub/b").unlink()
    (tmp_path / "run/sub/b").mkdir()
    (tmp_path / "run/a").write_text("old")
    with pytest.raises(transfer.Failed, match="sub/b: one is a folder"):
        fetch(volume, "/run", tmp_path / "run", force=True)
    assert (tmp_path / "run/a").read_text() == "old"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"do": "ls", "path": "/runs/nix"}, "there is no /runs/nix; /runs has: one, two"),
        ({"do": "get", "path": "/nix/nix", "skip": 0}, "there is no /nix/nix; / has: out, runs"),
        ({"do": "get", "path": "/out", "skip": 0}, "leads out of the volume"),
        ({"do": "get", "path": "/runs/pipe/../two", "skip": 0}, "neither file nor folder"),
        ({"do": "put", "path": "/runs", "name": "one", "replace": False, "bytes": 1}, "/runs/one exists already"),
        ({"do": "put", "path": "/out/x", "name": "x", "replace": False, "bytes": 1}, "leads out of the volume"),
        ({"do": "put", "path": "/new", "name": "x", "replace": False, "bytes": 1 << 60}, "do not fit"),
    ],
)
def test_the_other_end_says_what_cannot_be(tmp_path, request_, message):
    volume = tmp_path / "volume"
    (volume / "runs/one").mkdir(parents=True)
    os.mkfifo(volume / "runs/two")
    (volume / "out").symlink_to("/etc")
    with other_end(root=str(volume), **request_) as messages, pytest.raises(transfer.Failed, match=message) as caught:
        list(iter(messages.hear, None))
    assert caught.value.mendable


def test_an_error_of_the_other_end_is_told_in_its_words(tmp_path):
    (tmp_path / "file").write_text("")
    request = {"do": "put", "path": "/file/x", "name": "x", "replace": False, "bytes": 1}
    with other_end(root=str(tmp_path), **request) as messages, pytest.raises(transfer.Failed, match=r"^/file: ") as caught:
        messages.facts()
    assert not caught.value.mendable


def test_what_goes_on_after_a_break_is_the_same_stream(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_PAUSES_S", (0.01,) * 3)
    tree = tmp_path / "volume/tree"
    tree.mkdir(parents=True)
    draw = random.Random(1)
    for name in "abc":
        (tree / name).write_bytes(draw.randbytes(700_001))
    asked = []

    def ask(got):
        """A connection that breaks after a few messages."""
        asked.append(got)
        sent: list = []

        class Collected(transfer.Messages):
            def pour(self, piece, kind=b"D"):
                sent.append(piece)

        end = transfer.pack(tree, Collected(None, None), skip=got)
        replies = iter([{"surveyed": False}, {"surveyed": True}, *sent, end][: 4 if len(asked) < 4 else None])

        class Broken(transfer.Messages):
            def hear(self):
                for reply in replies:
                    return reply
                raise Unreachable("broken")

        return Broken(None, None)

    stream = files.Persistent(ask)
    transfer.unpack(stream.hear, tmp_path / "back", False)
    assert picture(tmp_path / "back") == picture(tree)
    assert len(asked) == 4 and asked == sorted(set(asked))
    assert "trying again" in capsys.readouterr().err


def test_a_connection_that_stays_broken_is_given_up(monkeypatch):
    monkeypatch.setattr(files, "_PAUSES_S", (0.01,) * 3)
    asked = []

    class Broken(transfer.Messages):
        def hear(self):
            asked.append(1)
            if len(asked) == 1:
                return {"surveyed": True}
            raise Unreachable("broken")

    stream = files.Persistent(lambda got: Broken(None, None))
    with pytest.raises(Unreachable):
        stream.hear()
    assert len(asked) == 1 + 4

"""Files on a volume: the transfer between two processes, the pod, and the whole way on a cluster."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import random
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from worldsize.errors import UserError
from worldsize.launch import browse, filepod, files, pod, transfer, volumes
from worldsize.launch.cluster import Cluster, ClusterError, Unreachable

PROGRAM = Path(transfer.__file__).read_bytes()


# The transfer, with a Python process as the pod -----------------------------------------------------------------------


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


def picture(root: Path) -> dict[str, tuple]:
    """All that a tree is: type, mode, and content or link, by name."""
    found = {}
    for path in [root, *root.rglob("*")]:
        about = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mode = None if path.is_symlink() else stat.S_IMODE(about.st_mode)
        found[os.fsencode(path.relative_to(root))] = (stat.S_IFMT(about.st_mode), mode, content)
    return found


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


# What is asked, and what is shown -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "parsed"),
    [
        ("imagenet", ("imagenet", "/")),
        ("imagenet:", ("imagenet", "/")),
        ("imagenet:/", ("imagenet", "/")),
        ("imagenet:/runs/x", ("imagenet", "/runs/x")),
        ("imagenet:runs//./x/", ("imagenet", "/runs/x/")),
        ("a.b-1:/x:y z", ("a.b-1", "/x:y z")),
    ],
)
def test_volume_and_path(there, parsed):
    assert files.parse(there) == parsed


@pytest.mark.parametrize("there", ["", ":/x", "Image:/x", "a/b", "v:/../x", "v:/a/..", "v:/a\0b", "-v:/x"])
def test_what_is_no_volume_and_path(there):
    with pytest.raises(UserError):
        files.parse(there)


def test_a_listing_looks_like_this(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    lines = files.listing(
        [
            ["checkpoints", True, 4096, 0, ""],
            ["report\x1b[2J", False, 12, 86400, ""],
            ["weights", False, 102_500_000, 1.5e9, ""],
            ["last", False, 7, 1.5e9, "weights"],
        ]
    )
    assert lines == [
        "       -  1970-01-01 00:00  checkpoints/",
        "12 bytes  1970-01-02 00:00  report\\x1b[2J",
        "102.5 MB  2017-07-14 02:40  weights",
        " 7 bytes  2017-07-14 02:40  last -> weights",
    ]


# The pod --------------------------------------------------------------------------------------------------------------


def test_the_pod_is_this_one():
    of = filepod.FilePod("imagenet", "ns", "registry/image:1", "a1b2c3", pull_secrets=("reg",), node="node-7")
    expected = """
    apiVersion: v1
    kind: Pod
    metadata:
      annotations: {sidecar.istio.io/inject: "false"}
      name: files-imagenet-a1b2c3
      namespace: ns
    spec:
      activeDeadlineSeconds: 43200
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [node-7]}]}]
      automountServiceAccountToken: false
      containers:
      - name: files
        image: registry/image:1
        imagePullPolicy: IfNotPresent
        command: [sleep, "43200"]
        resources: {limits: {cpu: "1", memory: 256Mi}, requests: {cpu: 200m, memory: 256Mi}}
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, readOnlyRootFilesystem: true}
        volumeMounts: [{mountPath: /mnt/imagenet, name: volume, readOnly: true}]
      enableServiceLinks: false
      imagePullSecrets: [{name: reg}]
      restartPolicy: Never
      securityContext: {fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch, runAsGroup: 1000, runAsNonRoot: true,
                        runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
      terminationGracePeriodSeconds: 5
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      volumes: [{name: volume, persistentVolumeClaim: {claimName: imagenet}}]
    """
    rendered = filepod.manifest(of)
    labels = rendered["metadata"].pop("labels")
    assert rendered == yaml.safe_load(expected)
    assert labels == pod.labels("imagenet", "files") | {"sidecar.istio.io/inject": "false"}


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True))
def test_any_volume_gives_a_pod_with_lawful_names(volume):
    rendered = filepod.manifest(filepod.FilePod(volume, "ns", "i:1", "a1b2c3"))["metadata"]
    dns = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
    assert re.fullmatch(dns, rendered["name"])
    assert all(re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", v) for v in rendered["labels"].values())


WAITING = {
    "image": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'},
    "once": {"reason": "ErrImagePull", "message": "timeout"},
    "config": {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'},
    "creating": {"reason": "ContainerCreating"},
}


@pytest.mark.parametrize(
    ("status", "events", "why"),
    [
        ({"phase": "Pending"}, [], ("", False)),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            [],
            ("not scheduled: 0/3 nodes are available", False),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["image"]}}]},
            [
                {"reason": "Failed", "message": 'Failed to pull image "x": no such host', "type": "Warning"},
                {"reason": "Failed", "message": "Error: ImagePullBackOff", "type": "Warning"},
            ],
            ('ImagePullBackOff: Failed to pull image "x": no such host', True),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["once"]}}]},
            [],
            ("ErrImagePull: timeout", False),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["config"]}}]},
            [],
            ('CreateContainerConfigError: secret "x" not found', True),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["creating"]}}]},
            [{"reason": "FailedAttachVolume", "message": "Multi-Attach error", "type": "Warning"}],
            ("FailedAttachVolume: Multi-Attach error", False),
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, [], ("Evicted: low on disk", True)),
    ],
)
def test_why_the_pod_does_not_run(status, events, why):
    assert filepod.hindrance({"status": status}, events) == why


def test_the_page_for_a_volume_is_restricted_and_closed():
    policy, service, deployment = browse.manifests("imagenet", "ns", "filebrowser:1")
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert [one["kind"] for one in (policy, service, deployment)] == ["NetworkPolicy", "Service", "Deployment"]
    assert {one["metadata"]["name"] for one in (policy, service, deployment)} == {"browse-imagenet"}
    # What Pod Security calls restricted: https://kubernetes.io/docs/concepts/security/pod-security-standards/
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["volumeMounts"][0] == {"mountPath": "/mnt/imagenet", "name": "volume", "readOnly": True}
    assert "--root=/mnt/imagenet" in container["command"]
    # Without a login: where nothing enforces the policy, other pods could reach any other address of it, and change files.
    assert "--address=127.0.0.1" in container["command"]
    assert not [name for name in container if name.endswith("Probe")]
    assert policy["spec"]["ingress"] == [] and service["spec"]["clusterIP"] == "None"
    labels = template["metadata"]["labels"]
    for selector in (policy["spec"]["podSelector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    writable = browse.manifests("imagenet", "ns", "filebrowser:1", write=True)[2]
    assert writable["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] is False


# The way over the API server's websocket, with a server that runs the command here ------------------------------------


class Server:
    """What an API server and a kubelet do for one pod: its commands run here, and its volume is a folder here."""

    def __init__(self) -> None:
        self.pods: dict[str, dict] = {}
        self.deleted: list[str] = []
        self.claim = {"metadata": {"name": "vol"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
        self.cut_after: list[int] = []  # bytes of stdout after which each connection breaks
        self.connections = 0
        self.refusal: dict | None = None
        self.received = 0  # bytes of all commands' stdin
        self.others: list[dict] = []  # pods that are there already
        self._processes: list = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        from aiohttp import web

        async def main() -> None:
            self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
            app = web.Application()
            base = "/api/v1/namespaces/ns"
            app.router.add_get(base + "/persistentvolumeclaims/vol", self._get_claim)
            app.router.add_get(base + "/pods", self._list)
            app.router.add_get(base + "/events", self._no_events)
            app.router.add_post(base + "/pods", self._create)
            app.router.add_get(base + "/pods/{name}", self._get)
            app.router.add_delete(base + "/pods/{name}", self._delete)
            app.router.add_get(base + "/pods/{name}/exec", self._exec)
            runner = web.AppRunner(app, shutdown_timeout=1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._closing.wait()
            for process in self._processes:
                process.kill()
            await runner.cleanup()

        asyncio.run(main())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(20)

    async def _get_claim(self, request):
        from aiohttp import web

        return web.json_response(self.claim)

    async def _list(self, request):
        from aiohttp import web

        return web.json_response({"items": self.others, "metadata": {"resourceVersion": "1"}})

    async def _no_events(self, request):
        from aiohttp import web

        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})

    async def _create(self, request):
        from aiohttp import web

        one = await request.json()
        self.pods[one["metadata"]["name"]] = one | {"status": {"phase": "Running"}}
        return web.json_response(one)

    async def _get(self, request):
        from aiohttp import web

        return web.json_response(self.pods[request.match_info["name"]])

    async def _delete(self, request):
        from aiohttp import web

        self.deleted.append(request.match_info["name"])
        return web.json_response(self.pods.pop(request.match_info["name"]))

    async def _exec(self, request):
        from aiohttp import WSMsgType, web

        if self.refusal is not None:
            return web.json_response(self.refusal, status=self.refusal["code"])
        assert request.headers["sec-websocket-protocol"] == "v4.channel.k8s.io"
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"], max_msg_size=0)
        await socket.prepare(request)
        limit = self.cut_after[self.connections] if self.connections < len(self.cut_after) else None
        self.connections += 1
        pipe = subprocess.PIPE
        process = subprocess.Popen(request.query.getall("command"), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self._processes.append(process)

        async def forward(stream, channel, limit=None):
            while chunk := await asyncio.to_thread(stream.read, 1 << 15):
                if limit is not None and (limit := limit - len(chunk)) < 0:
                    process.stdout.close()
                    request.transport.abort()
                    return
                await socket.send_bytes(bytes([channel]) + chunk)

        async def end():
            await asyncio.gather(forward(process.stdout, 1, limit), forward(process.stderr, 2))
            code = await asyncio.to_thread(process.wait)
            status = {"status": "Failure", "message": f"exit code {code}"} if code else {"status": "Success"}
            await socket.send_bytes(b"\3" + json.dumps(status).encode())
            await socket.close()

        ending = asyncio.ensure_future(end())
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[0] == 0:
                self.received += len(message.data)
                with suppress(BrokenPipeError):
                    await asyncio.to_thread(process.stdin.write, message.data[1:])
        process.stdin.close()
        await asyncio.wait([ending], timeout=10)
        ending.cancel()
        return socket


@pytest.fixture
def server(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    settings_of_client = pytest.importorskip("kubernetes.config.kube_config")
    one = Server()
    about = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{one.port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(about))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(settings_of_client, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(files, "VOLUMES", tmp_path / "mnt")
    monkeypatch.setattr(files, "_PAUSES_S", (0.05,) * 3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt/vol").mkdir(parents=True)
    yield one
    one.close()


REACH = files.Reach(image="any:1", wait=20)


def test_there_and_back_over_a_websocket(server, tmp_path, capsys):
    (tmp_path / "big").write_bytes(random.Random(0).randbytes(20_000_000))
    one = Cluster()
    assert files.put(files.FilesPut(Path("big"), "vol:/new/", reach=REACH), one) == 0
    assert capsys.readouterr().out == "vol:/new/big\n"
    assert (tmp_path / "mnt/vol/new/big").read_bytes() == (tmp_path / "big").read_bytes()
    assert files.get(files.FilesGet("vol:/new", Path("back"), reach=REACH), one) == 0
    captured = capsys.readouterr()
    assert captured.out == "back\n" and "1 file, 20.0 MB" in captured.err
    assert (tmp_path / "back/big").read_bytes() == (tmp_path / "big").read_bytes()
    assert files.show(files.FilesList("vol:/new", REACH), one) == 0
    assert capsys.readouterr().out.split()[:2] == ["20.0", "MB"]
    assert server.pods == {} and len(set(server.deleted)) == 3


def user(name, node, image="trainer:1", ours=True, created="2026-01-01", **spec):
    """A pod that uses the volume."""
    labels = pod.labels("run") if ours else {}
    spec |= {"nodeName": node, "containers": [{"image": image}]}
    spec["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "vol"}}]
    metadata = {"name": name, "labels": labels, "creationTimestamp": created}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def test_the_pod_fits_the_volume_and_who_uses_it(server):
    one = Cluster()
    taint = {"key": "gpus-only", "operator": "Exists"}
    server.others = [
        user("old", "n1", "trainer:1", tolerations=[taint]),
        user("new", "n2", "trainer:2", created="2026-01-02"),
        user("foreign", "n3", "other:1", ours=False, created="2026-01-03"),
    ]
    anywhere = filepod.fitting(one, "vol", "x", "", read_only=True)
    assert (anywhere.image, anywhere.node, anywhere.read_only) == ("trainer:2", None, True)
    server.claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    there = filepod.fitting(one, "vol", "x", "mine:1", read_only=False)
    assert (there.image, there.node, there.tolerations, there.read_only) == ("mine:1", "n1", (taint,), False)
    server.claim["spec"]["accessModes"] = ["ReadWriteOncePod"]
    with pytest.raises(UserError, match="only one pod at a time can use volume vol, and old does"):
        filepod.fitting(one, "vol", "x", "", read_only=True)
    for leaving in server.others:
        leaving["metadata"]["deletionTimestamp"] = "2026-01-04"
    assert filepod.fitting(one, "vol", "x", "", read_only=True).node == "n1"
    server.claim["spec"]["accessModes"] = ["ReadOnlyMany"]
    assert filepod.fitting(one, "vol", "x", "", read_only=True).node is None
    with pytest.raises(UserError, match="can only be read"):
        filepod.fitting(one, "vol", "x", "", read_only=False)


def test_a_download_goes_on_where_the_connection_broke(server, tmp_path, capsys):
    content = random.Random(0).randbytes(5_000_000)
    (tmp_path / "mnt/vol/big").write_bytes(content)
    server.cut_after = [1_000_000, 300_000, 2_500_000]
    assert files.get(files.FilesGet("vol:/big", Path("back"), reach=REACH), Cluster()) == 0
    assert server.connections == 4
    assert (tmp_path / "back").read_bytes() == content
    assert server.pods == {}


def test_an_upload_that_breaks_leaves_nothing(server, tmp_path):
    (tmp_path / "big").write_bytes(bytes(5_000_000))
    server.cut_after = [0]
    with pytest.raises(Unreachable):
        files.put(files.FilesPut(Path("big"), "vol:/big", reach=REACH), Cluster())
    assert server.pods == {}
    until = time.monotonic() + 10
    while os.listdir(tmp_path / "mnt/vol") and time.monotonic() < until:
        time.sleep(0.05)
    assert os.listdir(tmp_path / "mnt/vol") == []


def test_what_cannot_be_is_said_before_anything_is_sent(server, tmp_path):
    (tmp_path / "mnt/vol/there").write_text("old")
    (tmp_path / "mine").write_bytes(bytes(5_000_000))
    with pytest.raises(UserError, match="volume vol: there is no /nix; / has: there"):
        files.get(files.FilesGet("vol:/nix", reach=REACH), Cluster())
    with pytest.raises(UserError, match="volume vol: /there exists already"):
        files.put(files.FilesPut(Path("mine"), "vol:/there", reach=REACH), Cluster())
    with pytest.raises(UserError, match="mine exists already; --force"):
        files.get(files.FilesGet("vol:/there", Path("mine"), reach=REACH), Cluster())
    with pytest.raises(UserError, match="there is no folder no"):
        files.get(files.FilesGet("vol:/there", Path("no/mine"), reach=REACH), Cluster())
    with pytest.raises(UserError, match="there is no nix"):
        files.put(files.FilesPut(Path("nix"), "vol:/x", reach=REACH), Cluster())
    with pytest.raises(UserError, match="--image"):
        files.get(files.FilesGet("vol:/there"), Cluster())
    assert sorted(os.listdir(tmp_path / "mnt/vol")) == ["there"]
    assert server.pods == {}


def test_a_full_volume_is_told_though_there_is_more_to_send(server, tmp_path, monkeypatch):
    """The pod's side fails while this side is still sending: here because of a limit on the size of files."""
    with open(tmp_path / "mine", "wb") as file:
        file.truncate(300_000_000)
    limited = transfer.LOADER.replace(
        "import sys;",
        "import sys, resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, 1000000));",
    )
    monkeypatch.setattr(transfer, "LOADER", limited)
    with pytest.raises(ClusterError, match="File too large"):
        files.put(files.FilesPut(Path("mine"), "vol:/x", reach=REACH), Cluster())
    assert 1_000_000 < server.received < 200_000_000
    assert os.listdir(tmp_path / "mnt/vol") == []


def test_an_image_without_python_says_so(server, monkeypatch):
    monkeypatch.setattr(transfer, "LOADER", "import sys; sys.exit('no such thing here')")
    with pytest.raises(ClusterError, match="exit code 1\nno such thing here"):
        files.show(files.FilesList("vol", REACH), Cluster())
    server.refusal = {"kind": "Status", "code": 403, "message": 'pods "x" is forbidden: cannot create resource "pods/exec"'}
    with pytest.raises(ClusterError, match="pods/exec"):
        files.show(files.FilesList("vol", REACH), Cluster())
    assert server.pods == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_removes_the_pod_and_the_part(server, tmp_path, number):
    (tmp_path / "mnt/vol/pipe").mkdir()
    with open(tmp_path / "mnt/vol/pipe/big", "wb") as file:
        file.truncate(1 << 40)  # it has no end within this test
    script = (
        "import sys, pathlib; from worldsize.launch import files; from worldsize.launch.cluster import Cluster;"
        f"files.VOLUMES = pathlib.Path({str(tmp_path / 'mnt')!r}); import shutil;"
        "shutil.disk_usage = lambda _: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50);"
        "reach = files.Reach(image='any:1');"
        "files.get(files.FilesGet('vol:/pipe', pathlib.Path('back'), reach=reach), Cluster())"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 30
        while not list(tmp_path.glob(".worldsize-*/new/big")) and time.monotonic() < until:
            time.sleep(0.05)
        assert server.pods
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode in (130, 128 + number, -number)
    assert server.pods == {} and len(server.deleted) == 1
    assert not list(tmp_path.glob("back*")) and not list(tmp_path.glob(".worldsize-*"))


# On a cluster ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def volume(cluster):
    volumes.create(volumes.VolumeCreate("vol", "1Gi"), cluster)
    return "vol"


@pytest.fixture
def reach(image):
    return files.Reach(image=image, wait=180)


def gone(cluster, seconds=60) -> bool:
    until = time.monotonic() + seconds
    while cluster.list("Pod", "app.kubernetes.io/component=files"):
        if time.monotonic() > until:
            return False
        time.sleep(0.3)
    return True


@pytest.mark.cluster
def test_a_tree_to_a_cluster_and_back(cluster, volume, reach, tmp_path, capsys):
    (tmp_path / "mine/sub").mkdir(parents=True)
    (tmp_path / "mine/big").write_bytes(random.Random(0).randbytes(20_000_000))
    (tmp_path / "mine/sub/empty").write_bytes(b"")
    (tmp_path / "mine/sub/run").write_text("#!/bin/sh\n")
    (tmp_path / "mine/sub/run").chmod(0o755)
    (tmp_path / "mine/link").symlink_to("sub/run")
    files.put(files.FilesPut(tmp_path / "mine", f"{volume}:/runs/", reach=reach), cluster)
    assert capsys.readouterr().out == "vol:/runs/mine\n"
    files.show(files.FilesList(f"{volume}:/runs/mine", reach), cluster)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["big", "sub/run", "sub/"]
    files.get(files.FilesGet(f"{volume}:/runs/mine", tmp_path / "back", reach=reach), cluster)
    assert picture(tmp_path / "back") == picture(tmp_path / "mine")
    # The image is known now from the newest pod, if it is still there; a named one always works.
    with pytest.raises(UserError, match="there is no /runs/nix; /runs has: mine"):
        files.get(files.FilesGet(f"{volume}:/runs/nix", tmp_path / "nix", reach=reach), cluster)
    with pytest.raises(UserError, match="/runs/mine/big exists already"):
        files.put(files.FilesPut(tmp_path / "mine/big", f"{volume}:/runs/mine", reach=reach), cluster)
    assert gone(cluster)


@contextmanager
def line_that_breaks(host: str, port: int, after: int):
    """A port that leads there; every connection over which so many bytes came back is cut off."""
    listening = socket.create_server(("127.0.0.1", 0))
    cut = []

    def forward(source, sink, limit=None):
        passed = 0
        with suppress(OSError):
            while content := source.recv(1 << 16):
                passed += len(content)
                if limit is not None and passed > limit:
                    cut.append(passed)
                    break
                sink.sendall(content)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                near, far = listening.accept()[0], socket.create_connection((host, port))
                threading.Thread(target=forward, args=(near, far), daemon=True).start()
                threading.Thread(target=forward, args=(far, near, after), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listening.getsockname()[1], cut
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


@pytest.mark.cluster
def test_a_download_from_a_cluster_goes_on_where_the_connection_broke(cluster, volume, reach, tmp_path, monkeypatch):
    import kubernetes.config.kube_config as settings_of_client

    (tmp_path / "big").write_bytes(random.Random(0).randbytes(50_000_000))
    files.put(files.FilesPut(tmp_path / "big", f"{volume}:/big", reach=reach), cluster)
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    with line_that_breaks(server.hostname, server.port, 20_000_000) as (port, cut):
        config["clusters"][0]["cluster"] |= {"server": f"https://127.0.0.1:{port}", "tls-server-name": server.hostname}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(settings_of_client, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        weak = Cluster(namespace=cluster.namespace)
        files.get(files.FilesGet(f"{volume}:/big", tmp_path / "back", reach=reach), weak)
    assert len(cut) == 2
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()


@pytest.mark.cluster
def test_ctrl_c_on_a_cluster_removes_the_pod_and_the_part(cluster, volume, reach, tmp_path):
    (tmp_path / "big").write_bytes(bytes(400_000_000))
    files.put(files.FilesPut(tmp_path / "big", f"{volume}:/big", reach=reach), cluster)
    script = (
        "import sys, pathlib; from worldsize.launch import files; from worldsize.launch.cluster import Cluster;"
        "reach = files.Reach(image=sys.argv[2]); cluster = Cluster(namespace=sys.argv[1]);"
        "files.get(files.FilesGet('vol:/big', pathlib.Path('back'), reach=reach), cluster)"
    )
    command = [sys.executable, "-c", script, cluster.namespace, reach.image]
    (tmp_path / "here").mkdir()
    with subprocess.Popen(command, cwd=tmp_path / "here", stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while not list((tmp_path / "here").glob(".worldsize-*/new")) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert os.listdir(tmp_path / "here") == []
    assert gone(cluster)


@pytest.mark.cluster
def test_a_pod_that_cannot_start_gives_its_reason(cluster, volume, image):
    with pytest.raises(UserError, match="has no volume 'nix'; there are: vol"):
        files.show(files.FilesList("nix:/", files.Reach(image)), cluster)
    with pytest.raises(ClusterError, match=r"does not start\n  ImagePullBackOff: Failed to pull image .*nix:1: not found"):
        files.show(files.FilesList(volume, files.Reach("localhost:5000/nix:1", wait=60)), cluster)
    cluster.create(volumes.manifest("unbound", cluster.namespace, "1Gi", "rwx", "nix"))
    with pytest.raises(ClusterError, match=r'not scheduled: [^\n]*\n  the volume has no storage: .*"nix" not found'):
        files.show(files.FilesList("unbound", files.Reach(image, wait=8)), cluster)
    quota = {"hard": {"pods": "0"}}
    about = {"name": "none", "namespace": cluster.namespace}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": about, "spec": quota})
    time.sleep(1)
    with pytest.raises(ClusterError, match="exceeded quota: none"):
        files.show(files.FilesList(volume, files.Reach(image)), cluster)
    assert gone(cluster)


@pytest.mark.cluster
def test_the_objects_pass_pod_security_restricted(cluster, image):
    cluster.patch(
        "Namespace", cluster.namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    cluster.create(filepod.manifest(filepod.FilePod("vol", cluster.namespace, image, "x")), dry_run=True)
    deployment = browse.manifests("vol", cluster.namespace, "x:1")[2]
    about = {"name": "x", "namespace": cluster.namespace}
    spec = deployment["spec"]["template"]["spec"]
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}, dry_run=True)
    for manifest in browse.manifests("vol", cluster.namespace, "x:1"):
        cluster.create(manifest, dry_run=True)

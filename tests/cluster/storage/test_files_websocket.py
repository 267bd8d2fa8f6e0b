"""Files on a volume: transfer over the API server's websocket, with a fake server that runs the command locally."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from waiting import until
from worldsize.cluster.api.client import Cluster, ClusterError
from worldsize.cluster.api.errors import Unreachable
from worldsize.cluster.manifests import pod
from worldsize.cluster.storage import file_pod, files, transfer
from worldsize.errors import UserError


class Server:
    """A fake API server and kubelet: the pod's commands run locally, and its volume is a local folder."""

    def __init__(self) -> None:
        self.pods: dict[str, dict] = {}
        self.deleted: list[str] = []
        self.claim = {"metadata": {"name": "vol"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
        self.cut_after: list[int] = []  # per connection: bytes of stdout after which it breaks
        self.connections = 0
        self.refusal: dict | None = None
        self.received = 0  # total bytes of stdin
        self.others: list[dict] = []  # other pods in the namespace
        self._processes: list = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(240)

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

        created = await request.json()
        self.pods[created["metadata"]["name"]] = created | {"status": {"phase": "Running"}}
        return web.json_response(created)

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
    running = Server()
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{running.port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(settings_of_client, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(files, "VOLUMES", tmp_path / "mnt")
    monkeypatch.setattr(files, "_RETRY_PAUSES_S", (0.05,) * 3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt/vol").mkdir(parents=True)
    yield running
    running.close()


POD = files.PodOptions(image="any:1", wait=20)


def test_upload_and_download_over_a_websocket(server, tmp_path, capsys):
    (tmp_path / "big").write_bytes(random.Random(0).randbytes(20_000_000))
    cluster = Cluster()
    assert files.put(files.FilesPut(Path("big"), "vol:/new/", pod=POD), cluster) == 0
    assert capsys.readouterr().out == "vol:/new/big\n"
    assert (tmp_path / "mnt/vol/new/big").read_bytes() == (tmp_path / "big").read_bytes()
    assert files.get(files.FilesGet("vol:/new", Path("back"), pod=POD), cluster) == 0
    captured = capsys.readouterr()
    assert captured.out == "back\n" and "1 file, 20.0 MB, checksum verified" in captured.err
    assert (tmp_path / "back/big").read_bytes() == (tmp_path / "big").read_bytes()
    assert files.show(files.FilesList("vol:/new", POD), cluster) == 0
    assert capsys.readouterr().out.split()[:2] == ["20.0", "MB"]
    assert server.pods == {} and len(set(server.deleted)) == 3


def test_a_run_moves_to_the_volume_and_back(server, tmp_path, capsys):
    """With the same commands, however often; get creates missing folders."""
    volume = tmp_path / "mnt/vol"
    run = tmp_path / "runs/relay"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    put = files.FilesPut(Path("runs/relay"), "vol:/runs/relay", force=True, pod=POD)
    get = files.FilesGet("vol:/runs/relay", Path("other/runs/relay"), force=True, pod=POD)
    there, back = volume / "runs/relay", tmp_path / "other/runs/relay"
    for step in (1, 2, 3):
        (run / "metrics.jsonl").write_text(json.dumps({"step": step}))
        assert files.put(put, Cluster()) == files.get(get, Cluster()) == 0
        assert capsys.readouterr().out == "vol:/runs/relay\nother/runs/relay\n"
        assert sorted(os.listdir(there)) == sorted(os.listdir(back)) == ["metrics.jsonl", "recipe.yaml"]
        assert json.loads((back / "metrics.jsonl").read_text()) == {"step": step}
    (back / "metrics.jsonl").write_text(json.dumps({"step": 4}))
    with pytest.raises(
        UserError, match=r"^other/runs/relay has steps that the run to copy lacks.* ends at step 4, in the run"
    ):
        files.get(get, Cluster())
    with pytest.raises(UserError, match=r"^runs/relay already exists; pass --force to replace the whole run"):
        files.get(files.FilesGet("vol:/runs/relay", Path("runs/relay"), pod=POD), Cluster())
    (there / "metrics.jsonl").write_text(json.dumps({"step": 4}))
    with pytest.raises(UserError, match=r"^volume vol: /runs/relay has steps that the run to copy lacks"):
        files.put(put, Cluster())
    assert json.loads((there / "metrics.jsonl").read_text()) == {"step": 4}


def user(name, node, image="trainer:1", ours=True, created="2026-01-01", **spec):
    """A pod that uses the volume."""
    labels = pod.labels("run") if ours else {}
    spec |= {"nodeName": node, "containers": [{"image": image}]}
    spec["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "vol"}}]
    metadata = {"name": name, "labels": labels, "creationTimestamp": created}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def test_pod_settings_follow_the_volume_and_its_users(server):
    cluster = Cluster()
    taint = {"key": "gpus-only", "operator": "Exists"}
    server.others = [
        user("old", "n1", "trainer:1", tolerations=[taint]),
        user("new", "n2", "trainer:2", created="2026-01-02"),
        user("foreign", "n3", "other:1", ours=False, created="2026-01-03"),
    ]
    anywhere = file_pod.plan(cluster, "vol", "x", "", read_only=True)
    assert (anywhere.image, anywhere.node, anywhere.read_only) == ("trainer:2", None, True)
    server.claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    same_node = file_pod.plan(cluster, "vol", "x", "mine:1", read_only=False)
    assert (same_node.image, same_node.node, same_node.tolerations, same_node.read_only) == ("mine:1", "n1", (taint,), False)
    server.claim["spec"]["accessModes"] = ["ReadWriteOncePod"]
    with pytest.raises(UserError, match="volume vol allows one pod at a time and is in use by old"):
        file_pod.plan(cluster, "vol", "x", "", read_only=True)
    for leaving in server.others:
        leaving["metadata"]["deletionTimestamp"] = "2026-01-04"
    assert file_pod.plan(cluster, "vol", "x", "", read_only=True).node == "n1"
    server.claim["spec"]["accessModes"] = ["ReadOnlyMany"]
    assert file_pod.plan(cluster, "vol", "x", "", read_only=True).node is None
    with pytest.raises(UserError, match="volume vol is read-only"):
        file_pod.plan(cluster, "vol", "x", "", read_only=False)


def test_download_resumes_where_the_connection_broke(server, tmp_path, capsys):
    content = random.Random(0).randbytes(5_000_000)
    (tmp_path / "mnt/vol/big").write_bytes(content)
    server.cut_after = [1_000_000, 300_000, 2_500_000]
    assert files.get(files.FilesGet("vol:/big", Path("back"), pod=POD), Cluster()) == 0
    assert server.connections == 4
    assert (tmp_path / "back").read_bytes() == content
    assert server.pods == {}


def test_an_upload_that_breaks_leaves_nothing(server, tmp_path):
    (tmp_path / "big").write_bytes(bytes(5_000_000))
    server.cut_after = [0]
    with pytest.raises(Unreachable):
        files.put(files.FilesPut(Path("big"), "vol:/big", pod=POD), Cluster())
    assert server.pods == {}
    until(lambda: os.listdir(tmp_path / "mnt/vol") == [], "the volume is empty")


def test_errors_are_reported_before_anything_is_sent(server, tmp_path):
    (tmp_path / "mnt/vol/existing").write_text("old")
    (tmp_path / "mine").write_bytes(bytes(5_000_000))
    with pytest.raises(UserError, match="volume vol: /nix does not exist; / contains: existing"):
        files.get(files.FilesGet("vol:/nix", pod=POD), Cluster())
    with pytest.raises(UserError, match="volume vol: /existing already exists"):
        files.put(files.FilesPut(Path("mine"), "vol:/existing", pod=POD), Cluster())
    with pytest.raises(UserError, match="mine already exists; pass --force"):
        files.get(files.FilesGet("vol:/existing", Path("mine"), pod=POD), Cluster())
    with pytest.raises(UserError, match="nix does not exist"):
        files.put(files.FilesPut(Path("nix"), "vol:/x", pod=POD), Cluster())
    with pytest.raises(UserError, match="--image is required"):
        files.get(files.FilesGet("vol:/existing"), Cluster())
    assert sorted(os.listdir(tmp_path / "mnt/vol")) == ["existing"]
    assert server.pods == {}


def test_a_full_volume_is_reported_during_the_upload(server, tmp_path, monkeypatch):
    """The pod's side fails while this side is still sending; here because of a limit on file size."""
    with open(tmp_path / "mine", "wb") as file:
        file.truncate(300_000_000)
    limited = transfer.LOADER.replace(
        "import sys;",
        "import sys, resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, 1000000));",
    )
    monkeypatch.setattr(transfer, "LOADER", limited)
    with pytest.raises(ClusterError, match="File too large"):
        files.put(files.FilesPut(Path("mine"), "vol:/x", pod=POD), Cluster())
    assert 1_000_000 < server.received < 200_000_000
    assert os.listdir(tmp_path / "mnt/vol") == []


def test_an_image_without_python_is_reported(server, monkeypatch):
    monkeypatch.setattr(transfer, "LOADER", "import sys; sys.exit('no Python here')")
    with pytest.raises(ClusterError, match="exit code 1\nno Python here"):
        files.show(files.FilesList("vol", POD), Cluster())
    server.refusal = {"kind": "Status", "code": 403, "message": 'pods "x" is forbidden: cannot create resource "pods/exec"'}
    with pytest.raises(ClusterError, match="pods/exec"):
        files.show(files.FilesList("vol", POD), Cluster())
    assert server.pods == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_pod_and_the_partial_file(server, tmp_path, number):
    (tmp_path / "mnt/vol/pipe").mkdir()
    with open(tmp_path / "mnt/vol/pipe/big", "wb") as file:
        file.truncate(1 << 40)  # too large to complete within this test
    script = (
        "import sys, pathlib; from worldsize.cluster.storage import files; from worldsize.cluster.api.client import Cluster;"
        f"files.VOLUMES = pathlib.Path({str(tmp_path / 'mnt')!r}); import shutil;"
        "shutil.disk_usage = lambda _: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50);"
        "pod = files.PodOptions(image='any:1');"
        "files.get(files.FilesGet('vol:/pipe', pathlib.Path('back'), pod=pod), Cluster())"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        until(lambda: list(tmp_path.glob(".worldsize-*/new/big")), "the download has begun", running=process)
        assert server.pods
        process.send_signal(number)
        process.communicate(timeout=240)
    assert process.returncode in (130, 128 + number, -number)
    assert server.pods == {} and len(server.deleted) == 1
    assert not list(tmp_path.glob("back*")) and not list(tmp_path.glob(".worldsize-*"))

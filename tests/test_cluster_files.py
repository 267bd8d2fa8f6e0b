"""Files on a volume of a real cluster: there and back, over connections that break, and pods that cannot start."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from trees import picture
from worldsize.errors import UserError
from worldsize.launch import browse, filepod, files, volumes
from worldsize.launch.cluster import Cluster, ClusterError


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

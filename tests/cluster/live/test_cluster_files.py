"""Files on a volume of a real cluster: transfers, broken connections, and pods that cannot start."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from trees import snapshot
from waiting import until
from worldsize.cluster.api.client import Cluster, ClusterError
from worldsize.cluster.storage import browse, file_pod, files, volumes
from worldsize.errors import UserError


@pytest.fixture
def volume(cluster):
    volumes.create(volumes.VolumeCreate("vol", "1Gi"), cluster)
    return "vol"


@pytest.fixture
def pod(image):
    return files.PodOptions(image=image, wait=180)


def no_file_pods_are_left(cluster) -> None:
    until(lambda: not cluster.list("Pod", "app.kubernetes.io/component=files"), "no pod for files is left", every=0.3)


@pytest.mark.cluster
def test_upload_and_download_of_a_tree(cluster, volume, pod, tmp_path, capsys):
    (tmp_path / "mine/sub").mkdir(parents=True)
    (tmp_path / "mine/big").write_bytes(random.Random(0).randbytes(20_000_000))
    (tmp_path / "mine/sub/empty").write_bytes(b"")
    (tmp_path / "mine/sub/run").write_text("#!/bin/sh\n")
    (tmp_path / "mine/sub/run").chmod(0o755)
    (tmp_path / "mine/link").symlink_to("sub/run")
    files.put(files.FilesPut(tmp_path / "mine", f"{volume}:/runs/", pod=pod), cluster)
    assert capsys.readouterr().out == "vol:/runs/mine\n"
    files.show(files.FilesList(f"{volume}:/runs/mine", pod), cluster)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["big", "sub/run", "sub/"]
    files.get(files.FilesGet(f"{volume}:/runs/mine", tmp_path / "back", pod=pod), cluster)
    assert snapshot(tmp_path / "back") == snapshot(tmp_path / "mine")
    # Passes --image: its default is that of the newest pod, which may be deleted already.
    with pytest.raises(UserError, match="/runs/nix does not exist; /runs contains: mine"):
        files.get(files.FilesGet(f"{volume}:/runs/nix", tmp_path / "nix", pod=pod), cluster)
    with pytest.raises(UserError, match="/runs/mine/big already exists"):
        files.put(files.FilesPut(tmp_path / "mine/big", f"{volume}:/runs/mine", pod=pod), cluster)
    no_file_pods_are_left(cluster)


@pytest.mark.cluster
def test_a_run_is_replaced_on_a_volume_and_back(cluster, volume, pod, tmp_path):
    run, back = tmp_path / "runs/relay", tmp_path / "back/runs/relay"
    put = files.FilesPut(run, f"{volume}:/runs/relay", force=True, pod=pod)
    get = files.FilesGet(f"{volume}:/runs/relay", back, force=True, pod=pod)
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    for step in (8, 9):
        for old in run.glob("*.txt"):
            old.unlink()
        (run / f"log.rank{step}.txt").write_text("")
        (run / "metrics.jsonl").write_text(f'{{"step": {step}}}')
        files.put(put, cluster)
        files.get(get, cluster)
        assert snapshot(back) == snapshot(run)
    (run / "metrics.jsonl").write_text('{"step": 8}')
    with pytest.raises(UserError, match=r"volume vol: /runs/relay has steps that the run to copy lacks: .* ends at step 9"):
        files.put(put, cluster)
    no_file_pods_are_left(cluster)


@contextmanager
def breaking_proxy(host: str, port: int, after: int):
    """A local port that forwards to the server; cuts every connection after ``after`` bytes of response."""
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
def test_download_from_a_cluster_resumes_where_the_connection_broke(cluster, volume, pod, tmp_path, monkeypatch):
    import kubernetes.config.kube_config as settings_of_client

    (tmp_path / "big").write_bytes(random.Random(0).randbytes(50_000_000))
    files.put(files.FilesPut(tmp_path / "big", f"{volume}:/big", pod=pod), cluster)
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    with breaking_proxy(server.hostname, server.port, 20_000_000) as (port, cut):
        config["clusters"][0]["cluster"] |= {"server": f"https://127.0.0.1:{port}", "tls-server-name": server.hostname}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(settings_of_client, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        unreliable = Cluster(namespace=cluster.namespace)
        files.get(files.FilesGet(f"{volume}:/big", tmp_path / "back", pod=pod), unreliable)
    assert len(cut) == 2
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()


@pytest.mark.cluster
def test_ctrl_c_on_a_cluster_removes_the_pod_and_the_partial_file(cluster, volume, pod, tmp_path):
    (tmp_path / "big").write_bytes(bytes(400_000_000))
    files.put(files.FilesPut(tmp_path / "big", f"{volume}:/big", pod=pod), cluster)
    script = (
        "import sys, pathlib; from worldsize.cluster.storage import files; from worldsize.cluster.api.client import Cluster;"
        "pod = files.PodOptions(image=sys.argv[2]); cluster = Cluster(namespace=sys.argv[1]);"
        "files.get(files.FilesGet('vol:/big', pathlib.Path('back'), pod=pod), cluster)"
    )
    command = [sys.executable, "-c", script, cluster.namespace, pod.image]
    (tmp_path / "here").mkdir()
    with subprocess.Popen(command, cwd=tmp_path / "here", stderr=subprocess.PIPE) as process:
        begun = tmp_path / "here"
        until(lambda: list(begun.glob(".worldsize-*/new")), "the download has begun", running=process, every=0.005)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    assert os.listdir(tmp_path / "here") == []
    no_file_pods_are_left(cluster)


@pytest.mark.cluster
def test_a_pod_that_cannot_start_reports_the_reason(cluster, volume, image):
    with pytest.raises(UserError, match=r"no volume 'nix' in namespace .*; existing volumes: vol"):
        files.show(files.FilesList("nix:/", files.PodOptions(image)), cluster)
    with pytest.raises(ClusterError, match=r"does not start\n  ImagePullBackOff: Failed to pull image .*nix:1: not found"):
        files.show(files.FilesList(volume, files.PodOptions("localhost:5000/nix:1", wait=60)), cluster)
    cluster.create(volumes.manifest("unbound", cluster.namespace, "1Gi", "rwx", "nix"))
    with pytest.raises(ClusterError, match=r'not scheduled: [^\n]*\n  the volume has no storage: .*"nix" not found'):
        files.show(files.FilesList("unbound", files.PodOptions(image, wait=8)), cluster)
    quota = {"hard": {"pods": "0"}}
    metadata = {"name": "none", "namespace": cluster.namespace}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": quota})
    until(lambda: cluster.get("ResourceQuota", "none").get("status", {}).get("hard"), "the quota applies", every=0.1)
    with pytest.raises(ClusterError, match="exceeded quota: none"):
        files.show(files.FilesList(volume, files.PodOptions(image)), cluster)
    no_file_pods_are_left(cluster)


@pytest.mark.cluster
def test_the_objects_pass_pod_security_restricted(cluster, image):
    cluster.patch(
        "Namespace", cluster.namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    cluster.create(file_pod.manifest(file_pod.FilePod("vol", cluster.namespace, image, "x")), dry_run=True)
    deployment = browse.manifests("vol", cluster.namespace, "x:1")[2]
    metadata = {"name": "x", "namespace": cluster.namespace}
    spec = deployment["spec"]["template"]["spec"]
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, dry_run=True)
    for manifest in browse.manifests("vol", cluster.namespace, "x:1"):
        cluster.create(manifest, dry_run=True)

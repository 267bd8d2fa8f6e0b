"""What all tests share."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

from processes import Ranks
from worldsize import cli
from worldsize.launch.cluster import Cluster

# Where a shell started us in its background we ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data sets for development that lie beside the repository; tests that need one skip where it is absent."""
    return Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    """ranks(size, ...): processes for the runs of one module, all in one folder; see `Ranks`. The same again each time."""
    cwd = tmp_path_factory.mktemp("ranks")
    started: dict[tuple, Ranks] = {}

    def start(size: int, *more, **options) -> Ranks:
        key = (size, *more, *options.items())
        if key not in started:
            started[key] = Ranks(size, cwd, *more, **options)
        return started[key]

    start.cwd = cwd
    yield start
    for running in started.values():
        running.close()


@pytest.fixture
def fails(tmp_path, monkeypatch, capfd):
    """fails(*arguments, code=64): runs the command here and gives its message."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, code: int = 64) -> str:
        try:
            returned = cli.main([str(a) for a in arguments])
        except SystemExit as stop:
            returned = stop.code
        out = capfd.readouterr()
        assert returned == code, out.err
        assert "Traceback" not in out.err
        assert not list(Path("runs").glob("[!.]*"))
        return out.err

    return run


@pytest.fixture
def cluster():
    """A namespace of the test's own on the cluster that KUBECONFIG names; removed afterwards."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: KUBECONFIG is not set (CONTRIBUTING says how to get one)")
    namespace = f"worldsize-test-{uuid.uuid4().hex[:8]}"
    one = Cluster(namespace=namespace)
    one.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    deadline = time.monotonic() + 30
    while one.get("ServiceAccount", "default") is None and time.monotonic() < deadline:
        time.sleep(0.1)
    yield one
    one.delete("Namespace", namespace)


@pytest.fixture
def use(tmp_path, monkeypatch):
    """use(server, namespace, **user): a `Cluster` for that entry and that user of a kubeconfig."""
    import kubernetes.config.kube_config as module

    def use(server, namespace="team", **user):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(module, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        return Cluster(namespace=namespace)

    return use


@pytest.fixture(scope="session")
def image() -> str:
    """An image of this checkout that the cluster's nodes can pull, with Open MPI and Horovod."""
    name = os.environ.get("WORLDSIZE_TEST_IMAGE")
    if not name:
        pytest.skip("no image: WORLDSIZE_TEST_IMAGE is not set (CONTRIBUTING says how to build one)")
    return name

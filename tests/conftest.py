"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

from apiserver import World, serve
from fetching import pack
from objectserver import CLASSES, DEFAULT, Store
from packing import encode, noise, odd_folder, packed
from processes import Ranks
from trees import put, two_classes
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


@pytest.fixture
def world(request, use):
    """A pretended cluster to which world.cluster talks: a healthy `World`, or what the module calls WORLD."""
    world = getattr(request.module, "WORLD", World)()
    with serve(world) as address:
        world.cluster = use({"server": address})
        yield world


@pytest.fixture(scope="session")
def image() -> str:
    """An image of this checkout that the cluster's nodes can pull, with Open MPI and Horovod."""
    name = os.environ.get("WORLDSIZE_TEST_IMAGE")
    if not name:
        pytest.skip("no image: WORLDSIZE_TEST_IMAGE is not set (CONTRIBUTING says how to build one)")
    return name


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small data set of two classes."""
    return two_classes(tmp_path / "tree")


@pytest.fixture
def archive(tree, tmp_path) -> Path:
    """An archive of it."""
    return pack(tree, tmp_path / "pictures.zip")


@pytest.fixture
def challenge(tmp_path) -> Path:
    """A little of ImageNet, as Kaggle packs it."""
    root = tmp_path / "challenge"
    for i, wnid in enumerate(("n01440764", "n01443537", "n02102040")):
        put(root / f"ILSVRC/Data/CLS-LOC/train/{wnid}/{wnid}_1.JPEG", bytes([i]) * 20_000)
        put(root / f"ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_0000000{i}.JPEG", bytes([9 - i]) * 20_000)
    rows = ("ImageId,PredictionString", *(f"ILSVRC2012_val_0000000{i},n01440764 1 2 3 4" for i in range(3)))
    put(root / "LOC_val_solution.csv", "\n".join(rows).encode())
    return root


@pytest.fixture(scope="session")
def larger(tmp_path_factory) -> Path:
    """A data set that takes a second or so to pack, so that it can be interrupted; not to be changed."""
    root = tmp_path_factory.mktemp("larger") / "root"
    for split, count in (("train", 60), ("val", 10)):
        for i in range(count):
            put(root / split / "ab"[i % 2] / f"{i}.jpg", encode(noise(700, 500, i), "JPEG", quality=90))
    return root


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> Path:
    """Pictures of every kind (`odd_folder`); not to be changed."""
    return odd_folder(tmp_path_factory.mktemp("originals") / "root")


@pytest.fixture(scope="session")
def root(originals) -> Path:
    """The same, as the root of what is packed."""
    return originals


@pytest.fixture(scope="session")
def whole(originals, tmp_path_factory) -> Path:
    """Shards of the odd folder; not to be changed."""
    out = tmp_path_factory.mktemp("shards") / "out"
    packed(originals, out)
    return out


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The same, to be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory):
    """A `Store` with a Cluster that talks to it; for tests, emptied: `store`."""
    module = pytest.importorskip("kubernetes.config.kube_config")
    store = Store()
    about = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{store.server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(yaml.safe_dump(about))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        store.cluster = Cluster()
    yield store
    store.server.shutdown()
    store.server.server_close()


@pytest.fixture
def store(apiserver):
    """A `Store` that has nothing but a StorageClass."""
    apiserver.objects.clear()
    apiserver.answer = lambda method, path, body: None
    apiserver.put(f"{CLASSES}/standard", metadata=DEFAULT)
    return apiserver

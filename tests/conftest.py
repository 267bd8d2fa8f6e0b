"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import settings

from fake_cluster import FakeCluster, serve
from fetching import pack
from object_server import CLASSES, DEFAULT, Store
from packing import encode, noise, odd_folder, packed
from paths import SHARED, SMALL_NETWORK
from processes import Ranks
from trees import put, two_classes
from waiting import until
from worldsize import cli
from worldsize.cluster.api.client import Cluster

pytest_plugins = ["time_limits"]

# What the user's home holds (settings, keys, caches) must not decide what a test says.
_HOME = tempfile.TemporaryDirectory(prefix="home-")
os.environ["HOME"] = _HOME.name
_PLACES = ("XDG_", "TORCH_HOME", "HF_", "KAGGLE_", "WANDB_", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE")
for _name in [name for name in os.environ if name.startswith(_PLACES)]:
    del os.environ[_name]

# A background job of a shell ignores Ctrl-C, and its child processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes run tests, and those start more; with more threads than cores torch takes several times as long.
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")

# The files that take longest, so that all test processes finish at about the same time.
LONGEST = (
    *("finetune_tutorial", "faults", "resume", "bitwise", "every_recipe", "strategies", "exactness", "async", "watched"),
    *("documented_commands", "export_errors", "export_use", "export", "bench_scaling", "gpu_benchmark", "unfreezing"),
    *("track", "preflight", "fetch_interrupted", "errors", "strategies_resume", "many_ranks", "training", "bench"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; within a file, keep the order."""
    rank = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish() -> None:
    """Search what is imported and collected for no garbage: a full search takes half a second, and there were hundreds."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_make_parametrize_id(val: object) -> str | None:
    """A short name, which is the same in every checkout."""
    return "small" if isinstance(val, str) and val == SMALL_NETWORK else None


@pytest.fixture(autouse=True)
def restore_signals() -> Iterator[None]:
    """A command that a test runs in this process handles signals, and in the end ignores them; later children would too."""
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Development datasets next to the repository; tests that need one are skipped if it is absent."""
    return SHARED / "data"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    """ranks(size, ...): processes shared by the tests of a module, in one folder, reused for equal arguments; see `Ranks`"""
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
    shutil.rmtree(cwd / "runs", ignore_errors=True)  # pytest would keep these gigabytes until all tests are done


@pytest.fixture
def fails(tmp_path, monkeypatch, capfd):
    """fails(*arguments, code=64): run the command in this process, check its exit code and return its stderr."""
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
    """A separate namespace for the test on the cluster of KUBECONFIG; deleted afterwards."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: KUBECONFIG is not set (see CONTRIBUTING)")
    namespace = f"worldsize-test-{uuid.uuid4().hex[:8]}"
    one = Cluster(namespace=namespace)
    one.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    until(lambda: one.get("ServiceAccount", "default"), "the namespace has a service account", every=0.1)
    yield one
    one.delete("Namespace", namespace)


@pytest.fixture
def use(tmp_path, monkeypatch):
    """use(server, namespace, **user): a `Cluster` for a kubeconfig with this cluster entry and user."""
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
def fake_cluster(request, use):
    """A healthy `FakeCluster`, or the FAKE_CLUSTER of the test module; `fake_cluster.cluster` is its client."""
    fake_cluster = getattr(request.module, "FAKE_CLUSTER", FakeCluster)()
    with serve(fake_cluster) as address:
        fake_cluster.cluster = use({"server": address})
        yield fake_cluster


@pytest.fixture(scope="session")
def image() -> str:
    """A container image of this checkout that the cluster's nodes can pull, with Open MPI and Horovod."""
    name = os.environ.get("WORLDSIZE_TEST_IMAGE")
    if not name:
        pytest.skip("no container image: WORLDSIZE_TEST_IMAGE is not set (see CONTRIBUTING)")
    return name


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small dataset with two classes."""
    return two_classes(tmp_path / "tree")


@pytest.fixture
def archive(tree, tmp_path) -> Path:
    """An archive of `tree`."""
    return pack(tree, tmp_path / "images.zip")


@pytest.fixture
def challenge(tmp_path) -> Path:
    """A few files of ImageNet, in Kaggle's layout."""
    root = tmp_path / "challenge"
    for i, wnid in enumerate(("n01440764", "n01443537", "n02102040")):
        put(root / f"ILSVRC/Data/CLS-LOC/train/{wnid}/{wnid}_1.JPEG", bytes([i]) * 20_000)
        put(root / f"ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_0000000{i}.JPEG", bytes([9 - i]) * 20_000)
    rows = ("ImageId,PredictionString", *(f"ILSVRC2012_val_0000000{i},n01440764 1 2 3 4" for i in range(3)))
    put(root / "LOC_val_solution.csv", "\n".join(rows).encode())
    return root


@pytest.fixture(scope="session")
def larger(tmp_path_factory) -> Path:
    """A dataset that takes about a second to pack, so that packing can be interrupted; do not modify."""
    root = tmp_path_factory.mktemp("larger") / "root"
    for split, count in (("train", 60), ("val", 10)):
        for i in range(count):
            put(root / split / "ab"[i % 2] / f"{i}.jpg", encode(noise(700, 500, i), "JPEG", quality=90))
    return root


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> Path:
    """Images of every kind (`odd_folder`); do not modify."""
    return odd_folder(tmp_path_factory.mktemp("originals") / "root")


@pytest.fixture(scope="session")
def root(originals) -> Path:
    """`originals`, under the name that the tests of packed data use."""
    return originals


@pytest.fixture(scope="session")
def packed_root(originals, tmp_path_factory) -> Path:
    """Shards of `originals`; do not modify."""
    out = tmp_path_factory.mktemp("shards") / "out"
    packed(originals, out)
    return out


@pytest.fixture
def copied(packed_root, tmp_path) -> Path:
    """A copy of `packed_root`, for tests that damage it."""
    return shutil.copytree(packed_root, tmp_path / "copy")


@pytest.fixture(scope="session")
def object_server(tmp_path_factory):
    """A `Store` with a `Cluster` as its client; tests use `store`, which is emptied."""
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
def store(object_server):
    """A `Store` that contains only a StorageClass."""
    object_server.objects.clear()
    object_server.answer = lambda method, path, body: None
    object_server.put(f"{CLASSES}/standard", metadata=DEFAULT)
    return object_server

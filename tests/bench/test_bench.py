"""`worldsize strategies` and `worldsize bench`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import trees
from processes import environment, worldsize
from worldsize import parallel
from worldsize.bench import loader, other_loaders
from worldsize.bench.options import BenchLoader
from worldsize.bench.strategies import Measured, table, variants
from worldsize.config import recipe
from worldsize.parallel import STRATEGIES, availability
from worldsize.parallel.base import StrategySupport


def test_every_strategy_is_known_everywhere():
    names = set(typing.get_args(recipe.StrategyName)) - {"auto"}
    assert set(STRATEGIES) == names == {way.strategy for way in availability.support()}
    assert [parallel.load(name).name for name in STRATEGIES] == list(STRATEGIES)
    special = {setting for name in STRATEGIES for setting in parallel.load(name).settings}
    assert special | {"strategy", "timeout_s", "stall_s"} == set(recipe.Parallel.model_fields)


def test_what_is_known_of_strategies_needs_no_torch():
    program = (
        "import sys; from worldsize import parallel; "
        "[parallel.load(n) for n in parallel.STRATEGIES]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_table_shows_whether_horovod_works(tmp_path):
    """In this environment, and with a Horovod package that cannot be imported."""
    here = worldsize("strategies", cwd=tmp_path, COLUMNS="200").stdout
    assert ("make horovod" in here) == (importlib.util.find_spec("horovod") is None)
    (tmp_path / "horovod.py").write_text("raise ImportError('compiled for torch 1.0')\n")
    broken = worldsize("strategies", cwd=tmp_path, COLUMNS="200", PYTHONPATH=str(tmp_path)).stdout
    assert "compiled for torch 1.0" in broken
    assert "ddp" in broken


def test_unusable_strategies_are_skipped(monkeypatch):
    rows = [StrategySupport("ddp", "cpu", "gloo", (), ""), StrategySupport("adasum", "cpu", "gloo", (), "")]
    rows += [
        StrategySupport("localsgd", "cpu", "gloo", (), "broken"),
        StrategySupport("horovod", "cpu", "MPI", (), "not installed"),
    ]
    monkeypatch.setattr("worldsize.bench.strategies.support", lambda: rows)
    assert [v.name for v in variants(2)] == ["ddp", "ddp fp16", "ddp bf16", "ddp powersgd", "adasum"]
    assert "adasum" not in [v.name for v in variants(3)]


def test_ratios_are_computed_within_each_round():
    """A machine that becomes half as fast between two rounds does not change the ratio."""
    results = [Measured("ddp", 1, 100.0, 1.0, 2.0, 3.0), Measured("adasum", 1, 80.0, 1.0, 2.0, 3.0)]
    results += [Measured("ddp", 2, 50.0, 1.0, 2.0, 3.0), Measured("adasum", 2, 40.0, 1.0, 2.0, 3.0)]
    assert table(results).splitlines()[-1].replace("|", "").split() == ["adasum", "60.00", "0.800", "3.0", "2"]


def test_strategies_are_not_compared_in_no_rounds(fails):
    assert "--rounds 0 must be at least 1" in fails("bench", "strategies", "--rounds", "0")


@pytest.mark.slow
def test_strategies_are_compared(tmp_path):
    command = ("bench", "strategies", "--model", "shufflenet_v2_x0_5", "--size", "32", "--steps", "6", "--rounds", "1")
    done = worldsize(*command, "--only", "ddp fp16", "async", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "bench-strategies-1"
    results = {r["variant"]: r for r in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}
    assert list(results) == ["ddp", "ddp fp16", "async"]
    assert results["ddp fp16"]["sent_mb"] == pytest.approx(results["ddp"]["sent_mb"] / 2)
    assert all(r["images_per_s"] > 0 for r in results.values())
    assert (folder / "table.md").read_text() in done.stdout


@pytest.mark.parametrize(
    ("speed", "busy", "reading", "expected"),
    [
        (3000, 0.5, 9000, "the device"),
        (900, 0.95, 9000, "the CPU"),
        (900, 0.3, 1000, "the disk"),
        (900, 0.3, 9000, "outside this process"),
    ],
)
def test_the_bottleneck_of_the_loader(tmp_path, speed, busy, reading, expected):
    assert loader.bottleneck(speed, busy, reading, BenchLoader((tmp_path,))).startswith(expected)


def test_a_remote_dataset_is_on_the_network(tmp_path):
    options = BenchLoader((Path("s3://bucket/shards"),))
    assert loader.bottleneck(900, 0.3, 1000, options).startswith("the network")
    options = BenchLoader((Path(tmp_path.as_uri()),))
    assert loader.bottleneck(900, 0.3, 1000, options).startswith("the disk")


def test_a_loader_without_images_is_in_the_table():
    results = [loader.Measured(loader.OURS, 1, 100.0, 0.01), loader.Measured("webdataset", 1, 0.0)]
    assert loader.table(results).splitlines()[-1].replace("|", "").split() == ["webdataset", "0", "inf"]


def some_images(root: Path) -> None:
    trees.two_classes(root)
    trees.tree(root, *(f"train/{name}/{i}.png" for name in ("cat", "dog") for i in range(10, 20)))


@pytest.mark.slow
def test_loaders_are_compared_on_the_same_files(tmp_path):
    some_images(tmp_path / "data")
    options = ("--batch", "8", "--rounds", "2", "--size", "16", "--workers", "1", "--against", "torchvision,webdataset")
    packed = worldsize("data", "pack", "--root", "data", "--out", "shards", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    done = worldsize("bench", "loader", "--root", "data", "shards", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "bench-loader-1"
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert {r["round"] for r in results} == {1, 2}
    ours, theirs = {"worldsize", "worldsize, shards"}, {"torchvision, 1 workers", "torchvision, 2 workers"}
    assert {r["loader"] for r in results} == ours | theirs
    assert all(r["images_per_s"] > 0 for r in results)
    assert "skipped webdataset" in done.stdout
    assert (folder / "table.md").read_text() in done.stdout


@pytest.mark.parametrize(("crop", "scaling"), [("random_resized", True), ("none", False)])
def test_our_loader_is_configured_as_in_training(tmp_path, monkeypatch, crop, scaling):
    some_images(tmp_path / "data")
    options = BenchLoader((tmp_path / "data",), batch=8, size=16)
    settings = {"data": {"dct_scaling": True, "train_crop": crop, "train_crop_size": 16}, "augment": {"repeats": 3}}
    given = {}
    monkeypatch.setattr(loader, "Loader", lambda *_, **named: given.update(named))
    loader.Ours(loader._samples(tmp_path / "data", options), recipe.Recipe.model_validate(settings), options)
    assert (given["scaling"], given["repeats"]) == (scaling, 3)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("torchvision", ("cutout", "lighting", "rotate90", "vflip")),
        ("timm", ("cutout", "lighting", "rotate90", "vflip")),
        ("torchcodec", ("color_jitter", "cutout", "erasing", "lighting", "policy", "rotate90", "vflip")),
        ("dali", ("color_jitter", "cutout", "erasing", "lighting", "policy", "repeats", "rotate90", "vflip")),
    ],
)
def test_a_loader_that_lacks_an_augmentation_is_not_compared(tmp_path, name, lacks):
    if name in ("timm", "torchcodec"):
        pytest.importorskip(name)
    some_images(tmp_path / "data")
    samples = loader._samples(tmp_path / "data", BenchLoader((tmp_path / "data",), batch=8))
    values = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "cutout": 8, "erasing": 0.25, "lighting": 0.1, "repeats": 3}
    values |= {"rotate90": 1.0, "vflip": 0.5}
    for setting in lacks:
        changed = recipe.Recipe.model_validate({"augment": {setting: values.get(setting, "trivialaugment")}})
        with pytest.raises(other_loaders.Unavailable, match=rf"compared without augment\.{setting} only"):
            other_loaders.PEERS[name](samples, changed, 8, 1)


def test_timm_is_compared_with_the_jitter_that_it_applies(tmp_path):
    pytest.importorskip("timm")
    some_images(tmp_path / "data")
    samples = loader._samples(tmp_path / "data", BenchLoader((tmp_path / "data",), batch=8))
    jitter = {"color_jitter": (0.3, 0.3, 0.3, 0.0)}
    for policy, names in ((None, ["ColorJitter"]), ("3-augment", ["AutoAugment", "ColorJitter"])):
        changed = recipe.Recipe.model_validate({"augment": {"policy": policy} | jitter})
        peer = other_loaders.PEERS["timm"](samples, changed, 8, 1)
        steps = [type(step).__name__ for step in peer._loader.dataset._transform.transforms]
        assert steps[2:-1] == names
        assert next(iter(peer.batches())) == 8
    with pytest.raises(other_loaders.Unavailable, match=r"compared without augment\.color_jitter only"):
        other_loaders.PEERS["timm"](
            samples, recipe.Recipe.model_validate({"augment": {"policy": "randaugment-timm"} | jitter}), 8, 1
        )


def test_crops_of_other_loaders_are_those_of_the_recipe():
    settings = {"crop_area": (0.5, 0.6), "crop_ratio": (1.0, 1.1), "flip": False, "train_crop_size": 16}
    [crop] = other_loaders._crop_and_flip(recipe.Recipe.model_validate({"data": settings}))
    assert (crop.scale, crop.ratio, crop.size) == ((0.5, 0.6), (1.0, 1.1), (16, 16))


@pytest.mark.parametrize("repeats", [1, 3])
def test_other_loaders_repeat_images_as_the_recipe(repeats):
    changed = recipe.Recipe.model_validate({"augment": {"repeats": repeats}})
    order = other_loaders._Shuffled(range(20), changed)
    indices = list(order)
    assert len(indices) == len(order) == 20 and len(set(indices)) == -(-20 // repeats)


def test_an_unknown_loader_is_refused(fails, tmp_path):
    some_images(tmp_path / "data")
    assert "torchvision" in fails("bench", "loader", "--root", "data", "--batch", "8", "--against", "fccv")
    assert "--batch 80" in fails("bench", "loader", "--root", "data", "--batch", "80")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rounds", "0"), "--rounds 0 must be at least 1"),
        (("--batch", "0"), "--batch 0 must be at least 1"),
        (("--workers", "-1"), "--workers -1 must be at least 1"),
        (("--feed", "0"), "--feed 0 must be greater than 0"),
        (("--images", "7", "--batch", "8"), "--images 7 must be at least --batch 8"),
    ],
)
def test_options_out_of_range_are_refused(fails, tmp_path, options, message):
    some_images(tmp_path / "data")
    assert message in fails("bench", "loader", "--root", "data", *options)


def test_unreadable_images_do_not_stop_the_benchmark(tmp_path):
    some_images(tmp_path / "data")
    samples = loader._samples(tmp_path / "data", BenchLoader((tmp_path / "data",), batch=8))
    Path(samples.name(3)).unlink()
    assert loader._reading(samples, BenchLoader((tmp_path / "data",))) > 0


def test_every_image_that_webdataset_decodes_is_counted(tmp_path):
    some_images(tmp_path / "data")
    packed = worldsize("data", "pack", "--root", "data", "--out", "shards", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    samples = loader._samples(tmp_path / "shards", BenchLoader((tmp_path / "shards",), batch=8))
    assert len(samples) % 9 != 0
    small = loader.recipe_of(BenchLoader((tmp_path / "shards",), size=16))
    assert sum(other_loaders.webdataset(samples, small, 9, 1).batches()) == len(samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "theirs", "skipped"),
    [("imagenet-a2", "timm", "torchvision"), ("imagenet-tv-v2", "torchvision", "timm")],
)
def test_recipes_are_compared_with_their_own_libraries(tmp_path, recipe, theirs, skipped):
    some_images(tmp_path / "data")
    options = ("--recipe", recipe, "--batch", "8", "--rounds", "1", "--size", "16", "--workers", "1")
    done = worldsize("bench", "loader", "--root", "data", *options, "--against", "torchvision,timm", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{theirs}, 2 workers" in done.stdout and f"skipped {skipped}" in done.stdout
    assert f"{recipe}, 16 pixels" in done.stdout


def test_other_loaders_are_not_compared_with_a_recipe_that_crops_otherwise(fails, tmp_path):
    some_images(tmp_path / "data")
    arguments = ("bench", "loader", "--root", "data", "--batch", "8", "--recipe", "cifar10", "--against", "torchvision")
    assert "random resized crops only" in fails(*arguments)


@pytest.mark.parametrize("fill", ["", "head -c 65536 /dev/zero > /dev/shm/full"], ids=["small", "full"])
def test_other_loaders_without_shared_memory_end_with_the_remedy(tmp_path, fill):
    own = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    small = [*own, "sh", "-c", f'mount -t tmpfs -o size=64k small /dev/shm && {fill or "true"}; exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made")
    some_images(tmp_path / "data")
    command = [*small, sys.executable, "-m", "worldsize", "bench", "loader", "--root", "data", "--batch", "8"]
    command += ["--rounds", "1", "--workers", "1", "--against", "torchvision"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stdout + done.stderr
    assert "/dev/shm is too small" in done.stderr and "--workers" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "remedy"),
    [(("--procs", "1"), "--procs 2"), (("--steps", "3"), "--steps"), (("--only", "dpp"), "ddp fp16")],
)
def test_an_impossible_comparison_is_refused(fails, options, remedy):
    assert remedy in fails("bench", "strategies", *options)

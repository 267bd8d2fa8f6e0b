"""`worldsize strategies` and `worldsize bench`: what they say is what there is."""

from __future__ import annotations

import importlib.util
import json
import typing
from pathlib import Path

import pytest

import trees
from processes import worldsize
from worldsize import recipe
from worldsize.arguments import BenchLoader
from worldsize.bench import loader, peers
from worldsize.bench.strategies import Measured, table, variants
from worldsize.parallel import STRATEGIES, usable


def test_every_strategy_is_known_everywhere():
    names = set(typing.get_args(recipe.StrategyName)) - {"auto"}
    assert set(STRATEGIES) == names == {row.strategy for row in usable.rows()}
    for name, kind in STRATEGIES.items():
        assert importlib.util.find_spec(f"worldsize.parallel.{kind.module or name}") is not None


def test_the_table_tells_the_truth_about_horovod(tmp_path):
    """With a package of that name that does not load, and as this environment is."""
    here = worldsize("strategies", cwd=tmp_path, COLUMNS="200").stdout
    assert ("make horovod" in here) == (importlib.util.find_spec("horovod") is None)
    (tmp_path / "horovod.py").write_text("raise ImportError('compiled for torch 1.0')\n")
    told = worldsize("strategies", cwd=tmp_path, COLUMNS="200", PYTHONPATH=str(tmp_path)).stdout
    assert "compiled for torch 1.0" in told
    assert "ddp" in told


def test_what_is_missing_is_left_out_of_the_comparison(monkeypatch):
    rows = [usable.Row("ddp", "cpu", "gloo", (), ""), usable.Row("adasum", "cpu", "gloo", (), "")]
    rows += [usable.Row("localsgd", "cpu", "gloo", (), "broken"), usable.Row("horovod", "cpu", "MPI", (), "not here")]
    monkeypatch.setattr("worldsize.bench.strategies.rows", lambda: rows)
    assert [v.name for v in variants(2)] == ["ddp", "ddp fp16", "ddp bf16", "ddp powersgd", "adasum"]
    assert "adasum" not in [v.name for v in variants(3)]


def test_the_ratio_is_that_of_each_round():
    """A machine that slows down by half between the rounds changes no ratio."""
    results = [Measured("ddp", 1, 100.0, 1.0, 2.0, 3.0), Measured("adasum", 1, 80.0, 1.0, 2.0, 3.0)]
    results += [Measured("ddp", 2, 50.0, 1.0, 2.0, 3.0), Measured("adasum", 2, 40.0, 1.0, 2.0, 3.0)]
    assert table(results).splitlines()[-1].replace("|", "").split() == ["adasum", "60.00", "0.800", "3.0", "2"]


@pytest.mark.slow
def test_the_comparison_itself(tmp_path):
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
    ("speed", "busy", "reading", "limit"),
    [
        (3000, 0.5, 9000, "the consumer"),
        (900, 0.95, 9000, "the CPU"),
        (900, 0.3, 1000, "the disk"),
        (900, 0.3, 9000, "not in this process"),
    ],
)
def test_what_holds_the_loader_up(tmp_path, speed, busy, reading, limit):
    assert loader.limit(speed, busy, reading, BenchLoader((tmp_path,))).startswith(limit)


def test_a_remote_data_set_is_on_the_network(tmp_path):
    asked = BenchLoader((Path("s3://bucket/shards"),))
    assert loader.limit(900, 0.3, 1000, asked).startswith("the network")
    asked = BenchLoader((Path(tmp_path.as_uri()),))
    assert loader.limit(900, 0.3, 1000, asked).startswith("the disk")


def test_a_loader_that_gives_nothing_is_in_the_table():
    results = [loader.Measured(loader.OURS, 1, 100.0, 0.01), loader.Measured("webdataset", 1, 0.0)]
    assert loader.table(results).splitlines()[-1].replace("|", "").split() == ["webdataset", "0", "inf"]


def some_pictures(root: Path) -> None:
    trees.two_classes(root)
    trees.tree(root, *(f"train/{name}/{i}.png" for name in ("cat", "dog") for i in range(10, 20)))


def test_loaders_are_compared_on_the_same_files(tmp_path):
    some_pictures(tmp_path / "data")
    words = ("--batch", "8", "--rounds", "2", "--size", "16", "--workers", "1", "--against", "torchvision,webdataset")
    packed = worldsize("data", "pack", "--root", "data", "--out", "shards", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    done = worldsize("bench", "loader", "--root", "data", "shards", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "bench-loader-1"
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert {r["round"] for r in results} == {1, 2}
    ours, theirs = {"worldsize", "worldsize, shards"}, {"torchvision, 1 workers", "torchvision, 2 workers"}
    assert {r["loader"] for r in results} == ours | theirs
    assert all(r["images_per_s"] > 0 for r in results)
    assert "left out: webdataset" in done.stdout
    assert (folder / "table.md").read_text() in done.stdout


def test_a_loader_that_nobody_knows(fails, tmp_path):
    some_pictures(tmp_path / "data")
    assert "torchvision" in fails("bench", "loader", "--root", "data", "--batch", "8", "--against", "fccv")
    assert "--batch 80" in fails("bench", "loader", "--root", "data", "--batch", "80")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rounds", "0"), "--rounds 0 must be at least 1"),
        (("--batch", "0"), "--batch 0 must be at least 1"),
        (("--workers", "-1"), "--workers -1 must be at least 1"),
        (("--feed", "0"), "--feed 0 must be more than 0"),
        (("--pictures", "7", "--batch", "8"), "--pictures 7 must be at least --batch 8"),
    ],
)
def test_numbers_that_cannot_be_measured_with(fails, tmp_path, words, message):
    some_pictures(tmp_path / "data")
    assert message in fails("bench", "loader", "--root", "data", *words)


def test_pictures_that_cannot_be_read_do_not_end_the_measuring(tmp_path):
    some_pictures(tmp_path / "data")
    samples = loader._samples(tmp_path / "data", BenchLoader((tmp_path / "data",), batch=8))
    Path(samples.name(3)).unlink()
    assert loader._reading(samples, BenchLoader((tmp_path / "data",))) > 0


def test_every_picture_that_webdataset_decodes_counts(tmp_path):
    some_pictures(tmp_path / "data")
    packed = worldsize("data", "pack", "--root", "data", "--out", "shards", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    samples = loader._samples(tmp_path / "shards", BenchLoader((tmp_path / "shards",), batch=8))
    assert len(samples) % 9 != 0
    assert sum(peers.webdataset(samples, 16, 9, 1).batches()) == len(samples)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [(("--procs", "1"), "--procs 2"), (("--steps", "3"), "--steps"), (("--only", "dpp"), "ddp fp16")],
)
def test_a_comparison_that_cannot_be(fails, words, remedy):
    assert remedy in fails("bench", "strategies", *words)

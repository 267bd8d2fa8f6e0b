"""`worldsize predict` and `worldsize.load`: the logits of the run's own evaluation, whatever the images come from."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import worldsize
from processes import environment
from processes import worldsize as command
from worldsize import checkpoint
from worldsize.cli import main
from worldsize.errors import DataError, UserError
from worldsize.inference import opening, trained
from worldsize.inference.predict import images, rows
from worldsize.inference.predict.model import Model
from worldsize.inference.predict.top import Row
from worldsize.training.precision import Precision

CLASSES = ("blue", "green", "red")
SETTINGS = (
    *("--model.name", "shufflenet_v2_x0_5", "--data.name", "folder", "--data.train-crop-size", "32"),
    *("--data.val-resize-size", "40", "--data.val-crop-size", "32", "--global-batch", "4", "--micro-batch", "4"),
    *("--epochs", "1", "--schedule.warmup-epochs", "0", "--precision", "fp32"),
)


def picture(seed: int, size: tuple[int, int] = (60, 48)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for split, count in (("train", 4), ("val", 3)):
        for place, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                picture(100 * place + i + (50 if split == "val" else 0)).save(root / split / name / f"{i}.jpg", quality=92)
    return root


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    """A run of a few steps."""
    out = data / "runs"
    words = ["train", "digits", *SETTINGS, "--data.root", str(data), "--out", str(out), "--name", "a"]
    assert main(words) == 0
    return out / "a"


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return worldsize.load(run, device="cpu")


@pytest.mark.parametrize(
    ("folder", "target"), [("", "."), ("checkpoints", "STEP"), ("checkpoints", ".."), ("checkpoints/STEP", ".")]
)
def test_the_run_of_a_relative_path(run: Path, monkeypatch: pytest.MonkeyPatch, folder: str, target: str):
    step = checkpoint.find(run).name
    monkeypatch.chdir(run / folder.replace("STEP", step))
    found = opening.find(Path(target.replace("STEP", step)))
    assert (found.title, found.cache) == (run.name, run.parent / ".cache")
    identity = trained.identity(found.path, raw=False)
    assert (identity["run"], identity["checkpoint"]) == (run.name, step)


def listed(data: Path) -> list[str]:
    return [str(path) for path in sorted((data / "val").rglob("*.jpg"))]


def predicted(*words: str) -> list[dict]:
    """The rows of `predict --format json`."""
    done = command("predict", *words, "--format", "json", cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_logits_are_those_of_torchvisions_preprocessing(run: Path, data: Path, model: Model):
    """An independent pipeline: torchvision's transforms and network, with the weights of the checkpoint."""
    from torchvision.models import shufflenet_v2_x0_5

    network = shufflenet_v2_x0_5(num_classes=3)
    network.load_state_dict(checkpoint.read(checkpoint.find(run)).model)
    settings = model.recipe.data
    transform = v2.Compose(
        [
            *(v2.Resize(40, antialias=True), v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)),
            v2.Normalize(settings.mean, settings.std),
        ]
    )
    paths = listed(data)
    with torch.inference_mode():
        expected = network.eval()(torch.stack([transform(Image.open(path).convert("RGB")) for path in paths]))
    assert torch.allclose(model.logits(paths), expected, atol=1e-4)
    assert model.classes == CLASSES


def test_a_picture_gives_the_same_in_every_form(data: Path, model: Model):
    path = listed(data)[0]
    image = Image.open(path).convert("RGB")
    array = np.asarray(image)
    reference = model.logits([path])
    for form in (Path(path), Path(path).read_bytes(), image, array, array[::-1, ::-1][::-1, ::-1]):
        assert torch.equal(model.logits([form]), reference)
    assert torch.equal(model.logits(torch.from_numpy(array.copy()).permute(2, 0, 1)[None]), reference)
    seen = torch.from_numpy(model.preprocess(path)).permute(2, 0, 1)[None].double() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (model.recipe.data.mean, model.recipe.data.std))
    assert torch.allclose(model.logits(((seen - mean) / std).float()), reference, atol=1e-5)


def test_normalized_images_are_averaged_with_their_mirror_images(run: Path, data: Path):
    source = opening.find(run)

    def with_data(**changes: bool) -> Model:
        recipe = source.recipe.model_copy(update={"data": source.recipe.data.model_copy(update=changes)})
        return Model(source.load(recipe, Precision("fp32", torch.device("cpu")), False))

    mirrored, ten = with_data(val_mirror=True), with_data(val_ten_crop=True)
    pixels = torch.from_numpy(np.stack([mirrored.preprocess(path) for path in listed(data)])).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (source.recipe.data.mean, source.recipe.data.std))
    normalized = (pixels / 255 - mean) / std
    assert torch.allclose(mirrored.logits(normalized), mirrored.logits(listed(data)), atol=1e-5)
    with pytest.raises(UserError, match="ten crops of an image: pass images"):
        ten.logits(normalized)


def test_fp32_is_fp32_while_a_model_computes(run: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in cuDNN, whose convolutions round to TF32 by default; the setting of the process is kept."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    model, seen = worldsize.load(run, device="cpu"), []
    model._found.network.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: model.logits([path]), listed(data)))
    assert seen == [False] * 9 and torch.backends.cudnn.allow_tf32


def test_predictions_are_sorted_probabilities(data: Path, model: Model):
    every = model.predict_all(listed(data), topk=9)
    logits = model.logits(listed(data))
    assert len(every) == 9
    for row, one in zip(logits.double().softmax(1), every, strict=True):
        assert one.probabilities == pytest.approx(sorted(row.tolist(), reverse=True), abs=1e-5)
        assert one.labels == tuple(CLASSES[i] for i in one.indices) and one.label == CLASSES[int(row.argmax())]
    assert model.predict(listed(data)[0], topk=1).labels == every[0].labels[:1]


@pytest.mark.parametrize("topk", [0, -1, 1.5, True, "5"])
def test_what_is_no_number_of_classes_is_refused_before_the_work(model: Model, topk: object):
    for asked in ([b"no image"], []):
        with pytest.raises(UserError, match=re.escape(f"topk={topk!r}: must be a whole number, at least 1")):
            model.predict_all(asked, topk)


def test_several_images_are_any_iterable_but_one_is_not(data: Path, model: Model):
    paths = listed(data)
    assert torch.equal(model.logits(Path(path) for path in paths), model.logits(paths))
    for one in (paths[0], Path(paths[0]), Path(paths[0]).read_bytes()):
        with pytest.raises(UserError, match=r"pass \[image\], or call predict"):
            model.predict_all(one)


def test_classes_are_ordered_by_logits(model: Model, monkeypatch: pytest.MonkeyPatch):
    """Probabilities of several classes may round to the same number; of equal logits, the first is that of argmax."""
    count = len(model.classes)
    logits = torch.stack([torch.arange(count) + 1000.0 * (torch.arange(count) == 0), torch.zeros(count)])
    monkeypatch.setattr(Model, "logits", lambda *_: logits)
    rising, equal = model.predict_all([b"", b""], count)
    assert rising.indices == (0, *range(count - 1, 0, -1)) and rising.probabilities[1:] == (0.0,) * (count - 1)
    assert equal.indices == tuple(range(count))


def test_threads_share_a_model(data: Path, model: Model):
    paths = listed(data)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: model.logits([path]), paths * 8))
    assert all(torch.equal(one, model.logits([path])) for one, path in zip(found, paths * 8, strict=True))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (3, "not int"),
        (np.zeros((4, 4), np.uint8), r"not uint8 \(4, 4\)"),
        (np.zeros((4, 4, 3), np.float32), "not float32"),
    ],
)
def test_what_is_not_an_image_is_a_user_error(model: Model, image: object, message: str):
    with pytest.raises(UserError, match=message):
        model.logits([image])


def test_images_that_cannot_be_read(model: Model, tmp_path: Path):
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(DataError, match=r"text\.jpg: .*cannot identify"):
        model.predict(tmp_path / "text.jpg")
    with pytest.raises(DataError, match=r"missing\.jpg: No such file"):
        model.predict(tmp_path / "missing.jpg")
    with pytest.raises(UserError, match=r"must be \(n, 3, 32, 32\), not \(1, 3, 31, 32\)"):
        model.logits(torch.zeros(1, 3, 31, 32))
    with pytest.raises(UserError, match="uint8"):
        model.logits(torch.zeros(1, 3, 31, 32, dtype=torch.int32))


@pytest.mark.slow
def test_two_processes_give_the_rows_of_one(run: Path, data: Path, model: Model):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    one = predicted(str(run), str(data / "val"))
    assert [row["filename"] for row in one] == listed(data)
    assert predicted(str(run), str(data / "val"), "--procs", "2") == one
    probabilities = model.logits(listed(data)).softmax(1)
    for row, expected in zip(one, probabilities, strict=True):
        assert row["prob"] == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-5)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_validation_images_without_paths(run: Path, data: Path):
    assert predicted(str(run)) == predicted(str(run), str(data / "val"))


def test_every_source_gives_the_same_rows(run: Path, data: Path, tmp_path: Path):
    reference = [row["prob"] for row in predicted(str(run), str(data / "val"))]
    paths = listed(data)
    assert [row["prob"] for row in predicted(str(run), *paths)] == reference
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for path in paths:
            tar.add(path)
    assert [row["prob"] for row in predicted(str(run), str(tmp_path / "val.tar"))] == reference
    shards = tmp_path / "shards"
    assert main(["data", "pack", "--root", str(data), "--out", str(shards)]) == 0
    packed = predicted(str(run), str(shards))[-len(paths) :]  # the training images come first
    assert [row["prob"] for row in packed] == [pytest.approx(row, abs=1e-5) for row in reference]


@pytest.mark.slow
def test_standard_input(run: Path, data: Path):
    paths = listed(data)[:3]
    words = [sys.executable, "-m", "worldsize", "predict", str(run), "-", "--format", "json"]

    def rows_of(stdin: bytes) -> list[dict]:
        done = subprocess.run(words, input=stdin, capture_output=True, env=environment(), check=True)
        return json.loads(done.stdout)

    rows = rows_of("\n".join(paths).encode())
    assert [row["filename"] for row in rows] == paths
    (one,) = rows_of(Path(paths[0]).read_bytes())
    assert one["filename"] == "standard input" and one["prob"] == pytest.approx(rows[0]["prob"], abs=1e-5)


def test_what_standard_input_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A list that begins like a bitmap is a list; a bitmap is an image; other binary data is refused."""
    monkeypatch.chdir(tmp_path)
    Path("BMW").mkdir()
    picture(0).save("BMW/1.png")
    picture(0).save("1.bmp")
    names = [f"a{separator}b.png" for separator in "\u2028\x85\v\f\x1c"]
    for name in names:
        picture(0).save(name)
    for end in ("\n", "\r\n"):
        listed = images.find("-", CLASSES, lambda end=end: end.join([*names, ""]).encode())
        assert [listed.name(i) for i in range(len(listed))] == names
    assert images.find("-", CLASSES, lambda: b"BMW/1.png\nBMW/1.png\n").name(1) == "BMW/1.png"
    assert images.find("-", CLASSES, Path("1.bmp").read_bytes).name(0) == "standard input"
    with pytest.raises(UserError, match="neither an image of a known format nor a list of paths"):
        images.find("-", CLASSES, lambda: bytes(range(256)))


def test_names_that_are_not_utf_8(run: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    picture(0).save(name)
    words = ["predict", str(run), name, "--topk", "1", "--exclude-output"]
    assert main([*words, "--format", "csv"]) == 0
    assert capsysbinary.readouterr().out.splitlines()[1].startswith(os.fsencode(name) + b",")
    assert main([*words, "--format", "json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)[0]["filename"] == name
    assert main([*words, "--sheet", str(tmp_path / "page.html")]) == 0
    pytest.importorskip("pyarrow", reason="no pyarrow")
    assert main([*words, "--format", "parquet", "--results-file", str(tmp_path / "a.parquet")]) == 0


def test_classes_that_are_not_utf_8(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="no pyarrow")
    columns = rows.Columns("image", "label", None, None, 1)
    rows.write_parquet(tmp_path / "a.parquet", [Row("a.jpg", (0,), (0.5,))], columns, [os.fsdecode(b"\xff")])
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == [{"image": "a.jpg", "label_0": "\\udcff"}]


def test_broken_images_are_rows_of_their_own(run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (tmp_path / "empty.jpg").touch()
    good = listed(data)[0]
    words = ["predict", str(run), str(tmp_path / "broken.jpg"), good, str(tmp_path / "empty.jpg"), "--format", "csv"]
    assert main([*words, "--topk", "2", "--sheet", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == ["filename", "label_0", "label_1", "prob_0", "prob_1", "error"]
    assert [row["label_0"] == "" for row in rows] == [True, False, True]
    assert rows[2]["error"] == "empty file" and rows[1]["error"] == ""
    assert "2 of 3 images could not be decoded" in err
    page = (tmp_path / "page.html").read_text()
    assert page.count("<figure>") == 3 and page.count("<meter") == 1 and "broken: empty file" in page
    assert main(["predict", str(run), str(tmp_path / "empty.jpg")]) == 65
    assert "none of the 1 images could be decoded" in capsys.readouterr().err


def test_parquet_and_names_of_columns(run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    parquet = pytest.importorskip("pyarrow.parquet", reason="no pyarrow")
    file = tmp_path / "rows.parquet"
    words = ["predict", str(run), str(data / "val"), "--format", "parquet", "--results-file", str(file), "--topk", "1"]
    assert main([*words, "--output", "logit", "--include-index", "--filename-col", "image", "--label-col", "class"]) == 0
    rows = parquet.read_table(file).to_pylist()
    assert list(rows[0]) == ["image", "index_0", "class_0", "logit_0"]
    assert all(row["class_0"] == CLASSES[row["index_0"]] for row in rows) and len(rows) == 9
    assert main([*words[:3], "--format", "parquet"]) == 64
    assert "pass --results-file FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda", 0, 'device="cuda": torch finds no GPU on this machine; use device="cpu"'),
        ("cuda:2", 2, 'device="cuda:2": this machine has 2 GPUs, counted from cuda:0'),
        ("tpu", 0, 'device="tpu": must be auto, cpu, cuda, or one GPU, such as cuda:1'),
        ("cuda:x", 2, 'device="cuda:x": must be auto, cpu, cuda, or one GPU, such as cuda:1'),
    ],
)
def test_a_device_that_is_not_there_is_an_error_of_ours(run, monkeypatch, device, gpus, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=message):
        worldsize.load(run, device=device)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("missing.jpg",), 64, "missing.jpg: no such file or folder"),
        (("empty",), 64, "empty contains no images"),
        (("not.tar",), 64, "cannot be read as a tar file"),
        (("half.tar",), 64, "half.tar cannot be read as a tar file: truncated or damaged"),
        (("-", "--procs", "2"), 64, "several processes cannot share"),
        (("--sheet-images", "-1"), 64, "--sheet-images -1: must be at least 1"),
        (("--topk", "0"), 64, "--topk 0: must be at least 1"),
        (("--format", "csv", "--filename-col", "label", "--label-col", "label"), 64, "two columns would be called 'label'"),
        (("--format", "json", "--filename-col", "prob"), 64, "two columns would be called 'prob': choose other names"),
        (("--format", "csv", "--filename-col", "label_0"), 64, "two columns would be called 'label_0'"),
        (("--format", "csv", "--include-index", "--output-col", "index"), 64, "two columns would be called 'index'"),
        (("--format", "json", "--label-col", "error"), 64, "two columns would be called 'error'"),
        (("--results-file", "no/where.csv"), 64, "--results-file no/where.csv: no such folder"),
        (("--results-file", "empty"), 64, "--results-file empty is a folder"),
        (("--sheet", "empty"), 64, "--sheet empty is a folder"),
        (("--results-file", "a", "--sheet", "empty/../a"), 64, "--results-file and --sheet are the same file, empty/../a"),
        (("--model.name", "resnet18"), 66, "does not fit resnet18"),
    ],
)
def test_what_cannot_be_done_is_one_message(run, tmp_path, monkeypatch, capsys, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "not.tar").write_text("text")
    with tarfile.open(tmp_path / "half.tar", "w") as tar:
        tar.add("empty", "a")
        tar.add("empty", "b")
    os.truncate(tmp_path / "half.tar", 512)
    assert main(["predict", str(run), *words]) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_images_of_several_sources_in_any_order(data: Path):
    """As the loader asks for them: several at once, in the order of the request."""
    paths = listed(data)
    found = images.find([paths[0], str(data / "val" / "red"), paths[1], "-"], CLASSES, lambda: Path(paths[2]).read_bytes())
    assert len(found) == 6 and found.name(5) == "standard input"
    order = np.array([5, 0, 3, 4, 1])
    expected = [paths[2], paths[0], paths[8], paths[1], paths[6]]
    assert [bytes(image) for image in found.several(order)] == [Path(path).read_bytes() for path in expected]
    assert [bytes(image) for image in found.several(np.arange(6))] == [bytes(found.encoded(i)) for i in range(6)]

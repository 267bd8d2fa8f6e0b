"""`worldsize eval --details`: its numbers against scikit-learn, SciPy and definitions, and the same at every world size."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics
from test_predict import CLASSES, SETTINGS, data, picture, run  # noqa: F401 (fixtures)
from torch.nn import functional
from torchvision.models import VisionTransformer, resnet18

from browser import browse, figures, marks
from full_disk import files_up_to
from worldsize.cli import main
from worldsize.config.command_line import Evaluate
from worldsize.config.recipe import Data, Recipe
from worldsize.data.datasets import test_sets
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import ArraySamples
from worldsize.errors import UserError
from worldsize.inference import evaluate_checkpoint
from worldsize.inference.details import calibration, comparison, gradcam, measures, summary, write
from worldsize.inference.details import charts as details_charts
from worldsize.inference.details import command as details_command
from worldsize.inference.details.collected import Answers
from worldsize.report import page


def answers(seed: int, n: int = 300, classes: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Random logits, often right."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, n)
    logits = random.normal(0, 1.5, (n, classes))
    logits[np.arange(n), labels] += 2
    return logits, labels


@pytest.mark.parametrize("seed", range(4))
def test_the_measures_are_scikit_learns(seed: int):
    logits, labels = answers(seed, n=60 + 50 * seed)
    labels[labels == 3] = 2  # a class without images
    predictions = logits.argmax(1)
    matrix = measures.confusion(labels, predictions, 7)
    assert np.array_equal(matrix, metrics.confusion_matrix(labels, predictions, labels=range(7)))
    expected = metrics.precision_recall_fscore_support(labels, predictions, labels=range(7), zero_division=0)
    found = [(one.precision, one.recall, one.f1, one.support) for one in measures.of_classes(matrix)]
    assert np.allclose(np.array(found).T, expected)
    top = [metrics.top_k_accuracy_score(labels, logits, k=k, labels=range(7)) for k in range(1, 7)]
    assert measures.top_k(logits, labels, 6) == pytest.approx(top)
    assert measures.top_k(logits, labels, 99)[6:] == [1.0]
    tied = np.round(logits)
    assert measures.top_k(tied, labels, 6)[0] == (tied.argmax(1) == labels).mean()
    expected_loss = metrics.log_loss(labels, measures.softmax(logits), labels=range(7))
    assert calibration.loss(logits, labels, 1.0) == pytest.approx(expected_loss)


def test_confused_pairs_are_sorted():
    matrix = np.array([[9, 2, 0], [5, 9, 1], [0, 0, 9]])
    assert measures.confused(matrix, 2) == [(1, 0, 5), (0, 1, 2)]
    assert measures.confused(matrix, 9) == [(1, 0, 5), (0, 1, 2), (1, 2, 1)]


def test_the_interval_is_that_of_drawing_images():
    right = np.arange(200) < 170
    random = np.random.default_rng(1)
    drawn = right[random.integers(0, 200, (20000, 200))].mean(1)
    assert measures.interval(170, 200) == pytest.approx(np.percentile(drawn, (2.5, 97.5)), abs=0.006)
    assert measures.interval(170, 200) == measures.interval(170, 200)
    assert measures.interval(200, 200) == (1.0, 1.0)


def test_the_calibration_error_is_its_definition():
    logits, labels = answers(5)
    probabilities = measures.softmax(logits)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    expected = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert calibration.error(calibration.reliability(probabilities, labels)) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
def test_the_temperature_minimizes_the_loss(scale: float):
    logits, labels = answers(6)
    best = calibration.temperature(logits * scale, labels)
    # The reference: Guo et al. use L-BFGS.
    inverse = torch.ones((), dtype=torch.float64, requires_grad=True)
    tensors = torch.from_numpy(logits * scale), torch.from_numpy(labels)
    optimizer = torch.optim.LBFGS([inverse], lr=0.1, max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = functional.cross_entropy(tensors[0] * inverse, tensors[1])
        value.backward()
        return value

    optimizer.step(closure)
    assert best == pytest.approx(1 / inverse.item(), rel=1e-3)
    assert calibration.loss(logits * scale, labels, best) <= calibration.loss(logits * scale, labels, 1.0)


def test_a_temperature_without_mistakes_or_at_its_bounds_is_doubted():
    logits, labels = answers(6)
    best = calibration.temperature(logits, labels)
    assert calibration.doubt(best, wrong=3) is None
    assert "no prediction is wrong" in str(calibration.doubt(best, wrong=0))
    for scale in (1e-3, 1e3):
        assert "beyond the range 0.05 to 20" in str(calibration.doubt(calibration.temperature(logits * scale, labels), 3))


def test_the_calibration_chart_names_no_temperature_that_is_not_fitted(tmp_path: Path):
    """And its diagonal is drawn over the whole axis, however few bins have images, in a color seen on dark pages."""
    logits, labels = np.eye(3)[np.arange(60) % 3] * 9, (np.arange(60) + np.arange(60) // 30) % 3
    found = summary.of(Answers(np.arange(60), labels, logits), 3, np.zeros(60, int))
    assert len(found.bins) == 1 and found.doubt is None
    doubted = "The temperature is not fitted."
    for doubt, ends in ((None, "fitted on the same images."), (doubted, f"%. {doubted}")):
        [figure, *_], tables = details_charts.of(dataclasses.replace(found, doubt=doubt), ("a", "b", "c"))
        assert figure.caption.endswith(ends) and figure.caption.count("%") == (1 if doubt else 2)
    path = tmp_path / "page.html"
    path.write_text(page.write(page.Page("a", "b", figures=[figure], data=tables[:1])), "utf-8")
    for shade, ink in (("0", "#e6e9ed"), ("1", "#1c2127")):  # dark and light; --ink of page.css
        dom, console = browse(path, tmp_path, f"--blink-settings=preferredColorScheme={shade}")
        drawn = figures(dom)["reliability"]
        across, upwards = re.findall(r'role-axis-domain.*?<line [^>]*x2="([-\d]+)" y2="([-\d]+)"', drawn)
        diagonals = re.findall(r'mark-rule role-mark.*?<line [^>]*x2="([-\d]+)" y2="([-\d]+)" stroke="([^"]+)"', drawn)
        assert console == [] and diagonals == [(across[0], upwards[1], ink)]


def test_a_rare_mistake_is_seen_in_the_confusion_matrix_on_bright_and_dark_pages(tmp_path: Path):
    """Empty cells have almost the color of the card, and a share of 1 % differs from them, but less than one of 100 %."""
    labels = np.arange(2000) // 1000
    wrong = np.where(np.arange(2000) < 10, 1, labels)
    found = summary.of(Answers(np.arange(2000), labels, np.eye(2)[wrong] * 9), 2, np.zeros(2000, int))
    charts, tables = details_charts.of(found, ("a", "b"))
    path = tmp_path / "page.html"
    path.write_text(page.write(page.Page("a", "b", figures=charts, data=tables)), "utf-8")
    for shade, card in (("0", (0x1B, 0x20, 0x27)), ("1", (255, 255, 255))):  # dark and light; --card of page.css
        dom, _ = browse(path, tmp_path, f"--blink-settings=preferredColorScheme={shade}")
        cells = re.findall(r'share: ([\d.]+)%[^>]*fill="rgb\((\d+), (\d+), (\d+)\)"', figures(dom)["confusion"])
        color = {float(share): np.array([int(part) for part in rgb]) for share, *rgb in cells}
        assert sorted(color) == [0, 1, 99, 100]
        assert np.abs(color[0] - card).max() <= 21 and np.abs(color[1] - color[0]).max() >= 15
        assert np.abs(color[100] - color[0]).max() > 5 * np.abs(color[1] - color[0]).max()


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_mcnemars_test_is_the_exact_binomial_one(only_first: int, only_second: int, both: int):
    first = np.repeat([True, False, True, False], [only_first, only_second, both, 3])
    second = np.repeat([False, True, True, False], [only_first, only_second, both, 3])
    found = comparison.mcnemar(first, second)
    assert (found.only_first, found.only_second, found.both, found.neither) == (only_first, only_second, both, 3)
    if only_first + only_second:
        assert found.p == pytest.approx(stats.binomtest(only_first, only_first + only_second).pvalue)
    else:
        assert found.p == 1


def test_accuracy_over_size():
    sizes = np.array([10, 10, 20, 30, 40, 50, 0])
    right = np.array([True, False, True, True, False, True, False])
    assert measures.by_size(sizes, right, bins=3) == [(10, 10, 2, 0.5), (20, 30, 2, 1.0), (40, 50, 2, 0.5)]
    assert measures.by_size(np.zeros(7, int), right) == []
    assert len(measures.by_size(np.full(7, 32), right)) == 1


def test_grad_cam_of_a_resnet_is_its_class_activation_map():
    """Selvaraju et al., section 3.1: with global average pooling and one linear layer, both are the same."""
    torch.manual_seed(0)
    network = resnet18(num_classes=5).eval()
    images, classes = torch.randn(3, 3, 96, 96), torch.tensor([0, 3, 4])
    found = gradcam.maps(network, images, classes)
    body = torch.nn.Sequential(*list(network.children())[:-2])
    expected = torch.einsum("nchw,nc->nhw", body(images), network.fc.weight[classes]).relu()
    expected = expected / expected.amax((1, 2), keepdim=True)
    assert found is not None and found.shape == (3, 3, 3)
    assert torch.allclose(found, expected, atol=1e-5)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    frozen = gradcam.maps(network, images, classes)
    assert frozen is not None and torch.allclose(frozen, expected, atol=1e-5)
    assert gradcam.overlay(np.zeros((96, 96, 3), np.uint8), found[0]).size == (96, 96)


def test_an_early_layer_does_not_explain_a_prediction():
    """Of 16 pixels, the last two stages of a ResNet-18 leave one place."""
    network = resnet18(num_classes=5).eval()
    assert gradcam.maps(network, torch.randn(1, 3, 16, 16), torch.tensor([0])) is None
    assert gradcam.maps(network, torch.randn(1, 3, 33, 33), torch.tensor([0])) is not None


def test_a_network_with_attention_has_no_grad_cam():
    network = VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=2).eval()
    assert gradcam.maps(network, torch.randn(1, 3, 32, 32), torch.tensor([0])) is None


def test_the_details_are_the_same_at_every_world_size(run: Path, data: Path, ranks):  # noqa: F811
    for name, world_size in (("one", 1), ("two", 2)):
        output = ranks(world_size).run("eval", run, "--details", name, "--against", run)
        assert "top-1" in output and f"{name}/page.html" in output
    folder = ranks.cwd
    for file in ("details.json", "classes.csv", "confusion.csv", "images.csv"):
        assert (folder / "one" / file).read_bytes() == (folder / "two" / file).read_bytes()
    found = json.loads((folder / "one" / "details.json").read_text())
    assert found["images"] == 9 and found["against"]["p"] == 1
    matrix = [row.split(",")[1:] for row in (folder / "one" / "confusion.csv").read_text().splitlines()[1:]]
    assert sum(int(cell) for row in matrix for cell in row) == 9
    assert [one["support"] for one in found["classes"]] == [3, 3, 3]
    rows = list(csv.DictReader((folder / "one" / "images.csv").open()))
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert found["top1"] == right / 9 and {row["label"] for row in rows} == set(CLASSES)
    dom, console = browse(folder / "one" / "page.html", folder)
    assert console == []
    drawn = figures(dom)
    assert marks(drawn["confusion"], "rect") == 9 and marks(drawn["top_k"], "symbol") == 3
    assert f"Compared with {run}" in dom and "The difference is not significant (McNemar, p = 1)" in dom
    assert [row["other_prediction"] for row in rows] == [row["prediction"] for row in rows]
    assert dom.count('<div class="pair">') >= 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--against", "RUN"), "pass --details FOLDER"),
        (("--details", "file"), "--details file is a file, not a folder"),
        (("--details", "new", "--against", "nowhere"), "nowhere does not exist"),
        (("--details", "new", "--against", "OTHER"), "has other classes than these images"),
    ],
)
def test_what_cannot_be_compared_is_one_message(run, tmp_path, monkeypatch, capsys, words, message):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    if "OTHER" in words:
        for split in ("train", "val"):
            for name in ("a", "b"):
                (tmp_path / "images" / split / name).mkdir(parents=True)
                for i in range(4):
                    picture(i).save(tmp_path / "images" / split / name / f"{i}.jpg")
        assert main(["train", "digits", *SETTINGS, "--data.root", "images", "--out", ".", "--name", "other"]) == 0
    monkeypatch.setattr(evaluate_checkpoint, "_evaluate", None)  # the first network need not be evaluated for this
    places = {"RUN": str(run), "OTHER": "other"}
    assert main(["eval", str(run), *(places.get(word, word) for word in words)]) == 64
    assert message in capsys.readouterr().err


def test_details_are_for_one_label_per_image(tmp_path: Path):
    settings = Recipe(data=Data(name="multilabel"), loss={"name": "bce"})
    with pytest.raises(UserError, match="--details is for one label per image"):
        details_command.check(Evaluate(settings, details=tmp_path / "new"))


def test_images_that_only_one_network_gets_right():
    """Answers of two networks of the images 3, 5, 7, 9; the second could not decode 5."""
    eye = 9 * np.eye(3)
    first = Answers(np.array([3, 5, 7, 9]), np.array([0, 1, 2, 2]), eye[[0, 1, 2, 0]])
    second = Answers(np.array([3, 7, 9]), np.array([0, 2, 2]), eye[[0, 1, 2]])
    other = summary.compared("b", first, second)
    assert other.predictions.tolist() == [0, -1, 1, 2] and other.top1 == 2 / 3
    assert (other.counts.both, other.counts.only_first, other.counts.only_second, other.counts.neither) == (1, 1, 1, 0)
    assert np.isnan(other.label_probability).tolist() == [False, True, False, False]
    assert other.label_probability[3] > 0.99 > 0.01 > other.label_probability[2]
    details = summary.of(first, 3, np.zeros(4, int))
    chosen = write._different(details, first, other)
    assert [(title, rows.tolist()) for title, _, rows in chosen] == [("Wrong only in b", [2]), ("Right only in b", [3])]
    samples = ArraySamples("x", np.zeros((10, 8, 8, 3), np.uint8), np.zeros(10, np.int32), ("a", "b", "c"))
    titles, cells = write._images(details, first, samples, other)
    table = [dict(zip(titles, row, strict=True)) for row in cells]
    assert [row["other_prediction"] for row in table] == ["a", "", "b", "c"]
    assert table[1]["other_label_probability"] == "" and float(table[3]["other_label_probability"]) > 0.99


@pytest.mark.parametrize(
    ("size", "file", "left"),
    [
        (10_000, "page.html", ["classes.csv", "confusion.csv", "details.json", "images.csv"]),
        (100, "details.json", []),
    ],
)
def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(run, tmp_path, monkeypatch, capsys, size, file, left):  # noqa: F811
    monkeypatch.chdir(run.parent.parent)
    with files_up_to(size):
        assert main(["eval", str(run), "--details", str(tmp_path / "d")]) == 64
    assert f"cannot write {tmp_path}/d/{file}: File too large" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == left


def test_no_part_of_a_table_stays_on_a_full_disk(tmp_path: Path):
    path = tmp_path / "images.csv"
    with files_up_to(1000), pytest.raises(UserError, match=r"cannot write .*images\.csv: File too large"):
        write._csv(path, ("image", "label"), [(f"{i}.jpg", "cat") for i in range(10_000)])
    assert not path.exists()


@pytest.mark.parametrize(
    ("wrong", "verdict"), [(9, "The difference is significant: the first network is better"), (2, "not")]
)
def test_the_verdict_of_mcnemars_test(wrong: int, verdict: str):
    right = np.ones(100, bool)
    assert verdict in str(comparison.mcnemar(right, np.arange(100) >= wrong))
    assert ("the other one is better" in str(comparison.mcnemar(np.arange(100) >= wrong, right))) == (wrong == 9)


@pytest.mark.parametrize(
    ("p", "shown"),
    [(0.0501, "0.0501"), (0.04999, "0.04999"), (0.0456, "0.046"), (1.0, "1"), (1.234e-9, "1.2e-09"), (0.05, "0.05")],
)
def test_p_is_shown_on_its_side_of_the_limit(p: float, shown: str):
    found = comparison.Comparison(1, 2, 3, 4, p)
    assert f"p = {shown})" in str(found) and ("not" in str(found)) == (float(shown) >= 0.05)


def test_sizes_are_read_from_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FileSamples, "encoded", None)  # reads a complete file
    (tmp_path / "a").mkdir()
    picture(0, (60, 48)).save(tmp_path / "a" / "0.jpg")
    (tmp_path / "a" / "1.jpg").write_bytes(b"nothing")
    samples = test_sets.open_folder(tmp_path, ("a",), tmp_path / "cache")
    assert details_command._sides(samples, np.arange(2)).tolist() == [48, 0]

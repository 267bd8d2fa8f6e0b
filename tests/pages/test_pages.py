"""Pages: names of any kind appear as text, nothing is requested, and a browser shows them without errors."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from browser import browse
from worldsize import pages
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.survey import sheet as contact_sheet
from worldsize.inference.labels import write as labels
from worldsize.inference.labels.suspects import Suspect
from worldsize.inference.predict import sheet as predictions
from worldsize.inference.predict.top import Row
from worldsize.reproduce import page as replay
from worldsize.reproduce.promise import Promise

HOSTILE = [
    '<script>document.documentElement.lang = "xx"</script>',
    '"><img src=x onerror="document.documentElement.lang=1">',
    "' onfocus='alert(1)' x='",
    "</style></title></script></pre><b>bold</b>&amp;&#60;",
    "<!-- <script>",
    "two\nlines",
    "\u202egpj.exe\u2066\u200f",
    "{{ 7 * 7 }}{% raw %}{#",
    "\udcff.png",  # a file name that is not UTF-8
]


class Named(ArraySamples):
    """Two images that are called ``title``, of two classes, the first of which is called so."""

    def __init__(self, title: str) -> None:
        super().__init__(title, np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1], np.int32), (title, "b"))

    def name(self, index: int) -> str:
        return self._title


def _contact_sheet(path: Path, name: str) -> None:
    contact_sheet.write(Named(name), path, name, 2, 0)


def _predictions(path: Path, name: str) -> None:
    rows = [Row(name, (0, 1), (0.75, 0.25)), Row(name, broken=name)]
    predictions.write(path, name, Named(name), rows, (name, "b"), 2, True)


def _labels(path: Path, name: str) -> None:
    found = [Suspect(0, name, name, "b", name, 0.5, -1.0, 2.0, 3, (name,)), Suspect(1, name, name, "b")]
    labels.sheet(path, name, found, Dataset(Named(name), Named(name)))


def _replay(path: Path, name: str) -> None:
    record = {"step": 2} | dict.fromkeys(("lr", "loss", "top1", "grad_norm", "step_ms", "data_ms", "communication_ms"), 0.5)
    arrays = {
        "pixels": np.zeros((2, 8, 8, 3), np.uint8),
        "names": np.array([name, name]),
        "labels": np.array([0, 1]),
        "predictions": np.array([0, 0]),
        "losses": np.array([0.5, 2.0]),
        "probabilities": np.array([0.6, 0.1]),
        "shares": np.array([1.0, 0.6]),
    }
    seen = replay.Seen(arrays, [name, "b"], {name: {"gradient": 1.0, "weight": 2.0, "update": 0.1}})
    replay.write(
        path, SimpleNamespace(name=name), replay.Replay(2, 2, 1, 1, Promise(), [record], [record], None, None, path), seen
    )


def _report(path: Path, name: str) -> None:
    charts = pytest.importorskip("worldsize.report.charts", reason="no Altair")
    from worldsize.report import bench_charts
    from worldsize.report.data import Data
    from worldsize.report.page import Example, Gallery, Page, write

    table = pages.Table(name, [("name", name), (name, name)])
    data = Data("bench", name, {"series": "string", "images_per_s": "number"}, [{"series": name, "images_per_s": 3.0}])
    [drawn] = bench_charts.of_bench([data], "speed")
    figure = charts.Figure(drawn.name, name, name, drawn.chart)
    gallery = Gallery(name, name, [Example([pages.data_uri(Image.new("L", (4, 4)))], name, name)])
    page = Page(name, name, [name], [figure], [gallery], [table], [table], [data])
    path.write_text(write(page), "utf-8")


PAGES: dict[str, Callable[[Path, str], None]] = {
    "contact_sheet": _contact_sheet,
    "predictions": _predictions,
    "labels": _labels,
    "replay": _replay,
    "report": _report,
}
SCRIPTED = ("labels", "report")


class Parsed(HTMLParser):
    """The elements of a page with the names of their attributes, and its texts: those of elements and of attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.texts: list[str] = []
        self.urls: list[str] = []
        self._buffer = ""
        self._inside = ""
        self.feed(text)
        self.close()
        self._end_text()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_text()
        self._inside = tag
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.texts += [value for _, value in attrs if value]
        self.urls += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "poster")]

    def handle_endtag(self, tag: str) -> None:
        self._end_text()
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self._buffer += data

    def _end_text(self) -> None:
        self.texts.append(self._buffer)
        self._buffer = ""


def make(kind: str, folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    PAGES[kind](folder / "page.html", name)
    return folder / "page.html"


def read(kind: str, folder: Path, name: str) -> str:
    return make(kind, folder, name).read_text("utf-8")


def test_every_template_of_a_page_is_among_these():
    folder = Path(pages.__file__).parent / "templates"
    assert {path.stem for path in folder.glob("*.html")} - {"base", "parts"} == PAGES.keys()


@pytest.mark.parametrize("kind", PAGES)
def test_hostile_names_appear_as_text(kind, tmp_path):
    plain = Parsed(read(kind, tmp_path / "plain", "plain"))
    expected = sum(text.count("plain") for text in plain.texts)
    assert expected >= 4 and len(plain.elements) > 20
    names = ["".join(HOSTILE)] if kind == "report" else HOSTILE  # charts take a second
    for i, name in enumerate(names):
        found = Parsed(read(kind, tmp_path / str(i), name))
        assert found.elements == plain.elements, name
        shown = name.encode("utf-8", "replace").decode()
        # A table as CSV doubles quotes.
        assert sum(text.replace('""', '"').count(shown) for text in found.texts) == expected, name


@pytest.mark.parametrize("kind", PAGES)
def test_pages_request_nothing(kind, tmp_path):
    text = read(kind, tmp_path / "a", "https://example.com/x")
    found = Parsed(text)
    assert all(url.startswith("data:") for url in found.urls)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in text[: text.index("<title>")]
    assert text.startswith("<!doctype html>")
    assert ("<script" in text) == ("script-src" in text) == (kind in SCRIPTED)


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in SCRIPTED else pytest.mark.slow) for one in PAGES])
def test_a_browser_shows_hostile_names_without_errors(kind, tmp_path):
    for i, name in enumerate(("".join(HOSTILE[:5]), "".join(HOSTILE[5:]))):
        dom, console = browse(make(kind, tmp_path / str(i), name), tmp_path)
        assert console == []
        assert '<html lang="en">' in dom  # none of the scripts in names ran


def test_a_value_that_is_missing_is_an_error():
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="about"):
        pages.render("contact_sheet.html", title="x", cells=[])
    with pytest.raises(jinja2.UndefinedError, match="source"):
        pages.render("contact_sheet.html", title="x", about="y", cells=[{"name": "a", "file": "b", "broken": False}])


def test_columns_of_numbers_are_aligned_at_the_right():
    rows = [
        ("1", "1,234.5", "2%", "-1.5e-03", "a", "", "70 (63 to 77)"),
        ("2", "", "13.25%", "7", "1", "", "80"),
    ]
    assert pages.Table("", [("",) * 7, *rows]).right == [False, True, True, True, False, False, False]
    assert pages.Table("", [("a", "b")]).right == [False, False]


def test_images_are_inlined_without_loss():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    kind, _, text = pages.data_uri(image).partition(",")
    assert kind == "data:image/png;base64"
    assert np.array_equal(Image.open(io.BytesIO(base64.b64decode(text))), image)


@pytest.mark.parametrize(("share", "width"), [(0.25, "30.0"), (-1, "0.0"), (2, "120.0")])
def test_bars_stay_within_their_cells(share, width):
    assert f'<rect width="{width}"' in pages.bar(share)


def test_a_library_cannot_end_its_element():
    assert "</script" not in pages.script('document.write("</script>")')


def test_jinja2_is_imported_with_the_first_page():
    code = "import sys, worldsize.pages; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

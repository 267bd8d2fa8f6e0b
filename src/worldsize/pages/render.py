"""Renders templates, and makes what they contain: tables, inline images, SVG drawings and scripts."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

# Jinja2 is imported where it is used, so that `worldsize --help` stays fast.
if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from PIL import Image

# A cell is text, which is escaped, or Markup of this package.
Rows = Sequence[Sequence[str]]
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?%?", re.ASCII)


@dataclass(frozen=True)
class Table:
    """A table with its heading; the first row has the titles, the first column names the row."""

    title: str
    rows: Rows

    @property
    def right(self) -> list[bool]:
        """The alignment of each column: columns of numbers are aligned at the right, so that their digits line up."""
        columns = range(len(self.rows[0]))
        cells = [[row[column] for row in self.rows[1:] if row[column]] for column in columns]
        return [column > 0 and bool(cells[column]) and all(map(_NUMBER.fullmatch, cells[column])) for column in columns]


def render(template: str, **values: object) -> str:
    """A page as HTML. Bytes of names that are not UTF-8 become question marks, so that the page can be written.

    Raises:
        jinja2.UndefinedError: the template uses a value that is not given.
    """
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", "replace").decode("utf-8")


def fragment(template: str, **values: object) -> Markup:
    """A part of a page, such as an SVG chart, to use as a value of another template."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(values))


def bar(share: float) -> Markup:
    """A horizontal bar for a cell of a table; ``share`` of its greatest length, 0 to 1."""
    return fragment("bar.svg", share=min(max(share, 0.0), 1.0))


def script(code: str) -> Markup:
    """Our own code or a library's for a <script> element, which it cannot end early."""
    from markupsafe import Markup

    return Markup(code.replace("</script", "<\\/script"))


def data_uri(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """The image as the source of an <img>.

    Args:
        kind: the format as Pillow calls it.
        options: of Pillow's encoder.
    """
    out = io.BytesIO()
    image.save(out, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


@cache
def _environment() -> Environment:
    import jinja2

    # No template is exempt: the default of Jinja2's select_autoescape would leave out .svg files.
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("worldsize.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Keep the order of keys, and leave bytes that are not UTF-8 to `render`.
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    made.globals["static"] = _static
    return made


def _static(name: str) -> Markup:
    """A stylesheet or script of this package, for its element in a page."""
    return script((resources.files("worldsize.pages") / "static" / name).read_text("utf-8"))

"""The model card: README.md of an export (pure)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_SHOWN = 20  # classes


def text(about: dict[str, Any], parity: dict[str, Any], recipe: str, use: Sequence[str]) -> str:
    """Markdown with the front matter that the Hugging Face hub reads.

    Args:
        about: export.json.
        parity: parity.json.
        recipe: the recipe as YAML.
        use: lines of Python that show how to use the files.
    """
    library = "timm" if about["format"] == "timm" else about["format"].replace("pt2", "pytorch")
    tags = ["image-classification", *(["timm", "transformers"] if about["format"] == "timm" else [library])]
    front = [
        "---",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "pipeline_tag: image-classification",
        f"library_name: {library}",
        "---",
    ]
    code = ["```python", *use, "```"]
    body = [
        f"# {about['run']}",
        "",
        f"{about['network']} for {len(about['classes']):,} classes: {_classes(about['classes'])}. Exported by worldsize "
        f"{about['worldsize']} from {about['checkpoint']} of the run {about['run']}.",
        "",
        *_results(about),
        "",
        *code,
        "",
        "## Preprocessing",
        "",
        _preprocessing(about),
        "",
        "## Parity",
        "",
        *_parity(about, parity),
        "",
        "## Data",
        "",
        *(f"- {name}: {value}" for name, value in about["data"].items()),
        "",
        "## Recipe",
        "",
        "```yaml",
        recipe.rstrip(),
        "```",
    ]
    return "\n".join([*front, "", *body]) + "\n"


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ..."


def _results(about: dict[str, Any]) -> list[str]:
    results = about["results"]
    if not results:
        return ["The checkpoint was not evaluated during training."]
    score = "" if results.get("map") is None else f", mAP {results['map']:.2%}"
    return [
        f"Validation during training: top-1 {results['top1']:.2%}, top-5 {results['top5']:.2%}{score}, loss "
        f"{results['loss']:.4f} on {results['samples']:,} images."
    ]


def _preprocessing(about: dict[str, Any]) -> str:
    p = about["preprocessing"]
    where = (
        "inside the file: it takes decoded RGB images, uint8, of any size" if about["preprocess"] else "before the network"
    )
    mirror = "; the logits are the mean over the image and its mirror image" if p["mirror"] else ""
    return (
        f"RGB; the shorter side to {p['resize']} pixels ({p['interpolation']}, antialiased); the center {p['size']} x "
        f"{p['size']}; divided by 255, minus {p['mean']}, divided by {p['std']}; {where}{mirror}."
    )


def _parity(about: dict[str, Any], parity: dict[str, Any]) -> list[str]:
    levels = parity["largest_pixel_difference_levels"]
    lines = [
        f"The files were run in their own runtime on {parity['images']:,} validation images and compared with the run's "
        f"network in float32: {'passed' if parity['passed'] else '**not passed**'}.",
        "",
        f"- best class agrees: {parity['top1_agreement']:.4%} ({parity['disagreements']:,} images differ"
        + (f": {parity['differs']})" if parity["differs"] else ")"),
        f"- largest difference of a probability: {parity['largest_probability_difference']:.2g}",
        f"- top-1: {parity['top1_run']:.2%} in the run, {parity['top1_export']:.2%} in this file",
    ]
    if levels is not None:
        lines.append(f"- largest difference of the preprocessing: {levels:g} gray levels")
    changes = {name: about[name] for name in ("fold", "int8", "aoti", "temperature") if about[name] not in (False, 1.0)}
    if changes:
        lines.append(f"- options: {json.dumps(changes)}")
    return lines

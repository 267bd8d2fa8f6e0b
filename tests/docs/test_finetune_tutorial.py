"""The tutorial of fine-tuning, followed line by line: every command runs to its end.

Three runs are trained as the page says, and what it says of their accuracies is true; the others for two steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import documents
from processes import environment, records

PAGE = "docs/finetune.md"
COMPARED = ("scratch", "many", "tuned")
MARGIN = 0.05  # of 124 validation images


def lines() -> Iterator[str]:
    """The commands of the page, without those for the reader's own folder."""
    for block in documents.blocks(PAGE):
        if block.language == "sh" and "FOLDER" not in block.text:
            yield from (line.text for line in documents.commands(block))


def _is_compared(line: str) -> bool:
    return any(f"--name {name} " in line for name in COMPARED)


@pytest.mark.slow
def test_the_tutorial_can_be_followed(tmp_path):
    followed = list(lines())
    assert [line.split()[0] for line in followed].count("worldsize") > 15
    variables = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for line in followed:
        short = f"{line} --max-steps 2" if "--name" in line and not _is_compared(line) else line
        program = f"{short}\nEND" if "<<'END'" in short else short
        done = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    scratch, tuned = (records(tmp_path / "runs" / name, "epoch")[-1]["val_top1"] for name in ("scratch", "tuned"))
    assert tuned > scratch + MARGIN
    assert {path.name for path in Path(tmp_path, "tuned-onnx").iterdir()} >= {"model.onnx"}
    assert Path(tmp_path, "details", "page.html").is_file()

"""The tutorial of fine-tuning, followed line by line: every command runs to its end, each training for a few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import documents

PAGE = "docs/finetune.md"


def lines() -> Iterator[str]:
    """The commands of the page, without those for the reader's own folder."""
    for block in documents.blocks(PAGE):
        if block.language == "sh" and "FOLDER" not in block.text:
            yield from (line.text for line in documents.commands(block))


@pytest.mark.slow
def test_the_tutorial_can_be_followed(tmp_path):
    followed = list(lines())
    assert [line.split()[0] for line in followed].count("worldsize") > 15
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in followed:
        short = f"{line} --max-steps 2" if line.startswith("worldsize train") else line
        program = f"{short}\nEND" if "<<'END'" in short else short
        done = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert {path.name for path in Path(tmp_path, "tuned-onnx").iterdir()} >= {"model.onnx"}
    assert Path(tmp_path, "details", "page.html").is_file()

"""Generates the table in docs/reliability.md: ``python docs/make_fault_table.py``.

With ``--measure`` it first injects all faults, which takes half an hour. benchmarks/results/faults.json keeps the results.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldsize.distributed.rank import cores
from worldsize.training.environment import device_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
FILE = "tests/faults/test_faults.py"
HEAD = (
    "| fault | what happens | exit code | reported after | resumed after | steps lost | same bits | suite | test |",
    "| --- | --- | --- | ---: | ---: | ---: | --- | --- | --- |",
)


def faults() -> list[Any]:
    """The faults that are injected into real runs, in the order of the table."""
    for folder in ("faults", "helpers"):
        if str(ROOT / "tests" / folder) not in sys.path:
            sys.path.append(str(ROOT / "tests" / folder))
    from test_faults import FAULTS

    return list(FAULTS)


def page(text: str, results: Mapping[str, Any]) -> str:
    """The page ``text`` with a new table between its marks."""
    before, rest = text.split(BEGIN)
    rows = [_row(fault, results.get(fault.name)) for fault in faults()]
    about = f"Measured on {results['about']}."
    return "\n".join([before + BEGIN, "", *HEAD, *rows, "", about, "", END + rest.split(END)[1]])


def _row(fault: Any, measured: Mapping[str, Any] | None) -> str:
    cells = (
        fault.title,
        fault.happens,
        " or ".join(f"`{code}`" for code in fault.codes),
        *(_measured(fault, measured) if measured else ["not measured"] * 4),
        "full",
        f"`test_fault[{fault.name}]` in `{FILE}`",
    )
    return f"| {' | '.join(cells)} |"


def _measured(fault: Any, measured: Mapping[str, Any]) -> tuple[str, ...]:
    lost = f"{measured['lost']} of at most {fault.lost}" if fault.lost else "none"
    seconds = _seconds(measured["detected_s"]), _seconds(measured["recovered_s"])
    return *seconds, lost if fault.resumes else "the run", "yes" if measured["equal"] else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def measure() -> None:
    """Inject all faults, one after the other, and write what they cost."""
    loads = [os.getloadavg()[2]]
    environment = os.environ | {"WORLDSIZE_FAULTS": str(RESULTS), "OMP_WAIT_POLICY": "passive"}
    RESULTS.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "pytest", "-q", FILE], cwd=ROOT, env=environment, check=True)
    loads.append(os.getloadavg()[2])
    low, high = (f"{load:.0f}" for load in (min(loads), max(loads)))
    load = high if low == high else f"{low} to {high}"
    about = f"{cores()} cores ({device_name('cpu')}), load average with these runs {load}, {datetime.date.today()}"
    results = json.loads(RESULTS.read_text()) | {"about": about}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    guide = ROOT / "docs" / "reliability.md"
    guide.write_text(page(guide.read_text(), json.loads(RESULTS.read_text())))

"""The table of faults in docs/reliability.md is generated from the faults and from what was measured."""

from __future__ import annotations

import json
import runpy

from paths import ROOT

MAKE = runpy.run_path(str(ROOT / "docs" / "make_fault_table.py"))
GUIDE = ROOT / "docs" / "reliability.md"
MEASURED = json.loads((ROOT / "benchmarks/results/faults.json").read_text())


def test_the_table_is_generated():
    text = GUIDE.read_text()
    assert MAKE["page"](text, MEASURED) == text, "run: python docs/make_fault_table.py"


def test_there_are_twenty_faults_and_what_was_measured_is_what_they_promise():
    faults = {fault.name: fault for fault in MAKE["faults"]()}
    assert len(faults) == len(MAKE["faults"]()) >= 20
    for name, measured in MEASURED.items():
        if name != "about":
            fault = faults[name]
            assert measured["code"] in fault.codes and measured["lost"] <= fault.lost, name
            assert measured["equal"] == fault.resumes, name

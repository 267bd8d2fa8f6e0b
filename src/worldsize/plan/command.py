"""``worldsize plan RECIPE``."""

from __future__ import annotations

from worldsize import arguments, catalog
from worldsize.errors import SUCCESS
from worldsize.plan.arguments import Plan
from worldsize.recipe import Recipe


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    if source is None and not arguments.asks_help(argv):
        raise catalog.missing("plan")
    base = catalog.load(source) if source else Recipe()
    asked = arguments.parse(Plan, argv[1:] if source else argv, Plan(settings=base), f"plan {source or 'RECIPE'}")
    assert source is not None
    from worldsize.plan import prediction, report  # these import torch, which --help should not wait for

    predicted = prediction.predict(asked)
    report.show(source, asked, predicted)
    if asked.json is not None:
        report.write(asked.json, source, asked, predicted)
        print(f"\n{asked.json}: all numbers with their intervals")
    return SUCCESS

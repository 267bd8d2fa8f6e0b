"""``worldsize plan RECIPE``."""

from __future__ import annotations

from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import SUCCESS
from worldsize.plan.arguments import Plan


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    if source is None and not command_line.asks_help(argv):
        raise recipe_files.missing("plan")
    base = recipe_files.load(source) if source else Recipe()
    asked = command_line.parse(Plan, argv[1:] if source else argv, Plan(settings=base), f"plan {source or 'RECIPE'}")
    assert source is not None
    from worldsize.plan import prediction, report  # these import torch, which --help should not wait for

    predicted = prediction.predict(asked)
    report.show(source, asked, predicted)
    if asked.json is not None:
        report.write(asked.json, source, asked, predicted)
        print(f"\n{asked.json}: all numbers with their intervals")
    return SUCCESS

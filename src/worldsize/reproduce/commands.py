"""The commands that compute parts of a run again: one function per command. Does not import torch."""

from __future__ import annotations

from worldsize import arguments, catalog
from worldsize.errors import FAILED, SUCCESS
from worldsize.recipe import Recipe


def prove(argv: list[str]) -> int:
    """``worldsize prove``."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    if source is None and not arguments.asks_help(argv):
        raise catalog.missing("prove")
    base = catalog.load(source) if source else Recipe()
    rest = argv[1:] if source else argv
    asked = arguments.parse(arguments.Prove, rest, arguments.Prove(base), f"prove {source or 'RECIPE'}")
    from worldsize.reproduce import prove as proofs

    proof = proofs.prove(asked, asked.settings, tell)
    print_table(proofs.table(proof))
    print("\n".join(proofs.verdict(proof)))
    return SUCCESS if proof.holds else FAILED


def tell(line: str) -> None:
    """Report progress."""
    print(line, flush=True)


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows of text; the first one has the titles."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows[1:]:
        table.add_row(*row)
    Console().print("", table, "", sep="\n")

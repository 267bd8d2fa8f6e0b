"""The commands that compute parts of a run again: one function per command. Does not import torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TypeVar

from worldsize.config import command_line, output_files, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.config.wording import printable_lines
from worldsize.distributed.stop_signals import interruptible
from worldsize.errors import FAILED, SUCCESS, UserError
from worldsize.reproduce import options
from worldsize.runs import run_folder
from worldsize.runs.run_folder import RunFolder

T = TypeVar("T")
STOPPED = "stopped before its end, without a result"  # said by a command that a signal ends


def prove(argv: list[str]) -> int:
    """``worldsize prove``."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    if source is None and not command_line.asks_help(argv):
        raise recipe_files.missing("prove")
    base = recipe_files.load(source) if source else Recipe()
    rest = argv[1:] if source else argv
    asked = command_line.parse(options.Prove, rest, options.Prove(base), f"prove {source or 'RECIPE'}")
    from worldsize.reproduce import prove as proofs

    with interruptible(STOPPED):
        proof = proofs.prove(asked, asked.settings, tell)
    print_table(proofs.table(proof))
    tell("\n".join(proofs.verdict(proof)))
    return SUCCESS if proof.holds else FAILED


def replay(argv: list[str]) -> int:
    """``worldsize replay``."""
    folder, asked = _of_run(options.Replay, argv, "replay RUN")
    _check_procs(asked.procs)
    from worldsize.reproduce import replay as replays

    with interruptible(STOPPED):
        result = replays.replay(folder, asked.step, asked.procs, asked.from_start, asked.out, tell)
    tell("\n".join(replays.report(result)))
    return FAILED if result.broken is not None else SUCCESS


def audit(argv: list[str]) -> int:
    """``worldsize audit``."""
    folder, asked = _of_run(options.Audit, argv, "audit RUN")
    _check_procs(asked.procs)
    if asked.windows < 0:
        raise UserError(f"--windows {asked.windows}: must be at least 0")
    if asked.out is not None:
        output_files.check("--out", asked.out)
    from worldsize.reproduce import audit as audits

    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    with interruptible(STOPPED):
        certificate = audits.audit(folder, asked.windows, seed, asked.procs, tell)
    tell("\n".join(audits.text(certificate)))
    if asked.out is not None:
        with output_files.written(asked.out):
            asked.out.write_text(json.dumps(certificate.as_dict(), indent=1) + "\n", "utf-8")
    return SUCCESS if certificate.problem is None else FAILED


def _of_run(kind: type[T], argv: list[str], title: str) -> tuple[RunFolder, T]:
    """The run folder that the command line begins with, and its other arguments."""
    if not argv or argv[0].startswith("-"):
        if not command_line.asks_help(argv):
            raise UserError(f"RUN is required as the first argument: worldsize {title}, a folder such as runs/digits-1")
        command_line.parse(kind, argv, None, title)
    return run_folder.open_existing(_named(Path(argv[0]))), command_line.parse(kind, argv[1:], None, title)


def _named(path: Path) -> Path:
    """The path with the run's name at its end, which ``.`` and ``..`` do not have."""
    return path if path.name not in ("", "..") else path.resolve()


def _check_procs(procs: int | None) -> None:
    """Refuse a number that is none; None is that of the run."""
    from worldsize.launch.distribute import check_procs

    if procs is not None:
        check_procs(procs)


def tell(text: str) -> None:
    """Print lines, such as progress. The records of a run, perhaps of others, may have what a terminal would obey."""
    print(printable_lines(text), flush=True)


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows of text; the first one has the titles."""

    from worldsize.config import tables

    table = tables.table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    tables.console().print("", table, "", sep="\n")

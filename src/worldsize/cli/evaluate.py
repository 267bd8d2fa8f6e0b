"""``worldsize eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.config.wording import count
from worldsize.errors import UserError
from worldsize.launch import garbage

if TYPE_CHECKING:
    from worldsize.distributed.stop_signals import StopFlag


def run(argv: list[str]) -> int:
    """``worldsize eval``."""
    title = "eval RUN|CHECKPOINT"
    if not argv or argv[0].startswith("-"):
        if not command_line.asks_help(argv):
            raise UserError(f"RUN or CHECKPOINT is required as the first argument: worldsize {title}")
        command_line.parse(command_line.Evaluate, argv, command_line.Evaluate(Recipe()), title)
    from worldsize import checkpoint
    from worldsize.distributed.rank import discover_rank_info
    from worldsize.launch.distribute import distribute

    path = checkpoint.find(Path(argv[0]))
    recipe = recipe_files.load(str(path / "recipe.yaml"))
    default = command_line.Evaluate(recipe)
    parsed = command_line.parse(command_line.Evaluate, argv[1:], default, title, recorded=recipe)
    rank_info = discover_rank_info()

    def work(_: StopFlag) -> int:
        with garbage.not_sought():
            from worldsize.inference.evaluate_checkpoint import evaluate_checkpoint

        result = evaluate_checkpoint(path, parsed, rank_info)
        if rank_info.rank == 0:
            print(f"{path}")
            print(result if parsed.real_labels is None else f"ReaL top-1 {result.top1:.2%} on {count(result.samples)}")
            if result.broken:
                print(f"{count(result.broken)} not counted: could not be decoded")
        return 0

    return distribute(["eval", *argv], parsed.procs, rank_info, work)

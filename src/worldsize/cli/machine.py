"""``worldsize strategies`` and ``env``: what this machine can do. They take no arguments."""

from __future__ import annotations

from worldsize.config.command_line import asks_help
from worldsize.errors import UserError


def strategies(argv: list[str]) -> int:
    """``worldsize strategies``."""
    if argv:
        return _usage(argv, "strategies", "Lists the parallel strategies, and which of them work on this machine.")
    from worldsize.parallel import availability

    availability.show()
    return 0


def env(argv: list[str]) -> int:
    """``worldsize env``."""
    if argv:
        return _usage(argv, "env", "Shows this machine, and what a run on it would use.")
    from worldsize.training.environment import table

    rows = table()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _usage(argv: list[str], command: str, text: str) -> int:
    print(f"usage: worldsize {command}\n\n{text}")
    return 0 if asks_help(argv) else UserError.exit_code

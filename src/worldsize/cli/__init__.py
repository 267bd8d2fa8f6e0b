"""The command line. `commands` lists all commands; the other modules have those that are no package's own.

Imports nothing heavy before a command needs it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence

from worldsize import __version__
from worldsize.cli import usage
from worldsize.errors import SIGNAL_BASE, UserError, WorldsizeError
from worldsize.launch import entry_point


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code, see `worldsize.errors`."""
    if argv is None:
        entry_point.speak_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage.complete_help(), end="")
        return 0
    if words[0] in ("--version", "version"):
        print(__version__)
        return 0
    from worldsize.launch.failure import fail, fail_alone, fail_internally

    try:
        return _run(words)
    except WorldsizeError as error:
        return (fail_alone if error.of_one_rank else fail)(str(error), error.exit_code)
    except KeyboardInterrupt:
        return SIGNAL_BASE + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has exited (`worldsize recipes | head`): end as any filter does, with SIGPIPE's code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNAL_BASE + signal.SIGPIPE
    except Exception:
        return fail_internally(traceback.format_exc())


def _run(words: list[str]) -> int:
    command = usage.find(words)
    if command is not None:
        return command.run(words[len(command.words.split()) :])
    print(usage.group_help(words), end="")
    return 0 if "-h" in words or "--help" in words else UserError.exit_code

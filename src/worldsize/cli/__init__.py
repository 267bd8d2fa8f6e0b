"""The command line. `commands` lists all commands; the other modules have those that are no package's own.

Imports nothing heavy before a command needs it.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence

from worldsize import __version__
from worldsize.cli import stdout, usage
from worldsize.distributed import stop_signals
from worldsize.errors import SIGNAL_BASE, UserError, WorldsizeError, explained, no_current_folder
from worldsize.launch import entry_point


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code, see `worldsize.errors`."""
    if argv is None:
        entry_point.open_closed_streams()
        entry_point.speak_utf8()
        entry_point.mend_width()
    words = list(sys.argv[1:] if argv is None else argv)
    stop_signals.undo_inherited()
    from worldsize.launch.failure import fail, fail_alone, fail_internally

    if (problem := no_current_folder()) is not None:
        return fail_alone(problem, UserError.exit_code)
    try:
        return _printed(words)
    except WorldsizeError as error:
        return (fail_alone if error.of_one_rank else fail)(str(error), error.exit_code)
    except stop_signals.Interrupted as stop:
        return fail(str(stop), SIGNAL_BASE + stop.number)
    except KeyboardInterrupt:
        return SIGNAL_BASE + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has exited (`worldsize recipes | head`): end as any filter does, with SIGPIPE's code.
        stdout.drop()
        return fail("", SIGNAL_BASE + signal.SIGPIPE)
    except Exception as error:
        stdout.flush_or_drop()
        if (known := explained(error)) is not None:
            return fail_alone(str(known), known.exit_code)
        return fail_internally(traceback.format_exc())


def _printed(words: list[str]) -> int:
    """Run one command; what it printed has reached the reader, or OSError says why not."""
    try:
        code = _run(words)
    except SystemExit as stop:  # after --help, and after a printed error of the command line
        sys.stdout.flush()
        if stop.code != UserError.exit_code:
            raise
        from worldsize.launch.failure import fail

        # Without a report, an agent would start this process again and again.
        raise SystemExit(fail("", UserError.exit_code)) from None
    sys.stdout.flush()
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage.complete_help(), end="")
        return 0
    if words[0] in ("--version", "version"):
        print(__version__)
        return 0
    command = usage.find(words)
    if command is not None:
        argv = words[len(command.words.split()) :]
        if "" in argv or any(word.endswith("=") for word in argv):
            from worldsize.config.command_line import refuse_empty_arguments

            refuse_empty_arguments(argv)
        return command.run(argv)
    print(usage.group_help(words), end="")
    return 0 if "-h" in words or "--help" in words else UserError.exit_code

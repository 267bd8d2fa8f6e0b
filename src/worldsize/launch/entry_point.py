"""How the package starts its own programs: in UTF-8, and without the working folder on the path of their imports.

``python -m`` puts the working folder first on sys.path, so a file torchvision.py that happens to be there would run instead
of the library, and only with several processes. Python's options against it, -P and PYTHONSAFEPATH, need Python 3.11.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

# Removes the working folder, which `python -c` adds as '', before it imports anything. Folders of PYTHONPATH stay. Without
# single quotes, because it is quoted for shells.
_PATH = "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
_MAIN = "from {module} import main; sys.exit(main(sys.argv[1:]))"
# Python would raise KeyboardInterrupt: it prints a traceback during imports, and is dropped in callbacks, after which the
# worker would wait for the others, which are gone.
_SIGNAL = "import signal; signal.getsignal(2) is signal.default_int_handler and signal.signal(2, signal.SIG_DFL); "

_NARROWEST = 20  # characters; tyro's help has no end in 3 or fewer


def command(python: str, module: str = "worldsize.cli") -> list[str]:
    """The words that start ``module`` with the interpreter ``python``; its arguments follow.

    Args:
        module: its ``main`` takes the arguments and returns the exit code or None.
    """
    return [python, "-X", "utf8", "-c", _PATH + _MAIN.format(module=module)]


def worker(python: str, module: str = "worldsize.cli") -> list[str]:
    """The same for one of the processes that a launcher starts: Ctrl-C ends it at once until it handles signals itself."""
    return [python, "-X", "utf8", "-c", _PATH + _SIGNAL + _MAIN.format(module=module)]


def open_closed_streams() -> None:
    """Connect standard streams that are closed, as some daemons and cron jobs have them, to the null device.

    Otherwise, Python has none, and the next file that is opened gets the number of a stream and what libraries print to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # the lowest number that is free: the stream's own
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def speak_utf8() -> None:
    """Names, recipes and output are UTF-8, whatever the locale: otherwise starts this process again in Python's UTF-8 mode.

    What is not UTF-8 (file names are bytes) is printed with escapes.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [*command(sys.executable), *sys.argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="backslashreplace")


def mend_width() -> None:
    """Forget a COLUMNS in which nothing fits, such as the 0 that shells have without a terminal: tables would be empty."""
    width = os.environ.get("COLUMNS", "")
    if not width.isdecimal() or int(width) < _NARROWEST:
        os.environ.pop("COLUMNS", None)

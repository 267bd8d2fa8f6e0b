"""Entry point for ``worldsize`` and ``python -m worldsize``, which torchrun, mpirun and srun start."""

import os
import sys

# Python has put the working folder first on the path: what is there must not replace libraries. See `launch.entry_point`.
try:
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib may be there
        del sys.path[0]
except OSError:
    pass  # the folder was deleted, which `main` says; Python has not put it on the path

import signal


def main() -> int:
    """The command line. Ctrl-C while it is imported ends this process without a traceback."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup, for one, ignores it
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from worldsize import cli
    from worldsize.launch import failure as failure  # which `cli.main` imports before it handles Ctrl-C

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())

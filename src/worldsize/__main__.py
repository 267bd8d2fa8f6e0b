"""Entry point for ``python -m worldsize``, which torchrun, mpirun and srun start."""

import os
import sys

# Python has put the working folder first on the path: what is there must not replace libraries. See `launch.entry_point`.
try:
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib may be there
        del sys.path[0]
except OSError:
    pass  # the folder was deleted, which `main` says; Python has not put it on the path

from worldsize.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

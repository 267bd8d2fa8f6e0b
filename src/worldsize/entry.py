"""How the package starts its own programs: without the working folder on the path of their imports (pure).

``python -m`` puts the working folder first on sys.path, so a file torchvision.py that happens to be there would run instead
of the library, and only with several processes. Python's options against it, -P and PYTHONSAFEPATH, need Python 3.11.
"""

from __future__ import annotations

# Removes the working folder, which `python -c` adds as '', before it imports anything. Folders of PYTHONPATH stay. Without
# single quotes, because it is quoted for shells.
_START = "import sys; sys.path[:1] = filter(None, sys.path[:1]); from {module} import main; sys.exit(main(sys.argv[1:]))"


def command(python: str, module: str = "worldsize.cli") -> list[str]:
    """The words that start ``module`` with the interpreter ``python``; its arguments follow.

    Args:
        module: its ``main`` takes the arguments and returns the exit code or None.
    """
    return [python, "-c", _START.format(module=module)]

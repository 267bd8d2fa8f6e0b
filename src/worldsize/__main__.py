"""Entry point for ``python -m worldsize``, which torchrun, mpirun and srun start."""

from worldsize.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m worldsize``: the form that torchrun, mpirun and srun start."""

from worldsize.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

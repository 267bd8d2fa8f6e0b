"""The command line of ``worldsize bench scaling``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worldsize.config.command_line import RecipeFlags


@dataclass
class BenchScaling:
    """Measure how RECIPE scales: short real runs with several numbers of processes, interleaved in rounds.

    With weak scaling, each process computes as many images at every world size: RECIPE's global batch is that of the
    smallest one. With strong scaling, all processes share RECIPE's global batch. Efficiency is the number of images/s per
    process relative to the smallest world size of the same round.

    On a cluster, jobs run one after the other and are deleted afterwards. Pass their options (--image, --volume, --gpus,
    --cpu, ...) after `--`. They need a volume, on which the runs remain under runs/bench-*.

    Prints a table and writes it, with all measurements and a page (page.html; needs the extra `report`), to
    OUT/bench-scaling-N. If a run fails, the others continue, and the table says why; the exit code is then 1. --resume makes
    the runs that are missing. More processes than cores or GPUs are marked as oversubscribed and have no efficiency.

        worldsize bench scaling imagenet --synthetic --procs 1,2,4,8
        worldsize bench scaling imagenet --nodes 1,2 --procs 8 --on pytorchjob -- --image IMAGE --volume imagenet
    """

    settings: RecipeFlags
    procs: str = "1,2"
    """Processes per node, separated by commas."""
    nodes: str = "1"
    """Numbers of nodes, separated by commas; more than one requires a cluster."""
    on: str = "local"
    """Where the runs are made: local, pytorchjob, mpijob, trainjob, or several, separated by commas."""
    strategies: str = "ddp"
    """Strategies, separated by commas, by their names in `bench strategies`, such as 'ddp,ddp bf16,horovod'."""
    weak: bool = False
    """Measure weak scaling, as without --strong and --both."""
    strong: bool = False
    """Measure strong scaling."""
    both: bool = False
    """Measure both."""
    synthetic: bool = False
    """Train on random images of the recipe's size instead of its dataset, with as many classes. For a folder that is not on
    this machine, pass --data.classes N."""
    steps: int = 20
    """Steps of each run that count."""
    warmup: int = 5
    """Steps before them."""
    rounds: int = 3
    """How often each configuration runs."""
    resume: Path | None = None
    """Continue this interrupted benchmark; repeat its other options."""
    out: Path = Path("runs")
    """Where the folder is created."""

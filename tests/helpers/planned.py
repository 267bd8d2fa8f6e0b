"""Hardware, clusters and commands of the tests about plans."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from worldsize import cli
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.plan import model, network, traffic
from worldsize.plan.model import Cluster, Hardware, Message, Traffic

GPU = Hardware(
    image_s=0.4e-3,
    pass_s=4e-3,
    contention=0.001,
    jitter=0.01,
    link_latency_s=10e-6,
    link_bytes_per_s=2.8e9,
    local_latency_s=5e-6,
    local_bytes_per_s=50e9,
)
EIGHTHS = Traffic(tuple(Message((i + 1) / 8, 12.5e6) for i in range(8)))
sent = st.builds(
    lambda sizes, every: Traffic(tuple(Message((i + 1) / len(sizes), s) for i, s in enumerate(sizes)), every),
    *(st.lists(st.floats(1e3, 1e9), min_size=1, max_size=8), st.floats(1, 16)),
)

# A machine unlike the assumptions: CPU processes over a slow loopback.
CPU = Hardware(0.03, 0.02, 0.08, 0.03, 10e-6, 1e8, 50e-6, 4e8)


def plan(*arguments):
    assert cli.main(["plan", *map(str, arguments)]) == 0


def forecasts(path):
    return {f["devices"]: f for f in json.loads(path.read_text())["forecasts"]}


def results(folder, **changed):
    """The results of `bench scaling` on a machine like CPU, whose speed differs from round to round."""
    folder.mkdir()
    recipe = Recipe.model_validate({"model": {"name": "resnet18"}, "data": {"name": "cifar10", "train_crop_size": 32}})
    sent = traffic.of_recipe(recipe, network.profile(recipe, 10).tensors)
    lines = []
    for procs in (1, 2):
        step = model.step(CPU, sent, Cluster(1, procs), 16)
        for turn in (1, 2, 3):
            noise = (1.0, 1.6, 0.8)[turn - 1] * (1 + 0.003 * (turn - 2) * (procs - 1))
            line = {"kind_of_job": "local", "strategy": "ddp", "scaling": "weak", "nodes": 1, "procs": procs}
            line |= {"world_size": procs, "round": turn, "global_batch": 16 * procs, "lr": 0.1, "data_ms": 0.1}
            unit = 1000 * noise
            line |= {"step_ms": unit * step.total_s + 0.1, "compute_ms": unit * step.compute_s}
            line |= {"communication_ms": unit * step.communication_s, "straggler_ms": unit * step.straggler_s}
            lines.append(line | {"sent_mb": sent.size / 1e6 * (procs > 1)} | changed)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ddp-weak-1x1-1.yaml").write_text(recipe_files.to_yaml(recipe))
    return folder, recipe, sent


OF_RESULTS = (
    *("--model.name", "resnet18", "--model.stem", "imagenet", "--data.train-crop-size", "32"),
    *("--device", "cpu", "--micro-batch", "16"),
)

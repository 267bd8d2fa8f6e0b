"""`worldsize bench step`."""

from __future__ import annotations

import json

import pytest
import torch

from processes import worldsize
from worldsize.bench import step
from worldsize.bench.options import BenchStep
from worldsize.bench.step import Form, Measured
from worldsize.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def measured(form: str, first: float, second: float, on_gpu: bool = True) -> list[Measured]:
    """Two rounds with these images/s."""
    device = (9.0, 1.5, 800) if on_gpu else (None, None, None)
    return [Measured(form, turn, speed, *device) for turn, speed in ((1, first), (2, second))]


def test_the_operations_of_resnet50_are_those_of_the_literature():
    """4.089 G multiply-adds per image (torchvision's documentation). Backward takes twice as many, without the gradient of
    the images: 7 x 7 x 3 x 64 x 112 x 112 in the first layer."""
    forward, first = 4.089e9, 7 * 7 * 3 * 64 * 112 * 112
    assert step.flops_per_image("resnet50", 224) == pytest.approx(2 * (3 * forward - first), rel=2e-3)


def test_ratios_are_medians_within_rounds_and_the_share_is_of_16_bit_operations():
    results = measured("bare bf16", 100, 50) + measured("bare bf16 compiled", 200, 100)
    results += measured("torchvision bf16 contiguous", 50, 25)
    results += measured("worldsize bf16", 150, 75) + measured("worldsize tf32", 10, 5, on_gpu=False)
    lines = [line.strip("| ").split("|") for line in step.table(results, 2e9, 1e12).splitlines()]
    rows = {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}
    # 0.75 of the fastest bare loop, 3 times torchvision's; 112.5 images/s x 2 GFLOP.
    assert rows["worldsize bf16"] == ["112.5", "0.750", "3.000", "0.23", "22.5%", "1.5", "9.00", "800"]
    assert rows["worldsize tf32"] == ["7.5", "-", "-", "0.01", "-", "-", "-", "-"]


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("GTX 1", None)])
def test_the_peak_is_that_of_the_gpu(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert step.peak(GPU) == expected
    assert step.peak(CPU) is None


def test_each_format_is_compared_with_both_loops():
    forms = step.chosen(BenchStep(precision=("fp32",), compile=True), CPU)
    assert [form.name for form in forms] == [
        "torchvision fp32 contiguous",
        "bare fp32",
        "bare fp32 compiled",
        "worldsize fp32",
        "worldsize fp32 compiled",
        "worldsize fp32 contiguous",
    ]
    on_gpu = [form.name for form in step.chosen(BenchStep(precision=("fp32",), compile=True), GPU)]
    assert set(on_gpu) - {form.name for form in forms} == {
        "worldsize fp32 micro-batch 32",
        "worldsize fp32 micro-batch 32 compiled",
        "worldsize fp32 micro-batch 32 compiled graphs",
        "worldsize fp32 graphs",
        "worldsize fp32 compiled graphs",
    }
    assert step.chosen(BenchStep(precision=("fp32",), only=("bare fp32",)), CPU) == [Form("bare", "fp32")]
    with pytest.raises(UserError, match=r"--only 'bare bf1' is unknown; available: torchvision fp32 contiguous, bare fp32,"):
        step.chosen(BenchStep(precision=("fp32",), only=("bare bf1",)), CPU)


@pytest.mark.parametrize("options", [{"batch": 32}, {"batch": 40}, {"micro_batch": 64}])
def test_micro_batches_of_a_recipe_are_measured_where_a_step_has_several(options):
    names = [form.name for form in step.chosen(BenchStep(precision=("fp32",), **options), GPU)]
    assert not [name for name in names if "micro-batch" in name]


class Queue:
    """A GPU that works on a step for 50 ms, and a clock: launching takes 1 ms, and waits while the queue holds one step."""

    def __init__(self) -> None:
        self.now = self.idle_at = 0.0

    def step(self) -> None:
        self.now = max(self.now + 0.001, self.idle_at)
        self.idle_at = max(self.now, self.idle_at) + 0.05

    def wait(self) -> None:
        self.now = max(self.now, self.idle_at)


def test_the_time_of_launching_excludes_the_wait_for_steps_before(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(step.time, "perf_counter", lambda: queue.now)
    queue.step()  # what the device still does when the measurement begins
    assert step.launch_ms(queue.step, queue.wait) == pytest.approx(1)


def test_the_capture_of_a_graph_is_not_measured():
    with pytest.raises(UserError, match=r"--warmup 3: step 4 captures CUDA graphs .* pass --warmup 4 or more"):
        step.chosen(BenchStep(precision=("fp32",), warmup=3), GPU)
    assert step.chosen(BenchStep(precision=("fp32",), warmup=4), GPU)
    assert step.chosen(BenchStep(precision=("fp32",), warmup=1), CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps and --rounds must be positive"),
        ({"batch": 8, "micro_batch": 3}, "micro"),
        ({"size": 4}, "train"),
        ({"batch": 0}, "batch"),
    ],
)
def test_options_out_of_range_measure_no_step(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        step.run(BenchStep(out=tmp_path, device="cpu", **options), print)


def test_a_step_is_measured(tmp_path):
    small = ("--model", "shufflenet_v2_x0_5", "--batch", "4", "--micro-batch", "2", "--size", "32", "--precision", "fp32")
    done = worldsize("bench", "step", *small, "--steps", "2", "--warmup", "1", "--rounds", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "runs/bench-step-1/results.jsonl").read_text().splitlines()]
    order = ["torchvision fp32 contiguous", "bare fp32", "worldsize fp32", "worldsize fp32 contiguous"]
    assert [r["form"] for r in results] == order + order[::-1]
    assert all(r["images_per_s"] > 0 for r in results)
    assert (tmp_path / "runs/bench-step-1/table.md").read_text().rstrip() in done.stdout

"""The number formats of GPUs, tested where a CPU can compute them or refuses them."""

from __future__ import annotations

import threading

import pytest
import torch

from worldsize import cli
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.training import precision

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
def test_fp32_is_fp32_and_so_are_sums(name):
    products = torch.backends.cuda.matmul
    before = precision._rules_now()
    try:
        precision._Rules(True, False, True, True).set()
        precision.Precision(name, GPU).apply()
        assert torch.backends.cudnn.allow_tf32 == products.allow_tf32 == (name == "tf32")
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
    finally:
        before.set()


def test_threads_with_other_formats_take_turns(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen: list[bool] = []

    def compute(name: str) -> None:
        for _ in range(50):
            with precision.Precision(name, GPU).applied():
                seen.append(torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == (name == "tf32"))

    threads = [threading.Thread(target=compute, args=(name,)) for name in ("fp32", "tf32", "fp32", "tf32")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 200 and all(seen)
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "fp16"), "--precision fp16 is for GPUs, and torch finds none here: use bf16 or fp32, or add"),
        (("--precision", "tf32"), "--precision tf32 is a format of GPUs, and this run computes on a CPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_formats_of_gpus_are_refused_on_a_cpu(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "digits", *arguments]) == 64
    assert message in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "capability", "refused"), [("bf16", 7, True), ("tf32", 7, True), ("bf16", 8, False)])
def test_a_gpu_without_the_units_is_refused(monkeypatch, name, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    if refused:
        with pytest.raises(UserError, match=f"--precision {name}: Tesla T4 has no units for it .* use fp16 or fp32"):
            precision.resolve(Recipe(precision=name), GPU)
    else:
        assert precision.resolve(Recipe(precision=name), GPU).name == name


@pytest.mark.parametrize(
    ("capability", "compression", "chosen"),
    [(6, "none", "fp32"), (7, "none", "fp16"), (7, "powersgd", "fp32"), (8, "none", "bf16"), (9, "powersgd", "bf16")],
)
def test_auto_is_the_fastest_format_of_the_gpu(monkeypatch, capability, compression, chosen):
    """PowerSGD does not work with a loss scale."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 5))
    recipe = Recipe.model_validate({"parallel": {"strategy": "ddp", "compression": compression}})
    assert precision.resolve(recipe, GPU).name == chosen

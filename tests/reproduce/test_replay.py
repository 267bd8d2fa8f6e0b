"""What a replay shows of steps that diverged, were mixed or were of other processes, and where it writes its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Batch
from worldsize.reproduce import page
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision
from worldsize.training.step_recorder import StepRecorder

CPU = torch.device("cpu")


def recorded(folder: Path, recipe: Recipe, batch: Batch, teacher: torch.nn.Module | None = None) -> tuple:
    """What the recorder writes of one micro-batch, and the losses that the forward pass returned."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))
    objective = Objective(network, Normalise(recipe.data, CPU, torch.float32), Precision("fp32", CPU), recipe, None, teacher)
    losses, logits = objective(batch.pixels, batch.labels, batch.mix)

    class Names:
        def name(self, i: int) -> str:
            return str(i)

    recorder = StepRecorder(folder, 1, 1, 0, Names(), ["zero", "one", "two"])
    recorder.forward(batch, losses, logits, objective)
    recorder.before_update(network)
    recorder.after_update(1, network)
    return page.read_step(folder, 1, 1), losses.detach().double().numpy()


def test_the_images_of_a_replay_are_mixed_as_those_of_the_step(tmp_path):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8))
    # An image of which a quarter is the partner's, and otherwise 70 % its own.
    mix = torch.tensor([[0.4, 0.7, 0.0, 0.0, 4.0, 4.0]]).repeat(4, 1)
    recipe = Recipe(micro_batch=4, global_batch=4)
    seen, losses = recorded(tmp_path, recipe, Batch(pixels, torch.tensor([0, 1, 2, 0]), np.arange(4), mix))
    own, partner = pixels.double().numpy(), pixels.roll(1, 0).double().numpy()
    expected = 0.7 * own + 0.3 * partner
    expected[:, :4, :4] = partner[:, :4, :4]
    assert np.abs(seen.arrays["pixels"] - expected).max() <= 0.501
    np.testing.assert_array_equal(seen.arrays["labels"], [0, 0, 1, 2])  # those of the larger part
    np.testing.assert_array_equal(seen.arrays["losses"], losses)
    assert seen.classes == ["zero", "one", "two"]


def test_the_losses_of_a_replay_include_the_teacher(tmp_path):
    recipe = Recipe.model_validate({"micro_batch": 4, "global_batch": 4, "loss": {"teacher": "a.safetensors"}})
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8))
    teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))
    batch = Batch(pixels, torch.tensor([0, 1, 2, 0]), np.arange(4), None)
    seen, losses = recorded(tmp_path, recipe, batch, teacher)
    np.testing.assert_array_equal(seen.arrays["losses"], losses)


def test_a_page_needs_no_checkpoint_of_the_run_and_shows_what_is_not_a_number_first(tmp_path):
    """The newest checkpoint may be damaged."""
    arrays = {
        "pixels": np.zeros((2, 2, 2, 3), np.uint8), "names": np.array(["fine", "broken"]), "labels": np.array([0, 1]),
        "predictions": np.array([0, 0]), "losses": np.array([0.5, np.nan]), "probabilities": np.array([0.5, 0.5]),
    }  # fmt: skip
    images = page._images(page.Seen(arrays, ["zero", "one"], {}))
    assert [(image.name, image.label) for image in images] == [("broken", "one"), ("fine", "zero")]

"""What a replay shows of steps that diverged, were mixed or were of other processes, and where it writes its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from eight_steps import EIGHT_STEPS
from full_disk import files_up_to
from processes import records, worldsize
from worldsize import cli
from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Batch
from worldsize.errors import Diverged, UserError
from worldsize.reproduce import page, replay, scratch_runs
from worldsize.reproduce.training_process import ComputationFailed
from worldsize.runs.run_folder import RunFolder
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision
from worldsize.training.step_recorder import StepRecorder

CPU = torch.device("cpu")
# Eight steps of digits per epoch.
SETTINGS = (*EIGHT_STEPS, "--epochs", "2")


@pytest.fixture(scope="module")
def diverged(ranks) -> Path:
    """A run without a checkpoint, whose loss became NaN; do not modify."""
    ranks(1).run("train", "digits", *SETTINGS, "--name", "nan", "--optimizer.lr", "1e30", "--max-steps", "4", code=76)
    return ranks.cwd / "runs" / "nan"


def test_the_step_that_diverged_is_replayed_without_a_checkpoint(diverged, tmp_path):
    step = next(line["step"] for line in records(diverged, "step") if line["loss"] is None)
    done = worldsize("replay", diverged, "--step", str(step), "--from-start", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {step}: bit-identical to metrics.jsonl" in done.stdout
    assert "nan" in (tmp_path / f"nan-step-{step}.html").read_text()


def test_without_a_checkpoint_the_remedy_is_to_compute_from_the_start(diverged, fails):
    assert "has no checkpoint before step 2. Pass --from-start" in fails("replay", diverged, "--step", "2")
    assert replay._start(RunFolder(diverged), 1, from_start=False) == (0, None)


@pytest.mark.parametrize(("code", "last", "accepted"), [(76, 2, True), (76, 3, False), (66, 2, False)])
def test_a_training_that_ends_with_the_loss_counts_if_it_has_the_step(tmp_path, monkeypatch, code, last, accepted):
    def fail(*arguments):
        scratch_runs.folder_of_steps(tmp_path).path.mkdir()
        lines = [json.dumps({"kind": "step", "step": step, "loss": None}) + "\n" for step in (1, 2)]
        scratch_runs.folder_of_steps(tmp_path).metrics.write_text("".join(lines))
        raise ComputationFailed("the loss is nan", code)

    monkeypatch.setattr(scratch_runs, "compute_again", fail)
    if accepted:
        assert len(replay._again(RunFolder(tmp_path), None, last, 1, tmp_path)) == 2
        return
    with pytest.raises(ComputationFailed):
        replay._again(RunFolder(tmp_path), None, last, 1, tmp_path)
    assert Diverged.exit_code == 76


@pytest.mark.parametrize("command", [("audit",), ("replay", "--step", "1")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(diverged, fails, command):
    said = fails(command[0], diverged, *command[1:], "--out", "nodir/file")
    assert "--out nodir/file: no such folder" in said


def test_a_page_is_named_after_the_run_in_the_current_folder(diverged, tmp_path, monkeypatch, capfd):
    run = shutil.copytree(diverged, tmp_path / "nan")
    (run / "nan-step-1.html").mkdir()  # so that nothing is computed
    monkeypatch.chdir(run)
    assert cli.main(["replay", ".", "--step", "1"]) == 64
    assert "--out nan-step-1.html is a folder" in capfd.readouterr().err


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
    np.testing.assert_allclose(seen.arrays["shares"], 0.6, rtol=1e-6)
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
        "shares": np.array([1.0, 0.7]),
    }  # fmt: skip
    images = page._images(page.Seen(arrays, ["zero", "one"], {}))
    assert [(image.name, image.label, image.share) for image in images] == [("broken", "one", "70%"), ("fine", "zero", "")]


def test_a_full_disk_of_temporary_files_is_named(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "model.safetensors").write_bytes(bytes(1000))
    with files_up_to(100), pytest.raises(UserError, match=r"cannot write .*/b/model\.safetensors .*too large.*with TMPDIR"):
        scratch_runs._copy(tmp_path / "step-00000001", tmp_path / "b")

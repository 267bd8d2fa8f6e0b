"""A user's mistake: one message that says what, where and what would be right; code 64; nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from folders import folder_recipe, images
from paths import SMALL_NETWORK
from processes import environment, losses, newest, records, worldsize
from worldsize import cli

QUICK = ("--model.name", SMALL_NETWORK, "--max-steps", "2", "--global-batch", "8", "--micro-batch", "8")

LARGER_VALIDATION = ("--data.val-crop-size", "48", "--data.val-resize-size", "48")
GROWING = (
    *("--data.train-crop-size", "40", "--data.train-crop-sizes", "32", "40"),
    *("--data.train-crop-epochs", "0", "3"),
)


# Commands with a path or the name of a recipe as their last word.
WITH_PATHS = [
    *(words.split() for words in ("train", "tune", "init", "eval", "predict a", "labels", "runs", "compare a", "report")),
    *(words.split() for words in ("explain", "prove", "audit", "replay --step 1", "plan", "export --to timm --out a")),
    *(words.split() for words in ("recipes", "recipes import", "render", "data verify", "data info", "data pack --out a")),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tain", "digits"], "unknown command 'tain'; did you mean 'train'?"),
        (["train"], "RECIPE is required"),
        (["train", "digts"], "did you mean 'digits'?"),
        (["train", "none.yaml"], "cannot read the recipe none.yaml"),
        # Since Python 3.14, no file exists under a name that is too long; before, asking for one is an error.
        (["train", "a" * 300], "no recipe is called 'aaa" if sys.version_info >= (3, 14) else "aaa...: File name too long"),
        (["eval", "a" * 300], "aaa...: File name too long"),
        (["train", "digits", "--augment.mixup", "1e-320"], "must be 0, or between 1e-30 and 1e+30 in size"),
        (["train", "digits", "--optimizer.weight-decay", "1e39"], "weight_decay 1e+39: must be 0, or between"),
        (["train", "digits", "--data.sampling-weights", *["1e308"] * 10], "sampling_weights 1e+308: must be 0, or between"),
        (["train", "digits", "--model.nam", "resnet18"], "--model.name"),
        (["train", "digits", "--epochs", "many"], "--epochs"),
        (["train", "digits", "--optimizer.betas", "0.9", "1"], "optimizer.betas.1: Input should be less than 1"),
        (["train", "digits", "--epochs", "0"], "epochs: Input should be greater than or equal to 1"),
        (["train", "digits", "--micro-batch", "48"], "nearest are 48 and 96"),
        (["train", "digits", "--micro-batch", "96"], "global_batch 64 is not a multiple of micro_batch 96: the least is 96"),
        (["train", "digits", "--procs", "3"], "World sizes that fit: 1, 2"),
        (["train", "digits", "--procs", "0"], "--procs 0: must be at least 1"),
        (["train", "digits", "--model.name", "resnet51"], "did you mean resnet50 or resnet"),
        (["train", "digits", "--model.name", "vgg11", "--model.stem", "cifar"], "use --model.stem imagenet"),
        (["train", "digits", "--model.name", "vit_b_16"], "requires images of 224 pixels, not 32"),
        (["train", "digits", "--model.name", "alexnet"], "does not support images of 32 pixels"),
        (
            ["train", "digits", "--model.name", "timm:vit_tiny_patch16_224", *LARGER_VALIDATION],
            "does not support images of 48 pixels (Input height (48) doesn't match model (32).): set --data.train-crop-size",
        ),
        (
            ["train", "digits", *GROWING],
            "train_crop_sizes 40 is not a multiple of data.train_crop_step 32, to which sizes are rounded: set it to 32, "
            "or set the step to 8",
        ),
        (["train", "digits", "--model.weights", "gone.pth"], "gone.pth: file not found"),
        (["train", "digits", "--global-batch", "2048"], "lower --global-batch to at most 1437"),
        (["train", "digits", "--parallel.strategy", "ddp"], "add --procs 2"),
        (["train", "digits", "--device", "cuda"], "torch finds no GPU"),
        (["train", "digits", "--micro-batch", "1"], "--micro-batch 2 or more"),
        (["train", "digits", "--name", "a/b"], "is not a folder name"),
        (["train", "digits", "--name", 300 * "a"], "has 300 characters: use at most 200"),
        (
            ["train", "digits", "--schedule.warmup-epochs", "12"],
            "add --schedule.warmup-epochs 0, or set --epochs to at least 13",
        ),
        (["train", "imagenet"], "--data.root FOLDER"),
        (["train", "imagenet", "--data.root", "gone"], "gone: no such folder in /"),
        (["train", "cifar10", "--data.root", "."], "--data.download"),
        (["train", "--resume", "gone"], "run gone does not exist"),
        (["train", "--resume", "."], "is not a run folder"),
        (["eval"], "RUN or CHECKPOINT is required"),
        (["eval", "gone"], "run gone does not exist"),
        *(([*words, ""], "an argument is empty; is the shell variable set?") for words in WITH_PATHS),
        (["export", "gone", "--to", "timm", "--out="], "--out is empty; is the shell variable set?"),
        (["agent", "--id", "a", "--", "train", ""], "an argument is empty; is the shell variable set?"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(fails, arguments, expected):
    if "cuda" in arguments:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    message = fails(*arguments)
    assert expected in " ".join(message.split()) or expected in message


def test_a_python_without_the_dependencies_is_named(tmp_path):
    without = "import sys; sys.modules['tyro'] = None; from worldsize import cli; sys.exit(cli.main(['train', 'digits']))"
    done = subprocess.run(
        [sys.executable, "-c", without],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 64
    assert done.stderr.startswith(f"worldsize: {sys.executable} has no module tyro, which worldsize requires: install ")
    assert done.stderr.count("\n") == 1


def test_a_run_in_place_of_a_recipe_is_named(fails, tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "recipe.yaml").write_text("base: digits\n")
    message = fails("train", "a run")
    assert "a run is a run, not a recipe: continue it with --resume 'a run'" in message
    assert "pass its recipe, 'a run/recipe.yaml'" in message


def test_a_path_with_a_nul_character_is_refused(fails, tmp_path):
    (tmp_path / "own.yaml").write_text('base: "dig\\0its"\n')
    assert "a path or a name contains a NUL character" in fails("train", "own.yaml")


def test_an_unknown_key_in_a_file_names_the_nearest(fails, tmp_path):
    (tmp_path / "r.yaml").write_text("base: digits\noptimizer: {learning_rate: 1}\nmodel: {nam: resnet18}\n")
    message = fails("train", "r.yaml")
    assert "unknown setting 'model.nam'; did you mean 'model.name'?" in message
    assert "optimizer.learning_rate" in message


@pytest.mark.parametrize(
    ("train", "val", "expected"),
    [
        ({}, {}, "does not have the expected layout"),
        ({"cat": 3}, {"cat": 3}, "has only one class, 'cat': training a classifier requires at least two. Add"),
        ({"cat": 3, "dog": 3}, {"cat": 3, "dgo": 3}, "only in train: dog; only in val: dgo. Rename or remove"),
        ({"cat": 3, "dog": 0}, {"cat": 3, "dog": 3}, "dog contains no images: add some"),
        ({"cat": 3, "dog": 3}, {}, "missing: val"),
    ],
)
def test_folders_that_cannot_be_trained_on(fails, tmp_path, train, val, expected):
    root = tmp_path / "images"
    root.mkdir()
    images(root, train, val)
    assert expected in fails("train", folder_recipe(tmp_path, root))


def test_a_taken_name_is_refused_and_nothing_in_it_changes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert cli.main(["train", "digits", "--name", "mine"]) == 64
    assert "choose another --name" in capfd.readouterr().err
    assert list((tmp_path / "runs" / "mine").iterdir()) == []


def test_an_output_that_cannot_be_written(fails, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file is a file" in fails("train", "digits", "--out", "file/runs")
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "cannot write to" in fails("train", "digits", "--out", "locked/runs")


def test_too_many_broken_images_stop_the_run_and_few_are_named_and_replaced(tmp_path):
    root = images(tmp_path / "images", {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3})
    (root / "train" / "dog" / "005.png").write_bytes(b"not an image")
    recipe = folder_recipe(tmp_path, root)
    stopped = worldsize("train", recipe, "--name", "a", "--max-steps", "3", cwd=tmp_path)
    assert stopped.returncode == 65
    assert "1 of 24 images cannot be decoded, more than the allowed 0.10%" in stopped.stderr
    allowed = worldsize("train", recipe, "--name", "b", "--max-steps", "3", "--data.max-broken", "0.05", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr
    assert allowed.stderr.count("dog/005.png") == 1
    assert records(tmp_path / "runs" / "b", "step")[-1]["broken"] == 1
    assert "dog/005.png" in (tmp_path / "runs" / "b" / "log.txt").read_text()


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(tmp_path):
    settings = ("--optimizer.lr", "1e12", "--schedule.name", "constant", "--schedule.warmup-epochs", "0")
    more = ("--max-steps", "40", "--checkpoint.every-steps", "1", "--precision", "fp32", "--track.every-seconds", "0")
    stopped = worldsize("train", "digits", *QUICK, *settings, *more, "--name", "a", cwd=tmp_path)
    assert stopped.returncode == 76, stopped.stdout + stopped.stderr
    run = tmp_path / "runs" / "a"
    step = int(stopped.stderr.split("at step ")[1].split(" ")[0])
    assert str(newest(run).relative_to(tmp_path)) in stopped.stderr
    assert int(newest(run).name[5:]) < step


def test_a_full_disk_costs_a_warning_and_nothing_else(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        # One checkpoint of this model has 3 MB: the first fits on the disk, the second does not beside it.
        words = (*QUICK, "--model.name", "shufflenet_v2_x0_5", "--checkpoint.every-steps", "1")
        done = worldsize("train", "digits", *words, "--out", disk / "runs", "--name", "a", cwd=tmp_path)
        assert done.returncode == 74, done.stdout + done.stderr
        assert "training continues" in done.stderr
        assert "Last good checkpoint:" in done.stderr
        assert "step-00000001" in done.stderr
        assert f"{disk}/runs/a/checkpoints/step-00000002.tmp-" in done.stderr and "No space left on device" in done.stderr
        assert f"worldsize train --resume {disk}/runs/a" in done.stderr
        assert len(losses(disk / "runs" / "a")) == 2
        kept = list((disk / "runs" / "a" / "checkpoints").iterdir())
        assert [path.name for path in kept] == ["step-00000001"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_was_deleted_or_is_a_loop_of_links_is_named(tmp_path, monkeypatch, fails):
    (tmp_path / "loop").symlink_to("loop")
    assert "loop: Too many levels of symbolic links" in fails("eval", "loop")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["train", "digits", "--out", str(tmp_path / "runs")]) == 64
    command = [sys.executable, "-m", "worldsize", "recipes"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    monkeypatch.chdir(tmp_path)
    assert done.returncode == 64
    assert "worldsize: the current folder does not exist any more" in done.stderr


def test_a_port_in_use_names_the_remedy(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        done = worldsize("train", "digits", cwd=tmp_path, MASTER_PORT=str(taken.getsockname()[1]), **env)
    assert done.returncode == 64
    assert "is in use" in done.stderr
    assert "MASTER_PORT" in done.stderr


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    done = worldsize("train", "digits", *QUICK, "--name", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    other = worldsize("eval", "runs/a", "--model.name", "mobilenet_v3_small", cwd=tmp_path)
    assert other.returncode == 66
    assert "does not fit mobilenet_v3_small" in other.stderr
    resumed = worldsize(
        "train",
        "--resume",
        "runs/a",
        "--model.name",
        "mobilenet_v3_small",
        "--allow-changes",
        "--max-steps",
        "3",
        cwd=tmp_path,
    )
    assert resumed.returncode == 66
    assert "belongs to another model" in resumed.stderr and len(resumed.stderr) < 1000
    # The run is as before.
    assert worldsize("train", "--resume", "runs/a", "--max-steps", "3", cwd=tmp_path).returncode == 0


def test_a_changed_data_set_is_noticed(tmp_path):
    root = images(tmp_path / "images", {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3})
    recipe = folder_recipe(tmp_path, root)
    assert worldsize("train", recipe, "--name", "a", cwd=tmp_path).returncode == 0
    (root / "train" / "cat" / "000.png").rename(root / "train" / "dog" / "000b.png")
    done = worldsize("train", "--resume", "runs/a", "--max-steps", "3", cwd=tmp_path)
    assert done.returncode == 64
    assert "the dataset: was 24+6 images" in done.stderr


def test_workers_tell_their_failure_once_with_its_own_code(tmp_path):
    root = images(tmp_path / "images", {"cat": 3}, {"cat": 3})
    done = worldsize("train", folder_recipe(tmp_path, root), "--procs", "2", cwd=tmp_path)
    assert done.returncode == 64
    assert done.stderr.count("has only one class") == 1
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("[!.]*"))


def test_help_needs_no_torch(tmp_path):
    code = (
        "import sys; from worldsize.cli import main; main(['--help']); print('torch' in sys.modules, 'tyro' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"
    helped = worldsize("train", "digits", "--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert "--data.train-crop-size" in helped.stdout

"""Computing steps of a run again: replay, audit."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from eight_steps import EIGHT_STEPS
from forging import rewrite_state, seal
from processes import records, worldsize
from worldsize import cli
from worldsize.checkpoint import list_checkpoints
from worldsize.checkpoint.retention import thinned
from worldsize.config.recipe import Data, Recipe
from worldsize.data.datasets.digits import open_dataset
from worldsize.data.images.crops import PadCrop
from worldsize.data.sampling.random_numbers import Use, uniforms
from worldsize.reproduce import promise, replay
from worldsize.reproduce.promise import Promise
from worldsize.runs import step_hashes

# Eight steps of digits per epoch; checkpoints after steps 8, 16 and 24.
SETTINGS = (*EIGHT_STEPS, "--epochs", "3", "--checkpoint.every-epochs", "1", "--checkpoint.history", "all")


@pytest.fixture(scope="module")
def finished(ranks) -> Path:
    """A finished run of one process; do not modify."""
    ranks(1).run("train", "digits", *SETTINGS, "--name", "finished")
    return ranks.cwd / "runs" / "finished"


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def audit(run: Path, capsys, *arguments: str) -> tuple[int, str]:
    before = contents(run)
    code = cli.main(["audit", str(run), *arguments])
    assert contents(run) == before
    return code, capsys.readouterr().out


# Records


def test_checkpoints_and_the_result_have_the_head_of_the_chain(finished):
    steps = records(finished, "step")
    assert len({step["samples"] for step in steps}) == len(steps) == 24
    for path in list_checkpoints(finished / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        assert state["chain"] == steps[state["step"] - 1]["chain"]
    assert json.loads((finished / "result.json").read_text())["chain"] == steps[-1]["chain"]


@pytest.mark.parametrize("name", step_hashes.COVERED)
def test_a_link_covers_each_number(finished, name):
    step = records(finished, "step")[3]
    changed = step | {name: step[name] + ("0" if name == "samples" else 1e-9)}
    assert step_hashes.link("head", changed) != step_hashes.link("head", step) != step_hashes.link("other", step)


@pytest.mark.parametrize("every", [1, 22, 1000])
def test_thinning_keeps_few_checkpoints_and_the_more_the_newer(tmp_path, every):
    kept: list[Path] = []
    for step in range(every, every * 300, every):
        kept = thinned([*kept, tmp_path / f"step-{step:08d}"], step)
        ages = sorted(step - int(path.name.removeprefix("step-")) for path in kept)
        assert len(ages) <= 20
        assert (ages[0], ages[-1]) == (0, step - every)  # the last one and the first one
        assert all(older <= 2 * max(newer, every) for newer, older in itertools.pairwise(ages))


# audit


def test_an_audit_of_an_untouched_run_certifies_it(run, capsys, tmp_path):
    code, output = audit(run, capsys, "--windows", "0", "--out", str(tmp_path / "certificate.json"))
    assert code == 0, output
    assert "CONSISTENT" in output and "24, of which 24 have a fingerprint" in output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["chain"] == records(run, "step")[-1]["chain"]
    weights = run / "checkpoints" / "step-00000024" / "model.safetensors"
    assert certificate["checkpoints"]["step-00000024"] == hashlib.sha256(weights.read_bytes()).hexdigest()


def edit_line(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"step": 11,' in line)
    loss = json.loads(lines[at])["loss"]
    lines[at] = lines[at].replace(f'"loss": {loss}', f'"loss": {loss - 0.01}')
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return "step 11 in metrics.jsonl was changed"


def skip_step(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 12,' not in line))
    return "step 12 is missing"


def edit_recipe(run: Path) -> str:
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("label_smoothing: 0.1", "label_smoothing: 0.0"))
    assert (run / "recipe.yaml").read_text() != text
    return "recipe.yaml is not the recipe"


def other_data(run: Path) -> str:
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text)
    for path in list_checkpoints(run / "checkpoints"):
        rewrite_state(path, lambda state: state["data"].update(train="0" * 64))
    return "the dataset is not the one"


def swap_checkpoint(run: Path) -> str:
    shutil.rmtree(run / "checkpoints" / "step-00000016")
    shutil.copytree(run / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000016")
    rewrite_state(run / "checkpoints" / "step-00000016", lambda state: state.update(step=16, epoch=0, epoch_step=16))
    return "step-00000016 belongs to another run"


def add_initial_checkpoint(run: Path) -> str:
    shutil.copytree(run / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000000")
    rewrite_state(
        run / "checkpoints" / "step-00000000", lambda state: state.update(step=0, epoch=0, epoch_step=0, evaluated_step=-1)
    )
    return "step-00000000 belongs to another run"


def move_checkpoint(run: Path) -> str:
    rewrite_state(run / "checkpoints" / "step-00000008", lambda state: state.update(step=9))
    return f"{run / 'checkpoints' / 'step-00000008' / 'state.json'}: step is 9, in a folder that is called step-00000008"


def edit_result(run: Path) -> str:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"chain": "0" * 64}))
    return "result.json does not belong"


def remove_fingerprint(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[10] = re.sub(r', "chain": "[0-9a-f]+"', "", lines[10])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return f"step {json.loads(lines[10])['step']} in metrics.jsonl was changed"


def remove_all_fingerprints(run: Path) -> str:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r', "chain": "[0-9a-f]+"', "", text))
    return "step-00000008 belongs to another run, or metrics.jsonl was changed"


def damage_checkpoint(run: Path) -> str:
    path = run / "checkpoints" / "step-00000008" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return f"{path.parent}: optimizer.safetensors is damaged"


FORGERIES = (
    *(edit_line, skip_step, remove_fingerprint, remove_all_fingerprints),
    *(edit_recipe, other_data, swap_checkpoint, add_initial_checkpoint, move_checkpoint),
    *(damage_checkpoint, edit_result),
)


@pytest.mark.parametrize("forge", FORGERIES)
def test_an_audit_finds_what_was_changed(run, capsys, forge):
    expected = forge(run)
    code, output = audit(run, capsys, "--windows", "0")
    assert code == 1
    assert f"INCONSISTENT: {expected}" in output


def test_a_run_without_fingerprints_is_audited_as_far_as_it_is_recorded(run, capsys):
    """As runs of older versions."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plain = [{k: v for k, v in line.items() if k not in ("chain", "samples")} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain))
    for path in list_checkpoints(run / "checkpoints"):
        rewrite_state(path, lambda state: state.pop("chain"))
    code, output = audit(run, capsys, "--windows", "0")
    assert code == 0, output
    assert "of which 0 have a fingerprint (the others: not recorded)" in output


@pytest.mark.slow
def test_an_audit_computes_windows_again(run, tmp_path):
    done = worldsize("audit", run, "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"window +steps (\d+ to \d+)", done.stdout) == ["1 to 8", "9 to 16", "17 to 24"]
    forged = run / "checkpoints" / "step-00000016"
    weights = bytearray((forged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (forged / "model.safetensors").write_bytes(weights)
    seal(forged)
    done = worldsize("audit", run, cwd=tmp_path)
    assert done.returncode == 1
    assert "INCONSISTENT: step-00000016/model.safetensors is not what its steps compute" in done.stdout


@pytest.mark.slow
def test_steps_of_other_processes_are_compared_up_to_rounding(run, tmp_path):
    """As those of a GPU without --deterministic are."""
    done = worldsize("audit", run, "--procs", "2", "--windows", "1", "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"window +steps \d+ to \d+: the same samples, the same numbers up to rounding \(0.0001\); after", done.stdout
    )
    assert "CONSISTENT up to rounding: the records agree; bits are not promised, because 2 processes computed" in done.stdout
    done = worldsize("replay", run, "--step", "18:20", "--procs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical" in done.stdout or "up to rounding (0.0001): this holds" in done.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wrong = [line | {"loss": 1.01 * line["loss"]} if line.get("step") == 17 else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in wrong))
    done = worldsize("replay", run, "--step", "18:20", "--procs", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "from step 17, loss is" in done.stdout and "up to rounding (0.0001): this does not hold" in done.stdout


GPU = {"device": "NVIDIA H100 80GB HBM3", "instructions": "AVX512", "threads": None, "cuda": "12.8", "driver": "550.54.15"}


def on_gpu(run: Path) -> dict:
    """Let environment.json say that the run was on a GPU."""
    environment = json.loads((run / "environment.json").read_text())
    environment |= {"device": GPU["device"], "hardware": GPU, "precision": "bf16"}
    (run / "environment.json").write_text(json.dumps(environment))
    return environment


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_run_of_a_gpu_is_computed_again_on_a_gpu_only(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    on_gpu(run)
    assert cli.main(["audit", str(run), "--windows", "0"]) == 0
    said = capfd.readouterr().out
    assert "the bits may differ: device: was NVIDIA H100 80GB HBM3, is none" in said
    assert "the bits may differ: driver: was 550.54.15, is" in said
    for arguments in (["audit", str(run)], ["replay", str(run), "--step", "20"]):
        assert cli.main(arguments) == 64
        said = capfd.readouterr().err
        assert "was trained on a GPU (NVIDIA H100 80GB HBM3), and torch finds none here: use a machine" in said
        assert ("--windows 0" in said) == (arguments[0] == "audit")


def test_another_number_of_threads_is_named(run, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, said = audit(run, capsys, "--windows", "0")
    assert re.search(r"the bits may differ: threads: was \d+, is 7", said)


@pytest.mark.parametrize(
    ("strategy", "deterministic", "procs", "says"),
    [
        ("auto", False, 1, "the same samples, the same numbers up to rounding (0.02)"),
        ("auto", True, 1, "the same bits"),
        ("auto", True, 2, "the same samples, the same numbers up to rounding (0.02)"),
        ("bitwise", False, 2, "the same bits"),
        ("localsgd", True, 2, "the same samples"),
    ],
)
def test_what_is_promised_of_a_run_on_a_gpu(run, strategy, deterministic, procs, says):
    recipe = Recipe.model_validate({"deterministic": deterministic, "parallel": {"strategy": strategy}})
    assert str(promise.of(on_gpu(run), recipe, 1, procs)) == says
    recorded_on_a_cpu = {"precision": "fp32", "hardware": {"cuda": None}}
    assert not promise.of(recorded_on_a_cpu, recipe, procs, procs).no_bits


@pytest.mark.parametrize(
    ("change", "bits", "rounded"),
    [
        ({}, None, None),
        ({0: {"loss": 1 + 1e-6}}, 1, None),
        ({0: {"grad_norm": 1 + 1e-3}}, 1, None),
        ({0: {"grad_norm": 1.1}}, 1, 1),
        ({0: {"loss": 1.1}}, 1, 1),
        ({2: {"loss": 1.1}}, 3, None),  # rounding grows
        ({2: {"lr": 1 + 1e-9}}, 3, 3),
    ],
)
def test_rounding_is_told_from_other_numbers(finished, change, bits, rounded):
    recorded = records(finished, "step")
    again = [dict(step) for step in recorded]
    for at, factors in change.items():
        again[at] |= {name: again[at][name] * factor for name, factor in factors.items()}
    for kept, expected in ((Promise(), bits), (Promise("of a GPU", 0.01), rounded)):
        found = kept.broken(recorded, again)
        assert (found and found.step) == expected
    again[5]["samples"] = "0" * 16
    for tolerance in (0.01, None):
        assert Promise("of a GPU", tolerance).broken(recorded, again).name in ("samples", "lr")


# replay


@pytest.mark.slow
def test_a_replayed_step_is_bit_identical_and_its_page_shows_the_images_of_the_step(run, tmp_path):
    before = contents(run)
    done = worldsize("replay", run, "--step", "18:20", "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computing steps 17 to 20 again" in done.stdout
    assert "steps 18 to 20: bit-identical to metrics.jsonl" in done.stdout
    assert contents(run) == before
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    shown = {hashlib.sha256(pixels.tobytes()).hexdigest() for pixels in images_of(page)}
    assert shown == {hashlib.sha256(pixels.tobytes()).hexdigest() for pixels in expected_images(step=18)}
    names = re.findall(r'predicted [^\n]*\n.*\n?<span class="soft">(.*?)</span></figcaption></figure>', page)
    assert len(names) == len(set(names)) == 160


def images_of(page: str) -> list[np.ndarray]:
    encoded = re.findall(r"data:image/png;base64,([^\"]+)", page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in encoded]


def expected_images(step: int) -> np.ndarray:
    """The images of a step of `finished`, from the sample order and the crop's definition."""
    from worldsize.data.sampling.order import permute

    data = Data(name="digits", train_crop="pad", train_crop_size=32, val_resize_size=32, val_crop_size=32)
    train, crop = open_dataset(data, Path()).train, PadCrop(32, flip=False, padding=2)
    epoch, first = divmod(step - 1, 8)
    chosen = permute(0, epoch, np.arange(first * 160, (first + 1) * 160), len(train))
    return crop.batch(train.pixels[chosen], uniforms(0, Use.AUGMENT, epoch, chosen, crop.draws))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "25"), "has the steps 1 to 24, but not step 25"),
        (("--step", "0"), "steps are counted from 1"),
        (("--step", "9:8"), "must not be empty"),
        (("--step", "last"), "pass a step such as 120"),
        (("--step", "5"), "no checkpoint before step 5, only at 8, 16, 24. Pass --from-start"),
    ],
)
def test_steps_that_cannot_be_replayed_are_refused_with_a_remedy(run, tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert cli.main(["replay", str(run), *arguments]) == 64
    assert message in capfd.readouterr().err
    assert contents(tmp_path) == before


def test_an_asynchronous_run_is_not_computed_again(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("strategy: auto", "strategy: async"))
    for words in (
        ("replay", "--step", "20"),
        ("replay", "--step", "5"),
        ("replay", "--step", "5", "--from-start"),
        ("audit",),
    ):
        capfd.readouterr()
        assert cli.main([words[0], str(run), *words[1:]]) == 64
        told = capfd.readouterr()
        assert "the order of its updates depends on time" in told.err and "--from-start" not in told.err
        assert ("--windows 0" in told.err) == (words == ("audit",))
        assert told.out == ""  # nothing was begun


def test_a_run_is_not_stopped_after_a_step_that_it_has_done(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--resume", str(run), "--stop-after", "24"]) == 64
    assert "has already done 24 steps: pass a later --stop-after" in capfd.readouterr().err


def test_steps_are_numbers_or_ranges():
    assert replay.steps("7") == (7, 7)
    assert replay.steps("7:9") == (7, 9)

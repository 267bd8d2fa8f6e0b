"""The run folder: always a new one, never that of another run."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from threading import Barrier

import pytest

from worldsize.config import job_pod
from worldsize.errors import UserError
from worldsize.runs import atomic, run_folder


def test_runs_without_a_name_are_numbered(tmp_path):
    out = tmp_path / "runs"
    assert [run_folder.create(out, None, "digits").name for _ in range(3)] == ["digits-1", "digits-2", "digits-3"]
    assert run_folder.create(out, None, "cifar10").name == "cifar10-1"


def test_a_number_is_not_reused_while_a_later_one_exists(tmp_path):
    for name in ("digits-2", "digits-10", "digits-x", "digits-3b", "xdigits-99", "digits"):
        (tmp_path / name).mkdir()
    assert run_folder.create(tmp_path, None, "digits").name == "digits-11"


def test_a_stem_is_not_a_pattern(tmp_path):
    (tmp_path / "resnet-5").mkdir()
    assert run_folder.create(tmp_path, None, "res.et").name == "res.et-1"


@pytest.mark.parametrize(
    ("stem", "name"), [("my recipe", "my-recipe-1"), (".hidden", "hidden-1"), ("ü", "run-1"), ("a" * 250, "a" * 180 + "-1")]
)
def test_a_stem_becomes_a_valid_name(tmp_path, stem, name):
    assert run_folder.create(tmp_path, None, stem).name == name
    assert run_folder.name_problem(name) == ""


def test_a_named_run_gets_its_name(tmp_path):
    folder = run_folder.create(tmp_path / "deep" / "er", "My_run.2-b", "digits")
    assert folder.path == tmp_path / "deep" / "er" / "My_run.2-b"
    assert folder.path.is_dir()


def test_a_taken_name_is_refused_and_nothing_in_it_is_touched(tmp_path):
    taken = run_folder.create(tmp_path, "mine", "digits")
    taken.recipe.write_text("epochs: 3\n")
    with pytest.raises(UserError, match=r"'mine' already exists.*--resume"):
        run_folder.create(tmp_path, "mine", "digits")
    assert [p.name for p in taken.path.iterdir()] == ["recipe.yaml"]
    assert taken.recipe.read_text() == "epochs: 3\n"


def test_a_file_of_that_name_is_taken_too(tmp_path):
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(UserError, match="already exists"):
        run_folder.create(tmp_path, "mine", "digits")
    assert (tmp_path / "mine").read_text() == "notes"


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "../x", "a b", "a\n", "a\0", "ü", "a" * 300, "~", "*"]
)
def test_an_invalid_folder_name_is_refused(tmp_path, name):
    with pytest.raises(UserError):
        run_folder.create(tmp_path / "out", name, "digits")
    assert set(tmp_path.rglob("*")) <= {tmp_path / "out"}


def test_an_out_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UserError, match="is a file"):
            run_folder.create(out, None, "digits")


def test_an_out_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in (None, "mine"):
        with pytest.raises(UserError, match=r"cannot write to .*--out"):
            run_folder.check_name(tmp_path / "runs", name)
    assert not any(tmp_path.iterdir())


def test_a_volume_that_cannot_be_written_is_named_with_the_user(tmp_path, monkeypatch):
    """In a job's pod nobody passed --out, not even in the ranks of mpirun, which lack the variables of Kubernetes."""
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr(job_pod, "RECIPE", PurePosixPath(tmp_path / "recipe.yaml"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in ("/mnt/data", "/mnt", "/"))
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    user = rf"user {os.getuid()} with group {os.getgid()} cannot write to volume data"
    with pytest.raises(UserError, match=user) as error:
        run_folder.check_name(Path("/mnt/data/runs"), "mine")
    assert "--out" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_read_only_out_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="cannot write to"):
            run_folder.create(tmp_path, None, "digits")
    finally:
        tmp_path.chmod(0o700)


def test_an_out_that_is_a_dangling_link_is_refused(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError):
        run_folder.create(tmp_path / "out", None, "digits")


def test_checking_a_name_creates_nothing(tmp_path):
    run_folder.check_name(tmp_path / "runs", "mine")
    assert not any(tmp_path.iterdir())


def test_runs_that_start_together_get_different_folders(tmp_path, monkeypatch):
    together, real = Barrier(8), Path.iterdir

    def listed_by_all_before_any_continues(folder: Path) -> list[Path]:
        found = list(real(folder))
        together.wait(timeout=240)
        return found

    monkeypatch.setattr(Path, "iterdir", listed_by_all_before_any_continues)
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: run_folder.create(tmp_path / "runs", None, "digits").name, range(8)))
    assert sorted(names) == sorted(f"digits-{i}" for i in range(1, 9))


def test_only_one_of_several_runs_gets_the_same_name(tmp_path, monkeypatch):
    together, real = Barrier(6), run_folder.check_name

    def checked_by_all_before_any_continues(out: Path, name: str | None) -> None:
        real(out, name)
        together.wait(timeout=240)

    def create(_: int) -> str:
        try:
            return run_folder.create(tmp_path / "runs", "mine", "digits").name
        except UserError as error:
            return str(error)

    monkeypatch.setattr(run_folder, "check_name", checked_by_all_before_any_continues)
    with ThreadPoolExecutor(6) as pool:
        results = sorted(pool.map(create, range(6)))
    assert results.count("mine") == 1
    assert sum("already exists" in result for result in results) == 5


def test_an_existing_run_is_one_with_a_recipe(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        run_folder.open_existing(tmp_path / "gone")
    with pytest.raises(UserError, match=r"no recipe\.yaml"):
        run_folder.open_existing(tmp_path)
    (tmp_path / "recipe.yaml").write_text("epochs: 3\n")
    assert run_folder.open_existing(tmp_path).path == tmp_path


def test_a_file_is_no_run_that_does_not_exist(tmp_path):
    for name, remedy in (
        ("my base.yaml", f". To start a run with this recipe: worldsize train '{tmp_path}/my base.yaml'"),
        ("a.pt", ""),
    ):
        (tmp_path / name).write_text("epochs: 3\n")
        with pytest.raises(UserError) as refused:
            run_folder.open_existing(tmp_path / name)
        assert str(refused.value) == f"{tmp_path / name} is a file, not the folder of a run{remedy}"


def test_contents_lists_only_existing_files(tmp_path):
    folder = run_folder.RunFolder(tmp_path)
    assert folder.contents() == []
    folder.metrics.write_text("")
    folder.checkpoints.mkdir()
    assert [name for name, _ in folder.contents()] == ["checkpoints/", "metrics.jsonl"]


def test_json_is_replaced_atomically(tmp_path):
    path = tmp_path / "result.json"
    atomic.write_json(path, {"top1": 0.5})
    with pytest.raises(TypeError):
        atomic.write_json(path, {"top1": object()})
    assert json.loads(path.read_text()) == {"top1": 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_only_rank_0_always_leaves_a_log(tmp_path):
    folder = run_folder.RunFolder(tmp_path)
    with run_folder.RunLog(folder, 0), run_folder.RunLog(folder, 1):
        assert [p.name for p in tmp_path.iterdir()] == ["log.txt"]
        logging.getLogger("worldsize.test").warning("something odd")
        assert {p.name for p in tmp_path.iterdir()} == {"log.txt", "log.rank1.txt"}
    logging.getLogger("worldsize.test").warning("of the next run in this process")
    assert "something odd" in folder.log_file(1).read_text()
    assert "next run" not in folder.log_file(0).read_text()


def test_a_log_on_a_full_disk_hides_no_error(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, "worldsize")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    (tmp_path / "log.rank1.txt").mkdir()  # cannot be opened
    for rank in (0, 1):
        with pytest.raises(UserError, match="what really happened"), run_folder.RunLog(run_folder.RunFolder(tmp_path), rank):
            raise UserError("what really happened")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "expected"), [(UserError("no such class"), "no such class\n"), (KeyError("what"), "KeyError: 'what'\n")]
)
def test_a_log_ends_with_the_error_that_ended_the_run(tmp_path, caplog, error, expected):
    folder = run_folder.RunFolder(tmp_path)
    caplog.set_level(logging.INFO, "worldsize")
    with pytest.raises(type(error)), run_folder.RunLog(folder, 0):
        raise error
    assert folder.log_file(0).read_text().endswith(expected)

"""The table of commands: what it names exists, and help and completion are made from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from worldsize import cli
from worldsize.cli import completion, usage
from worldsize.cli.command import load
from worldsize.cli.commands import COMMANDS
from worldsize.config import command_line
from worldsize.errors import UserError

WITH_FLAGS = [command for command in COMMANDS if command.options]
GROUPS = sorted({" ".join(command.words.split()[:n]) for command in COMMANDS for n in range(1, len(command.words.split()))})


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code = cli.main([*words, "--help"])
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    return printed.out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_each_command_has_a_function_and_help(command, capsys):
    assert callable(load(command.function))
    assert f"usage: worldsize {command.words.split()[0]}" in help_of(capsys, *command.words.split())


@pytest.mark.parametrize("command", WITH_FLAGS, ids=lambda command: command.words)
def test_help_shows_optional_values_as_users_read_them(command, capsys):
    shown = help_of(capsys, *command.words.split())
    assert "{None}" not in shown and "None," not in shown
    assert "default: None" not in " ".join(shown.replace("│", " ").split())


@dataclass
class Options:
    """Options whose values may be of several types."""

    where: Path | int | None = None
    """A path or a number."""
    sizes: tuple[int | str, ...] | None = None
    """Sizes."""
    mode: Literal["fast", "safe"] | float | None = None
    """A mode or a number."""


def test_help_shows_each_type_of_an_optional_value(capsys):
    with pytest.raises(SystemExit):
        command_line.parse(Options, ["--help"], None, "test")
    shown = capsys.readouterr().out
    assert "--where PATH|INT" in shown and "--sizes INT|STR ..." in shown and "--mode {fast,safe}|FLOAT" in shown


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_describes_its_commands(group, capsys):
    shown = help_of(capsys, *group.split())
    for command in COMMANDS:
        assert (command.summary in shown) == command.words.startswith(f"{group} ") or command.hidden
    assert cli.main(group.split()) == UserError.exit_code


def test_the_help_lists_every_command_or_its_group(capsys):
    shown = help_of(capsys)
    for command in COMMANDS:
        assert f"worldsize {command.words.split()[0]} " in shown or command.hidden
    assert "Exit codes:" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tain digits", "unknown command 'tain'; did you mean 'train'?"),
        ("data fech", "worldsize data has no command 'fech'; did you mean 'fetch'?"),
        ("cluster volume crate x", "worldsize cluster volume has no command 'crate'; did you mean 'create'?"),
        ("bench zzz", "worldsize bench has no command 'zzz'; commands: scaling, allreduce, step, strategies, loader"),
    ],
)
def test_unknown_commands_are_named_with_the_nearest_one(words, message):
    with pytest.raises(UserError) as raised:
        usage.find(words.split())
    assert str(raised.value) == message


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["data", "--help"], ["jobs", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(words):
    program = f"import sys\nfrom worldsize import cli\ntry: cli.main({words})\nfinally: sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_each_name_of_a_command_means_one_command():
    words = [command.words for command in COMMANDS]
    assert len({*words}) == len(words)
    assert not {*words} & {*GROUPS}


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "worldsize"
    path.write_text(completion.script("bash"))
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("worldsize tra", {"train"}),
        ("worldsize cluster vol", {"volume"}),
        ("worldsize cluster volume ", {"create", "list", "delete"}),
        ("worldsize train digits --global", {"--global-batch"}),
        ("worldsize train digits --precision tf", {"tf32"}),
        ("worldsize audit RUN --win", {"--windows"}),
    ],
)
def test_bash_completes_commands_flags_and_choices(bash_script, line, expected):
    program = f"""
source {bash_script}
COMP_WORDS=({line}); [[ {line!r} == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}
$(complete -p worldsize | sed -E 's/.*-F ([^ ]+).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert {*done.stdout.split()} - {"-h", "--help"} == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_accepts_its_script(tmp_path):
    (tmp_path / "_worldsize").write_text(completion.script("zsh"))
    subprocess.run(["zsh", "-n", tmp_path / "_worldsize"], check=True)

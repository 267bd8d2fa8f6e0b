"""What README and docs contain: command lines, as a shell reads them, and links to measurements."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass

from paths import ROOT
from worldsize import cli
from worldsize.cli import usage
from worldsize.cli.command import load
from worldsize.cli.commands import COMMANDS
from worldsize.jobs.targets import TARGETS

PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "native/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
)
# Before a block that the tests do not run: <!-- not run: REASON -->
_MARK = re.compile(r"<!-- not run: (.+) -->")
_FENCE = re.compile(r"^ *```(\w*)")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``reason`` says why the tests do not run it; empty if they do."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Line:
    """A command line. ``complete``: it can be copied; otherwise the text only names a command, or leaves words out."""

    where: str
    text: str
    complete: bool = True


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    at = 0
    while at < len(lines):
        if (fence := _FENCE.match(lines[at])) is None:
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        mark = _MARK.fullmatch(next((line for line in reversed(lines[:at]) if line.strip()), ""))
        yield Block(page, at + 1, fence[1], "\n".join(lines[at + 1 : end]), mark[1] if mark else "")
        at = end + 1


def commands(block: Block) -> Iterator[Line]:
    """The command lines of a block: continued lines are joined, a here-document belongs to its command."""
    lines = iter(enumerate(block.text.splitlines(), block.line + 1))
    for number, text in lines:
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + next(lines)[1].strip()
        if (here := re.search(r"<<'(\w+)'", text)) is not None:
            text = "\n".join([text, *(line for _, line in itertools.takewhile(lambda one: one[1] != here[1], lines))])
        else:
            text = re.sub(r"(^|\s+)#.*", "", text)
        if text.strip():
            yield Line(f"{block.page}:{number}", text.strip())


def inline(page: str) -> Iterator[Line]:
    """The commands in the text of a page: `worldsize ...` and `python benchmarks/...` in backticks."""
    text = re.sub(
        r"^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), (ROOT / page).read_text("utf-8"), flags=re.M | re.S
    )
    for found in re.finditer(r"`((?:worldsize|python benchmarks|make|pip|(?:torchrun|mpirun)[^`]* worldsize) [^`]*)`", text):
        where = f"{page}:{text.count(chr(10), 0, found.start()) + 1}"
        yield Line(where, " ".join(found[1].replace("\\|", "|").split()), complete=False)


def of_help() -> Iterator[Line]:
    """The usage of each command, in all its forms, and the commands in the texts of its flags."""
    for command in COMMANDS:
        for arguments in (command.usage, *(arguments for arguments, _ in command.more)):
            for text in forms(f"worldsize {command.words} {arguments}".replace(" ...", "").strip()):
                yield Line(f"help of {command.words}", text)
        if command.options:
            source = " ".join(inspect.getsource(load(command.options)).split())
            for found in re.finditer(r"(?<!`)`(worldsize [^`]+)`", source):
                yield Line(f"help of {command.words}", found[1], complete=False)
    for found in re.finditer(r"(?:worldsize \S|torchrun -).*", usage._END):
        yield Line("worldsize --help", found[0])


def forms(text: str) -> list[str]:
    """What a usage stands for: with and without each part in brackets, and with each alternative.

    >>> forms("worldsize recipes [NAME] a|b")
    ['worldsize recipes a', 'worldsize recipes b', 'worldsize recipes NAME a', 'worldsize recipes NAME b']
    """
    if (optional := re.search(r"\[([^\[\]]*)\]", text)) is not None:
        before, after = text[: optional.start()], text[optional.end() :]
        return [form for part in ("", optional[1]) for form in forms(" ".join(f"{before}{part}{after}".split()))]
    if (word := re.search(r"\S+\|\S+", text)) is not None:
        return [form for part in word[0].split("|") for form in forms(text.replace(word[0], part, 1))]
    return [text]


# Flags --------------------------------------------------------------------------------------------------------------------

LANGUAGES = ("sh", "text", "python", "yaml")
# Of Slurm, timm, a benchmark and other programs; `--augment.` is the beginning of some.
_FOREIGN = (
    *("--array", "--cpus-per-task", "--gpus-per-node", "--mem", "--no-requeue", "--ntasks-per-node", "--signal"),
    *("--augment", "--cifar10", "--class-map", "--enable-scheme", "--help", "--nnodes", "--nproc-per-node", "--version"),
)


def flags(page: str) -> set[str]:
    """The flags that the text of a page names in backticks, as ours."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if span.startswith(("--", "worldsize "))]
    return {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", span)} - {*_FOREIGN}


@functools.cache
def known_flags() -> frozenset[str]:
    """Every flag of every command, on every target."""
    helps = [[*command.words.split(), "--help"] for command in COMMANDS if command.options]
    helps += [["train", "digits", "--on", on, "--help"] for on in TARGETS if on not in ("skypilot", "dstack")]
    helps += [["render", "digits", "--on", on, "--help"] for on in TARGETS] + [["recipes", "--help"]]
    printed = io.StringIO()
    for words in helps:
        with redirect_stdout(printed), suppress(SystemExit):
            cli.main(words)
    return frozenset(re.findall(r"--[a-z][\w.-]*\w", printed.getvalue()))


# Numbers ------------------------------------------------------------------------------------------------------------------

# Before a paragraph, list or table: <!-- measured: FILE ... --> or <!-- not measured: REASON -->
_SOURCE = re.compile(r"<!-- (measured|not measured): (.+) -->")
_UNITS = r"\d\s*(?:%|images/s|JPEGs/s|ms\b|µs|MB/s|GB/s)"
_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|\.\d)")


@dataclass(frozen=True)
class Text:
    """A paragraph, a list or a table outside of fenced blocks.

    ``files`` are those that hold its numbers; ``reason`` says why its numbers are no measurements.
    """

    where: str
    text: str
    files: tuple[str, ...] = ()
    reason: str = ""

    @property
    def numbers(self) -> list[str]:
        """Its numbers, without those of code and of names such as ResNet-50."""
        return _NUMBER.findall(self.text)

    @property
    def looks_measured(self) -> bool:
        """Whether a number has the unit of a measurement."""
        return re.search(_UNITS, self.text) is not None


def texts(page: str) -> Iterator[Text]:
    """The paragraphs, lists and tables of a page, without code and the targets of links."""
    text = (ROOT / page).read_text("utf-8")
    text = re.sub(r"^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    files, reason, line = (), "", 1
    for part in re.split(r"(\n\s*\n)", text):
        body = part.strip("\n")
        if (mark := _SOURCE.match(body)) is not None:
            files = tuple(mark[2].split()) if mark[1] == "measured" else ()
            reason = "" if files else mark[2]
            body = body[mark.end() :].strip("\n")
        body = re.sub(r"^<!--.*?-->\n*", "", body)
        if body.strip():
            plain = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", body)
            yield Text(f"{page}:{line}", plain, files, reason)
            files, reason = (), ""
        line += part.count("\n")

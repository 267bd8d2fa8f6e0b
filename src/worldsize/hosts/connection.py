"""One ssh connection to a host. The only module that starts ssh.

It starts OpenSSH, not a library such as paramiko, so that the user's configuration, agent, jump hosts and keys all work.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from worldsize.errors import UserError

LOST = 255  # ssh's exit code when the connection fails
_OPTIONS = {
    "BatchMode": "yes",  # a question could be answered on one host's terminal only
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "6",
}
# What ssh says, and what it means; first match.
_REASONS = (
    ("Host key verification failed", "has an unknown or changed host key: connect once with `ssh {host}` and check it"),
    ("Permission denied (", "refuses your key or asks for a password: set up a key with `ssh-copy-id {host}`"),
    ("Could not resolve hostname", "is unknown: check --hosts and your ssh configuration"),
    ("Connection refused", "refuses connections: is sshd running there?"),
    ("timed out", "does not answer: check that it is up and reachable"),
    ("No route to host", "does not answer: check that it is up and reachable"),
)


class Connection:
    """Runs a command on a host.

    Args:
        command: for the remote shell.
        line: called with each line of the command's output and errors, from threads.
        config: configuration file for ssh; None: the user's.

    Raises:
        UserError: there is no ssh here.
    """

    def __init__(self, host: str, command: str, line: Callable[[str], None], config: Path | None) -> None:
        self.host = host
        self._unsent = b""
        self._finished = False
        self.errors: list[str] = []
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        where = ["-F", str(config)] if config is not None else []
        # A session of its own: Ctrl-C in the terminal must reach the launcher only.
        try:
            self._process = subprocess.Popen(
                ["ssh", *where, *options, "--", host.replace("[", "").replace("]", ""), command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise UserError("ssh is not on this machine: install OpenSSH's client") from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._threads = [
            threading.Thread(target=self._read, args=(stream, line, keep), daemon=True)
            for stream, keep in ((self._process.stdout, False), (self._process.stderr, True))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, content: bytes) -> None:
        """Write to the command's stdin; `poll` writes what a full pipe does not take now."""
        self._unsent += content
        self._write()

    def offer(self, content: bytes) -> None:
        """The same, but drop the content if earlier content waits: a stalled connection must not collect it."""
        if not self._unsent:
            self.send(content)

    def finish(self) -> None:
        """End the command's stdin, after what waits."""
        self._finished = True
        self._write()

    def poll(self) -> int | None:
        """The command's exit code, or `LOST`; None while it runs."""
        self._write()
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command's end, and its last lines.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        code = self._process.wait(timeout)
        for thread in self._threads:
            thread.join(5.0)
        return code

    def kill(self) -> None:
        """End the connection."""
        self._process.kill()

    def reason(self) -> str:
        """Why the connection failed, in words."""
        # The command's own errors arrive here too.
        said = "\n".join(line for line in self.errors if line.startswith(("ssh: ", "Host key ")) or "denied (" in line)
        for text, meaning in _REASONS:
            if text in said:
                return f"{self.host} {meaning.format(host=self.host)}"
        return f"the connection to {self.host} was lost" + (f": {self.errors[-1]}" if self.errors else "")

    def _write(self) -> None:
        """Write what waits, as far as the pipe takes it without waiting."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the command has ended; its exit code says why
            self._unsent = b""
        if self._finished:
            with suppress(OSError):
                stdin.close()

    def _read(self, stream: object, line: Callable[[str], None], keep: bool) -> None:
        for content in stream:  # type: ignore[attr-defined]
            text = content.decode("utf-8", "replace").rstrip("\n")
            if keep:
                self.errors = [*self.errors[-9:], text]
            line(text)

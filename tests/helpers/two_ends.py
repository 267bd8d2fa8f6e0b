"""A transfer of files between two processes, one of them started as in a pod."""

from __future__ import annotations

import select
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from worldsize.cluster.storage import files, placing, transfer


@contextmanager
def other_end(**request):
    """Messages exchanged with the program, started as in a pod, after it has received the request."""
    arguments, program = files.pod_program()
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", bufsize=0
    ) as process:

        def write(content):
            while content:
                content = content[process.stdin.write(content) :]

        def read(count):
            content = b""
            while len(content) < count:
                assert select.select([process.stdout], [], [], 10)[0], "no output within 10 s"
                content += process.stdout.read(count - len(content)) or pytest.fail("the process closed its output")
            return content

        messages = transfer.Messages(read, write)
        write(program)
        messages.send(**request)
        yield messages
        # It waits until its last output was read, because a container's last output can be lost.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.stdin.close()
        assert process.wait(240) == 0


def download(volume: Path, path: str, target: Path, force: bool = False) -> dict:
    with other_end(root=str(volume), do="get", path=path, skip=0) as messages:
        assert messages.receive_fields()["scanned"]
        return transfer.unpack(messages.receive, target, force)


def upload(local: Path, volume: Path, path: str, force: bool = False) -> dict:
    facts = {"name": local.name, "run": placing.run_state(local), "bytes": transfer.scan(local)["bytes"]}
    with other_end(root=str(volume), do="put", path=path, replace=force, **facts) as messages:
        messages.receive_fields()
        messages.send(**transfer.pack(local, messages))
        return messages.receive_fields()

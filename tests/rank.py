"""One rank that lives for several commands: each line of its input is ``[MASTER_PORT, [ARGUMENT, ...]]``.

It answers each with a line that holds the exit code; all else that is printed goes to the error output. A word on the
command line names a function of sabotage.py that is called first.
"""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist

import sabotage
from worldsize import cli

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for rule in sys.argv[1:]:
        getattr(sabotage, rule)()
    for line in sys.stdin:
        os.environ["MASTER_PORT"], arguments = json.loads(line)
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        if dist.is_initialized():  # a run that failed leaves its group to the end of the process
            dist.destroy_process_group()
        sys.stdout.flush()
        print(code, file=answers)

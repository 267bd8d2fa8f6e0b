"""Renders a Slurm job as a batch script: plain bash, the same bytes for the same spec (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from worldsize.errors import PERMANENT, Stopped
from worldsize.launch import entry_point
from worldsize.slurm.spec import SlurmSpec

COMMENT = "worldsize"
_END = "END_OF_RECIPE"
_LIMIT_S = 90  # with less time left than this plus the grace, a stop is taken for the time limit's


def render(spec: SlurmSpec) -> str:
    """The batch script.

    One task per process: Slurm's signals reach every rank, and its exit codes are the ranks' own. The script starts the
    ranks again when one is lost, requeues the job after a preemption and at the time limit, and ends it otherwise.
    """
    return "".join(
        [
            "#!/bin/bash\n",
            *(f"#SBATCH {option}\n" for option in _options(spec)),
            _INTRODUCTION.format(folder=shlex.quote(str(spec.folder))),
            _section("Site setup: edit freely", [*spec.setup, *_exports(spec)]),
            "set -u\n",
            _variables(spec),
            f"cat > \"$job/recipe.yaml\" <<'{_END}'\n{spec.recipe}{_END}\n",
            _functions(spec),
            _loop(spec),
        ]
    )


def _options(spec: SlurmSpec) -> Iterator[str]:
    resources = spec.resources
    # Slurm replaces what begins with %.
    log = str(spec.folder).replace("%", "%%") + ("/log-%a.txt" if spec.seeds else "/log.txt")
    yield f"--job-name={spec.name}"
    yield f"--comment={COMMENT}"
    yield f'--output="{log}"'
    yield "--open-mode=append"
    yield "--requeue"
    # mpirun starts the ranks, so only the batch shell can pass a signal on. SIGTERM is what it gets from scancel.
    yield f"--signal={'B:USR1' if spec.needs_mpi else 'TERM'}@{spec.grace_s}"
    yield f"--nodes={spec.nodes}"
    yield f"--ntasks-per-node={spec.procs}"
    optional = {
        "--cpus-per-task": spec.cores_per_process,
        "--mem": None if spec.memory_mib is None else f"{spec.memory_mib}M",
        "--gpus-per-node": _gpus(spec) if resources.gpus else None,
        "--time": spec.time,
        "--partition": spec.partition,
        "--account": spec.account,
        "--qos": spec.qos,
        "--constraint": None if spec.constraint is None else f'"{spec.constraint}"',
        "--array": ",".join(map(str, spec.seeds)) or None,
    }
    yield from (f"{name}={value}" for name, value in optional.items() if value is not None)
    yield from spec.extra


def _gpus(spec: SlurmSpec) -> str:
    return f"{spec.gpu_type}:{spec.resources.gpus}" if spec.gpu_type else str(spec.resources.gpus)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"# {title}.", *lines]) + "\n\n"


def _exports(spec: SlurmSpec) -> list[str]:
    # mpirun gives its ranks a pseudo-terminal, for which rich would print colors and progress bars.
    fixed = {"PYTHONUNBUFFERED": "1"} | ({"TTY_COMPATIBLE": "0"} if spec.needs_mpi else {})
    return [f"export {name}={shlex.quote(value)}" for name, value in (*fixed.items(), *spec.env)]


def _variables(spec: SlurmSpec) -> str:
    name, folder = shlex.quote(spec.name), shlex.quote(str(spec.folder))
    lines = [
        f"out={shlex.quote(str(spec.out))}",
        f"run={name}" + ("-seed$SLURM_ARRAY_TASK_ID" if spec.seeds else ""),
        f"folder={folder}   # of this job: script, ids, log",
        "job=$folder" + ("/$SLURM_ARRAY_TASK_ID" if spec.seeds else ""),
        "id=" + ("${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if spec.seeds else "$SLURM_JOB_ID"),
        f"retries={spec.retries}   # starts in a row without a new checkpoint",
        'mkdir -p "$job"',
    ]
    return "\n".join(lines) + "\n"


def _command(spec: SlurmSpec) -> str:
    """The words of one rank, as bash."""
    words = ['train "$job/recipe.yaml" --out "$out" --name "$run" --autoresume --retries "$retries"']
    if spec.seeds:
        words.append('--seed "$SLURM_ARRAY_TASK_ID"')
    return " ".join([shlex.join(entry_point.command(spec.python)), *words])


def _start(spec: SlurmSpec) -> str:
    """The command that starts all ranks, as bash."""
    if spec.needs_mpi:
        # Rank 0 runs on this node, the first; ranks of srun find it in the variables of their step. This shell does not have
        # it in its environment, which sbatch would hand to the job that continues this one on other nodes.
        address = '-x MASTER_ADDR="${MASTER_ADDR:-$SLURMD_NODENAME}" ' if spec.nodes > 1 else ""
        # Seconds that the ranks of another node have to save after scancel, which reaches mpirun's daemon there too.
        grace = "--mca odls_base_sigkill_timeout 5"
        return f"mpirun --bind-to none --tag-output {grace} {address}-np {spec.world_size} {_command(spec)}"
    words = ["srun --label --kill-on-bad-exit=0 --wait=0"]
    if spec.cores_per_process is not None:
        words.append(f"--cpus-per-task={spec.cores_per_process}")
    if spec.container and spec.container_runtime == "pyxis":
        mounts = "$PWD:$PWD" + (",$out:$out" if spec.out.is_absolute() else "")
        words.append(
            f'--container-image={shlex.quote(spec.container)} --container-mounts="{mounts}" --container-workdir="$PWD"'
        )
    if spec.container and spec.container_runtime == "apptainer":
        gpus = "--nv " if spec.resources.gpus else ""
        out = '--bind "$out" ' if spec.out.is_absolute() else ""
        words.append(f'apptainer exec {gpus}--bind "$PWD" {out}--pwd "$PWD" {shlex.quote(spec.container)}')
    return " ".join([*words, _command(spec)])


def _functions(spec: SlurmSpec) -> str:
    # srun would kill the ranks if it got the signal; Slurm signals them itself. mpirun passes SIGUSR1 on to them and waits;
    # SIGTERM would make it kill them after a second.
    forward = '; [ -z "$ranks" ] || kill -USR1 "$ranks"' if spec.needs_mpi else ""
    return _FUNCTIONS.format(
        chain="yes" if spec.chain else "no",
        near=spec.grace_s + _LIMIT_S,
        forward=forward,
        also=f"trap 'told=yes; signalled=yes{forward}' USR1\n" if spec.needs_mpi else "",
    )


def _loop(spec: SlurmSpec) -> str:
    final = "|".join(str(code) for code in sorted(PERMANENT))
    return _LOOP.format(start=_start(spec), final=final, stopped=Stopped.exit_code)


_INTRODUCTION = """
# Trains the recipe below. Submitted and followed by `worldsize train --on slurm`. To submit it by hand, from the folder
# to which its paths are relative: mkdir -p {folder}; sbatch SCRIPT

"""

_FUNCTIONS = """
chain={chain}      # continue after the time limit: yes or no
ranks=         # process id of what runs them
cancelled=no   # whether this shell got SIGTERM: from scancel, or when Slurm ends the job; not at once when preempted
told=no        # whether it got SIGUSR1: from `worldsize stop`, when preempted, or before the time limit

trap 'cancelled=yes; signalled=yes{forward}' TERM
{also}
checkpoint() {{ ls -1 "$out/$run/checkpoints" 2>/dev/null | grep -xE 'step-[0-9]+' | sort -t - -k 2n | tail -n 1; }}

# When the time limit ends this allocation, in seconds since 1970; NONE: there is no limit; empty: Slurm does not say.
# Asked now, because a preemption changes the answer. The user's own format of times may be one that date cannot read.
ends=$(SLURM_TIME_FORMAT=standard squeue -h -j "$id" -o %e 2>/dev/null)
case $ends in ""|NONE) ;; *) ends=$(date -d "$ends" +%s 2>/dev/null) ;; esac

ends_within() {{ [ "${{ends:-NONE}}" != NONE ] && [ $((ends - $(date +%s))) -le "$1" ]; }}

finish() {{
    echo "$1" > "$job/exit"
    exit "$1"
}}

stopped() {{
    echo "worldsize: stopped; to resume, repeat its 'worldsize train', or remove $job/stop and submit it again"
}}

# The state is saved. Continue in a new allocation where that makes sense; scancel and `worldsize stop` end the job.
continue_later() {{
    if [ -e "$job/stop" ]; then
        stopped
    elif [ $cancelled = yes ] && ! ends_within 0; then
        echo "worldsize: ended by scancel, or by Slurm, which then requeues it; else submit it again to resume"
    elif ends_within {near}; then
        if [ "$chain" = yes ]; then requeue "the time limit is near"; fi
        echo "worldsize: the time limit is near; submit the job again to resume"
    elif [ "$chain" = no ] && [ -z "$ends" ]; then
        echo "worldsize: preempted, or the time limit is near: Slurm did not say when; submit the job again to resume"
    else
        requeue "preempted"
    fi
    finish "$1"
}}

requeue() {{
    local said next
    echo "worldsize: $1; the job continues later"
    if said=$(scontrol requeue "$id" 2>&1); then
        sleep 60   # Slurm ends this shell
        exit 75
    fi
    case $said in
        *pending*) exit 75 ;;   # Slurm has requeued it already
        *disabled*) ;;          # this Slurm, or this job, is not requeued: a new job begins when this one has ended
        *) echo "worldsize: $said"; finish 75 ;;
    esac
    next=$(sbatch --parsable --dependency=afterany:"$id" \\
        ${{SLURM_ARRAY_TASK_ID:+--array="$SLURM_ARRAY_TASK_ID"}} "$folder/job.sh") || finish 75
    echo "${{next%%;*}}" >> "$folder/ids"
    exit 75
}}

"""

_LOOP = """\
rm -f "$job/exit"
echo "worldsize: job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST"
starts=0
while [ ! -e "$job/stop" ]; do
    before=$(checkpoint)
    {start} &
    ranks=$!
    signalled=yes
    while [ $signalled = yes ]; do   # a signal ends bash's wait, not the ranks
        signalled=no
        wait "$ranks"
        code=$?
    done
    ranks=
    case $code in
        0) finish 0 ;;
        {stopped}) continue_later "$code" ;;
        126|127|{final}) finish "$code" ;;   # the same start would fail in the same way
    esac
    if [ $cancelled = yes ] || [ $told = yes ]; then continue_later {stopped}; fi
    if [ "$(checkpoint)" = "$before" ]; then starts=$((starts + 1)); else starts=0; fi
    if [ $starts -gt "$retries" ]; then finish "$code"; fi
    if [ ! -e "$job/stop" ]; then echo "worldsize: a rank ended with code $code; starting all ranks again"; fi
    sleep 2
done
stopped
finish {stopped}
"""

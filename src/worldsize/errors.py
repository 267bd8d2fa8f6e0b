"""Everything that can end a run early, and the exit code each one leaves with.

=====  ==========================================================================
code   meaning
=====  ==========================================================================
0      done
64     the user can mend it: recipe, command line, folders, names (do not retry)
65     the data: more broken pictures than the recipe allows
66     the checkpoints: none of them can be trusted, or they belong to another run
69     the processes of the run did not find each other, or a store does not answer (retry)
70     a defect in worldsize or a library under it (the traceback is in the log)
71     started again and again without getting any further (``--autoresume``)
74     the last state could not be saved (a full disk); older checkpoints are as they were
75     stopped by SIGTERM or Ctrl-C after saving; ``--resume`` goes on (retry)
76     the loss is no longer finite
130    a second Ctrl-C: left at once (143: a second SIGTERM)
=====  ==========================================================================

The numbers follow BSD's sysexits.h where it has a name for the case, so that a Kubernetes
``podFailurePolicy`` or a batch script can tell "try again" (75) from "mend it first" (64).
"""

from __future__ import annotations


class WorldsizeError(Exception):
    """Base of all errors whose message is written for the person who typed the command."""

    exit_code = 70


class UserError(WorldsizeError):
    """Something asked for cannot be: says what, where, and what would be right."""

    exit_code = 64


class DataError(WorldsizeError):
    """The data set is too damaged to train on."""

    exit_code = 65


class CheckpointError(WorldsizeError):
    """No checkpoint that can be trusted, or one that does not belong to this model."""

    exit_code = 66


class Unmet(WorldsizeError):
    """The other processes were not there, or left while all were meeting."""

    exit_code = 69


class StoreUnreachable(WorldsizeError):
    """A store across the network does not answer, or not any more."""

    exit_code = 69


class NoProgress(WorldsizeError):
    """Started again several times, and every time ended before the next checkpoint."""

    exit_code = 71


class NotSaved(WorldsizeError):
    """The last state could not be written; older checkpoints are as they were."""

    exit_code = 74


class Stopped(WorldsizeError):
    """A signal asked the run to stop; everything up to the last step is saved."""

    exit_code = 75


class Diverged(WorldsizeError):
    """The loss is NaN or infinite."""

    exit_code = 76


# The same again would end the same way.
PERMANENT = frozenset(kind.exit_code for kind in (UserError, DataError, CheckpointError, NoProgress, NotSaved, Diverged))

"""One line about a run that lost time."""

from __future__ import annotations

from worldsize.attribution import advice, causes, evidence
from worldsize.attribution.advice import Advice
from worldsize.config import job_pod
from worldsize.config.wording import quoted
from worldsize.errors import UserError
from worldsize.runs.run_folder import RunFolder

_MUCH = 0.05  # of the run's time, to one cause


def line(found: Advice) -> str:
    """The advice as one sentence each for the cause, the remedy and the gain."""
    gain = f" ({found.gain:+.0%})" if found.saved >= advice.WORTH else ""
    return f"{found.loss.lost:.0%} of the time: {found.why}. {found.remedy[0].upper()}{found.remedy[1:]}{gain}"


def of(folder: RunFolder) -> str | None:
    """About a run that has just ended; None if it lost little time or its timing was not recorded."""
    try:
        seen = evidence.read(folder)
    except UserError:
        return None
    much = [advice.on(loss, seen) for loss in causes.losses(seen) if loss.lost >= _MUCH]
    if not much:
        return None
    more = "" if job_pod.inside() else f" More: worldsize explain {quoted(folder.path)}"
    return f"Lost {line(max(much, key=lambda found: found.saved))}.{more}"

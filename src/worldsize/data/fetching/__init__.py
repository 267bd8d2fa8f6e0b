"""Getting a data set onto a disk, in steps that can be interrupted anywhere; `worldsize.data.fetch` puts them together."""

from worldsize.errors import Stopped


class Interrupted(Stopped):
    """The source or the folder was not to be had for now; the same command goes on."""

"""The steps of fetching a dataset, which can be interrupted at any point; `worldsize.data.fetch.command` combines them."""

from worldsize.errors import Stopped


class Interrupted(Stopped):
    """The source or the folder is temporarily unavailable; the same command resumes."""

"""Checks of the tar headers and labels around the images. Training does not read them; `tar` and WebDataset do."""

from __future__ import annotations

from worldsize.data.shards import tar
from worldsize.data.shards.samples import ShardSamples


def fault(samples: ShardSamples, index: int) -> str | None:
    """What is wrong with the tar header of a sample's image or with its label member; None if both are intact."""
    record = samples.records[index]
    offset, length, head = int(record["offset"]), int(record["length"]), int(record["head"])
    end = offset + length
    try:
        blocks = samples.read(index, offset - head, head)
        name = tar.member_name(blocks)
        if bytes(blocks) != tar.header(name, length):
            return f"the tar header at byte {offset - head:,} of its shard is damaged"
        expected = tar.padding(length) + tar.label(name.split(".", 1)[0], int(record["label"]))
        if bytes(samples.read(index, end, len(expected))) != expected:
            return f"the label at byte {end:,} of its shard is damaged"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None

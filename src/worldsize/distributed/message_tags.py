"""The tags of messages between two ranks in `World.control`, so that none is taken for one of another kind.

Collective operations and the tree of `training.rank_decisions` use torch's default, 0.
"""

CHECKPOINT = 1  # what a rank wrote, to rank 0: `checkpoint.writer`
LOST_PEERS = 2  # between neighbours, all the time: `training.lost_peers`

"""Checkpoints: the format on disk, written atomically and verified before use.

When to save is decided in `training.saver`. Read `format` first; its functions are available from this package.
"""

from worldsize.checkpoint.copying import Copying as Copying
from worldsize.checkpoint.copying import copy as copy
from worldsize.checkpoint.format import AVERAGE as AVERAGE
from worldsize.checkpoint.format import FORMAT as FORMAT
from worldsize.checkpoint.format import SAMPLES as SAMPLES
from worldsize.checkpoint.format import Snapshot as Snapshot
from worldsize.checkpoint.format import Tensors as Tensors
from worldsize.checkpoint.format import all_damaged as all_damaged
from worldsize.checkpoint.format import check as check
from worldsize.checkpoint.format import digest as digest
from worldsize.checkpoint.format import find as find
from worldsize.checkpoint.format import list_checkpoints as list_checkpoints
from worldsize.checkpoint.format import network_digest as network_digest
from worldsize.checkpoint.format import newest_finite as newest_finite
from worldsize.checkpoint.format import newest_valid as newest_valid
from worldsize.checkpoint.format import rank_file as rank_file
from worldsize.checkpoint.format import rank_of as rank_of
from worldsize.checkpoint.format import read as read
from worldsize.checkpoint.format import run_of as run_of
from worldsize.checkpoint.format import score_of as score_of
from worldsize.checkpoint.format import sha256 as sha256
from worldsize.checkpoint.state_file import read_state as read_state
from worldsize.runs.run_folder import step_of as step_of

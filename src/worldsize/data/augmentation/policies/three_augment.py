"""3-Augment, the augmentation of DeiT III."""

from __future__ import annotations

import numpy as np

from worldsize.data.augmentation import operations as ops
from worldsize.data.augmentation.operations import Op, Program
from worldsize.data.augmentation.policies.base import Draws, Policy, pick

_GRAY = ops.row(Op.COLOR, 0.0)
_SOLARIZED = ops.row(Op.SOLARIZE, 128.0)
_SIGMAS = (0.1, 2.0)


class ThreeAugment(Policy):
    """Make each image gray, solarize it or blur it, each as likely.

    Touvron et al. 2022, "DeiT III: Revenge of the ViT" (arXiv 2204.07118), section 3. The blur's standard deviation is
    uniform from 0.1 to 2 pixels, as in the authors' code and timm.
    """

    draws = 2
    slots = 1

    def program(self, draws: Draws) -> Program:
        blurred = np.zeros((len(draws), ops.WIDTH))
        blurred[:, 0] = Op.BLUR
        blurred[:, 1] = _SIGMAS[0] + (_SIGMAS[1] - _SIGMAS[0]) * draws[:, 1]
        which = pick(draws[:, :1], 3)
        return np.where(which == 0, _GRAY, np.where(which == 1, _SOLARIZED, blurred))[:, None]

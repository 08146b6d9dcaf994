"""Group norm in the place of batch norm, for training that may not mix images (Wu & He, ECCV 2018).

Differential privacy bounds what one image does to a step. Batch norm lets every image of a batch change what becomes
of the others, so DP-SGD refuses it; group norm looks at one image at a time.
"""

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.models.net import StagedNet

MOST_GROUPS = 16


def with_group_norm(net: StagedNet) -> StagedNet:
    """The same network with every batch-norm layer replaced; it then has no statistics and no counters."""
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                setattr(parent, name, nn.GroupNorm(group_count(layer.num_features), layer.num_features))
    return net


def group_count(maps: int) -> int:
    """At most 16 groups of at least two maps each: a lone map of one pixel would be normalised to nothing."""
    return math.gcd(MOST_GROUPS, maps // 2) if maps % 2 == 0 else 1

"""`fedbn`: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

Algorithm 1: FedAvg of every layer but batch norm. A site keeps all of a batch-norm layer to itself: weight, bias,
running mean, running variance and counter. They are found by the type of the layer, not by its name: in many networks
the norm of a shortcut is called `downsample.1` or the like, and public versions that look for "bn" average it by
mistake.

What the paper leaves open, and what is done here:
- Who has never seen a site's images has no norm to use, so there is no shared model: `norms = "private"`, the default.
  For outsiders the authors suggest averaged norms, which is `"averaged"`: the sites' norms go up, too, their mean
  completes the shared model and is what a site that never trained takes home. No site that has its own ever uses it.
- Weights: the public code averages sites alike; here they weigh by images, as in Algorithm 1 of FedAvg.
- A network without batch norm would make this FedAvg under another name, so it is refused.

Batch norm is the subject; counters are never averaged, the largest is kept. With `norms = "shared"` everything travels
and this is FedAvg bit for bit.
"""

from __future__ import annotations

from typing import Literal

from wardround.errors import BadInput
from wardround.methods.fedper import KeepsLayers
from wardround.models import spec_layout
from wardround.settings import Frozen
from wardround.study import Study


class FedBN(KeepsLayers):
    """FedAvg of all but batch norm."""

    name = "fedbn"
    paper = "Li et al., ICLR 2021"
    summary = "FedAvg of all but batch norm, which stays at the site"

    class Settings(Frozen):
        """`norms` is what becomes of the batch-norm layers."""

        norms: Literal["private", "averaged", "shared"] = "private"

    def check(self, study: Study) -> None:
        """There has to be batch norm to keep."""
        super().check(study)
        if self.settings.norms != "shared" and not spec_layout(study.common_spec).has_batch_norm:
            raise BadInput(
                f"fedbn keeps batch norm at the sites, and {study.common_spec.name} has none; "
                "use a network with batch norm, such as small, or method fedavg"
            )

    def kept(self, study: Study) -> frozenset[str]:
        """Every tensor of a batch-norm layer."""
        return frozenset() if self.settings.norms == "shared" else spec_layout(study.common_spec).batch_norm

    def averages_kept(self) -> bool:
        """As the settings say."""
        return bool(self.settings.norms == "averaged")

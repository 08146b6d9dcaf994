"""`fedcurv`: Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, arXiv:1910.07796, 2019.

Elastic weight consolidation between sites: site k minimises its cross-entropy plus
λ·Σ_{j≠k} (v − w_j)ᵀ diag(F_j) (v − w_j), where w_j is the model that site j last sent and F_j the Fisher information of
that model on j's images. With U = Σ_{j≠k} u_j, u_j = diag(F_j), and V = Σ_{j≠k} u_j·w_j, the term's gradient is
2λ(U·v − V): two multiply-adds per tensor and no graph. So every site sends u and u·w beside its model and gets two
sums: three times FedAvg's traffic. The coordinator keeps the latest u and u·w of every site that ever answered. A
site's own are never in the sums it gets; these are added up anew for each site, since a total from which one's own are
taken in place has lost them for all who come later (as in one public version).

What the paper leaves open, and what is here:
- The Fisher information is the empirical one, with the true labels: the mean over images of the squared gradient of
  log p(y|x), image by image, of the trained network in evaluation mode. Both public versions square the gradient of a
  batch's mean instead, which is smaller the more the images' gradients disagree; one of them keeps the last batch only.
- λ = 1 and 500 images, drawn anew in every round where a site has more, are those of FedNTD's published
  configuration, which FedKPer's table follows.
- U grows with the number of sites, and is large for weights before a batch norm. Where a step of the learning rate η
  would go beyond the point V/U that it is pulled to, 2ηλU > 1, the pull is cut so that it ends there: else the
  penalty's own steps diverge, within six rounds on the built-in images.
- A site too small to train sends nothing new. Until another site has sent something, a site trains as in FedAvg: in the
  first round all do.
- Batch norm: weights and biases of its layers are parameters like others; statistics and counters as in FedAvg.

At λ = 0 this is FedAvg bit for bit, and nothing more than FedAvg's travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from wardround.data.imageset import ImageSet
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group
from wardround.learn import nets
from wardround.learn.fit import Fit, Fitted, Objective
from wardround.learn.pixels import normalise
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit, like_parameters
from wardround.models import NetSpec, Weights, spec_layout
from wardround.settings import Count, Frozen, NotNegative
from wardround.study import Study

FISHER, ANCHORED = "fisher", "fisher_weights"  # a site's u and u·w
OTHERS, OTHERS_ANCHORED = "others_fisher", "others_fisher_weights"  # the sums U and V over the other sites
GRADIENTS_AT_ONCE = 2**25  # numbers: as many images' gradients are held together as fit in 128 MiB
LARGEST_CHUNK = 32  # images; beyond this a CPU gets slower, not faster


class FedCurv(Averaging):
    """FedAvg with a pull towards the other sites' models, stronger where they know more."""

    name = "fedcurv"
    paper = "Shoham et al., arXiv:1910.07796, 2019"
    summary = "FedAvg that keeps the parameters which matter to other sites near theirs"

    class Settings(Frozen):
        """`lam` is λ, `images` how many of a site's images the Fisher information is measured on at most."""

        lam: NotNegative = 1.0
        images: Count = 500

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """The number of images, u and u·w."""
        fisher = like_parameters(study, FISHER, "how much each weight matters to this site (Fisher information)")
        anchored = like_parameters(study, ANCHORED, "the same, times the weights")
        return (*super().more_up_groups(study), *((fisher, anchored) if self.settings.lam > 0 else ()))

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """Of the trained network, u and u·w; nothing where the site could not train."""
        found = super().more_up(visit, fit, fitted)
        if self.settings.lam == 0 or fitted.trained_on == 0:
            return found
        chosen = self._chosen(visit)
        fisher = fisher_diagonal(fit.spec, fitted.weights, chosen, visit.ctx.device.torch)
        anchored = {name: u * fitted.weights[name].to(u.device) for name, u in fisher.items()}
        return {**found, FISHER: fisher, ANCHORED: anchored}

    def more_down_groups(self, study: Study) -> tuple[Group, ...]:
        """U and V, once another site has sent something."""
        if self.settings.lam == 0:
            return ()
        fisher = like_parameters(study, OTHERS, "how much each weight matters to the other sites together")
        return fisher, like_parameters(study, OTHERS_ANCHORED, "the same, each site's times its weights")

    def more_down(self, ctx: Context, site: str, state: State) -> dict[str, dict[str, Tensor]]:
        """U and V over all sites but this one."""
        others = [other for other in ctx.study.sites if other != site and _of(FISHER, other) in state.groups]
        return {
            OTHERS: _total([state.groups[_of(FISHER, other)] for other in others]),
            OTHERS_ANCHORED: _total([state.groups[_of(ANCHORED, other)] for other in others]),
        }

    def objective(self, visit: Visit) -> Objective:
        """Cross-entropy with the pull of the others; plain where there are none yet, and at λ = 0."""
        others, anchored = visit.request.group(OTHERS), visit.request.group(OTHERS_ANCHORED)
        rate = visit.ctx.study.recipe(visit.ctx.round).lr
        return Curved(self.settings.lam, others, anchored, rate) if others else Objective()

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """FedAvg's mean, and what each site sent in place of what it sent before; one of the two alone says nothing."""
        for averaged in super().absorb(ctx, state, answers):
            latest: dict[str, Mapping[str, Tensor]] = {}
            for site, answer in answers.items():
                if {FISHER, ANCHORED} <= answer.groups.keys():
                    latest |= {_of(group, site): answer.group(group) for group in (FISHER, ANCHORED)}
            yield State({**averaged.groups, **latest}, averaged.facts)

    def _chosen(self, visit: Visit) -> ImageSet:
        data, most = visit.site.train, self.settings.images
        if len(data) <= most:
            return data
        draw = visit.ctx.streams.torch("fisher", visit.site.name, visit.ctx.round)
        return data.take(torch.randperm(len(data), generator=draw)[:most])


class Curved(Objective):
    """Adds 2λ(U·v − V) to every trained gradient, cut where a step of this rate would go beyond V/U."""

    def __init__(self, lam: float, fisher: Mapping[str, Tensor], anchored: Mapping[str, Tensor], rate: float) -> None:
        self.lam = lam
        cuts = {name: (1 / (2 * lam * rate) / u).clamp_max(1) for name, u in fisher.items()}
        self.fisher = {name: cuts[name] * u for name, u in fisher.items()}
        self.anchored = {name: cuts[name] * uw for name, uw in anchored.items()}

    def to(self, device: str) -> None:
        """The sums move with the fit."""
        self.fisher = {name: tensor.to(device) for name, tensor in self.fisher.items()}
        self.anchored = {name: tensor.to(device) for name, tensor in self.anchored.items()}

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        """The penalty, differentiated."""
        live = {name: parameter for name, parameter in trained.items() if parameter.grad is not None}
        gradients = [parameter.grad for parameter in live.values() if parameter.grad is not None]
        values = [parameter.detach() for parameter in live.values()]
        torch._foreach_addcmul_(gradients, [self.fisher[name] for name in live], values, value=2 * self.lam)
        torch._foreach_add_(gradients, [self.anchored[name] for name in live], alpha=-2 * self.lam)


def fisher_diagonal(spec: NetSpec, weights: Weights, data: ImageSet, device: torch.device) -> Weights:
    """The mean over images of (∂ log p(y|x) / ∂θ)², in evaluation mode and fp32; many images' gradients at once."""
    layout = spec_layout(spec)
    chunk = max(1, min(LARGEST_CHUNK, GRADIENTS_AT_ONCE // layout.parameter_count))
    with nets.borrow(spec, device, weights) as net:
        net.eval()
        parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}

        def loss(values: dict[str, Tensor], pixels: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(net, values, (pixels.unsqueeze(0),))
            return F.cross_entropy(logits, label.unsqueeze(0))

        gradients_of = vmap(grad(loss), in_dims=(None, 0, 0))
        total = {name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name, p in parameters.items()}
        batches = zip(torch.split(data.images, chunk), torch.split(data.labels, chunk), strict=True)
        for images, labels in batches:
            gradients = gradients_of(parameters, normalise(images.to(device)), labels.to(device))
            for name, gradient in gradients.items():
                total[name] += gradient.square().sum(dim=0)
    return {name: tensor / len(data) for name, tensor in total.items()}


def _total(summands: list[Mapping[str, Tensor]]) -> Weights:
    """The sum by name, in a memory of its own; of nothing, nothing."""
    if not summands:
        return {}
    first, *rest = summands
    total = {name: tensor.clone() for name, tensor in first.items()}
    for summand in rest:
        for name, tensor in summand.items():
            total[name] += tensor.to(total[name].device)
    return total


def _of(group: str, site: str) -> str:
    return f"{group} of {site}"

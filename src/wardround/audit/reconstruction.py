"""FedMP's privacy analysis (§4.2.5, Table 5): a decoder trained on half of a site's images rebuilds the other half.

The attacker has the features that a site sent, the frozen extractor, and images like the site's: here the auxiliary
half. Beside FedMP's three measures stands what the attacker could do without the features, showing the most similar
auxiliary image instead: only what a reconstruction has beyond that was leaked by the payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.audit.decoder import Decoder, DecoderTraining, train_decoder
from wardround.audit.fitting import require_fit
from wardround.audit.frechet import FeatureNetwork, frechet
from wardround.audit.report import Attack, Figure
from wardround.audit.similarity import l2, nearest, ssim
from wardround.data.imageset import ImageSet
from wardround.data.splits import hold_out
from wardround.errors import BadInput
from wardround.learn.predictor import Member
from wardround.learn.prototypes import Prototypes
from wardround.learn.stages import stage_features, stage_name, stage_shape
from wardround.progress import NO_PROGRESS, Silent
from wardround.streams import Streams
from wardround.tensorfile import Groups

RISK = 0.1
BELOW_RISK = (
    "FedMP counts a reconstruction as a risk below 0.1, the memorisation threshold of Carlini et al. (USENIX Security "
    "2023). As L2 is taken here, 0.1 means that pixels are off by 0.1 of the full range in the root mean square"
)


@dataclass(frozen=True)
class Halves:
    """Which images the attacker has (`auxiliary`) and which are attacked, as sorted indices."""

    auxiliary: Tensor
    attacked: Tensor


def halves(images: ImageSet, streams: Streams, site: str = "", most: int = 2000) -> Halves:
    """Half of the images for the attacker, the other half to attack; of no patient in both, where ids are known.

    At most `most` images are used, a random draw: time and memory grow with them.
    """
    chosen = torch.randperm(len(images), generator=streams.torch("audit images", site))[:most].sort().values
    patients = None if images.patients is None else images.patients[chosen].numpy()
    kept, held = hold_out(len(chosen), 0.5, streams.numpy("audit halves", site), patients)
    if len(kept) < 2 or len(held) < 2:
        raise BadInput(
            f"{len(chosen)} images cannot be halved for a reconstruction attack; give four or more, of two patients "
            "or more"
        )
    return Halves(chosen[torch.from_numpy(kept)], chosen[torch.from_numpy(held)])


@dataclass(frozen=True)
class Rebuilt:
    """The attacked originals (8-bit), what the decoder made of their features (0 to 1), and the attacker's own images.

    The originals are patients' images: a `Rebuilt` stays at the site.
    """

    originals: Tensor
    images: Tensor
    auxiliary: Tensor
    decoder: Decoder

    def attack(self, eye: FeatureNetwork, seed: int, name: str = "decoder") -> Attack:
        """FedMP's measures and their controls, for the record."""
        n = len(self.originals)
        own, similar = l2(self.originals, self.images), ssim(self.originals, self.images)
        guess, place = nearest(self.originals, self.auxiliary)
        guess_similar = ssim(self.originals, self.auxiliary[place])
        seen = nearest(self.images, self.originals)[1]
        known = eye.features(self.originals)
        figures = (
            Figure("max_ssim", float(similar.max()), "the highest SSIM of an image and its reconstruction", n),
            Figure("mean_ssim", float(similar.mean()), "the mean SSIM of an image and its reconstruction", n),
            Figure("min_l2", float(own.min()), f"the smallest L2 of an image and its reconstruction. {BELOW_RISK}", n),
            Figure("mean_l2", float(own.mean()), "the mean L2 of an image and its reconstruction", n),
            Figure("share_below_0.1", _share(own < RISK), "the share of images whose L2 is below 0.1", n),
            Figure(
                "frechet",
                frechet(known, eye.features(self.images)),
                f"Fréchet's distance of originals and reconstructions, by {eye.name}; less is more alike",
                n,
            ),
            Figure(
                "identified",
                _share(seen == torch.arange(n)),
                "the share of reconstructions whose nearest attacked original is the right one; chance is 1 over n",
                n,
            ),
            Figure(
                "control_max_ssim",
                float(guess_similar.max()),
                "without the payload: the highest SSIM of an image and the auxiliary image nearest to it by L2",
                n,
            ),
            Figure(
                "control_mean_ssim",
                float(guess_similar.mean()),
                "without the payload: the mean SSIM of an image and the auxiliary image nearest to it by L2",
                n,
            ),
            Figure(
                "control_min_l2",
                float(guess.min()),
                "without the payload: the smallest L2 of an image and the auxiliary image nearest to it",
                n,
            ),
            Figure(
                "control_frechet",
                frechet(known, eye.features(self.auxiliary)),
                f"Fréchet's distance of the two halves of real images, by {eye.name}",
                n,
            ),
        )
        what = f"a decoder trained on {len(self.auxiliary)} auxiliary images rebuilds {n} others from what was sent"
        return Attack(name, what, seed, figures, self._findings(own, guess))

    def pictures(self, count: int = 8) -> Groups:
        """The `count` closest reconstructions, closest first: original, reconstruction, and nearest original, 8-bit."""
        own = l2(self.originals, self.images)
        worst = own.argsort(stable=True)[:count]
        seen = nearest(self.images[worst], self.originals)[1]
        return {
            "pairs": {
                "original": self.originals[worst],
                "reconstruction": _bytes(self.images[worst]),
                "nearest": self.originals[seen],
                "l2": own[worst].float(),
            }
        }

    def _findings(self, own: Tensor, guess: Tensor) -> tuple[str, ...]:
        if float(own.min()) >= RISK:
            return ()
        below, anyway = int((own < RISK).sum()), int(((own < RISK) & (guess < RISK)).sum())
        return (
            f"{below} of {len(own)} reconstructions are nearer than {RISK} to their image, FedMP's threshold of risk; "
            f"of {anyway} of these images some auxiliary image is as near as that, without anything sent",
        )


def rebuild(
    features: Tensor,
    shape: tuple[int, ...],
    images: Tensor,
    parts: Halves,
    how: DecoderTraining,
    streams: Streams,
    device: torch.device,
    progress: Silent = NO_PROGRESS,
) -> Rebuilt:
    """The attack on features `(n, width)` as they were sent, one row per image; noise that was added stays in them."""
    known, attacked = parts.auxiliary, parts.attacked
    with progress.task("training a decoder", how.epochs) as advance:
        decoder = train_decoder(features[known], images[known], shape, how, streams, device, advance)
    return Rebuilt(images[attacked], decoder.reconstruct(features[attacked]), images[known], decoder)


def rebuild_from_stage(
    extractor: Member,
    images: ImageSet,
    stage: int | None,
    how: DecoderTraining,
    streams: Streams,
    device: torch.device,
    *,
    site: str = "",
    most: int = 2000,
    progress: Silent = NO_PROGRESS,
) -> Rebuilt:
    """The attack on the features of a stage (from 1; None is the last) that this extractor gives for a site's images.

    Their memory is `most` × 4 bytes × the stage's width.
    """
    require_fit(extractor.spec, images)
    parts = halves(images, streams, site, most)
    used = torch.cat([parts.auxiliary, parts.attacked])
    few = images.images[used]
    name = stage_name(extractor.spec, stage)
    features = stage_features(extractor.spec, extractor.weights, few, name, device)
    split = len(parts.auxiliary)
    places = Halves(torch.arange(split), torch.arange(split, len(used)))
    return rebuild(features, stage_shape(extractor.spec, name), few, places, how, streams, device, progress)


def decode_prototypes(decoder: Decoder, prototypes: Prototypes) -> tuple[Tensor, Tensor]:
    """What the decoder makes of each known class's mean embedding: 8-bit images and their classes.

    A blend of the class's images where there were many, one of them where there was one; `inversion.likeness` tells.
    """
    labels = torch.nonzero(prototypes.known).flatten()
    return _bytes(decoder.reconstruct(prototypes.means[labels])), labels


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


def _share(which: Tensor) -> float:
    return float(which.double().mean())

"""Whether a study can keep what its privacy settings say, asked before anything is trained.

(ε, δ) is promised only where everything that leaves a site has gone through DP-SGD, or through noise of its own. So it
is promised by method, for those that touch images in training and nowhere else: a method that also sends class means,
or weighs models on its images, would leak beside the noise. A setting that would change nothing of what a method sends
is refused, too: whoever set it would believe to be protected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from wardround.errors import BadInput
from wardround.exchange.bundle import LABEL_COUNTS, PARAMETERS, SIZE
from wardround.methods.base import Method
from wardround.models import spec_layout
from wardround.models.registry import names
from wardround.privacy.account import least_epsilon
from wardround.settings import ModelSettings, PrivacySettings
from wardround.study import Study

# One fit a round, nothing else computed from images. `size`, the number of images, is taken as public.
COVERED = (
    *("local", "fedavg", "fedprox", "fedper", "fedntd", "moon"),
    *("ensemble", "confidence-ensemble", "class-ensemble", "consult"),
)

OF_FEATURES: Mapping[str, str] = {"embeddings": "features", "prototypes": "means"}  # group: its tensor of features
LABELLED = ("embeddings", "images")  # groups with the label of every image: whoever has them can count


def trains_privately(settings: PrivacySettings) -> bool:
    """Whether sites train by DP-SGD."""
    return settings.epsilon is not None or settings.noise is not None


def is_on(settings: PrivacySettings) -> bool:
    """Whether a site changes anything before it leaves."""
    return trains_privately(settings) or settings.counts_epsilon is not None or settings.feature_clip is not None


def count_tables(study: Study, method: Method) -> int:
    """How many tables of label counts a site sends at most."""
    privacy = study.settings.privacy
    if privacy.counts_epsilon is None:
        return 0
    return method.rounds(study) if LABEL_COUNTS in _sent(study, method) else 0


def agreed_promise(settings: PrivacySettings) -> dict[str, float] | None:
    """(ε, δ) that a study promises by its settings alone, nothing where it promises none.

    None: it sets noise and no ε, so what it promises also depends on how many images a site has.
    """
    if settings.epsilon is not None:
        return {"epsilon": settings.epsilon, "delta": settings.delta}
    return None if trains_privately(settings) else {}


def check(study: Study, method: Method) -> None:
    """Refuse a study whose privacy settings cannot be kept; the method and the setting are named."""
    privacy = study.settings.privacy
    if privacy.feature_noise and privacy.feature_clip is None:
        raise BadInput("privacy.feature_noise is measured by privacy.feature_clip, which is not set; set it, too")
    _refuse_what_needs_dpsgd(privacy)
    sent = _sent(study, method)
    _refuse_features_that_stay(privacy, method, sent)
    _refuse_counts_that_stay_or_show(privacy, method, sent)
    _refuse_rounded_counts(privacy, method)
    if not trains_privately(privacy):
        return
    _refuse_batch_norm(study, method)
    if method.name not in COVERED:
        raise BadInput(
            f"no (ε, δ) can be promised for {method.name}, which uses images beyond DP-SGD; use one of "
            f"{', '.join(COVERED)}, or leave privacy.epsilon and privacy.noise out"
        )
    train = study.settings.train
    if train.keep != "last":
        raise BadInput(f'train.keep = "{train.keep}" looks at validation images without noise; use "last" with privacy')
    if train.clip_norm is not None:
        raise BadInput("train.clip_norm has no place beside privacy.clip, which cuts each image's gradient; remove it")
    if train.checkpointing:
        raise BadInput("training with privacy cannot recompute stages; set train.checkpointing = false")
    if train.precision != "fp32":
        raise BadInput('training with privacy computes in full precision; set train.precision = "fp32"')
    _refuse_unnoised_groups(study, method)
    counts = (privacy.counts_epsilon or 0.0) * count_tables(study, method)
    if privacy.epsilon is not None and counts >= privacy.epsilon:
        raise BadInput(
            f"noised counts alone cost ε = {counts:g} of privacy.epsilon = {privacy.epsilon:g}; lower "
            "privacy.counts_epsilon"
        )
    if privacy.epsilon is not None and privacy.epsilon - counts <= (least := least_epsilon(privacy.delta)):
        raise BadInput(
            f"privacy.epsilon = {privacy.epsilon:g} cannot be reached with any noise: training costs more than "
            f"{least:.2g}, by the bound that is used here; raise it"
        )


def _refuse_what_needs_dpsgd(privacy: PrivacySettings) -> None:
    usual = PrivacySettings()
    for name in () if trains_privately(privacy) else ("clip", "delta"):
        if getattr(privacy, name) != getattr(usual, name):
            raise BadInput(
                f"privacy.{name} belongs to DP-SGD, which is off, so nothing would be protected by it; set "
                "privacy.epsilon or privacy.noise, too, or leave it out"
            )


def _sent(study: Study, method: Method) -> tuple[str, ...]:
    """The groups that the method declares to send up from any site, in the order of the declarations."""
    return tuple(dict.fromkeys(group.name for site in study.sites for group in method.payload(study, site).up))


def _refuse_features_that_stay(privacy: PrivacySettings, method: Method, sent: Collection[str]) -> None:
    """Where nothing at all is sent, all stays, as whoever set it wants; so bars such as `local` can be compared."""
    if privacy.feature_clip is not None and sent and not set(sent) & OF_FEATURES.keys():
        name = "privacy.feature_clip and privacy.feature_noise" if privacy.feature_noise else "privacy.feature_clip"
        raise _useless(name, method, " and ".join(OF_FEATURES), sent)


def _refuse_counts_that_stay_or_show(privacy: PrivacySettings, method: Method, sent: Collection[str]) -> None:
    if privacy.counts_epsilon is None or not sent:
        return
    if LABEL_COUNTS not in sent:
        raise _useless("privacy.counts_epsilon", method, LABEL_COUNTS, sent)
    if labelled := [name for name in LABELLED if name in sent]:
        raise BadInput(
            f"privacy.counts_epsilon would hide nothing with {method.name}, which also sends {labelled[0]} with the "
            "label of every image, so that anyone can count them; leave it out, or use another method"
        )


def _useless(setting: str, method: Method, noised: str, sent: Collection[str]) -> BadInput:
    return BadInput(
        f"{setting} would protect nothing with {method.name}: it changes {noised}, and {method.name} sends "
        f"{', '.join(sent)}; leave it out, or use another method"
    )


def _refuse_rounded_counts(privacy: PrivacySettings, method: Method) -> None:
    """One image moves an exact count by one, which the noise hides; a rounded one by a whole bin, which it does not."""
    if privacy.counts_epsilon is not None and getattr(method.settings, "counts", "exact") == "binned":
        raise BadInput(
            f'{method.name}.counts = "binned" rounds before the noise of privacy.counts_epsilon, which then hides too '
            'little; leave it "exact": counts are noised first, and rounded after that'
        )


def _refuse_batch_norm(study: Study, method: Method) -> None:
    """Methods that learn from batch-norm statistics are named; for the others there is a network to take instead."""
    with_norm = sorted({study.spec(s).name for s in study.sites if spec_layout(study.spec(s)).has_batch_norm})
    if not with_norm:
        return
    model = study.settings.model.model_copy(update={"name": "small-gn", "per_site": {}, "stem": None})
    try:
        method.check(_under(study, model))
    except BadInput as error:
        raise BadInput(
            f"DP-SGD cannot train batch norm, and {str(error).partition(';')[0]}; use another method than "
            f"{method.name}, or leave privacy.epsilon and privacy.noise out"
        ) from error
    instead = [f"{name}-gn" for name in with_norm if f"{name}-gn" in names()] or ["small-gn", "resnet18-gn"]
    raise BadInput(
        f"DP-SGD cannot train {', '.join(with_norm)}: batch norm lets one image change what becomes of others; use "
        f"model.name = {' or '.join([*instead, 'cnn4'])}"
    )


def _under(study: Study, model: ModelSettings) -> Study:
    return replace(study, settings=study.settings.model_copy(update={"model": model}))


def _refuse_unnoised_groups(study: Study, method: Method) -> None:
    covered = {PARAMETERS, SIZE, *([LABEL_COUNTS] if study.settings.privacy.counts_epsilon is not None else [])}
    for site in study.sites:
        for group in method.payload(study, site).up:
            if group.name not in covered:
                advice = "set privacy.counts_epsilon" if group.name == LABEL_COUNTS else "use another method"
                raise BadInput(f"{method.name} sends {group.name}, on which there is no noise; {advice}")

"""A study in plain words, for an ethics board: what is done, what leaves a hospital, and what could be done with it.

Every number comes out of the method's own declaration (`Payload`), the one that each bundle is checked against, so the
text cannot say less than what may leave. What each group of numbers is stands in `exchange/glossary.py`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wardround.exchange.bundle import LABEL_COUNTS, PARAMETERS
from wardround.exchange.glossary import GROUPS, LAST_LAYER, SEEN_BY
from wardround.exchange.payload import Group, Payload
from wardround.methods.alone import Alone
from wardround.methods.base import Method
from wardround.methods.distilled import Distilled
from wardround.methods.fedbicross import FedBiCross
from wardround.models import spec_layout
from wardround.privacy.counts import EDGES
from wardround.privacy.plan import count_tables, is_on, trains_privately
from wardround.show import printable, size
from wardround.study import Study

IMAGES = "images"
WITHOUT = " A hospital whose rules forbid it leaves it out, and the study goes on."
GUESSED = ", guessed from its weights where it sends none"
BINS = f"rounded down to coarse bins ({', '.join(map(str, EDGES[:5]))} and so on)"
UNLIMITED = 2**60  # bytes: a declaration of more than this is none


class Section(NamedTuple):
    """A heading and the paragraphs under it, plain text without markup."""

    heading: str
    paragraphs: list[str]


def describe(
    study: Study,
    method: Method,
    *,
    quorum: int | None = None,
    deadline: int | datetime.date | None = None,
) -> list[Section]:
    """The study in words. `quorum` None: all who are asked; `deadline`: days for each round, or one date."""
    payloads = [method.payload(study, site) for site in study.sites]
    rounds = method.rounds(study)
    sections = {
        "What is done": _done(study, method, payloads, rounds),
        "Until when": _until(study, rounds, quorum, deadline),
        "What leaves a hospital": _leaves(study, method, payloads, rounds),
        "Who sees it": _seen(study, payloads),
        "What an attacker could try with it": _risks(study, payloads),
        "What comes back": _returns(study, payloads),
        "What stays": _stays(payloads),
        "If a hospital withdraws": _withdrawal(payloads, rounds),
        "What protects it": _protections(study, method, payloads),
    }
    return [Section(heading, [printable(text) for text in paragraphs]) for heading, paragraphs in sections.items()]


def markdown(sections: Sequence[Section], title: str) -> str:
    """The text as a Markdown page. Class names and the like come from outside: nothing of them can be markup."""
    lines = [f"# {_plain(title)}"]
    for heading, paragraphs in sections:
        lines += [f"## {heading}", *map(_plain, paragraphs)]
    return "\n\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", printable(text))


# The sections ---------------------------------------------------------------------------------------------------------


def _done(study: Study, method: Method, payloads: Sequence[Payload], rounds: int) -> Iterator[str]:
    kind = "grey" if study.channels == 1 else "colour"
    yield (
        f"{_count(len(study.sites), 'hospital')} ({', '.join(study.sites)}) and a coordinator want programs that sort "
        f"{kind} images of {study.size} by {study.size} points into {len(study.classes)} classes: "
        f"{', '.join(study.classes)}."
    )
    if isinstance(method, Alone):
        yield "Every hospital works alone on its own images, as a yardstick for studies in which they work together."
    elif IMAGES in _up(payloads):
        yield "Every hospital sends its images to the coordinator, who trains a network on all of them."
    else:
        weights = sorted({spec_layout(study.spec(site)).parameter_count for site in study.sites})
        many = " to ".join(f"{number:,}" for number in dict.fromkeys((weights[0], weights[-1])))
        yield (
            f"Every hospital trains a network of {many} numbers on its own images, on a machine of its own, and sends "
            f"what is listed below. The coordinator combines what came, {_turns(rounds)}."
        )
    if isinstance(method, Distilled | FedBiCross):
        yield (
            "To combine the networks the coordinator computes artificial images out of them, trains on these, and "
            "keeps some in its record. They make visible what the networks have learned; no patient's image is used."
        )
    source = "" if method.paper == "-" else f" ({method.paper})"
    yield f"In the words of the field: {method.name}, {method.summary}{source}."


def _until(study: Study, rounds: int, quorum: int | None, deadline: int | datetime.date | None) -> Iterator[str]:
    if rounds == 0:
        yield "There is nothing to wait for: hospitals do not depend on one another."
        return
    needed = (
        f"at least {quorum} of {_count(len(study.sites), 'hospital')}" if quorum else "all hospitals that are asked"
    )
    if deadline is None:
        when = "There is no date by which they must answer."
    elif isinstance(deadline, int):
        when = f"They have {_count(deadline, 'day')} in each round."
    else:
        when = f"They have until {deadline.isoformat()}."
    yield f"A round ends when {needed} have answered. {when}"


def _leaves(study: Study, method: Method, payloads: Sequence[Payload], rounds: int) -> Iterator[str]:
    up = [payload.up for payload in payloads]
    if not any(up):
        yield "Nothing leaves a hospital."
        return
    asked = len(study.participants(0)) if method.family == "multi-round" else len(study.sites)
    who = "a hospital sends" if asked == len(study.sites) else f"{asked} of the hospitals, drawn by lot, send"
    yield f"{_turns(rounds).capitalize()} {who} this:"
    for name, groups in _by_name(up).items():
        content = GROUPS[name].content if name in GROUPS else groups[0].what
        changed = _changed_counts(study, method) if name == LABEL_COUNTS else ""
        yield f"{_title(name)} ({_amount(groups)}): {content}{changed}.{WITHOUT if groups[0].optional else ''}"
    sizes, bound = [sum(group.max_bytes for group in groups) for groups in up], any(map(_at_most, up))
    in_all = f" in a round, {_size([rounds * each for each in sizes], True)} in all" if rounds > 1 else ""
    yield f"Together: {_size(sizes, bound)}{in_all}."
    yield (
        "Beside these numbers each message says where it belongs: the study, the method, the hospital's name, the "
        "round, the time, the sender's key and the program's version. Figures about a hospital's own results leave "
        "only where its own rules allow it."
    )


def _seen(study: Study, payloads: Sequence[Payload]) -> Iterator[str]:
    if not _up(payloads):
        yield "Nobody sees anything of a hospital."
        return
    seen_by = payloads[0].seen_by
    yield f"What a hospital sends is seen by {SEEN_BY.get(seen_by, f'{seen_by}.')}"
    yield "It is not hidden in a sum: what each hospital sends is seen as it is."
    if _back(payloads):
        yield "What the coordinator makes of it goes to every hospital that takes part."
        if len(study.sites) == 2:
            yield "As there are two hospitals, each may be able to work out the other's part by taking away its own."


def _risks(study: Study, payloads: Sequence[Payload]) -> Iterator[str]:
    up, back = _up(payloads), _back(payloads)
    if not up:
        yield "Nothing leaves, so there is nothing to try."
        return
    yield "Whoever sees it, or steals it, could try this:"
    whole = _with_last_layer(study, payloads)
    yield from (_risk(name, whole) for name in up)
    if back:
        yield (
            "What comes back is open to such attempts, too, by every hospital and by whoever is given it later. What "
            "was made out of the parts of several hospitals tells less of one of them as a rule, but not nothing."
        )
        yield from (_risk(name, whole) for name in back if name not in up)


def _returns(study: Study, payloads: Sequence[Payload]) -> Iterator[str]:
    sent = {group.name for payload in payloads for group in payload.up if not group.optional}
    down, home = [payload.down for payload in payloads], [payload.home for payload in payloads]
    for declared, opening in ((down, "Before a round a hospital gets:"), (home, "At the end a hospital gets:")):
        if any(declared):
            yield opening
        for name, groups in _by_name(declared).items():
            of_each = any(tensor.partition("/")[0] in study.sites for tensor in groups[0].tensors or ())
            made = "those of every hospital" if of_each else "as the coordinator made them"
            back = GROUPS[name].back if name in GROUPS else groups[0].what
            guess = GUESSED if name == LABEL_COUNTS and name not in sent else ""
            yield f"{_title(name)} ({_amount(groups)}): {back or made}{guess}."
    if any(home):
        yield "Out of this, and of what its own images tell it, every hospital makes the model that it will use."
    if not _back(payloads):
        yield "Nothing: every hospital has the model that it made itself."


def _stays(payloads: Sequence[Payload]) -> Iterator[str]:
    if IMAGES in _up(payloads):
        yield "The images do not stay: this method sends them. All else that a hospital knows of its patients stays."
    else:
        yield "The images stay at the hospital, and so does all else that it knows of its patients."
    yield "What a hospital makes for itself in the end, and what it keeps from round to round, stay there."


def _withdrawal(payloads: Sequence[Payload], rounds: int) -> Iterator[str]:
    if not _up(payloads):
        yield "It just stops. Nothing has left, so there is nothing to delete."
        return
    yield "A hospital can withdraw at any time. If it has sent nothing yet, there is nothing to delete."
    yield (
        "What it has sent in the current round is deleted by the coordinator, and the coordinator's work on that "
        "round is done again without it."
    )
    earlier = "What it sent in earlier rounds remains a part of the models that were made then. " if rounds > 1 else ""
    yield f"{earlier}What other hospitals have already received cannot be called back."


def _protections(study: Study, method: Method, payloads: Sequence[Payload]) -> Iterator[str]:
    if not _up(payloads):
        yield "Nothing needs protection, as nothing leaves."
        return
    yield from _noise(study, method)
    if _rounds_counts(method):
        yield (
            "To round the numbers by class makes them coarser, and promises nothing: whoever knows all images but one "
            "may see a number change its bin."
        )
    yield (
        "Every hospital has rules of its own, in a file that nobody else can change. The program at the hospital holds "
        "them against the method before training, and against what would leave before anything is written or sent."
    )
    yield (
        "What is sent is signed by the sender, so a change on the way is noticed. The program does not encrypt it: it "
        "should be carried on an encrypted medium or over an encrypted connection."
    )


def _noise(study: Study, method: Method) -> Iterator[str]:
    privacy = study.settings.privacy
    if not is_on(privacy):
        yield "No noise is added to what leaves (no differential privacy)."
        return
    if trains_privately(privacy):
        promised = "of a strength that every message states"
        if privacy.epsilon is not None:
            promised = f"epsilon = {privacy.epsilon:g}, delta = {privacy.delta:g}; the smaller, the stronger"
        yield (
            "Noise is added in training, so that what leaves hardly depends on any single image (differential privacy, "
            f"{promised}). A patient of whom there are several images is protected less. The noise comes from a secret "
            "that stays at the hospital."
        )
    if privacy.counts_epsilon is not None:
        yield _noise_on_counts(privacy.counts_epsilon, count_tables(study, method), trains_privately(privacy))
    if privacy.feature_clip is not None:
        yield (
            "Embeddings and class means are shortened"
            f"{' and noise is added to them' if privacy.feature_noise else ''} before they leave. That makes it harder "
            "to rebuild an image from them; how hard can be measured, and is not promised."
        )


def _noise_on_counts(epsilon: float, tables: int, trained_privately: bool) -> str:
    """Every round sends another table, with noise of its own, and their epsilons add up (`privacy/counts.py`)."""
    in_all = f" in each round, at most {epsilon * tables:g} in all" if tables > 1 else ""
    said = f"epsilon = {epsilon:g}{in_all}, delta = 0, for one image added or removed"
    noise = "Noise is added to the numbers by class before they are rounded and leave"
    if trained_privately:
        return f"{noise}. What that costs ({said}, of these numbers) is a part of what is stated above."
    return (
        f"{noise} (differential privacy of these numbers alone, {said}; the smaller epsilon, the stronger). A patient "
        "of whom there are several images is protected less. The noise comes from a secret that stays at the hospital. "
        "Of all else that leaves nothing is promised: the network is trained without noise."
    )


def _changed_counts(study: Study, method: Method) -> str:
    """What becomes of the numbers by class on their way out; the glossary, which is for every study, cannot know."""
    if study.settings.privacy.counts_epsilon is not None:
        return f", with noise added, then {BINS}"
    return f", {BINS}" if _rounds_counts(method) else ""


def _rounds_counts(method: Method) -> bool:
    return getattr(method.settings, "counts", "exact") == "binned"


# Small things ---------------------------------------------------------------------------------------------------------


def _by_name(declared: Sequence[Sequence[Group]]) -> dict[str, list[Group]]:
    """The groups of all hospitals under their names, in the order of the declarations."""
    found: dict[str, list[Group]] = {}
    for group in (group for groups in declared for group in groups):
        found.setdefault(group.name, []).append(group)
    return found


def _up(payloads: Sequence[Payload]) -> list[str]:
    return list(_by_name([payload.up for payload in payloads]))


def _back(payloads: Sequence[Payload]) -> list[str]:
    return list(_by_name([(*payload.down, *payload.home) for payload in payloads]))


def _with_last_layer(study: Study, payloads: Sequence[Payload]) -> bool:
    """Whether weights travel with a network's last layer: what it shows of the classes the other layers do not."""
    heads = {tensor for site in study.sites for tensor in spec_layout(study.spec(site)).head}
    groups = (group for payload in payloads for group in (*payload.up, *payload.down, *payload.home))
    weights = (tensor for group in groups if group.name == PARAMETERS for tensor in group.tensors or ())
    return any(tensor.rpartition("/")[2] in heads for tensor in weights)  # those of every hospital are under its name


def _at_most(groups: Sequence[Group]) -> bool:
    """Whether the declared sizes are the most there can be, and not exact."""
    return any(group.tensors is None or group.partial or group.occasional or group.optional for group in groups)


def _amount(groups: Sequence[Group]) -> str:
    """How large one group is at all hospitals."""
    return _size([group.max_bytes for group in groups], _at_most(groups))


def _size(sizes: Sequence[int], at_most: bool) -> str:
    if max(sizes) > UNLIMITED:
        return "without a limit"
    if at_most:
        return f"at most {size(max(sizes))}"
    return " to ".join(dict.fromkeys((size(min(sizes)), size(max(sizes)))))


def _risk(name: str, with_last_layer: bool) -> str:
    known = GROUPS[name].risk if name in GROUPS else "This is no part of the program. Ask the author of the method."
    return f"{_title(name)}: {known}{f' {LAST_LAYER}' if name == PARAMETERS and with_last_layer else ''}"


def _title(name: str) -> str:
    """How a group is called here, and in brackets what policies and programs call it."""
    return f"{GROUPS[name].title.capitalize() if name in GROUPS else 'Something else'} [{name}]"


def _turns(rounds: int) -> str:
    return "once" if rounds == 1 else f"in each of {rounds} rounds"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""FedMP's Table 4 as arithmetic: the bytes of its rounds, from what our methods declare that they send.

The paper's figures come out to the last digit under one reading: three sites, all asked in every round, up and down,
float32, decimal gigabytes, ResNet-50 with one linear head for two classes; batch-norm statistics are not counted, and
FedBN's batch-norm weights stay at the sites. FedMP adds one vector of 2,048 numbers for each of 763 training images up,
100 of them down to each site from the second round on, and class prototypes; FedMR's prototypes are not counted.
FRAug's generator is not described, so its row cannot be met.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from wardround.exchange.bundle import PARAMETERS
from wardround.exchange.payload import Group
from wardround.methods.fedmp import EMBEDDINGS, PROTOTYPES
from wardround.methods.fraug import GENERATOR
from wardround.methods.registry import make
from wardround.papers.schema import Line, Table, value
from wardround.settings import validate
from wardround.study import Study

TRAINING_IMAGES = 763  # of the three sites together: what FedMP's row comes to
DOWNLOAD = 100  # embeddings that a site is sent, likewise
WIDTH, FLOAT, LABEL = 2048, 4, 8  # numbers in an embedding; bytes of a number and of a label
SITES = ("india", "montgomery", "shenzhen")
DATASET, ROUNDS, GIGABYTES = "tb", 0, 1  # of Table 4: its data set, and its columns


@dataclass(frozen=True)
class Cost:
    """One row of Table 4."""

    label: str
    rounds: int
    printed: str
    counted: float  # gigabytes, the paper's way
    declared: float  # gigabytes of everything that we declare, statistics, counters and labels included


def costs(table: Table) -> list[Cost]:
    """Every line that has a published row, over the rounds that the paper says it took."""
    found = []
    for line in table.entries:
        rounds, printed = (table.beside(line, DATASET, len(SITES), "natural", c) for c in (ROUNDS, GIGABYTES))
        if rounds is not None and printed is not None:
            count = int(value(rounds))
            both = (_bytes(line, count, counted) / 1e9 for counted in (True, False))
            found.append(Cost(line.label, count, printed, *both))
    return found


def _bytes(line: Line, rounds: int, counted: bool) -> float:
    """Up and down over some rounds and all sites: what the paper counts, or everything that is declared."""
    own = dict(line.settings)
    shares = line.method.startswith("fedmp")
    if line.method == "fedbn":
        own["norms"] = "private"  # the paper's bytes have no batch norm in them
    if shares:
        own |= {"upload": TRAINING_IMAGES, "download": DOWNLOAD}
    tree = {"rounds": rounds, "method": line.method, "model": {"name": "resnet50", "stem": "imagenet"}, "set": own}
    study = Study(validate(tree), ("normal", "tuberculosis"), 3, 256, SITES, "")
    payload = make(line.method, own).payload(study, SITES[0])
    names = {PARAMETERS, GENERATOR, *((EMBEDDINGS, PROTOTYPES) if shares else ())}
    exchanges = rounds - 1 if line.method == "fedmp-fewshot" else rounds  # its last answer is the model alone
    # The images of all sites are declared as one site's. What others sent comes down from the second round on.
    times_up = {EMBEDDINGS: exchanges, PROTOTYPES: len(SITES) * exchanges}
    times_down = dict.fromkeys((EMBEDDINGS, PROTOTYPES), len(SITES) * (rounds - 1))
    total = 0.0
    for groups, times in ((payload.up, times_up), (payload.down, times_down)):
        for group in groups:
            if not counted or group.name in names:
                size = _floats(group) if counted else group.max_bytes
                total += size * times.get(group.name, len(SITES) * rounds)
    return total


def _floats(group: Group) -> int:
    """The bytes of a group's floating-point numbers; labels and flags beside them are not counted."""
    if group.tensors is None:  # embeddings, each with its label
        return group.max_bytes // (FLOAT * WIDTH + LABEL) * FLOAT * WIDTH
    return sum(FLOAT * prod(shape) for shape, dtype in group.tensors.values() if dtype == "float32")

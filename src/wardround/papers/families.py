"""Whose runs a table's cells are, by the name of the family."""

from __future__ import annotations

from wardround.papers.fedkper import FedKPer
from wardround.papers.fedmp import FedMP
from wardround.papers.one_shot import OneShot
from wardround.papers.runs import Runs
from wardround.papers.schema import Family

RUNS: dict[Family, type[Runs]] = {"one-shot": OneShot, "fedkper": FedKPer, "fedmp": FedMP}

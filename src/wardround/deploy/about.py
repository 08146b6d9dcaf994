"""What an exported model says of itself: closed records, written into its files and its card.

A model without its class names, image size and normalisation is a riddle, and a guess about them gives wrong answers
with confidence. So each file of a model holds all that is needed to use it, and where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from wardround import __version__
from wardround.errors import BadInput
from wardround.settings import Frozen, Seed
from wardround.study import Study

FORMAT: Literal["wardround-model-1"] = "wardround-model-1"
NORMALISATION: Literal["pixels / 127.5 - 1"] = "pixels / 127.5 - 1"  # what learn.pixels does
LARGEST_SIDE = 4096  # pixels
LONGEST = 4000  # characters of a text
MOST_NOTES = 100

Text = Annotated[str, Field(min_length=1, max_length=255)]  # escaped wherever it is shown
Words = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Number = Annotated[int, Field(ge=0, lt=2**53)]
Record = TypeVar("Record", bound=BaseModel)


class Task(Frozen):
    """All that is needed to use a model: what goes in, and what the numbers that come out mean, in order."""

    classes: Annotated[tuple[Text, ...], Field(min_length=2, max_length=10_000)]
    channels: Literal[1, 3]
    size: Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
    normalisation: Literal["pixels / 127.5 - 1"] = NORMALISATION

    @model_validator(mode="after")
    def _no_name_twice(self) -> Task:
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("two classes have the same name")
        return self


class Origin(Frozen):
    """Where a model comes from. `site` is "shared" for the one model of all sites."""

    study: Text
    study_id: Text
    method: Text
    site: Text
    seed: Seed
    program: Text = __version__


class ModelRecord(Frozen):
    """The record inside each file of a model."""

    format: Literal["wardround-model-1"] = FORMAT
    task: Task
    origin: Origin


class Measured(Frozen):
    """A figure and what it is a figure of; a share such as an accuracy is between 0 and 1."""

    label: Text
    value: float
    definition: Words


class ModelAbout(Frozen):
    """All that a card says of a model, besides what is read off the model itself.

    `images` is how many images the site trained on. `label_counts`, how many of them each class has, is for whoever may
    see them: None keeps them out of the card. The method is the study's; what a site made of it, which may be to keep
    its own model, is in `notes`.
    """

    task: Task
    origin: Origin
    images: Number
    label_counts: tuple[Number, ...] | None = None
    accuracies: tuple[Measured, ...] = ()
    method_summary: Annotated[str, Field(max_length=LONGEST)] = ""
    notes: Annotated[tuple[Words, ...], Field(max_length=MOST_NOTES)] = ()

    @model_validator(mode="after")
    def _counts_fit(self) -> ModelAbout:
        if self.label_counts is not None and len(self.label_counts) != len(self.task.classes):
            raise ValueError(f"{len(self.label_counts)} label counts do not fit {len(self.task.classes)} classes")
        return self

    @property
    def record(self) -> ModelRecord:
        """What goes into the model's files."""
        return ModelRecord(task=self.task, origin=self.origin)


def about_study(
    study: Study,
    site: str,
    images: int,
    figures: Iterable[Mapping[str, Any]] = (),
    label_counts: Iterable[int] | None = None,
    name: str | None = None,
    notes: Iterable[str] = (),
) -> ModelAbout:
    """What the card of a model of this study says; `figures` are headlines, or records with the same three fields.

    A figure without a value says nothing about the model and is left out. `notes` are what the method remarked on when
    it made the model.
    """
    from wardround.methods.registry import known

    settings = study.settings
    method = known().get(settings.method)
    return parsed(
        ModelAbout,
        {
            "task": {"classes": study.classes, "channels": study.channels, "size": study.size},
            "origin": {
                "study": name or settings.name or study.id,
                "study_id": study.id,
                "method": settings.method,
                "site": site,
                "seed": settings.seed,
            },
            "images": images,
            "label_counts": None if label_counts is None else tuple(label_counts),
            "accuracies": [
                {key: figure[key] for key in ("label", "value", "definition")}
                for figure in figures
                if figure["value"] is not None
            ],
            "method_summary": method.summary if method else "",
            "notes": kept_notes(notes),
        },
        "what is known of the model",
    )


def kept_notes(notes: Iterable[str]) -> tuple[str, ...]:
    """Notes as records keep them: each once, the first so many, none without end (one may name a thousand sites)."""
    short = (note if len(note) <= LONGEST else f"{note[: LONGEST - 1]}…" for note in notes if note)
    return tuple(dict.fromkeys(short))[:MOST_NOTES]


def parsed(record: type[Record], tree: Any, what: str) -> Record:
    """A record out of anything; the first thing that does not fit becomes one line."""
    try:
        return record.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the record"
        raise BadInput(
            f"{what} is not as wardround writes it ({place}: {first['msg']}); export the model again"
        ) from error

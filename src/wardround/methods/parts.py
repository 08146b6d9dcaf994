"""Long work of the coordinator as named parts of many steps: shown, timed, and able to stop after any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from wardround.methods.base import Context
from wardround.synthesis.stopwatch import Stopwatch


class Parts:
    """How far each part has come. `done` is what a checkpoint must keep of it."""

    def __init__(self, ctx: Context, watch: Stopwatch, done: Mapping[str, int] | None = None) -> None:
        self.ctx, self.watch = ctx, watch
        self.done = dict(done or {})

    def run(self, part: str, step: Callable[[int], None], total: int) -> Iterator[None]:
        """Take the steps of a part that are left, by their numbers; yields whenever a checkpoint is due."""
        self.done.setdefault(part, 0)
        if self.done[part] >= total:
            return
        with self.ctx.progress.task(part, total, self.done[part]) as advance:
            while self.done[part] < total:
                with self.watch.time(part) as lap:
                    due = False
                    while self.done[part] < total and not due:
                        step(self.done[part])
                        self.done[part] += 1
                        lap.steps += 1
                        advance()
                        due = self.ctx.due()
                if due:
                    yield

    def run_all(self, part: str, step: Callable[..., object], inputs: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """The same where what each step takes is known before."""

        def numbered(number: int) -> None:
            step(*inputs[number])

        return self.run(part, numbered, len(inputs))

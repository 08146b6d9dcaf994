"""The ServerApp that runs beside the SuperLink: opens the coordinator's folder and plays the study to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from pydantic import Field

from wardround.errors import WardroundError
from wardround.exchange.keys import PrivateKey
from wardround.learn.device import find_device
from wardround.progress import Lines
from wardround.remote.cli import COORDINATOR_KEY, read_study, say
from wardround.remote.flower.conductor import Conductor
from wardround.remote.flower.post import GridPost
from wardround.remote.hub import Hub
from wardround.settings import Frozen, checked

app = ServerApp()


class RunConfig(Frozen):
    """The app's settings; `flwr run --run-config` changes them for one run."""

    study: str
    key: str = ""
    round_seconds: Annotated[float, Field(gt=0, alias="round-seconds")]
    wait_for_all: Annotated[bool, Field(alias="wait-for-all")] = True
    device: str = "auto"


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the study; where it cannot go on, the run fails with the reason, and the next run goes on from there."""
    try:
        config = checked(RunConfig, dict(context.run_config))
        study = Path(config.study)
        key = PrivateKey.load(Path(config.key) if config.key else study.with_name(COORDINATOR_KEY))
        hub = Hub(study.parent, read_study(study), key, find_device(config.device), Lines())
        Conductor(hub, GridPost(grid), say, round_seconds=config.round_seconds, wait_for_all=config.wait_for_all).play()
    except WardroundError as error:
        say(f"error: {error}")
        raise

"""Trained site models, kept by the hash of everything they depend on.

Methods that begin with the same local training (`local`, `ensemble`, one-round `fedavg`) then share it: the second
method to ask for a fit gets the stored weights, bit for bit, and a run that was killed does not train them again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from wardround import tensorfile
from wardround.errors import BadInput
from wardround.learn.fit import Fitted, weights_hash


class FitStore:
    """A folder of finished fits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Fitted | None:
        """The stored fit, or None; a damaged file counts as absent and is trained again."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            groups, record = tensorfile.from_bytes(path.read_bytes())
            if weights_hash(groups["weights"]) != record["weights_sha256"]:
                raise BadInput(f"{path} is damaged")
            return Fitted(
                groups["weights"],
                record["trained_on"],
                tuple(record["losses"]),
                record["best_epoch"],
                record["seconds"],
                record["skipped"],
            )
        except (BadInput, KeyError, TypeError):
            path.unlink(missing_ok=True)
            return None

    def put(self, key: str, fitted: Fitted) -> None:
        """Keep a fit."""
        record = {
            "trained_on": fitted.trained_on,
            "losses": list(fitted.losses),
            "best_epoch": fitted.best_epoch,
            "seconds": fitted.seconds,
            "skipped": fitted.skipped,
            "weights_sha256": weights_hash(fitted.weights),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        tensorfile.write(self._path(key), {"weights": fitted.weights}, record)

    def clear(self) -> None:
        """Remove every fit: the run that wanted them is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}.safetensors"

"""Federated learning for hospitals.

    result = wardround.simulate("fedbicross", sites=5, epochs=3)
    result = wardround.compare(["fedavg", "local"])
    result = wardround.open("runs/compare-phantoms")

`wardround.api` holds what these are. They are loaded when first asked for, so that a command starts at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wardround.api import Result, compare, simulate
    from wardround.api import open as open  # by its name only: `from wardround import *` must leave Python's own alone

__version__ = "0.1.0"
__all__ = ["Result", "__version__", "compare", "simulate"]
LAZY = ("Result", "compare", "open", "simulate")


def __getattr__(name: str) -> Any:
    if name in LAZY:
        from wardround import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})

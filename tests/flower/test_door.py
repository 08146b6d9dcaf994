"""What of a SuperLink the outside can reach."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from wardround.remote.flower.door import FOR_NODES, REFUSAL, Door

OUTSIDE, HERE = ("192.0.2.7", 4711), ("127.0.0.1", 4711)


def visit(kind: str, path: str, client: Any) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the visitor came through, and what the door itself said."""
    came, said = [], []

    async def house(scope: Any, receive: Any, send: Any) -> None:
        came.append(scope["path"])

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(Door(house)({"type": kind, "path": path, "client": client}, None, send))  # type: ignore[arg-type]
    return bool(came), said


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"])
def test_the_outside_reaches_what_is_for_nodes_alone(path: str) -> None:
    assert visit("http", path, HERE) == (True, [])
    assert visit("http", path, ("::1", 1)) == (True, [])
    assert visit("http", FOR_NODES + "pull-messages", OUTSIDE) == (True, [])
    for client in (OUTSIDE, ("2001:db8::1", 1), None, ("unix", 1)):
        came, said = visit("http", path, client)
        assert not came
        assert said[0]["status"] == 403
        assert said[1]["body"] == REFUSAL


def test_other_ways_in_are_closed() -> None:
    assert visit("websocket", FOR_NODES, OUTSIDE) == (False, [{"type": "websocket.close", "code": 1008}])
    assert visit("lifespan", "", None) == (True, [])


def test_flower_has_the_place_for_it_and_these_services() -> None:
    main = pytest.importorskip("flwr.superlink.main", reason="flwr is not installed: pip install 'wardround[flower]'")
    assert {"extensions", "get_middleware"} <= set(main._get_middleware.__code__.co_names)
    paths = {route.path for route in main.fleet_router.routes}
    assert paths
    assert all(path.startswith(FOR_NODES) for path in paths)
    assert all(not route.path.startswith(FOR_NODES) for route in main.control_router.routes)

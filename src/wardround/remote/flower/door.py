"""A SuperLink that shows the outside one thing only: the service by which known nodes fetch calls and bring replies.

Flower serves three things on one port: that service, the one by which runs are started, and the one for its own
helpers. Whoever may start runs may run code beside the SuperLink, and Flower asks nobody for a password unless a
login service is set up. So here the other two answer this machine alone.

    python -m wardround.remote.flower.door ARGUMENTS-OF-flower-superlink
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

FOR_NODES = "/v1/fleet/"
REFUSAL = b"this service answers the machine that it runs on, and nobody else\n"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Door:
    """Stands before everything else that the SuperLink does with a request (an ASGI middleware)."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through what is for nodes, and what comes from this machine."""
        if scope["type"] == "lifespan" or is_local(scope) or is_for_nodes(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})


def is_for_nodes(scope: Scope) -> bool:
    """Whether it is a request to the nodes' service."""
    return scope["type"] == "http" and str(scope["path"]).startswith(FOR_NODES)


def is_local(scope: Scope) -> bool:
    """Whether it comes from this machine; where that cannot be known, it does not."""
    try:
        return ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """A SuperLink with the door in place."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    behind = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Door), *behind())
    flower_superlink()


if __name__ == "__main__":
    main()

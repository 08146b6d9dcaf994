"""Flower's grid as the conductor uses it: who is online, send a call, fetch replies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wardround.errors import BadInput
from wardround.remote.flower.letters import Call, Reply, pack_call, unpack_reply

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

_NODE_GONE = (3, 4, 5)  # Flower's codes for a message or a reply that is lost, and for a node that is offline


@dataclass(frozen=True)
class Node:
    """A node as it joined: one that was started again is another, for what it was sent before is lost."""

    number: int
    joined: str


@dataclass(frozen=True)
class Arrival:
    """What came of a call: a reply, or a failure in words. `is_gone`: the call is lost and may be made again."""

    call: str
    reply: Reply | None
    failure: str = ""
    is_gone: bool = False


class Post(Protocol):
    """What carries calls and replies."""

    def nodes(self) -> Collection[Node]:
        """Those who are online."""

    def send(self, node: Node, call: Call, seconds: float) -> str:
        """Send a call that may wait so long; its name."""

    def arrivals(self, calls: Collection[str]) -> Iterator[Arrival]:
        """What has come of these calls by now, one at a time: a parcel may be large."""


class GridPost:
    """Flower's."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> Collection[Node]:
        """Those who are online."""
        return [Node(info.node_id, info.last_activated_at) for info in self.grid.get_nodes()]

    def send(self, node: Node, call: Call, seconds: float) -> str:
        """Send a call that may wait so long; its name."""
        from flwr.app import Message

        message = Message(pack_call(call), dst_node_id=node.number, message_type="query", ttl=seconds)
        sent = [name for name in self.grid.push_messages([message]) if name]
        return sent[0] if sent else ""

    def arrivals(self, calls: Collection[str]) -> Iterator[Arrival]:
        """What has come of these calls by now, one at a time: a parcel may be large."""
        for name in calls:
            for message in self.grid.pull_messages([name]):
                yield _arrival(name, message)


def _arrival(name: str, message: Message) -> Arrival:
    if message.has_error():
        is_gone = message.error.code in _NODE_GONE
        words = "its node went offline" if is_gone else "its Flower app failed; its log says why"
        return Arrival(name, None, words, is_gone)
    try:
        return Arrival(name, unpack_reply(message.content))
    except BadInput as error:
        return Arrival(name, None, str(error))

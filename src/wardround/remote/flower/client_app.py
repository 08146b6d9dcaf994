"""The ClientApp that runs at a site: one call, one reply."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from wardround.remote.flower.attend import attend
from wardround.remote.flower.letters import pack_reply, unpack_call

app = ClientApp()


@app.query()
def call(message: Message, context: Context) -> Message:
    """Answer the hub; whatever it asks for, the site's desk and policy decide."""
    reply = attend(unpack_call(message.content), context.node_id, context.node_config)
    return Message(pack_reply(reply), reply_to=message)

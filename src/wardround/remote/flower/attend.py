"""What a site's node does with a call: nothing that `wardround site` would not do, and nothing else leaves.

Where a site cannot answer, its log says why in full. The coordinator learns the name of the rule, or that it should
ask: a complaint may quote names of files, and those are the site's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from wardround.errors import BadInput, SiteFailed, WardroundError
from wardround.exchange.keys import PrivateKey
from wardround.files import write_atomically
from wardround.remote.cli import SITE_KEY, read_study, say, site_policy
from wardround.remote.flower.letters import ANSWER, HELLO, Call, Reply
from wardround.remote.rules import RULES, refusal
from wardround.settings import Frozen, checked

if TYPE_CHECKING:
    from wardround.remote.site import SiteDesk

INCOMING = "incoming.parcel"


class NodeConfig(Frozen):
    """What a site tells its node, and nobody else: the TOML file after `--node-config`."""

    study: str
    data: str
    key: str = ""
    policy: str = ""
    device: str = "auto"

    @property
    def own_key(self) -> PrivateKey:
        """The site's private key: `site.key` beside the study file, if no other is named."""
        return PrivateKey.load(Path(self.key) if self.key else Path(self.study).with_name(SITE_KEY))


def attend(call: Call, node: int, given: Mapping[str, object]) -> Reply:
    """Do what a call asks for; whatever goes wrong becomes a reply that says no more than it must."""
    config = checked(NodeConfig, dict(given))
    key = config.own_key
    # Signed for the site's own study, whatever the call names: no other study's hub can be shown this reply.
    own = replace(call, study=read_study(Path(config.study)).agreement.id)
    if call.do == HELLO:
        return Reply.signed(own, node, key)
    try:
        return Reply.signed(own, node, key, parcel=_work(call, config, key))
    except WardroundError as error:
        say(f"error: {error}")
        return Reply.signed(own, node, key, words=in_few_words(error))
    except Exception:
        logging.getLogger("flwr").exception("a fault of wardround")
        return Reply.signed(own, node, key, words="a fault of the program; its log has the details")


def in_few_words(error: WardroundError) -> str:
    """What the coordinator learns of an error: a rule's name, never what a file is called or holds."""
    from wardround.exchange.policy import Refused

    rule = str(error).partition(":")[0]
    if isinstance(error, Refused) or rule in RULES:
        return f"refused by {rule}"
    if isinstance(error, SiteFailed):
        return "training failed; its log says why"
    return "it cannot; its log says why"


def _work(call: Call, config: NodeConfig, key: PrivateKey) -> bytes:
    from wardround.sitedata import read_site

    desk = _desk(config, key)
    if call.study != desk.agreement.id:
        raise refusal(
            "another study", f"the call is of study {call.study}, and this node takes part in {desk.agreement.id}"
        )
    if call.parcel:
        with _stored(call.parcel, desk.folder / INCOMING) as parcel:
            manifest = desk.receive(parcel)
        if (manifest.kind == "request") != (call.do == ANSWER):
            raise BadInput(f"the call is to {call.do}, and its parcel is a {manifest.kind}")
    site = read_site(desk.agreement, desk.name, config.data, desk.progress)
    if call.do == ANSWER:
        say(f"{desk.name} answers")
        return desk.train(site).read_bytes()
    home = desk.take_home(site)
    say(*desk.deploy(site, home).lines)
    say(f"{desk.name}: balanced accuracy {100 * home.balanced_accuracy:.1f} % on its {home.images:,} test images")
    return b""


def _desk(config: NodeConfig, key: PrivateKey) -> SiteDesk:
    from wardround.learn.device import find_device
    from wardround.progress import Lines
    from wardround.remote.site import SiteDesk

    study = Path(config.study)
    policy = site_policy(study, Path(config.policy) if config.policy else None)
    return SiteDesk(study.parent, read_study(study), key, policy, find_device(config.device), Lines())


@contextmanager
def _stored(data: bytes, path: Path) -> Iterator[Path]:
    """Bytes from outside as the file that those who read parcels want; gone afterwards."""
    write_atomically(path, data)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)

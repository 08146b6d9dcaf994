"""`wardround key`: make a key, and show what others know it by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wardround.remote.cli import SITE_KEY, group, key_text, say

app = group("key", "Keys: one for each site and one for the coordinator.")
KeyFile = Annotated[Path, typer.Argument(hidden=True)]
KeyOrText = Annotated[str, typer.Argument(hidden=True)]


@app.command("new")
def new(path: KeyFile = Path(SITE_KEY)) -> None:
    """Make a key pair: the private half in PATH (site.key), the public half in a .pub file beside it."""
    from wardround.exchange.keys import PrivateKey, place_for_public
    from wardround.files import disk_errors, write_atomically

    public = place_for_public(path)
    key = PrivateKey.generate()
    key.save(path)
    with disk_errors(public):
        write_atomically(public, f"{key.public.text()}\n".encode())
    say(f"private key: {path} (never leaves this machine)", f"public key:  {public}", key.public.text())
    say(f"fingerprint: {key.public.fingerprint}", "Send the public key, and read the fingerprint out on the phone.")


@app.command("show")
def show(key: KeyOrText = SITE_KEY) -> None:
    """Show the public half and the fingerprint of KEY: a private key file, a .pub file, or a public key's text."""
    from wardround.exchange.keys import PrivateKey, PublicKey

    is_private = Path(key).suffix == ".key"
    public = PrivateKey.load(Path(key)).public if is_private else PublicKey.parse(key_text(key))
    say(public.text(), f"fingerprint: {public.fingerprint}")

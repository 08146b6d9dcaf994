"""`wardround board`: parse, serve, until Ctrl-C."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from wardround.show import printable

Folder = Annotated[Path, typer.Argument(metavar="DIR", hidden=True)]
Host = Annotated[str, typer.Option(help="address to listen on; others than this machine can then read all runs")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="port; 0: one that is free", show_default=False)]
Open = Annotated[bool, typer.Option("--open/--no-open", help="open it in a browser", show_default=False)]


def board_command(folder: Folder, host: Host = "127.0.0.1", port: Port = 0, open_: Open = False) -> None:
    """Show the runs in DIR as pages in a browser: list, compare, watch.

    It listens on this machine only, and goes on until Ctrl-C. It reads the folder and writes nothing.
    """
    from wardround.board.server import Board, Server

    with Server(Board(folder), host, port) as server:
        if not server.is_loopback:
            sys.stderr.write(
                f"warning: whoever can reach {printable(host)} on port {server.server_port} can read every run in "
                f"{printable(str(folder))}; there is no password\n"
            )
        typer.echo(server.address)
        sys.stdout.flush()
        if open_:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stderr.write("\n")

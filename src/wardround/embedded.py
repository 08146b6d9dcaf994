"""HTML files that need nothing else: a template's environment, pictures inside the page, and leave for its own style.

What is printed comes from outside (class names, file names): it is escaped, and nothing in it can turn text around.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from wardround.show import printable


def environment(folder: Path, clean: Callable[[str], str] = printable) -> Environment:
    """For the templates in a folder; a name that the view lacks is an error, and not an empty place.

    `clean` takes control characters out of every text that is printed; markup was made by a template already.
    """

    def finalize(value: object) -> object:
        if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
            return value
        return clean(value)

    found = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["csp_hash"] = csp_hash
    return found


def csp_hash(style: str) -> str:
    """What a content security policy calls this very style by, so that no other is applied."""
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


def data_uri(image: Image.Image) -> str:
    """A picture as the address of itself."""
    file = BytesIO()
    image.save(file, "PNG", compress_level=9)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

"""Pages that need nothing else: what comes from outside cannot act in them, and a missing value is not passed over."""

import base64
import hashlib
from io import BytesIO
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from PIL import Image

from wardround.embedded import csp_hash, data_uri, environment


def test_names_from_outside_are_shown_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.j2").write_text("{% set style %}a > b\n{}{% endset %}<b>{{ name }}</b>{{ style }}{{ n }}")
    template = environment(tmp_path).get_template("p.j2")
    text = template.render(name="<i>\u202egnp.exe\x1b & \ud800", n=3)
    assert text == "<b>&lt;i&gt;\\u202egnp.exe\\x1b &amp; \\ud800</b>a > b\n{}3"
    with pytest.raises(UndefinedError):
        template.render(name="x")


def test_a_style_is_known_by_its_hash() -> None:
    assert base64.b64decode(csp_hash("p { margin: 0 }")) == hashlib.sha256(b"p { margin: 0 }").digest()


def test_a_picture_is_its_own_address() -> None:
    kind, _, data = data_uri(Image.new("L", (3, 2), 7)).partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(BytesIO(base64.b64decode(data))) as back:
        assert (back.size, back.getpixel((0, 0))) == ((3, 2), 7)

"""What TLS and Flower's node authentication need: an authority of the consortium's own, and a key for each node.

Flower's nodes want keys on a NIST curve in OpenSSH's format; they prove which node is talking to the SuperLink, and
nothing else. Who a site is, and what it has sent, its Ed25519 key says (`wardround key new`).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wardround.errors import BadInput
from wardround.exchange.keys import place_for_public
from wardround.files import disk_errors, write_atomically, write_for_owner

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"
THIS_MACHINE = ("127.0.0.1", "localhost")  # Flower's own helpers connect to the SuperLink, too
DAYS_OF_CA, DAYS_OF_SERVER = 3650, 397


def make_certificates(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """An authority, where the folder has none yet, and a certificate for a SuperLink that is reached as `hosts`."""
    from cryptography.hazmat.primitives.asymmetric import ec

    names = [_general_name(host) for host in dict.fromkeys([*hosts, *THIS_MACHINE])]
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    authority, signer = _authority_in(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(folder / SERVER_KEY, _pem(key))
    _write(folder / SERVER, _certificate_pem(_server(key, names, authority, signer)))
    return [folder / name for name in (CA, CA_KEY, SERVER, SERVER_KEY)]


def make_node_key(path: Path) -> Path:
    """A node's key pair: the private half in `path`, the public half, which is returned, in a .pub file beside it."""
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric import ec

    if path.exists():
        raise BadInput(f"{path} exists already; a node keeps its key, or choose another name")
    place = place_for_public(path)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.OpenSSH, to.NoEncryption())
    public = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH)
    _write_private(path, private)
    _write(place, public + b"\n")
    return place


def _authority_in(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The folder's authority, made where it has none; never another one in the place of one that hospitals know."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if (folder / CA).exists() and not (folder / CA_KEY).exists():
        raise BadInput(f"{folder / CA} is here without its key; bring {CA_KEY} back, or use another folder")
    if not (folder / CA_KEY).exists():
        _write_private(folder / CA_KEY, _pem(ec.generate_private_key(ec.SECP384R1())))
    try:
        signer = load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise BadInput(f"{folder / CA_KEY} is not a key that this program made; use another folder")
        if not (folder / CA).exists():
            _write(folder / CA, _certificate_pem(_authority(signer)))
        return x509.load_pem_x509_certificate((folder / CA).read_bytes()), signer
    except (OSError, ValueError, TypeError) as error:  # TypeError: the key has a password
        raise BadInput(f"{CA} or {CA_KEY} in {folder} cannot be read; restore it, or use another folder") from error


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"), False
    ) | dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False)
    return (
        _builder("wardround consortium", "wardround consortium", key.public_key(), DAYS_OF_CA)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName],
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    return (
        _builder("wardround SuperLink", "wardround consortium", key.public_key(), DAYS_OF_SERVER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
            critical=False,
        )
        .sign(signer, hashes.SHA384())
    )


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of hospitals differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not all(part.replace("-", "").isalnum() and part.isascii() for part in host.split(".")):
        raise BadInput(f"{host!r} is neither a host's name nor an address; name what the nodes will connect to")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as to

    return key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _write_private(path: Path, data: bytes) -> None:
    """For its owner's eyes only, from the first byte on."""
    with disk_errors(path):
        write_for_owner(path, data)


def _write(path: Path, data: bytes) -> None:
    with disk_errors(path):
        write_atomically(path, data)

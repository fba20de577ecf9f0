"""Makes an authority and certificates for the machines of a cluster, by the package `cryptography`.

Keys are elliptic (P-256), certificates are for both sides of connections: a machine is a server to some and a client of
others.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapple_tf.errors import ClusterError
from dapple_tf.network.keys import AUTHORITY, CERTIFICATE, KEY

AUTHORITY_KEY = "authority_key.pem"
"""The authority's private key: who has it can let machines in."""
_EARLIER = datetime.timedelta(hours=1)
"""Certificates are valid from so long ago, since clocks differ."""


class Authority:
    """An authority, which signs certificates.

    Attributes:
        certificate: its certificate, in PEM form.
    """

    def __init__(self, certificate: bytes, key: bytes) -> None:
        """Reads an authority.

        Args:
            certificate: its certificate, in PEM form.
            key: its private key, without a password, in PEM form.

        Raises:
            ClusterError: they can't be read, don't go together, or aren't an authority's.
        """
        x509, serialization = _library()
        try:
            self._certificate = x509.load_pem_x509_certificate(certificate)
            self._key = serialization.load_pem_private_key(key, None)
            basic = self._certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except (ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise ClusterError(f"the authority's certificate or key can't be read: {error}") from error
        if self._certificate.public_key() != self._key.public_key():
            raise ClusterError("the authority's certificate and key don't go together")
        if not basic.ca:
            raise ClusterError("the authority's certificate is one of a machine: it says that it mustn't sign others")
        self.certificate = certificate

    @classmethod
    def make(cls, days: int) -> Authority:
        """Makes a new authority, valid for a number of days."""
        x509, serialization = _library()
        key = _new_key()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dapple_tf authority")])
        usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
        signed = (
            _builder(name, name, key.public_key(), key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .sign(key, _digest(key))
        )
        return cls(signed.public_bytes(serialization.Encoding.PEM), _private(key))

    def write(self, directory: Path) -> None:
        """Writes certificate and private key into a directory; the latter for its owner only."""
        _replace(directory / AUTHORITY, self.certificate)
        _replace(directory / AUTHORITY_KEY, _private(self._key), 0o600)

    def write_machine(self, directory: Path, names: Sequence[str], days: int) -> None:
        """Makes a machine's certificate and key, and writes all that the machine needs into a directory of its own.

        Args:
            directory: the directory, made if necessary; its former certificate is replaced.
            names: host names and addresses at which the machine is reached; the first is also its name for people.
            days: number of days for which the certificate is valid.
        """
        x509, serialization = _library()
        key = _new_key()
        purposes = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
        usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0][:64])])
        signed = (
            _builder(subject, self._certificate.subject, key.public_key(), self._key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .sign(self._key, _digest(self._key))
        )
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory / AUTHORITY, self.certificate)
        _replace(directory / KEY, _private(key), 0o600)
        _replace(directory / CERTIFICATE, signed.public_bytes(serialization.Encoding.PEM))


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _library() -> tuple[Any, Any]:
    try:
        from cryptography import x509  # only this module needs it, and not to use certificates
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise ClusterError(
            f"certificates are made by the package cryptography, which isn't installed here ({error}): "
            f"`pip install dapple_tf[tls]`; certificates that were made elsewhere need nothing"
        ) from error
    return x509, serialization


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _digest(key: Any) -> Any:
    """Returns the hash for signatures by a key; keys of Ed25519 and Ed448 have their own."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ed448, ed25519

    return None if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey) else hashes.SHA256()


def _builder(subject: Any, issuer: Any, public_key: Any, issuers_key: Any, days: int) -> Any:
    x509, _ = _library()
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(public_key)
    return (
        x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers_key), critical=False)
    )


def _name(name: str) -> Any:
    x509, _ = _library()
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: Any) -> bytes:
    _, serialization = _library()
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _replace(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replaces a file whole: readers find all of the old or all of the new."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)

"""A machine's certificate for mutual TLS: who it is, and by which authority it knows the others.

A directory has three files in PEM form, which `dapple-keys` makes, or any other authority's program:

    authority.pem     certificate of the authority; who has none of its certificates gets nowhere
    certificate.pem   this machine's own, of that authority, with its names and addresses
    key.pem           the private key of that certificate

Both sides of every connection show their certificates. A client looks for the address at which it reaches a worker
among the names in the worker's certificate. For the tunnels between TensorFlow's servers (`tunnels.py`) everybody knows
the very certificates of the others, by their fingerprints.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from dapple_tf.errors import ClusterError

logger = logging.getLogger(__name__)

TLS_VARIABLE = "DAPPLE_TF_TLS"
"""Environment variable with the directory of clients and workers that aren't told another one."""
AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
_ENCODING = "latin-1"
"""Encoding for any bytes: comments around PEM text may have any other."""
_FILES = {AUTHORITY: "the authority's certificate", CERTIFICATE: "this machine's certificate", KEY: "its private key"}


def fingerprint(connection: ssl.SSLSocket | ssl.SSLObject) -> str:
    """Returns the fingerprint of the certificate that the other side has shown: SHA-256, as 64 hexadecimal digits.

    The connection's handshake must be over.
    """
    certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None, "both sides are asked for certificates"
    return hashlib.sha256(certificate).hexdigest()


def tls_directory(named: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Returns the directory that a flag or an argument names, or else the environment variable; None without TLS.

    Raises:
        ClusterError: it is empty, such as where a variable in a script has no value.
    """
    directory = os.environ.get(TLS_VARIABLE) if named is None else named
    if directory is not None and not os.fspath(directory):
        where = f"the environment variable {TLS_VARIABLE}" if named is None else "the directory for TLS"
        raise ClusterError(f"{where} is empty: name the directory with this machine's certificate, or leave it out")
    return directory


class Keys:
    """The files of one directory, as they were when they were read.

    Others are told the fingerprint of this certificate. So whatever this process starts to speak for it gets `files`
    rather than the directory, where there may be another certificate by then.

    Attributes:
        directory: the directory.
        files: content of each file, by its name.
        fingerprint: that of this machine's certificate.
    """

    def __init__(self, directory: str | os.PathLike[str], files: Mapping[str, str] | None = None) -> None:
        """Reads the files.

        Args:
            directory: the directory.
            files: what another process has read there; None reads it now.

        Raises:
            ClusterError: a file is missing or isn't what it should be; others may read the private key; or the
                certificate isn't this key's, isn't this authority's, or isn't valid now.
        """
        self.directory = Path(directory).absolute()
        self._changed: list[int] | None = None
        self.files = self._read() if files is None else files
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER)
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        self._peer = self._context(ssl.PROTOCOL_TLS_CLIENT)
        self._peer.check_hostname = False
        self.fingerprint = self._check(self._peer, None)

    def _read(self) -> Mapping[str, str]:
        for name, what in _FILES.items():
            if not (self.directory / name).is_file():
                raise ClusterError(
                    f"TLS: {self.directory / name} ({what}) is missing; a directory for TLS has {', '.join(_FILES)}, "
                    f"and dapple-keys makes it"
                )
        key = self.directory / KEY
        if key.stat().st_mode & stat.S_IROTH:
            raise ClusterError(f"TLS: every user of this machine can read {key}; `chmod o= {key}`, or make new keys")
        self._changed = self._changes()
        try:
            return {name: (self.directory / name).read_text(_ENCODING) for name in _FILES}
        except OSError as error:
            raise ClusterError(f"TLS: {self.directory} can't be read: {error}") from error

    def renewed(self) -> Keys:
        """Returns the keys that the directory has now: these unless its files have changed, or can't be used."""
        try:
            return self if self._changes() == self._changed else Keys(self.directory)
        except (ClusterError, OSError) as error:
            logger.warning("the former certificate stays in use: %s", error)
            return self

    def _changes(self) -> list[int]:
        return [(self.directory / name).stat().st_mtime_ns for name in _FILES]

    def check_host(self, host: str) -> None:
        """Checks that the certificate is for a host's name or address, by which others will reach this machine.

        Raises:
            ClusterError: it isn't.
        """
        self._check(self._client, host)

    def server(self, connection: socket.socket) -> ssl.SSLSocket:
        """Returns a connection that was accepted, with the handshake still to come."""
        return self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def client(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Returns a connection to a host, whose certificate has to name it, with the handshake still to come."""
        return self._client.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)

    def peer(self, connection: socket.socket) -> ssl.SSLSocket:
        """Returns a connection to who is known by its fingerprint, which the caller has to compare."""
        return self._peer.wrap_socket(connection, do_handshake_on_connect=False)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            # Nobody resumes sessions, and a client that closes before it has read a ticket would lose what it sent.
            context.num_tickets = 0
        with contextlib.ExitStack() as stack:
            authority, certificate, key = (stack.enter_context(_in_memory(self.files[name])) for name in _FILES)
            try:
                context.load_verify_locations(authority)
            except (OSError, ssl.SSLError) as error:
                raise ClusterError(f"TLS: {self.directory / AUTHORITY} can't be read: {error}") from error
            try:
                context.load_cert_chain(certificate, key, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                raise ClusterError(
                    f"TLS: {CERTIFICATE} and {KEY} in {self.directory} don't go together or can't be read: {error}"
                ) from error
        return context

    def _check(self, context: ssl.SSLContext, host: str | None) -> str:
        """Greets itself, as others will: what they would refuse is refused here; returns the fingerprint they see."""
        one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self._server.wrap_bio(one, other, server_side=True)
        client = context.wrap_bio(other, one, server_hostname=host)
        try:
            for side in (client, server, client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ClusterError(
                f"TLS: others would refuse {self.directory / CERTIFICATE}"
                f"{f' from {host}' if host else ''}: {why}. Make one with dapple-keys, which is given the machine's "
                f"names and addresses"
            ) from error
        return fingerprint(client)


@contextlib.contextmanager
def _in_memory(content: str) -> Iterator[str]:
    """Yields the path of a file with this content that is on no disk: OpenSSL reads private keys from files alone."""
    descriptor = os.memfd_create("pem")
    try:
        with open(descriptor, "w", encoding=_ENCODING, closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_password() -> str:
    raise ClusterError("TLS: the private key has a password, which nobody is there to type; store it without one")

"""Makes certificates for a cluster with TLS: an authority, and a directory for each machine.

    dapple-keys --directory=keys node1,10.0.0.1 node2,10.0.0.2 client
    dapple-keys --directory=keys --days=30 node3,10.0.0.3     # one machine more

Each argument is a machine: the names and addresses at which others reach it, separated by commas. Its directory has the
first one's name, here keys/node1, and is to be copied to that machine alone, for `dapple-worker --tls=...` or
`dapple_tf.Cluster.of_servers(..., tls=...)`. The client needs a certificate too; any name will do for it.

An authority that is in the directory already signs further machines. keys/authority_key.pem lets machines in: keep it
where none of them is. To have another authority sign, give --authority and --authority_key; or put its files into the
machines' directories, as authority.pem, certificate.pem and key.pem, without this program.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NoReturn

from absl import app, flags

from dapple_tf.common.program import run_program
from dapple_tf.errors import ClusterError
from dapple_tf.network.certificates import AUTHORITY_KEY, Authority
from dapple_tf.network.keys import AUTHORITY, Keys

_DIRECTORY = flags.DEFINE_string("directory", "keys", "Where to write; made if necessary.")
_DAYS = flags.DEFINE_integer("days", 365, "Number of days for which machines' certificates are valid.", 1, 36_500)
_AUTHORITY_DAYS = flags.DEFINE_integer("authority_days", 3650, "The same for a new authority.", 1, 36_500)
_AUTHORITY = flags.DEFINE_string("authority", None, "Certificate of another authority, in PEM form.")
_AUTHORITY_KEY = flags.DEFINE_string("authority_key", None, "Private key of that authority, without a password.")

_MACHINE = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9._:*-]*[A-Za-z0-9])?|::1")


def machine_names(argument: str) -> list[str]:
    """Returns a machine's names and addresses.

    Raises:
        ClusterError: one is none.
    """
    names = [name.removeprefix("[").removesuffix("]") for name in argument.split(",")]
    for name in names:
        if not _MACHINE.fullmatch(name):
            raise ClusterError(f"{name!r} in {argument!r} is neither a host's name nor an address; see --help")
    return names


def authority(directory: Path) -> tuple[Authority, str]:
    """Returns the authority to sign with, made if there is none, and where it is from.

    Raises:
        ClusterError: its files can't be read, or only one of them is there.
    """
    if (_AUTHORITY.value is None) != (_AUTHORITY_KEY.value is None):
        raise ClusterError("--authority and --authority_key go together; give both, or neither")
    outside = _AUTHORITY.value is not None
    certificate = Path(_AUTHORITY.value) if outside else directory / AUTHORITY
    key = Path(_AUTHORITY_KEY.value) if outside else directory / AUTHORITY_KEY
    if outside or certificate.exists() or key.exists():
        try:
            return Authority(certificate.read_bytes(), key.read_bytes()), f"the authority of {certificate}"
        except OSError as error:
            raise ClusterError(f"the authority can't be read: {error}") from error
    authority = Authority.make(_AUTHORITY_DAYS.value)
    directory.mkdir(parents=True, exist_ok=True)
    authority.write(directory)
    return authority, f"a new authority, {certificate}; keep {key} where no machine of the cluster is"


def main(argv: list[str]) -> None:
    """Makes the certificates."""
    directory = Path(_DIRECTORY.value)
    try:
        machines = [machine_names(argument) for argument in argv[1:]]
        if not machines:
            raise ClusterError("no machine is named; give the names and addresses of each, such as node1,10.0.0.1")
        if len({names[0] for names in machines}) < len(machines):
            raise ClusterError("two machines have the same first name, by which their directories are called")
        signer, told = authority(directory)
        sys.stdout.write(f"{told}\n")
        for names in machines:
            signer.write_machine(directory / names[0], names, _DAYS.value)
            Keys(directory / names[0]).check_host(names[0])
            sys.stdout.write(f"{directory / names[0]}: {', '.join(names)}\n")
    except ClusterError as error:
        raise app.UsageError(str(error)) from error


def run() -> NoReturn:
    """Runs the console command."""
    run_program(main)


if __name__ == "__main__":
    run()

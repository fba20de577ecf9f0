"""Keys of machines: what can't be used is told early, and who has no certificate of the authority gets nothing."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest
from absl import app, flags
from absl.testing import flagsaver
from tls_keys import new_authority, new_machine

from dapple_tf.errors import ClusterError
from dapple_tf.network.certificates import AUTHORITY_KEY, Authority
from dapple_tf.network.control import Channel, ControlError, Hello
from dapple_tf.network.keys import AUTHORITY, CERTIFICATE, KEY, Keys, tls_directory
from dapple_tf.tools import keys as tool

Files = Callable[..., pathlib.Path]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority()


@pytest.fixture
def machine(authority: Authority, tmp_path: pathlib.Path) -> pathlib.Path:
    return new_machine(authority, tmp_path / "machine", "127.0.0.1", "node-1.example.org", "::1")


# ---- files


def test_keys_are_for_their_names(machine: pathlib.Path) -> None:
    keys = Keys(machine)
    assert keys.directory == machine
    for host in ("127.0.0.1", "node-1.example.org", "::1"):
        keys.check_host(host)
    for host in ("127.0.0.2", "node-2.example.org"):
        with pytest.raises(
            ClusterError, match=rf"others would refuse {machine}/certificate.pem from {host}: .*mismatch"
        ):
            keys.check_host(host)


@pytest.mark.parametrize("name", [AUTHORITY, CERTIFICATE, KEY])
def test_a_missing_file_is_named(machine: pathlib.Path, name: str) -> None:
    (machine / name).unlink()
    with pytest.raises(ClusterError, match=rf"TLS: {machine}/{name} \(.*\) is missing; a directory for TLS has"):
        Keys(machine)


@pytest.mark.parametrize("name", [AUTHORITY, CERTIFICATE, KEY])
def test_a_file_of_something_else_is_told(machine: pathlib.Path, name: str) -> None:
    (machine / name).write_text("nothing")
    with pytest.raises(ClusterError, match=r"TLS: .*can't be read"):
        Keys(machine)


def test_a_key_that_all_users_can_read_is_refused(machine: pathlib.Path) -> None:
    (machine / KEY).chmod(0o644)
    with pytest.raises(ClusterError, match=rf"every user of this machine can read {machine}/key.pem; `chmod o= "):
        Keys(machine)
    (machine / KEY).chmod(0o640)  # As Kubernetes gives it to a pod's group.
    Keys(machine)


def test_keys_that_others_would_refuse(authority: Authority, machine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expired = new_machine(authority, tmp_path / "expired", "127.0.0.1", days=0)
    with pytest.raises(ClusterError, match=r"others would refuse .*: certificate has expired"):
        Keys(expired)
    foreign = new_machine(new_authority(), tmp_path / "foreign", "127.0.0.1")
    shutil.copy(machine / AUTHORITY, foreign / AUTHORITY)
    with pytest.raises(
        ClusterError, match=r"others would refuse .*: (unable to get|self.signed|certificate signature)"
    ):
        Keys(foreign)
    shutil.copy(machine / CERTIFICATE, foreign / CERTIFICATE)
    with pytest.raises(ClusterError, match=r"certificate.pem and key.pem in .* don't go together"):
        Keys(foreign)


def test_keys_are_renewed_where_their_files_are(authority: Authority, machine: pathlib.Path) -> None:
    """A certificate runs out, and whoever replaces it has workers that serve; half a renewal changes nothing."""
    keys = Keys(machine)
    assert keys.renewed() is keys
    before = {path: path.read_bytes() for path in machine.iterdir()}
    new_machine(authority, machine, "127.0.0.1")
    renewed = keys.renewed()
    assert renewed.fingerprint == Keys(machine).fingerprint != keys.fingerprint
    (machine / CERTIFICATE).write_bytes(before[machine / CERTIFICATE])  # not of the new key
    assert renewed.renewed() is renewed
    (machine / CERTIFICATE).unlink()
    assert renewed.renewed() is renewed


@pytest.mark.parametrize("label", ["CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_the_fingerprint_is_that_of_the_certificate_that_is_shown(label: str, machine: pathlib.Path) -> None:
    """The first in the file, with any label that OpenSSL knows: a worker ended when its certificate got another one."""
    keys = Keys(machine)
    own = (machine / CERTIFICATE).read_text().replace("CERTIFICATE", label)
    (machine / CERTIFICATE).write_text(f"Certificate:\n...\n{own}{(machine / AUTHORITY).read_text()}")
    renewed = keys.renewed()
    assert renewed is not keys
    assert renewed.fingerprint == keys.fingerprint


def test_files_are_replaced_as_a_whole(authority: Authority, machine: pathlib.Path) -> None:
    """A worker that reads its directory meanwhile found a file without its end."""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((machine / name).open()) for name in (AUTHORITY, CERTIFICATE, KEY)}
        before = {name: (machine / name).read_text() for name in files}
        new_machine(authority, machine, "127.0.0.1")
        assert {name: file.read() for name, file in files.items()} == before
    assert {path.name for path in machine.iterdir()} == set(before)
    assert (machine / KEY).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("named", "variable"), [("", None), ("", "keys"), (None, "")])
def test_an_empty_directory_is_no_choice_against_tls(
    named: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable without a value in a script: the worker was open to everybody, without a word."""
    monkeypatch.delenv("DAPPLE_TF_TLS", raising=False)
    assert tls_directory(None) is None
    if variable is not None:
        monkeypatch.setenv("DAPPLE_TF_TLS", variable)
    with pytest.raises(ClusterError, match="is empty: name the directory with this machine's certificate, or leave"):
        tls_directory(named)


# ---- connections


@contextlib.contextmanager
def listening(directory: pathlib.Path | None) -> Iterator[tuple[str, list[str]]]:
    """A worker's side of one connection after the other: address, and what became of them."""
    answers: list[str] = []
    keys = None if directory is None else Keys(directory)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.settimeout(5)
                hello = Hello(connection, keys)
                hello.connection.setblocking(True)
                try:
                    assert hello.advance()
                    hello.channel.socket.setblocking(False)
                    hello.channel.send({"you": hello.channel.fingerprint}, 5)
                    answers.append("answered")
                except ControlError as error:
                    answers.append(str(error))
                hello.channel.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", answers
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def ask(address: str, keys: Keys | None) -> dict[str, str]:
    with contextlib.closing(Channel.connect(address, 5, keys)) as channel:
        return channel.ask({"ask": "status"}, 5)


def test_two_machines_of_one_authority_talk(
    authority: Authority, machine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    client = Keys(new_machine(authority, tmp_path / "client", "client"))
    with listening(machine) as (address, answers):
        answer = ask(address, client)
    assert answers == ["answered"]
    assert answer == {"you": client.fingerprint}


def test_strangers_get_nothing(authority: Authority, machine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Neither without TLS, nor without a certificate, nor with one of another authority, whatever it says."""
    foreign = Keys(new_machine(new_authority(), tmp_path / "foreign", "127.0.0.1"))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.load_cert_chain(foreign.directory / CERTIFICATE, foreign.directory / KEY)
    with listening(machine) as (address, answers):
        with pytest.raises(ControlError, match="connection"):
            ask(address, None)
        with pytest.raises(ControlError, match="has a certificate that isn't accepted"):
            ask(address, foreign)
        for context in (bare, trusting):
            with socket.create_connection(("127.0.0.1", int(address.split(":")[1])), 5) as plain:
                secured = context.wrap_socket(plain)
                with contextlib.closing(secured), pytest.raises(OSError):
                    secured.sendall(b'{"ask": "status"}\n')
                    if not secured.recv(100):
                        raise OSError("closed")
    assert len(answers) == 4 and "answered" not in answers


def test_a_worker_at_another_name_is_not_believed(
    authority: Authority, machine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    other = new_machine(authority, tmp_path / "other", "10.0.0.2")
    with listening(other) as (address, _), pytest.raises(ControlError, match=r"isn't accepted: IP address mismatch"):
        ask(address, Keys(machine))


def test_who_speaks_tls_to_a_worker_without_it_is_told(machine: pathlib.Path) -> None:
    told = r"doesn't speak TLS as expected \(was it started with --tls\?\)"
    with listening(None) as (address, answers), pytest.raises(ControlError, match=told):
        ask(address, Keys(machine))
    assert answers == ["speaks TLS, which this side wasn't told to (--tls)"]


# ---- dapple-keys


@pytest.fixture
def _flags(authority: Authority) -> Iterator[None]:
    with flagsaver.flagsaver():
        yield


def run(*arguments: str) -> None:
    tool.main(flags.FLAGS(["keys", *arguments]))


@pytest.mark.usefixtures("_flags")
def test_the_tool_makes_an_authority_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    run(f"--directory={directory}", "node1,10.0.0.1", "client")
    assert "a new authority" in capsys.readouterr().out
    assert (directory / AUTHORITY_KEY).stat().st_mode & 0o777 == 0o600
    assert (directory / "node1" / KEY).stat().st_mode & 0o777 == 0o600
    assert not (directory / "node1" / AUTHORITY_KEY).exists()
    Keys(directory / "node1").check_host("10.0.0.1")
    authority_before = (directory / AUTHORITY).read_bytes()
    run(f"--directory={directory}", "node2")
    assert (directory / "node2" / AUTHORITY).read_bytes() == authority_before == (directory / AUTHORITY).read_bytes()
    run(
        f"--directory={tmp_path / 'others'}",
        f"--authority={directory / AUTHORITY}",
        f"--authority_key={directory / AUTHORITY_KEY}",
        "node3",
    )
    assert (tmp_path / "others" / "node3" / AUTHORITY).read_bytes() == authority_before
    assert not (tmp_path / "others" / AUTHORITY_KEY).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no machine is named"),
        (["a,b", "a"], "two machines have the same first name"),
        (["../a"], "'../a' in '../a' is neither a host's name nor an address"),
        (["a,,b"], "'' in 'a,,b' is neither"),
        (["--authority=a.pem", "a"], "--authority and --authority_key go together"),
        (["--authority=none.pem", "--authority_key=none.pem", "a"], "the authority can't be read"),
    ],
)
@pytest.mark.usefixtures("_flags")
def test_mistakes_of_the_command_line(arguments: list[str], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(app.UsageError, match=message):
        run(f"--directory={tmp_path / 'keys'}", *arguments)


@pytest.mark.usefixtures("_flags")
def test_half_an_authority_is_told(machine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(app.UsageError, match=r"the authority can't be read: .*authority_key.pem"):
        run(f"--directory={machine}", "a")
    shutil.copy(machine / KEY, machine / AUTHORITY_KEY)
    with pytest.raises(app.UsageError, match="certificate and key don't go together"):
        run(f"--directory={machine}", "a")
    shutil.copy(machine / CERTIFICATE, machine / AUTHORITY)
    with pytest.raises(app.UsageError, match="is one of a machine"):
        run(f"--directory={machine}", "a")

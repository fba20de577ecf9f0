"""Restricts the addresses at which a server can be reached.

TensorFlow's gRPC has neither authentication nor encryption: whoever connects to a server can run any graph in its
process, and graphs read and write files. Its servers listen on all interfaces of their machine, whatever address they
are given. The kernel can restrict that: a filter on the listening socket drops every packet for another than
the wanted addresses, before TCP sees it. For others the port then doesn't answer.

    addresses = check_private("10.0.0.1", allow_public=False)
    with keep_closed(2222):
        server = tf.distribute.Server({"worker": ["10.0.0.1:2222"]}, task_index=0, start=False)
        confine(2222, addresses)
    server.start()

The filter checks the address that a packet is for, and the network device through which it came: Linux accepts
packets for one device's address on any other, so that neighbours on a public network could otherwise reach a machine
at its private address.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import platform
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dapple_tf.errors import ClusterError, PortTakenError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DANGER = (
    "TensorFlow's gRPC has neither authentication nor encryption, so that whoever connects can run any graph in the "
    "worker, which reads and writes files"
)
_ADVICE = (
    "keep others from the port by a firewall, a container or a network namespace, and pass --all_interfaces to "
    "python -m dapple_tf.worker"
)

# From the kernel's asm-generic/socket.h; Python's socket module lacks them.
_ATTACH_FILTER, _LOCK_FILTER, _ATTACH_REUSEPORT_FILTER = 26, 44, 51

# Classic BPF, from linux/filter.h. A packet's words are loaded as sent, the first byte highest.
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _JUMP, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x05, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here on are from the IP header.
_IPV4_DESTINATION, _IPV6_DESTINATION = 16, 24
_DEVICE = 0xFFFFF008  # SKF_AD_OFF + SKF_AD_IFINDEX: number of the network device instead of the packet's bytes.
_LOOPBACK = 1  # Number of the loopback device, in every network namespace.
_DROP, _WHOLE = 0, 0xFFFFFFFF  # Bytes of the packet to keep.

_IPV4_WILDCARD, _IPV6_WILDCARD = ipaddress.IPv4Address("0.0.0.0"), ipaddress.IPv6Address("::")

_ESTABLISHED, _TIME_WAIT, _CLOSE_WAIT, _LISTEN = 1, 6, 8, 10
"""States of TCP, from the kernel's net/tcp_states.h."""

_REUSE_PORT = "TF_GRPC_REUSE_PORT"
"""Environment variable with which TensorFlow sets SO_REUSEPORT on its listening socket (`GrpcServer::Init` in
grpc_server_lib.cc)."""

_PACKET_SECONDS = 0.02
"""Longer than the kernel takes for a packet that passed before the new filter was set."""


def resolve(host: str) -> tuple[Address, ...]:
    """Returns the addresses of a host name, each once; an address stands for itself.

        resolve("localhost")          127.0.0.1 and ::1, or one of them: as this machine has it
        resolve("[::ffff:10.0.0.1]")  10.0.0.1
        resolve("")                   0.0.0.0 and ::, which is all interfaces

    Raises:
        ClusterError: the name can't be resolved.
    """
    if not host:
        return (_IPV4_WILDCARD, _IPV6_WILDCARD)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return (_plain(ipaddress.ip_address(bare)),)
    except ValueError:
        pass  # It is a name, then.
    try:
        entries = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # UnicodeError, a ValueError, is for impossible names.
        raise ClusterError(
            f"the host {host!r} isn't known on this machine ({error}); correct it or give its IP address"
        ) from error
    return tuple(dict.fromkeys(_plain(ipaddress.ip_address(str(entry[4][0]))) for entry in entries))


def check_private(host: str, *, allow_public: bool, all_interfaces: bool = False) -> tuple[Address, ...]:
    """Returns the addresses of a host to listen on, none of which the whole Internet can reach.

    Args:
        host: name or address. Names depend on this machine's table of hosts, in which its own name is often
            127.0.1.1; addresses are safer.
        allow_public: also accept addresses that are reached from everywhere.
        all_interfaces: also accept the wildcard addresses 0.0.0.0, :: and "".

    Raises:
        ClusterError: the name can't be resolved, or an address isn't accepted without its flag.
    """
    addresses = resolve(host)
    for address in addresses:
        told = f"{host!r}" if str(address) == host else f"{host!r} ({address})"
        if address.is_unspecified:
            if not all_interfaces:
                raise ClusterError(
                    f"the address {told} means all interfaces of this machine. {_DANGER}. Give the address in the "
                    f"private network that the other servers and the client use; if all interfaces are meant and "
                    f"others are kept from the port, pass --all_interfaces to python -m dapple_tf.worker"
                )
        elif address.is_global and not allow_public:
            raise ClusterError(
                f"the address {told} is public: the whole Internet may reach it. {_DANGER}. Give an address in a "
                f"private network or a tunnel; if others are kept from this one by a firewall, pass --allow_public to "
                f"python -m dapple_tf.worker"
            )
    return addresses


@contextlib.contextmanager
def keep_closed(port: int) -> Iterator[None]:
    """Lets a TensorFlow server be made on the port in this process while nobody can connect to it.

    TensorFlow accepts connections and reads requests from the moment a server is made; it only doesn't answer before
    ``start()``. It then carries out earlier requests even if their clients have gone, so that no check of the
    connections would find them. Here our own socket listens on the port first, receives everything that comes to the
    port, and drops it. TensorFlow's socket, which shares the port (SO_REUSEPORT), receives packets only after it is
    `confine`d and our socket is closed. Clients who tried in between retry by themselves (TCP does so
    within 1 s) and notice nothing.

    Raises:
        ClusterError: the port is taken or may not be used, or this system has no socket filters.
    """
    _require_linux()
    with _bound(port) as gate:
        _attach(gate, _ATTACH_FILTER, [(_RETURN, 0, 0, _DROP)])
        # Only now: a port of another process that would share it still counts as taken.
        gate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            gate.listen()
        except OSError as error:  # Another socket, bound to the port as well, has begun to listen.
            raise port_error(f"no server can be started on port {port}", error) from error
        # Of the sockets that share the port, take the first for every connection.
        _attach(gate, _ATTACH_REUSEPORT_FILTER, [(_RETURN, 0, 0, 0)])
        _lock(gate)
        before = os.environ.get(_REUSE_PORT)
        os.environ[_REUSE_PORT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_REUSE_PORT]
            else:
                os.environ[_REUSE_PORT] = before


def confine(port: int, addresses: Sequence[Address]) -> None:
    """Restricts the server that listens on a port of this process to these addresses.

    Must be called between making a server with ``start=False`` and starting it, inside `keep_closed`. The kernel drops
    all other packets for the listening socket; the filter can't be removed. Connections inherit it. If a connection
    to another address already exists, made without `keep_closed`, the server mustn't be started.

    Args:
        port: port of the server.
        addresses: where it may be reached, as returned by `resolve`; addresses of other machines are ignored. With
            0.0.0.0 or :: among them nothing is filtered.

    Raises:
        ClusterError: no address is this machine's, nothing listens on the port or it is already confined, somebody is
            connected at another address (then end the process), the server has several sockets, or this system has no
            socket filters.
    """
    if any(address.is_unspecified for address in addresses):
        return
    _require_linux()
    own = [address for address in addresses if _is_own(address)]
    if not own:
        told = ", ".join(map(str, addresses)) or "none"
        raise ClusterError(
            f"the address to listen on ({told}) isn't one of this machine; is --task right? Behind address "
            f"translation, give the machine's own address and let the others reach it by that"
        )
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(item) for item in _listening(port)]
        # Locked are the gate of `keep_closed`, and sockets that were confined before.
        opened = [item for item in sockets if not item.getsockopt(socket.SOL_SOCKET, _LOCK_FILTER)]
        if not opened:
            why = "its filter can't be changed any more" if sockets else "make the server first, with start=False"
            raise ClusterError(f"no socket of this process that can be confined listens on port {port}; {why}")
        if len(opened) > 1:
            raise ClusterError(
                f"{len(opened)} sockets of this process listen on port {port}, as those of TensorFlow before 2.20 do, "
                f"and only one of them would be given connections; use TensorFlow 2.20 or a newer one for clusters"
            )
        for item in opened:
            _attach(item, _ATTACH_FILTER, _only_to(own, _devices(own)))
            _lock(item)
    time.sleep(_PACKET_SECONDS)
    if strays := _strays(port, own):
        raise ClusterError(
            f"while the server was made on port {port}, somebody connected to it at {strays[0].local} from "
            f"{strays[0].remote}, not at {', '.join(map(str, own))}, and may have sent a graph; end this process and "
            f"start it again"
        )


def port_error(text: str, error: OSError) -> ClusterError:
    """Returns the error for a port at which nothing can listen, a `PortTakenError` if another process has it.

    Args:
        text: what can't be done at which port.
        error: the system's.
    """
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(f"{text}: is it taken? ({error})")
    return ClusterError(f"{text}: {error}")


def listen(address: Address, port: int) -> socket.socket:
    """Returns a socket that listens at one address, for packets from that address's network device or this machine.

    Raises:
        OSError: the address isn't this machine's, or is in use.
    """
    made = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # After a restart, old connections linger.
        made.bind((str(address), port))
        if platform.system() == "Linux" and not address.is_unspecified:
            _attach(made, _ATTACH_FILTER, _only_to([address], _devices([address])))
            _lock(made)
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


class _Connection(NamedTuple):
    """One line of /proc/net/tcp."""

    local: Address
    port: int
    remote: Address
    state: int
    inode: int


def _plain(address: Address) -> Address:
    """Returns the address without a link-local interface, and as IPv4 where sent as IPv4."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return address.ipv4_mapped or ipaddress.IPv6Address(int(address))


def _require_linux() -> None:
    if platform.system() != "Linux":
        raise ClusterError(
            f"on {platform.system()} the server can't be confined to its address, as socket filters are Linux's, and "
            f"TensorFlow listens on all interfaces. {_DANGER}. Use Linux; or {_ADVICE}"
        )


def _bound(port: int) -> socket.socket:
    """Returns a socket bound to the wildcard address of TensorFlow's: both must be alike to share a port."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            made = socket.socket(family)
        except OSError:
            continue  # No IPv6 in this kernel.
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # After a restart, old connections linger.
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind((host, port))
            return made
        except OSError as error:
            made.close()
            if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                continue  # IPv6 is switched off.
            raise port_error(f"no server can be started on port {port}", error) from error
        except OverflowError as error:
            made.close()
            raise ClusterError(f"port {port} is no port; they go to 65535") from error
    raise ClusterError(f"no server can be started on port {port}: this machine has neither IPv6 nor IPv4")


def _is_own(address: Address) -> bool:
    """Returns whether an address is one of this machine's."""
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError as error:
            # A link-local address can't be bound without its interface, which isn't known here.
            return error.errno != errno.EADDRNOTAVAIL
    return True


_ADDRESS_BYTES = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""Offset and bytes of the address in struct sockaddr_in and sockaddr_in6."""


class _InterfaceAddress(ctypes.Structure):
    """The kernel's addresses as the C library lists them: struct ifaddrs, as far as it is read here."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _devices(addresses: Sequence[Address]) -> frozenset[int]:
    """Returns numbers of the network devices with these addresses, and of the loopback device; empty for any device.

    Any device is allowed if one can't be determined, or if the loopback device has a foreign address: a
    machine is reached at such an address through all of its devices.
    """
    library, head = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(head)):
        return frozenset()
    by_address: dict[Address, int] = {}
    try:
        item = head
        while item:
            entry = item.contents
            if entry.address:
                family = ctypes.c_ushort.from_address(entry.address).value
                if family in _ADDRESS_BYTES:
                    offset, size = _ADDRESS_BYTES[family]
                    packed = ctypes.string_at(entry.address + offset, size)
                    with contextlib.suppress(OSError):  # The device has gone meanwhile.
                        by_address[_plain(ipaddress.ip_address(packed))] = socket.if_nametoindex(entry.name.decode())
            item = entry.next
    finally:
        library.freeifaddrs(head)
    devices = {_LOOPBACK}
    for address in addresses:
        if address.is_loopback:
            continue  # All of 127.0.0.0/8, whether listed or not.
        device = by_address.get(address, _LOOPBACK)
        if device == _LOOPBACK:
            return frozenset()
        devices.add(device)
    return frozenset(devices)


def _only_to(addresses: Sequence[Address], devices: Collection[int] = ()) -> list[tuple[int, int, int, int]]:
    """Returns the filter that keeps packets for these addresses, as (code, jump if true, jump if false, operand).

    IPv4 packets reach an IPv6 socket unchanged, so that the header's version decides where to look.

    Args:
        addresses: addresses to keep.
        devices: numbers of the network devices through which packets may come; none for any.
    """
    keep, drop = (_RETURN, 0, 0, _WHOLE), (_RETURN, 0, 0, _DROP)
    parts: dict[int, list[tuple[int, int, int, int]]] = {4: [], 6: []}
    for address in addresses:
        first = _IPV4_DESTINATION if address.version == 4 else _IPV6_DESTINATION
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for index, word in enumerate(words):
            past = 2 * (len(words) - index) - 1  # From the comparison past this address's `keep`.
            parts[address.version].append((_LOAD_WORD, 0, 0, _NETWORK_HEADER + first + 4 * index))
            parts[address.version].append((_JUMP_EQUAL, 0, past, word))
        parts[address.version].append(keep)
    through = [(_LOAD_WORD, 0, 0, _DEVICE)] if devices else []
    for index, device in enumerate(sorted(devices)):
        through.append((_JUMP_EQUAL, len(devices) - index, 0, device))
    if devices:
        through.append(drop)
    return [
        *through,
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, 4),
        (_JUMP, 0, 0, len(parts[4]) + 1),
        *(*parts[4], drop),
        (_JUMP_EQUAL, 1, 0, 6),
        drop,
        *(*parts[6], drop),
    ]


def _attach(target: socket.socket, option: int, code: Sequence[tuple[int, int, int, int]]) -> None:
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("@HP", len(code), ctypes.addressof(buffer))  # struct sock_fprog
    try:
        target.setsockopt(socket.SOL_SOCKET, option, pointer)
    except OSError as error:
        raise ClusterError(
            f"this system doesn't take a filter for the server's socket ({error}), and TensorFlow listens on all "
            f"interfaces. {_DANGER}. Use Linux; or {_ADVICE}"
        ) from error


def _lock(target: socket.socket) -> None:
    """Locks the socket's filter: nobody, not even this process, can remove or replace it."""
    target.setsockopt(socket.SOL_SOCKET, _LOCK_FILTER, 1)


def _sockets() -> Iterator[socket.socket]:
    """Yields a handle on every socket of this process, TensorFlow's C++ code included."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # Closed by another thread.
            # Of sockets only: closing any copy of a file's handle releases this process's locks on it.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
            try:
                handle = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with handle:
                yield handle


def _listening(port: int) -> list[socket.socket]:
    """Returns handles on the sockets of this process that listen on the port; the caller closes them."""
    return [
        handle.dup()
        for handle in _sockets()
        if handle.family in (socket.AF_INET, socket.AF_INET6)
        and handle.type == socket.SOCK_STREAM
        and handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and handle.getsockname()[1] == port
    ]


def _strays(port: int, allowed: Sequence[Address]) -> list[_Connection]:
    """Returns connections to the port at other addresses, accepted by this process or waiting."""
    mine = {os.fstat(handle.fileno()).st_ino for handle in _sockets()}
    return [
        item
        for item in _connections()
        if item.port == port
        and item.local not in allowed
        and item.state not in (_LISTEN, _TIME_WAIT)
        # Without an inode it either waits to be accepted, or is being closed after its process has released it.
        and (item.inode in mine or (item.inode == 0 and item.state in (_ESTABLISHED, _CLOSE_WAIT)))
    ]


def _connections() -> Iterator[_Connection]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # No IPv6.
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                _, local, remote, state, *_, inode = line.split()[:10]
                address, _, port = local.partition(":")
                yield _Connection(
                    _from_hex(address), int(port, 16), _from_hex(remote.partition(":")[0]), int(state, 16), int(inode)
                )


def _from_hex(text: str) -> Address:
    """Parses an address of /proc/net/tcp: words of 32 bits, each in this machine's byte order."""
    packed = b"".join(int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8))
    return _plain(ipaddress.ip_address(packed))

"""The right to write to a directory of checkpoints, which one training has at a time.

The file ``.lock`` in the directory names the owner, which keeps it locked (``flock``). The kernel unlocks it when the
process ends, however it ends, so that whoever comes next takes over. Where a file system has no locks, the name alone
counts: who creates the file owns the directory; an owner on this machine that no longer runs is replaced, by who
creates ``.lock-taking`` first; one on another machine has to be removed by hand. Reading needs no lock.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import logging
import os
import pathlib
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterator

from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".lock"
_TAKING = ".lock-taking"
_MOST_BYTES = 4096
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What ``flock`` says on file systems without locks."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """A training that may write to a directory.

    Attributes:
        host: name of its machine.
        process: number of its process.
        started: when that process was started, in seconds since 1970.
        life: what no other process has, whatever clocks are set to: the machine's boot, and the time since.
        model: name of its model.
    """

    host: str
    process: int
    started: int
    life: str
    model: str

    @classmethod
    def here(cls, model: str) -> Owner:
        """Returns the owner for a model of this process."""
        process = os.getpid()
        return cls(socket.gethostname(), process, _started(process) or 0, _life(process) or "", model)

    @classmethod
    def of(cls, text: bytes) -> Owner | None:
        """Returns the owner that a file names; None if it names none."""
        try:
            data = json.loads(text)
            fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        types = {"host": str, "process": int, "started": int, "life": str, "model": str}
        return cls(**fields) if all(type(value) is types[name] for name, value in fields.items()) else None

    @property
    def may_run(self) -> bool:
        """Whether its process runs, as far as this machine knows."""
        return self.host != socket.gethostname() or _life(self.process) == self.life

    @property
    def is_here(self) -> bool:
        """Whether it is a model of this process."""
        return (self.host, self.process) == (socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        if self.is_here:
            return f"model {self.model!r} of this process"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"model {self.model!r} of process {self.process} on host {self.host}, which was started at {at}"


class DirectoryLock:
    """The lock of a directory, held until `release`, the end of this object or that of the process.

    Attributes:
        directory: the directory.
        busy: returns whether others in this process can't have the lock now.
    """

    def __init__(self, directory: pathlib.Path, model: str, busy: Callable[[], bool]) -> None:
        """Takes the lock; creates the directory if there is none.

        Args:
            directory: the directory.
            model: name of the model that is trained.
            busy: see `DirectoryLock`; unless it is busy, another model of this process takes the lock over.

        Raises:
            CheckpointError: another training has it, or the directory can't be written to.
        """
        self.directory = directory
        self._path, self.busy = directory / LOCK, busy
        self._descriptor: int | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._taken(Owner.here(model))
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written to {directory}: {error}") from error
        _held[os.path.realpath(directory)] = self

    def _taken(self, owner: Owner) -> int:
        """Returns the descriptor of the lock's file, which now is this owner's."""
        while True:
            descriptor, is_new = _opened(self._path)
            try:
                if self._lock(descriptor, owner, is_new=is_new) and self._is(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int, owner: Owner, *, is_new: bool) -> bool:
        """Locks the file and names its owner; returns False if a model of this process has given it back for that.

        Args:
            descriptor: the open file.
            owner: the owner.
            is_new: whether this process has created it.

        Raises:
            CheckpointError: another training has it.
        """
        other = _held.get(os.path.realpath(self.directory))
        if other is not None and not other.held:
            other = None
        locks, taken = True, False
        with contextlib.ExitStack() as stack:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = True
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                locks = False
                if not is_new:
                    stack.enter_context(self._alone())
            before = Owner.of(os.pread(descriptor, _MOST_BYTES, 0))
            if not locks and not is_new:  # Whoever has created a file without a name hasn't written its name yet.
                taken = before is None or (other is not None if before.is_here else before.may_run)
            if not taken:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(dataclasses.asdict(owner)).encode(), 0)
                if before is not None and before.host != owner.host:
                    logger.warning(
                        "%s was in use by %s, which hasn't given it back; if it still runs, locks of this file system "
                        "don't reach the other machine, and the two trainings remove each other's checkpoints",
                        *(self.directory, before),
                    )
                return True
        if other is not None and not other.busy():
            other.release()
            return False
        raise CheckpointError(self._in_use(f"{before or 'another process'} saves its checkpoints", self._path, locks))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Makes a context that one process at a time is in, as two could find that the owner no longer runs."""
        path = self._path.with_name(_TAKING)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError as error:
            raise CheckpointError(self._in_use("another process is about to save its checkpoints", path)) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def _in_use(self, who: str, path: pathlib.Path, locks: bool = False) -> str:
        way_out = "" if locks else f" (if that has ended, remove {path})"
        return f"{self.directory} is in use: {who} there{way_out}; choose another directory, or end that training first"

    def _is(self, descriptor: int) -> bool:
        """Whether the path still is that of the open file, which its owner may have removed."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.lstat(self._path))
        return False

    @property
    def held(self) -> bool:
        """Whether it hasn't been released."""
        return self._descriptor is not None

    def covers(self, directory: pathlib.Path) -> bool:
        """Whether it is held, and is that of a directory."""
        return self._descriptor is not None and directory == self.directory and self._is(self._descriptor)

    def release(self, *, here: bool = True) -> None:
        """Gives the lock back, or leaves it to the process that this one was forked from unless it is held here."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if here and self._is(descriptor):
                self._path.unlink()
        except OSError as error:  # The directory can't be written to any more; without the lock the name is nobody's.
            logger.debug("%s can't be removed: %s", self._path, error)
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _opened(path: pathlib.Path) -> tuple[int, bool]:
    """Opens a file, which is created if there is none; also returns whether it was: of several processes by one.

    Who can't write to the directory can't open it either: reading would suffice to lock it.

    Raises:
        CheckpointError: it isn't a regular file of one name; what links lead to is never changed.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    writers = os.stat(path.parent).st_mode & 0o022
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600 | writers | writers << 1), True
        try:
            descriptor = os.open(path, flags)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
                return descriptor, False
            os.close(descriptor)
        except FileNotFoundError:  # Its owner has removed it meanwhile.
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        raise CheckpointError(f"{path} is a link or no regular file, which no training has left: remove it")


_held: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()
"""Directory -> its lock, if a model of this process had it last."""


def _release_all(*, here: bool = True) -> None:
    for lock in list(_held.values()):
        lock.release(here=here)


atexit.register(_release_all)
os.register_at_fork(after_in_child=functools.partial(_release_all, here=False))


def _started(process: int) -> int | None:
    """Returns when a process was started, in seconds since 1970; None if there is none."""
    try:
        uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
        return round(time.time() - uptime + _ticks(process) / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return None


def _life(process: int) -> str | None:
    """Returns what tells a process from all others with its number, before and after it; None if there is none."""
    try:
        return f"{pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {_ticks(process)}"
    except OSError:
        return None


def _ticks(process: int) -> int:
    """Returns the clock ticks from the boot to the start of a process.

    Raises:
        OSError: there is none.
    """
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])

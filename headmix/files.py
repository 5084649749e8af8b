"""Files are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be written there; for asking before the work, not after it.

    Raises:
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: ``path`` is a folder.
        PermissionError: the folder cannot be written to.
    """
    target = Path(path)
    folder = target.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no folder {folder}")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; name a file inside it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {target}: the folder {folder} is not writable")
    return target


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name when the block ends without an error.

    Whatever happens, also a kill in the middle, ``path`` holds the old content or the new.

    Raises:
        OSError: as ``check_writable``, or what the system says (a full disk, say).
    """
    target = check_writable(path)
    folder = target.parent
    temporary = folder / f".{target.name[:100]}.{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(target)
        _sync(folder)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def one_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Refuses a second process that means to write ``path`` while the block runs.

    The lock is a file beside it, which the system lets go of when its process ends, however it
    ends.

    Raises:
        OSError: as ``check_writable``, or another process is writing it.
    """
    from filelock import FileLock, Timeout  # not needed until something is written

    target = check_writable(path)
    lock = FileLock(target.with_name(f".{target.name[:100]}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"cannot write {target}: another headmix is writing it; wait for it, or name another "
            "file with --out"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file; elsewhere a waiter looks again
            Path(lock.lock_file).unlink()
        lock.release()


def _sync(path: Path) -> None:
    """Wait until the disk has it; a rename alone may survive a crash that the content does not."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

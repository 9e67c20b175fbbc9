# SPDX-License-Identifier: Apache-2.0
"""What stands between a command and a file: permissions, mounts, attributes, a failing disk, other runs."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.errors import StateError, TreeError, quoted

_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS, the same on every 64-bit Linux
_IMMUTABLE, _APPEND_ONLY = 0x10, 0x20

# How long one command waits for another that holds a folder, a download at most; and how long in silence.
PATIENCE_S = 600.0
_QUIET_S = 5.0

_CAUSES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there (a quota is used up)",
    errno.EROFS: "mount the file system writable, or work elsewhere",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.ENAMETOOLONG: "use a shorter path",
}


_AGAIN = "run the command again"


def move_away(item: Path) -> str:
    """The remedy for what stands in the way."""
    return f"move it away (mv {quoted(item)} …), then retry"


def failed(error: OSError, where: object, again: str = _AGAIN) -> TreeError:
    """The refusal that an error of the operating system becomes; ``where`` unless it names a file.

    ``again`` is what to do once the cause is gone.
    """
    named = error.filename if isinstance(error.filename, (str, os.PathLike)) else where
    found = error.strerror or str(error) or type(error).__name__
    return TreeError(
        named,
        "a file or folder that can be read and written",
        found,
        f"{_CAUSES.get(error.errno or 0, 'remove the cause')}, then {again}",
    )


@contextmanager
def working(where: object, again: str = _AGAIN) -> Iterator[None]:
    """Turn an error of the operating system into a refusal. Raises TreeError."""
    try:
        yield
    except OSError as error:
        raise failed(error, where, again) from error


def held(item: Path) -> bool:
    """Whether a file or folder is immutable or append-only, where the file system tells."""
    import fcntl

    with suppress(OSError):
        fd = os.open(item, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = int.from_bytes(fcntl.ioctl(fd, _GET_FLAGS, bytes(8))[:4], "little")
            return bool(flags & (_IMMUTABLE | _APPEND_ONLY))
        finally:
            os.close(fd)
    return False


def obstacle(item: Path, whole: Path) -> tuple[str, str] | None:
    """What keeps this user from changing a file or a folder: what is found, and a remedy. None: nothing.

    ``whole`` is the tree that a chmod or a copy has to cover. Root, too, needs some write bit: who takes all
    of them away means it.
    """
    info = item.stat()
    mode = stat.S_IMODE(info.st_mode)
    needed = os.W_OK | os.X_OK if stat.S_ISDIR(info.st_mode) else os.W_OK
    with suppress(OSError):
        if os.statvfs(item).f_flag & os.ST_RDONLY:
            return "on a file system that is mounted read-only", "mount it writable, or use a writable copy"
    if held(item):
        remedy = f"chattr -i -a {quoted(item)} as root, or use a writable copy"
        return "immutable or append-only (lsattr shows it)", remedy
    if not mode & 0o222:
        return f"read-only (mode {mode:04o})", f"chmod -R u+w {quoted(whole)}, or use a writable copy"
    if os.access(item, needed):
        return None
    if info.st_uid == os.geteuid():
        found = f"no permission to write (mode {mode:04o})"
        return found, f"chmod -R u+rwX {quoted(whole)}, or use a writable copy"
    found = f"no permission to write (user {info.st_uid} owns it)"
    return found, "run as the user who owns it, or use a writable copy"


def require_folder(folder: Path) -> None:
    """Raise TreeError unless ``folder`` is, or can become, a folder that may be written into."""
    with working(folder):
        item = folder
        while not os.path.lexists(item) and item != item.parent:
            item = item.parent
        if not item.is_dir():
            found = "a broken symbolic link" if item.is_symlink() and not item.exists() else "a file"
            raise TreeError(item, "a folder, or nothing", found, move_away(item))
        problem = obstacle(item, item)
    if problem is not None:
        raise TreeError(item, "a folder that may be written into", *problem)


@contextmanager
def locked(folder: Path, patience_s: float = PATIENCE_S) -> Iterator[bool]:
    """Keep other commands out of a folder, leaving no file; False on a file system without locks.

    Says so where it has to wait; after ``patience_s`` seconds it raises StateError.
    """
    import fcntl

    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        begun = time.monotonic()
        said = alone = False
        while not alone:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                waited = time.monotonic() - begun
                if waited > patience_s:
                    remedy = "wait until it has finished, or end it, then retry"
                    found = "another command at work there"
                    raise StateError(folder, "the folder for itself", found, remedy) from None
                if waited > _QUIET_S and not said:
                    print(f"waiting for another command at work in {folder}", file=sys.stderr, flush=True)
                    said = True
                time.sleep(0.05)
            except OSError:
                break  # as some clusters mount: go on, as git and pip would
        yield alone
    finally:
        os.close(fd)

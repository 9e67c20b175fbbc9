# SPDX-License-Identifier: Apache-2.0
"""A folder with ``megatron/core`` in it: finding it, reading it, and changing it one atomic step at a time.

A killed process leaves each file as it was or as it shall be. What it can leave beside them are a temporary
file, whose name follows from the file's, and empty folders; the next apply or revert takes both away.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from scripts.errors import StateError, TreeError, quoted
from scripts.files import held, locked, move_away, obstacle, working

INIT = "megatron/core/__init__.py"
_DEPTH = 4
_LOOK_AT = 5000
_PATIENCE_S = 60.0
TEMPORARY = ".liger-overlay.tmp"


class Tree:
    """The files below ``root``; paths are posix and relative to it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def locate(cls, path: Path) -> Tree:
        """The tree at ``path``. Raises TreeError, which names the trees above and below it, if it is none."""
        expected = f"a folder that has {INIT}"
        try:
            root = path.resolve()
            if (root / INIT).is_file():
                return cls(root)
            found = "no such file in it" if root.exists() else "no such folder"
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
            found = getattr(error, "strerror", None) or "links in a circle"
            remedy = "run as a user who may read the tree, or give another folder"
            raise TreeError(path, expected, found, remedy) from None
        near = [*_editable(root), *_above(root), *_below(root)]
        remedy = " or ".join(f"--tree {quoted(tree)}" for tree in near[:3])
        remedy = f"use {remedy}" if near else "give the folder that holds megatron/"
        raise TreeError(path, expected, found, remedy)

    def path(self, path: str) -> Path:
        return self.root.joinpath(*path.split("/"))

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none. Raises TreeError for a link, a folder or the like."""
        target = self.path(path)
        try:
            inside = target.relative_to(self.root)
            for part in (*reversed(inside.parents[:-1]), inside):
                if (self.root / part).is_symlink():
                    # Never to follow it: it may lead into a cache that other environments share.
                    remedy = "give --tree the folder that the link leads into"
                    if part == inside:
                        remedy = "put the file itself there (pip's and uv's: install again, --link-mode copy)"
                    raise TreeError(part.as_posix(), "a file of the tree itself", "a symbolic link", remedy)
            if not stat.S_ISREG(target.stat().st_mode):
                raise TreeError(path, "a plain file", "something else", move_away(target))
            return target.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            found = error.strerror or str(error)
            remedy = "run as a user who may read the tree"
            raise TreeError(path, "a file that can be read", found, remedy) from None

    def in_the_way(self, paths: Iterable[str]) -> StateError | None:
        """The refusal of a file that stands where a path needs a folder."""
        for path in paths:
            folder = self.path(path).parent
            while not os.path.lexists(folder):
                folder = folder.parent
            if not folder.is_dir():
                name = folder.relative_to(self.root).as_posix()
                return StateError(name, "a folder, or nothing", "a file", move_away(folder))
        return None

    def require_writable(
        self, paths: Iterable[str], *, bytecode: Iterable[str] = (), remnants: Iterable[str] = ()
    ) -> None:
        """Raise TreeError or StateError unless all that a change touches could be changed.

        That is each file of ``paths``, its folder and its bytecode, the bytecode of the files ``bytecode``,
        and ``remnants``, which will be deleted. Root, too, needs some write bit.
        """
        paths = list(paths)
        blocked = self.in_the_way(paths)
        if blocked is not None:
            raise blocked
        with working(self.root):
            for path in paths:
                target = self.path(path)
                folder = target.parent
                while not folder.exists():
                    folder = folder.parent
                self._require_writable(folder)
                if target.exists():
                    self._require_writable(target)
                    self._require_removable(target)  # a rename over it is what a sticky folder forbids, too
                if self.temporary(path).is_dir():
                    name = self.temporary(path).relative_to(self.root).as_posix()
                    remedy = move_away(self.temporary(path))
                    raise StateError(name, "nothing, or a file that a run left", "a folder", remedy)
            for path in dict.fromkeys((*paths, *bytecode)):
                for item in self._bytecode(path):
                    self._require_removable(item)
            for path in remnants:
                self._require_removable(self.path(path))

    def require_space(self, sizes: Mapping[str, int]) -> None:
        """Raise TreeError unless there is room for files of these sizes, each beside what it replaces."""
        with working(self.root):
            disk = os.statvfs(self.path("megatron/core"))
            free = (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize
            needed = largest = 0
            for path, size in sizes.items():
                target = self.path(path)
                old = target.stat().st_size if target.exists() else 0
                new, old = (-(-length // disk.f_frsize) * disk.f_frsize for length in (size, old))
                needed, largest = needed + max(new - old, 0), max(largest, new)
        # Some file systems do not say what they have.
        if disk.f_blocks and free < needed + largest:
            expected = f"{needed + largest} bytes of free space, so that nothing is left half done"
            remedy = "free some space there, or use a copy elsewhere"
            raise TreeError(self.root, expected, f"{free} bytes", remedy)

    def _require_writable(self, item: Path) -> None:
        problem = obstacle(item, self.root)
        if problem is not None:
            name = item.relative_to(self.root).as_posix()
            raise TreeError(name, "a file or folder that may be written", *problem)

    def _require_removable(self, item: Path) -> None:
        self._require_writable(item.parent)
        folder, entry, user = item.parent.stat(), item.lstat(), os.geteuid()
        foreign = folder.st_mode & stat.S_ISVTX and user not in (0, folder.st_uid, entry.st_uid)
        if foreign or held(item):
            found = "another user's, in a sticky folder" if foreign else "immutable or append-only"
            remedy = "run as its owner" if foreign else f"chattr -i -a {quoted(item)} as root"
            name = item.relative_to(self.root).as_posix()
            raise TreeError(name, "a file that may be deleted", found, f"{remedy}, or use a writable copy")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other applies and reverts out, leaving no file. Waits a minute, then raises StateError."""
        core = self.path("megatron/core")
        with ExitStack() as held_lock:
            try:
                held_lock.enter_context(locked(core, _PATIENCE_S))
            except OSError as error:
                found = error.strerror or str(error)
                remedy = "run as a user who may read and write the tree, or use a copy"
                raise TreeError("megatron/core", "a folder that can be read", found, remedy) from None
            yield

    def write(self, path: str, data: bytes) -> None:
        """Replace or add a file. The new one has the old one's mode (0644 if none) and a later mtime."""
        target = self.path(path)
        try:
            old: os.stat_result | None = target.stat()
        except FileNotFoundError:
            old = None
        self._make_folder(target.parent)
        self.drop_bytecode(path)
        temporary = self.temporary(path)
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            self._own(fd, old or self.path(INIT).stat())
            os.fchmod(fd, stat.S_IMODE(old.st_mode) if old else 0o644)
            # Bytecode is checked against whole seconds and the size.
            if old and int(os.fstat(fd).st_mtime) <= int(old.st_mtime):
                os.utime(fd, (int(old.st_mtime) + 1, int(old.st_mtime) + 1))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, target)

    def remove(self, path: str) -> None:
        self.drop_bytecode(path)
        self.path(path).unlink(missing_ok=True)

    def temporary(self, path: str) -> Path:
        target = self.path(path)
        return target.with_name(f".{target.name}{TEMPORARY}")

    def sweep(self, paths: Iterable[str], folder: str) -> list[str]:
        """Take away what a killed run left beside ``paths``, and ``folder`` with its subfolders where empty.

        Returns what is left in ``folder``: files that are not ours.
        """
        folders = self._folders(paths, folder)
        for item in self._temporaries(folders):
            item.unlink(missing_ok=True)
        top = self.path(folder)
        for item in folders:
            if item.is_relative_to(top):
                for empty in (item / "__pycache__", item):
                    with suppress(OSError):
                        empty.rmdir()
        return sorted(p.relative_to(self.root).as_posix() for p in top.rglob("*") if not p.is_dir())

    def leftovers(self, paths: Iterable[str], folder: str) -> list[str]:
        """What a killed run left: temporary files beside ``paths``, and empty folders in ``folder``."""
        folders = self._folders(paths, folder)
        found = self._temporaries(folders)
        for item in folders:
            ours = item.is_relative_to(self.path(folder)) and item.is_dir()
            if ours and all(p.is_dir() or p in found for p in item.rglob("*")):
                found.append(item)
        return [p.relative_to(self.root).as_posix() for p in found]

    def _folders(self, paths: Iterable[str], folder: str) -> list[Path]:
        """The folders of ``paths``, and ``folder`` with all below it, the deeper first."""
        top = self.path(folder)
        below = {p for p in top.rglob("*") if p.is_dir() and not p.is_symlink()}
        return sorted({self.path(path).parent for path in paths} | {top} | below, reverse=True)

    @staticmethod
    def _temporaries(folders: Iterable[Path]) -> list[Path]:
        # By pattern: another version of the overlay may have been cut short at a file that this one has not.
        found = (p for folder in folders for p in folder.glob(f".*{TEMPORARY}"))
        return sorted(p for p in found if p.is_symlink() or not p.is_dir())

    def drop_bytecode(self, path: str) -> None:
        """Delete what ``__pycache__`` holds for a source file, and the cache when that empties it."""
        stale = self._bytecode(path)
        for item in stale:
            item.unlink(missing_ok=True)
        if stale:
            with suppress(OSError):
                stale[0].parent.rmdir()

    def _bytecode(self, path: str) -> list[Path]:
        target = self.path(path)
        cache = target.parent / "__pycache__"
        if target.suffix != ".py" or cache.is_symlink() or not cache.is_dir():
            return []
        return [item for item in cache.iterdir() if item.match(f"{_literal(target.stem)}.*.pyc")]

    def installed_record(self) -> str | None:
        """RECORD of the megatron-core installed here, relative to the tree; raises TreeError for two."""
        found = sorted(
            p.relative_to(self.root).as_posix() for p in self.root.glob("megatron_core-*.dist-info/RECORD")
        )
        if len(found) > 1:
            remedy = "uninstall megatron-core until none is left, then install one"
            raise TreeError(found[1], "one installed megatron-core", f"another, {found[0]}", remedy)
        return found[0] if found else None

    def says(self) -> str | None:
        """The version that the tree's ``package_info.py`` claims; nothing is decided by it."""
        try:
            text = (self.read("megatron/core/package_info.py") or b"").decode(errors="replace")
        except TreeError:  # a link, say: nothing is decided by it
            return None
        parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
        label = re.search(r"^PRE_RELEASE = ['\"]([^'\"]*)", text, re.MULTILINE)
        if not all(parts):
            return None
        return ".".join(part[1] for part in parts if part) + (label[1] if label else "")

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for item in reversed(missing):
            item.mkdir(mode=0o700)
            self._own(item, self.path(INIT).stat())
            item.chmod(0o755)

    @staticmethod
    def _own(item: int | Path, like: os.stat_result) -> None:
        if os.geteuid() == 0:  # root works on somebody's tree: the files stay theirs
            with suppress(OSError):
                os.chown(item, like.st_uid, like.st_gid)


def _literal(stem: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", stem)


def _above(root: Path) -> list[str]:
    with suppress(OSError):
        return [str(parent) for parent in root.parents if (parent / INIT).is_file()][:1]
    return []


def _below(root: Path) -> list[str]:
    found: list[str] = []
    level, looked = [root], 0
    for _ in range(_DEPTH):
        deeper: list[Path] = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    looked += 1
                    if looked > _LOOK_AT:
                        return found
                    # A package cache is no tree of anybody's: environments share what is in it.
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("archive-v"):
                        deeper.append(Path(entry.path))
        for folder in sorted(deeper):
            with suppress(OSError):
                found += [str(folder)] if (folder / INIT).is_file() else []
        level = deeper
    return found


def _editable(root: Path) -> list[str]:
    """Where the editable install of megatron-core in a site-packages folder has its source."""
    found: list[str] = []
    for info in root.glob("megatron_core-*.dist-info/direct_url.json"):
        import json
        from urllib.parse import unquote, urlsplit

        with suppress(OSError, ValueError, KeyError, TypeError):
            path = Path(unquote(urlsplit(json.loads(info.read_text())["url"]).path))
            if (path / INIT).is_file():
                found.append(str(path))
    return found

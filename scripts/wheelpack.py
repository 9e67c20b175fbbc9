# SPDX-License-Identifier: Apache-2.0
"""Repack a wheel with other and more files under a labelled version.

Members that stay keep their headers and their compressed bytes, changed and new ones are stored with a fixed
time and mode: the result is a function of the wheel and the files, on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.overlay import PACKAGE, RECORD, ROOT
from scripts.wheelfile import Archive, ArchiveWriter, read_archive, refusal
from scripts.wheelmeta import check_record, edit_metadata, edit_record, metadata_version

# Below dist-info/licenses/: ours, and upstream's, whose wheels carry none.
OURS = ("LICENSE", "NOTICE")
UPSTREAMS = "LICENSES/Megatron-LM.txt"

_FILENAME = re.compile(r"(?P<name>[^-/]+)-(?P<version>[^-/]+)(?P<tags>(?:-[^-/]+){3,4}\.whl)")
_NOTICE = """\
**Modified.** This build of megatron-core {version} is not NVIDIA's. The liger overlay for Megatron-Core, \
version {overlay}, changed it; NVIDIA neither made nor endorses it.

{changed}; added: the package `{package}`. \
`{record}` gives the hash of every such file before and after.

Please report faults of this build to the overlay's project, not to NVIDIA. Upstream's description follows."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that agrees with itself: file name, dist-info folder, METADATA and RECORD."""

    archive: Archive
    name: str
    version: str
    tags: str
    files: Mapping[str, bytes]

    @property
    def filename(self) -> str:
        return f"{self.stem}{self.tags}"

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def dist_info(self) -> str:
        return f"{self.stem}.dist-info"

    @property
    def metadata(self) -> str:
        return f"{self.dist_info}/METADATA"

    @property
    def record(self) -> str:
        return f"{self.dist_info}/RECORD"

    @property
    def signatures(self) -> tuple[str, ...]:
        """Files that sign RECORD; they are not listed in it with a hash."""
        return tuple(n for n in (f"{self.record}.jws", f"{self.record}.p7s") if n in self.files)


def read_wheel(data: bytes, filename: str) -> Wheel:
    """Parse the wheel ``data`` that is called ``filename``.

    Raises SourceError when it is damaged or unsafe (see ``read_archive``), or when its parts disagree: files
    and RECORD, or the versions in the name, in METADATA and of the dist-info folder.
    """
    match = _FILENAME.fullmatch(filename)
    if match is None:
        raise refusal(filename, "NAME-VERSION-TAGS.whl", "another name")
    archive = read_archive(data, filename)
    files = {m.name: archive.read(m) for m in archive.members if not m.is_folder}
    wheel = Wheel(archive, match["name"], match["version"], match["tags"], files)
    folders = sorted({n.split("/")[0] for n in files if n.split("/")[0].endswith(".dist-info")})
    if folders != [wheel.dist_info]:
        raise refusal(filename, f"one folder {wheel.dist_info}", ", ".join(folders) or "none")
    for name in (wheel.metadata, wheel.record):
        if name not in files:
            raise refusal(f"{filename}:{name}", "a file", "none")
    version = metadata_version(files[wheel.metadata], f"{filename}:{wheel.metadata}")
    if version != wheel.version:
        raise refusal(f"{filename}:{wheel.metadata}", f"Version: {wheel.version}", version)
    hashed = {n: d for n, d in files.items() if n not in (wheel.record, *wheel.signatures)}
    unhashed = {wheel.record, *wheel.signatures}
    check_record(files[wheel.record], f"{filename}:{wheel.record}", files=hashed, unhashed=unhashed)
    return wheel


def labelled(version: str, overlay_version: int) -> str:
    """The version of the patched wheel: ``1.2`` → ``1.2+liger.1``, ``1.2+a`` → ``1.2+a.liger.1``."""
    return f"{version}{'.' if '+' in version else '+'}liger.{overlay_version}"


def repack(
    wheel: Wheel, changes: Mapping[str, bytes], licenses: Mapping[str, bytes], overlay_version: int
) -> tuple[Wheel, bytes]:
    """Put ``changes`` (path → content; a new path is added) and ``licenses`` into a wheel, labelled.

    The tags stay. Untouched members keep their bytes and order; new files of the package come before
    dist-info, RECORD is the last. A signature of upstream's RECORD is left out. Returns the new wheel, read
    back and checked, and its bytes.
    """
    new = Wheel(wheel.archive, wheel.name, labelled(wheel.version, overlay_version), wheel.tags, wheel.files)

    def rename(name: str) -> str:
        for suffix in (".dist-info", ".data"):
            if name == wheel.stem + suffix or name.startswith(f"{wheel.stem}{suffix}/"):
                return new.stem + name[len(wheel.stem) :]
        return name

    changed = {n: d for n, d in changes.items() if n in wheel.files and d != wheel.files[n]}
    added = {n: d for n, d in changes.items() if n not in wheel.files}
    placed = _place_licenses(wheel, licenses)
    legal = {
        f"{new.dist_info}/{n}": d for n, d in placed.items() if f"{wheel.dist_info}/{n}" not in wheel.files
    }
    extended = ", ".join(f"`{n}`" for n in changed)
    changed[wheel.metadata] = edit_metadata(
        wheel.files[wheel.metadata],
        f"{wheel.filename}:{wheel.metadata}",
        version=new.version,
        notice=_NOTICE.format(
            version=wheel.version,
            overlay=overlay_version,
            changed=f"Changed: {extended}" if extended else "Changed: no file",
            package=PACKAGE.replace("/", "."),
            record=RECORD,
        ),
        license_files=[n.removeprefix("licenses/") for n in placed],
    )
    record = edit_record(
        wheel.files[wheel.record],
        f"{wheel.filename}:{wheel.record}",
        path=wheel.record,
        rename=rename,
        changed=changed,
        added={**added, **legal},
        dropped=wheel.signatures,
    )

    writer = ArchiveWriter(wheel.archive.comment)
    waiting = dict(added)
    for member in wheel.archive.members:
        if member.name.startswith(f"{wheel.dist_info}/"):
            for name, content in waiting.items():
                writer.store(name, content)
            waiting.clear()
        if member.name in (wheel.record, *wheel.signatures):
            continue
        if member.name in changed:
            writer.store(rename(member.name), changed[member.name])
        else:
            writer.copy(member, rename(member.name))
    for name, content in legal.items():
        writer.store(name, content)
    writer.store(new.record, record)
    data = writer.finish()
    return read_wheel(data, new.filename), data


def _place_licenses(wheel: Wheel, licenses: Mapping[str, bytes]) -> dict[str, bytes]:
    """Where each text goes below dist-info: under licenses/, out of the way of another text of that name."""
    placed = {}
    for name, content in licenses.items():
        taken = wheel.files.get(f"{wheel.dist_info}/licenses/{name}", content) != content
        placed[f"licenses/overlay/{name}" if taken else f"licenses/{name}"] = content
    return placed


def read_licenses(upstreams: bytes, root: Path = ROOT) -> dict[str, bytes]:
    """The licence texts and the notice that go into a wheel; ``upstreams`` is the text of its release."""
    texts = {name: (root / name).read_bytes() for name in OURS}
    return dict(sorted({**texts, UPSTREAMS: upstreams}.items()))

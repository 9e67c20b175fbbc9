# SPDX-License-Identifier: Apache-2.0
"""Report: what is installed, enabled, usable and used, and which ``megatron.core`` a script would import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from . import dispatch, installed, job
from .settings import OPS, SETTINGS
from .version import OVERLAY_VERSION

# Run by a fresh interpreter: argv[1] takes the place that `python SCRIPT` gives the script's folder (argv[2]:
# with a safe path too). Finders are asked for megatron and megatron.core, and neither is imported: the first
# folder of the namespace package that holds core wins, and a megatron/__init__.py ends the namespace.
_FINDER = """
import sys
safe = getattr(sys.flags, "safe_path", False)
if not safe:
    del sys.path[0]
import importlib.util, json
if not safe or sys.argv[2] == "1":
    sys.path.insert(0, sys.argv[1])
core = None
parent = importlib.util.find_spec("megatron")
if parent is not None and parent.submodule_search_locations is not None:
    folders = parent.submodule_search_locations
    for finder in sys.meta_path:
        core = getattr(finder, "find_spec", lambda *_: None)("megatron.core", folders)
        if core is not None:
            break
print(json.dumps(core.origin if core is not None else None))
"""


def core_of_script(script: Path) -> Path | None:
    """The ``megatron/core`` folder that ``python SCRIPT`` imports, or None when it finds none.

    The script is not run, so what it does to ``sys.path`` itself is not known. PYTHONPATH, PYTHONSAFEPATH,
    ``.pth`` files and editable installs count, as in a fresh run of this interpreter.

    Raises:
        FileNotFoundError: there is no such script.
    """
    if not script.exists():
        raise FileNotFoundError(f"no such script: {script}")
    script = script.resolve()  # Python, too, takes the folder that a link leads to
    whole = script.is_dir() or zipfile.is_zipfile(script)
    command = [sys.executable, "-c", _FINDER, str(script if whole else script.parent), "1" if whole else "0"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    origin = json.loads(found.stdout.splitlines()[-1])
    return Path(origin).resolve().parent if origin else None


def _script(script: Path) -> dict[str, Any]:
    core = core_of_script(script)
    table = installed.files(core) if core else {}
    return {
        "script": str(script),
        "core": str(core) if core else None,
        "this": core == installed.CORE,
        "overlaid": bool(table) and all(entry["state"] == installed.INSTALLED for entry in table.values()),
        "overlay": (installed.record(core) or {}).get("overlay") if core else None,
    }


def _why_not(op: str) -> str | None:
    """Why an op does not run on the kernel in a process like this one, or None."""
    platform = dispatch.platform()
    if platform.reason is not None:
        return platform.reason
    if platform.interpreted or torch.cuda.is_available():
        return None
    return "no CUDA device, and TRITON_INTERPRET=1 is not set"


def _device() -> str:
    try:
        return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    except Exception as error:  # a broken driver is something to report, not to stop at
        return f"unknown ({type(error).__name__})"


def report(script: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """What this overlay is and does in this process, as plain data (the command line's ``--json``).

    Args:
        script: a Python script; adds ``script``, which ``megatron.core`` it would import.

    Returns:
        ``overlay``, ``commit``, ``release``, ``files_as_in``, ``core``, ``python``, ``torch``, ``triton``,
        ``device``, ``strict``, ``check_labels``, ``label_smoothing``, ``linear_ce_mb``; ``ops``: for each
        ``installed``, ``enabled``, ``in_place``, ``usable``, ``why_not``, ``used`` (calls on the kernel), its
        counters and ``device_counts`` (waits for the device to read them); ``files``: each file of the
        record, with its hashes; ``script``: None without one; ``problems``: texts, none when all is well.

    Raises:
        FileNotFoundError: there is no such script.
    """
    record = installed.record()
    table = installed.files()
    counts = dispatch.counters()
    ops: dict[str, dict[str, Any]] = {}
    for name in OPS:
        why_not = _why_not(name)
        entries = counts[name]["entries"].values()
        ops[name] = {
            "installed": installed.op_state(name, table),
            "enabled": name in SETTINGS.enabled,
            "in_place": name in SETTINGS.in_place,
            "usable": why_not is None,
            "why_not": why_not,
            "used": sum(entry["kernel"] for entry in entries),
            **counts[name],
            "device_counts": dict(dispatch.OPS[name].device_counts(True)),
        }
    data: dict[str, Any] = {
        "overlay": OVERLAY_VERSION,
        "commit": (record or {}).get("commit"),
        "release": (record or {}).get("release"),
        "files_as_in": (record or {}).get("files_as_in") or [],
        "core": str(installed.CORE),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": dispatch.platform().triton,
        "device": _device(),
        "strict": SETTINGS.strict,
        "check_labels": SETTINGS.check_labels,
        "label_smoothing": SETTINGS.label_smoothing,
        "linear_ce_mb": SETTINGS.linear_ce_mb,
        "ops": ops,
        "files": table,
        "script": None if script is None else _script(Path(script)),
    }
    data["problems"] = _problems(record, data)
    return data


def _problems(record: dict[str, Any] | None, data: dict[str, Any]) -> list[str]:
    problems = []
    if record is None:
        problems.append(f"{installed.CORE / installed.RECORD} is missing or damaged: apply the overlay again")
    elif record.get("overlay") != OVERLAY_VERSION:
        problems.append(f"the record is of overlay {record.get('overlay')}, this code of {OVERLAY_VERSION}")
    for path, entry in data["files"].items():
        if entry["state"] != installed.INSTALLED:
            problems.append(
                f"{path}: {entry['state']} (sha256 {entry['found']}, expected {entry['expected']})"
            )
    script = data["script"]
    if script and script["core"] is None:
        problems.append(f"{script['script']} would find no megatron.core")
    elif script and not script["this"] and not script["overlaid"]:
        problems.append(
            f"SHADOWED: {script['script']} would import {script['core']}, which "
            + ("is not overlaid" if script["overlay"] is None else "has been changed since it was overlaid")
            + f"; the overlay in {installed.CORE} would not run. Apply it to that tree: apply --tree "
            + str(Path(script["core"]).parent.parent)
        )
    return problems


def _op_line(name: str, op: dict[str, Any]) -> str:
    enabled = "enabled" if op["enabled"] else dispatch.off(name)
    usable = "usable here" if op["usable"] else f"not usable here ({op['why_not']})"
    return f"  {name}: {op['installed']}, {enabled}, {usable}, used {op['used']} times in this process"


def text(data: dict[str, Any]) -> str:
    """What :func:`report` gives, for a reader."""
    release = data["release"] or f"(files as in {installed.span(data['files_as_in']) or 'unknown'})"
    lines = [
        f"liger overlay {data['overlay']} for Megatron-Core {release}, commit {data['commit'] or 'unknown'}",
        f"  {data['core']}",
        "  "
        + ", ".join(f"{name} {data[name] or 'none'}" for name in ("python", "torch", "triton", "device")),
        "ops (a job counts its own uses and prints them on rank 0; this process has just begun)",
        *(_op_line(name, op) for name, op in data["ops"].items()),
        "files",
        *(
            f"  {entry['state']}: {path} {(entry['found'] or 'missing')[:12]}"
            for path, entry in data["files"].items()
        ),
    ]
    if script := data["script"]:
        which = "this one" if script["this"] else "another one"
        overlaid = f"overlaid, version {script['overlay']}" if script["overlaid"] else "not overlaid"
        lines.append(f"script {script['script']} would import {script['core'] or 'no megatron.core'}")
        if script["core"]:
            lines.append(f"  {which}, {overlaid}")
    lines += [f"problem: {problem}" for problem in data["problems"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line: 1 when a file changed or the overlay is shadowed, else 0; misuse exits with 2."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m megatron.core.liger",
        description="What the overlay in this megatron.core is, and whether it is in use.",
    )
    parser.add_argument("--json", action="store_true", help="print plain data")
    parser.add_argument("--script", metavar="PATH", help="which megatron.core `python PATH` would import")
    options = parser.parse_args(arguments)
    job.silence()
    try:
        data = report(options.script)
    except FileNotFoundError as error:
        parser.error(str(error))
    print(json.dumps(data, indent=1, sort_keys=True) if options.json else text(data))
    return 1 if data["problems"] else 0

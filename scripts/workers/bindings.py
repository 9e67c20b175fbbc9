# SPDX-License-Identifier: Apache-2.0
"""Who is behind every name under which a module of a tree holds an entry, found in the tree's own sources."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from scripts.workers import runtime
from scripts.workers.entries import ENTRIES

OWN = "liger"


def bindings(tree: Path) -> dict[str, dict[str, str]]:
    """Import each module that binds an entry's name at its import, and look.

    Args:
        tree: the folder that holds ``megatron``.

    Returns:
        By ``module.name``: ``op``, and ``found``: ``"ours"``, ``"upstream"``, ``"unbound"`` (not on the way
        that the import took here), or the error of a module that cannot be imported here.
    """
    ops = {entry.name: entry.op for entry in ENTRIES}
    return {
        f"{module}.{name}": {"op": ops[entry], "found": _look(module, name)}
        for module, name, entry in sorted(set(_imports(tree, set(ops))))
    }


def _imports(tree: Path, entries: set[str]) -> Iterator[tuple[str, str, str]]:
    """Module, name in it and entry of every import of an entry that is not inside a function."""
    for file in (tree / "megatron").rglob("*.py"):
        parts = file.relative_to(tree).with_suffix("").parts
        text = file.read_text(encoding="utf-8")
        if OWN in parts or not any(entry in text for entry in entries):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in _at_import(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name in entries:
                        yield module, alias.asname or alias.name, alias.name


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _at_import(child)


def _look(module: str, name: str) -> str:
    try:
        holder = importlib.import_module(module)
    except ImportError as error:
        return f"{type(error).__name__}: {error}".replace(str(runtime.tree()), "TREE")
    found = getattr(holder, name, None)
    return "unbound" if found is None else runtime.origin(found)

"""Which source files a module's behaviour can come from, read from its imports; nothing is imported.

Tests check by it that imports run one way, `tools/affected.py` picks the tests of a change, and the compile check
knows when a report is still good. `from package import name` leads to where the package has the name from, not to all
that the package imports. What is imported by a computed name is not seen: a caller adds it (`beside`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

TREES = ("dsv4", "benchmarks", "examples", "tests", "tools")


class Import(NamedTuple):
    """`import target` (name is None) or `from target import name`."""

    target: str
    name: str | None


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a file, wherever in it it stands; relative ones spelled out."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(target, alias.name) for alias in node.names)


class Source:
    """One Python file of the checkout."""

    def __init__(self, path: Path, module: str) -> None:
        self.path = path
        self.module = module
        self.is_package = path.name == "__init__.py"

    @property
    def hands_on(self) -> bool:
        """Whether names taken from it are those of other modules: a package, or a module that imports on demand."""
        return self.is_package or any(
            isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in self.tree.body
        )

    @cached_property
    def tree(self) -> ast.Module:
        text = self.path.read_text(encoding="utf-8")
        try:
            return ast.parse(text)
        except SystemError:  # Python 3.11 counts the depth of all threads' trees together
            return ast.parse(text)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(imports_of(self.tree, self.module, self.is_package))

    @cached_property
    def imports_when_run(self) -> tuple[Import, ...]:
        """Without those that only type checkers read."""
        run = ast.Module([node for node in self.tree.body if not _is_for_types(node)], [])
        return tuple(imports_of(run, self.module, self.is_package))

    @cached_property
    def strings(self) -> frozenset[str]:
        """Its string constants: a module that is run by name stands there."""
        nodes = ast.walk(self.tree)
        return frozenset(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


class ImportGraph:
    """All Python files of a checkout. `beside(source)`: modules it also needs, which no import names."""

    def __init__(self, root: Path, beside: Callable[[Source], Iterable[str]] = lambda source: ()) -> None:
        self.root = root
        self._beside = beside
        self.sources: dict[str, Source] = {}
        self._known: dict[str, tuple[list[str], set[Path]]] = {}
        for path in sorted(path for tree in TREES for path in (root / tree).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.sources[module] = Source(path, module)

    def files(self, modules: Iterable[str]) -> set[Path]:
        """The files of these modules and of all they lead to."""
        pending, seen, found = list(modules), set[str](), set[Path]()
        while pending:
            module = pending.pop()
            if module in seen:
                continue
            seen.add(module)
            leads_to, files = self._next(module)
            found |= files
            pending += leads_to
        return found

    def _next(self, module: str) -> tuple[list[str], set[Path]]:
        """Modules that one leads to, and its file with those of packages on the way."""
        if module not in self._known:
            source = self.sources[module]
            modules, files = [name for name in self._beside(source) if name in self.sources], {source.path}
            for one in source.imports_when_run:
                leads_to, on_the_way = self._resolved(one, source)
                modules += leads_to
                files |= on_the_way
            self._known[module] = modules, files
        return self._known[module]

    def _resolved(self, one: Import, source: Source) -> tuple[list[str], set[Path]]:
        """Modules to follow, and packages of which only the one name is taken."""
        target = self._local(one.target, source)
        if target is None:
            return [], set()
        if one.name is None or not self.sources[target].hands_on:
            return [target], set()
        if f"{target}.{one.name}" in self.sources:
            return [f"{target}.{one.name}"], set()
        package = self.sources[target]
        origins = [known for known in package.imports if known.name == one.name and known.target != target]
        if not origins:
            return ([], {package.path}) if _assigns(package.tree, one.name) else ([target], set())
        modules, files = self._resolved(origins[0], package)
        return modules, files | {package.path}

    def _local(self, target: str, source: Source) -> str | None:
        """The module of the checkout that `target` is: by its whole name, beside the file, or in another folder of
        tests (helpers, which pytest finds by its `pythonpath`)."""
        if target in self.sources:
            return target
        folders = [*source.path.parents[: len(source.path.relative_to(self.root).parts) - 1]]
        names = [".".join((*folder.relative_to(self.root).parts, target)) for folder in folders]
        near = next((name for name in names if name in self.sources), None)
        if near is not None or not source.module.startswith("tests."):
            return near
        return next((name for name in self.sources if name.startswith("tests.") and name.endswith(f".{target}")), None)


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _assigns(tree: ast.Module, name: str) -> bool:
    """Whether a package itself defines the name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return False  # what it calls is not known by name alone: all imports count
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return True
    return False

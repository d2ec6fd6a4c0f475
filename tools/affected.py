"""The test files that a change can turn red, one a line.

    python tools/affected.py [--base COMMIT] [FILE ...]     default: what differs from the base, committed or not

A test is affected by every Python file that its imports lead to, by the `conftest.py` files above it, and by any other
file whose name or folder it mentions. What decides how all tests run (`EVERYTHING`) affects all.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.imports import ImportGraph, Source  # noqa: E402

EVERYTHING = {"pyproject.toml", "constraints.txt", "tests/conftest.py"}
# modules that import whole folders by computed names
FOLDERS = {"dsv4.testing.bench": "dsv4.testing.cases.", "dsv4.testing.op_call": "dsv4.ops."}
ALWAYS = "tests/test_imports.py"


def affected_tests(changed: set[str], graph: ImportGraph) -> list[str]:
    """Test files, relative to the checkout."""
    tests = [source for source in graph.sources.values() if _is_test(source, graph.root)]
    names = {test.module: str(test.path.relative_to(graph.root)) for test in tests}
    if changed & EVERYTHING:
        return sorted(names.values())
    chosen = {ALWAYS} & set(names.values()) if any(name.endswith(".py") for name in changed) else set()
    others = [Path(name) for name in changed if not name.endswith(".py")]
    for test in tests:
        sources = graph.files([test.module, *_conftests(test, graph)])
        reached = {str(path.relative_to(graph.root)) for path in sources}
        if reached & changed or any(_mentions(path, test) for path in others):
            chosen.add(names[test.module])
    return sorted(chosen)


def beside(modules: set[str]) -> Callable[[Source], Iterator[str]]:
    """What a file needs besides its imports: folders read as a whole, and modules that are run by their name."""

    def of(source: Source) -> Iterator[str]:
        prefix = FOLDERS.get(source.module)
        if prefix is not None:
            yield from (module for module in modules if module.startswith(prefix))
        if source.path.is_relative_to(ROOT / "tests"):
            yield from source.strings & modules - {"dsv4"}
            if "-m" in source.strings and "dsv4" in source.strings:
                yield "dsv4.__main__"

    return of


def checkout(root: Path = ROOT) -> ImportGraph:
    modules = set(ImportGraph(root).sources)
    return ImportGraph(root, beside(modules))


def _is_test(source: Source, root: Path) -> bool:
    return source.path.name.startswith("test_") and source.path.is_relative_to(root / "tests")


def _conftests(test: Source, graph: ImportGraph) -> list[str]:
    """conftest.py of the folder and those above it; the uppermost is named in EVERYTHING."""
    parts = test.module.split(".")[:-1]
    names = [".".join([*parts[:depth], "conftest"]) for depth in range(2, len(parts) + 1)]
    return [name for name in names if name in graph.sources]


def _mentions(path: Path, test: Source) -> bool:
    folder = path.parent.name
    return any(path.name in text or (folder and folder in text.split("/")) for text in test.strings)


def changed_files(base: str) -> set[str]:
    def lines(*command: str) -> set[str]:
        run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"git {' '.join(command)}: {run.stderr.strip()}")
        return set(run.stdout.splitlines())

    start = next(iter(lines("merge-base", base, "HEAD")))
    return lines("diff", "--name-only", start) | lines("ls-files", "--others", "--exclude-standard")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", default="main", help="the commit that was green (default: main)")
    parser.add_argument("files", nargs="*", help="these files instead of what git says")
    given = parser.parse_args()
    print("\n".join(affected_tests(set(given.files) or changed_files(given.base), checkout())))


if __name__ == "__main__":
    main()

"""Writes the tree of folders in docs/architecture.md from the packages' docstrings.

python tools/doc_tree.py
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- written by tools/doc_tree.py -->\n", "<!-- end of the tree -->\n"
COLUMN, WIDTH = 26, 109


def first_sentence(file: Path) -> str:
    """Of the module's docstring, on one line and without its full stop."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"\.\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    return sentence.removesuffix(".")


def tree(package: Path) -> str:
    """Top-level modules, then every package below `package`: its name, and the first sentence of its docstring."""
    modules = [file for file in sorted(package.glob("*.py")) if not file.name.startswith("__")]
    folders = sorted(file.parent for file in package.rglob("__init__.py") if file.parent != package)
    rows = [(file.name, 1, first_sentence(file)) for file in modules]
    rows += [(f"{d.name}/", len(d.relative_to(package).parts), first_sentence(d / "__init__.py")) for d in folders]
    lines = [f"{package.name}/"]
    for name, depth, says in rows:
        head = ("  " * depth + name).ljust(COLUMN)
        lines += textwrap.wrap(
            says, WIDTH, initial_indent=head, subsequent_indent=" " * COLUMN, break_on_hyphens=False
        ) or [head.rstrip()]
    return "\n".join(lines) + "\n"


def with_tree(text: str, package: Path) -> str:
    """The page with a fresh tree between its two marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n```text\n{tree(package)}```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text(encoding="utf-8"), ROOT / "dsv4"), encoding="utf-8")

"""Writes docs/ops.md from the docstrings of halfbyte/ops: `python docs/make_ops.py`. A test holds the two together.

Sources are parsed, not imported, so this needs nothing but Python.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPS = ROOT / "halfbyte" / "ops"
TARGET = ROOT / "docs" / "ops.md"
SWITCHES = ("using", "reference", "trace")  # what a caller may need of dispatch.py, which is no family of ops
ALIGNED = re.compile(r"\S {3}|; {2}|^ {4}|^->", re.M)  # text whose spaces mean something
INTRODUCTION = """\
# The ops

Made by `python docs/make_ops.py` from the docstrings: change those, not this file.

Every op takes and returns torch tensors: `from halfbyte.ops.quant import qmm`. The device of its tensors chooses the
kernel, and a call that breaks the contract raises a `ValueError` that names op and argument. Sizes are capital letters,
listed in [design.md](design.md#letters); how fast each op is stands in [performance.md](performance.md).
"""

Documented = ast.FunctionDef | ast.ClassDef


def reference() -> str:
    """The text of docs/ops.md."""
    sys.path.insert(0, str(ROOT))
    from halfbyte.listing import ops

    listed = ops()
    families = {path.stem: path for path in sorted(OPS.glob("*.py")) if path.stem not in ("__init__", "dispatch")}
    contents, sections = [], []
    for family, path in families.items():
        names = {op.name for op in listed if op.family == family}
        shown = [node for node in top_level(path) if node.name in names or is_type(node)]
        contents.append(f"- `{family}`: {', '.join(f'[{node.name}](#{node.name.lower()})' for node in shown)}")
        sections.append(section(path, shown))
    dispatch = OPS / "dispatch.py"
    sections.append(section(dispatch, [node for node in top_level(dispatch) if node.name in SWITCHES]))
    contents.append(f"- `dispatch`: {', '.join(f'[{name}](#{name})' for name in SWITCHES)}")
    return "\n".join([INTRODUCTION, *contents, "", *sections])


def top_level(path: Path) -> Iterator[Documented]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Documented):
            yield node


def is_type(node: Documented) -> bool:
    """What ops take beside tensors: the public classes."""
    return isinstance(node, ast.ClassDef) and not node.name.startswith("_")


def section(path: Path, shown: list[Documented]) -> str:
    source = path.read_text(encoding="utf-8")
    parts = [f"## halfbyte.ops.{path.stem}\n", prose(ast.get_docstring(ast.parse(source)) or "")]
    for node in shown:
        parts.append(f"### {node.name}\n")
        parts += class_parts(node, source) if isinstance(node, ast.ClassDef) else function_parts(node, source)
    return "\n".join(parts)


def function_parts(function: ast.FunctionDef, source: str) -> list[str]:
    return [fenced(head(function, source), "python"), prose(ast.get_docstring(function) or "", formula_first=True)]


def class_parts(kind: ast.ClassDef, source: str) -> list[str]:
    """Its fields as they are written, then what its methods with docstrings say."""
    fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    lines = source.splitlines()[fields[0].lineno - 1 : fields[-1].end_lineno]
    parts = [fenced("\n".join([f"class {kind.name}:", *lines]), "python"), prose(ast.get_docstring(kind) or "")]
    for method in kind.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            said = f"`{kind.name}.{method.name}`: {ast.get_docstring(method)}"
            parts.append(prose(said))
    return parts


def head(function: ast.FunctionDef, source: str) -> str:
    """The signature as it is written, with its types."""
    lines = source.splitlines()[function.lineno - 1 : function.body[0].lineno - 1]
    return "\n".join(lines).removeprefix("def ").removesuffix(":")


def prose(docstring: str, formula_first: bool = False) -> str:
    """A docstring as Markdown. Formulas and columns of shapes keep their spaces; sentences become sentences."""
    parts: list[tuple[bool, str]] = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        exact = ALIGNED.search(paragraph) is not None or (formula_first and not parts and " = " in paragraph)
        parts.append((exact, paragraph if exact else escaped(" ".join(paragraph.split()))))
    runs = groupby(parts, key=lambda part: part[0])
    texts = [(exact, "\n\n".join(text for _, text in run)) for exact, run in runs]
    return "\n".join(fenced(text, "text") if exact else f"{text}\n" for exact, text in texts)


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```\n"


def escaped(text: str) -> str:
    """Stars and angle brackets as themselves; what stands between backticks is code, and stays."""
    pieces = text.split("`")
    return "`".join(piece if i % 2 else re.sub(r"([*<>])", r"\\\1", piece) for i, piece in enumerate(pieces))


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")

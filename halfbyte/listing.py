"""Which op exists in which language, read from the source files: nothing is imported, so nothing heavy is loaded."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Op:
    """One op: ops/<family>.py::<name>. `asked` holds the (family, name) pairs it hands to `dispatch.kernel`."""

    family: str
    name: str
    signature: str
    asked: tuple[tuple[str, str], ...]
    languages: frozenset[str] = field(default_factory=frozenset)


def ops() -> list[Op]:
    """Every op, family by family, in the order of the files. An op is a public function that asks for its kernel."""
    found = []
    for path in sorted((PACKAGE / "ops").glob("*.py")):
        kernels = {folder.name: functions(folder / path.name) for folder in languages()}
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_") and asked(function):
                having = {"torch"} | {name for name, names in kernels.items() if function.name in names}
                found.append(Op(path.stem, function.name, signature(function), asked(function), frozenset(having)))
    return found


def asked(function: ast.FunctionDef) -> tuple[tuple[str, str], ...]:
    """The literal (family, name) of every `kernel(family, name, x)` call inside."""
    return tuple(
        tuple(ast.literal_eval(a) if isinstance(a, ast.Constant) else "?" for a in node.args[:2])  # type: ignore[misc]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "kernel"
    )


def signature(function: ast.FunctionDef) -> str:
    """name(parameters) as people write it: defaults, but no annotations."""
    arguments = copy.deepcopy(function.args)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return f"{function.name}({ast.unparse(arguments)})"


def languages() -> list[Path]:
    """The kernel folders that exist."""
    return sorted(path for path in (PACKAGE / "kernels").iterdir() if (path / "__init__.py").is_file())


def functions(path: Path) -> set[str]:
    """The functions that a file defines or takes from its own folder; none where there is no file."""
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    taken = [alias.name for node in body if isinstance(node, ast.ImportFrom) and node.level for alias in node.names]
    return {node.name for node in body if isinstance(node, ast.FunctionDef)} | set(taken)

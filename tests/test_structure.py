"""What the code base promises about itself: imports point down, kernels mirror ops, ops are proved, files are small."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte import listing
from halfbyte.cases import CASES
from halfbyte.check import tensors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "halfbyte"
SOURCES = sorted(PACKAGE.rglob("*.py"))
OPS = listing.ops()

# What each part may import of ours. A new part says here where it stands.
BELOW = {
    "kernels": set(),
    "ops": {"ops"},
    "cases": {"ops", "cases", "check"},
    "check": {"ops"},
    "listing": set(),
    "machine": set(),
    "bench": {"ops", "cases", "check", "machine"},
    "bench_load": {"checkpoint", "errors", "limits", "memory"},
    "cuda": {"ops", "cases", "check", "bench"},
    "proof": {"bench", "cases", "ops"},
    "errors": set(),
    "limits": set(),
    "strict_json": {"errors", "limits"},
    "files": {"errors", "limits"},
    "config": {"errors", "files", "limits", "strict_json"},
    "memory": {"errors"},
    "checkpoint": {"checkpoint", "config", "errors", "files", "limits", "memory", "ops", "strict_json"},
    "expert_cache": set(),
    "foresight": {"ops"},
    "expert_ranges": {"checkpoint"},
    "expert_batch": {"expert_ranges"},
    "expert_reader": {"checkpoint", "expert_batch", "expert_ranges", "ops"},
    "expert_shares": {"checkpoint", "errors"},
    "stored_experts": {
        "checkpoint", "errors", "expert_cache", "expert_ranges", "expert_reader", "expert_shares", "memory", "ops",
    },
    "residency": {
        "checkpoint", "errors", "expert_cache", "expert_reader", "expert_shares", "foresight", "memory", "ops",
        "stored_experts",
    },
    "slots": {"ops"},
    "host_experts": {"checkpoint", "errors", "expert_shares", "memory", "ops", "residency", "stored_experts"},
    "device_experts": {
        "checkpoint", "errors", "expert_shares", "foresight", "host_experts", "ops", "residency", "slots",
        "stored_experts",
    },
    "tiered_experts": {
        "checkpoint", "device_experts", "errors", "expert_cache", "foresight", "host_experts", "memory", "ops",
        "residency", "slots", "stored_experts",
    },
    "routes": {"errors", "files", "foresight", "limits", "ops", "strict_json"},
    "simulation": {"expert_cache", "expert_shares", "foresight", "routes"},
    "slot_simulation": {"routes", "simulation", "slots"},
    "disk": {"checkpoint", "expert_ranges", "expert_reader", "expert_shares", "residency"},
    "step": set(),
    "cache": {"memory", "step"},
    "models": {
        "cache", "checkpoint", "config", "device_experts", "errors", "files", "limits", "memory", "models", "ops",
        "residency", "step", "strict_json", "tiered_experts",
    },
    "accounting": {"cache", "checkpoint", "models"},
    "conversion": {
        "checkpoint", "config", "conversion", "errors", "files", "hub", "limits", "models", "ops", "strict_json",
    },
    "text": {"errors", "files", "limits", "strict_json", "text"},
    "chat": {"errors", "files", "limits", "strict_json", "text"},
    "sampling": {"errors", "limits", "ops", "step"},
    "graph": {"check", "ops"},
    "fusion": {"check", "errors", "fusion", "graph", "memory", "ops"},
    "replaying": {"cache", "check", "fusion", "graph", "models", "ops"},
    "decoding": {"cache", "fusion", "graph", "models", "ops", "replaying", "sampling", "step"},
    "prefilling": {"cache", "fusion", "graph", "models", "ops", "replaying", "step"},
    "request": {"sampling"},
    "flights": {"cache", "decoding", "models", "replaying", "request", "sampling"},
    "engine": {"cache", "decoding", "flights", "machine", "models", "ops", "prefilling", "request", "sampling", "step"},
    "recordings": {"decoding", "engine", "prefilling"},
    "cache_file": {"cache", "models", "strict_json"},
    "conversation": {
        "cache", "chat", "engine", "errors", "memory", "models", "prefixes", "request", "sampling", "text",
    },
    "conversation_file": {"errors", "files", "limits"},
    "bench_model": {"accounting", "cache", "engine", "machine", "memory", "models", "replaying", "sampling"},
    "model_proof": {"check", "graph", "memory", "models", "ops"},
    "costs": {"check", "ops"},
    "explain": {"cache", "check", "costs", "cuda", "decoding", "device_experts", "graph", "machine", "models"},
    "download": {"errors"},
    "hub_cache": {"download", "errors"},
    "hub": {"download", "errors", "files", "hub_cache"},
    "progress": {"errors"},
    "fitting": {"checkpoint", "errors", "expert_shares", "memory"},
    "loading": {
        "cache", "chat", "checkpoint", "config", "device_experts", "download", "errors", "expert_cache", "fitting",
        "host_experts", "hub", "memory", "models", "progress", "residency", "tiered_experts",
    },
    "compilation": {"cache", "decoding", "machine", "models", "ops", "tiered_experts"},
    "sample_utils": {"errors", "limits", "ops", "request", "sampling"},
    "generation_arguments": {"cache", "chat", "errors", "models", "request", "sample_utils", "sampling"},
    "generation": {"cache", "chat", "compilation", "engine", "generation_arguments", "memory", "models", "request"},
    "quality": {"engine", "models", "ops"},
    "metrics": set(),
    "prefixes": {"cache"},
    "grammar": {"chat", "errors", "limits", "text"},
    "jobs": {"engine", "grammar", "sampling", "text"},
    "scheduler": {
        "cache", "engine", "errors", "grammar", "jobs", "machine", "metrics", "models", "prefixes", "recordings",
        "sampling", "text",
    },
    "server": {
        "__init__", "cache", "chat", "engine", "errors", "fitting", "grammar", "jobs", "limits", "memory", "metrics",
        "models", "prefixes", "sampling", "scheduler", "server", "strict_json", "text",
    },
    "commands": {
        "__init__", "accounting", "bench", "bench_load", "bench_model", "cache", "cache_file", "cases", "chat",
        "checkpoint", "commands", "compilation", "conversation", "conversation_file", "conversion", "cuda",
        "device_experts", "disk", "errors", "expert_cache", "expert_shares", "explain", "files", "fitting",
        "fusion", "generation", "grammar", "hub", "listing", "loading", "machine", "memory", "model_proof", "models",
        "ops", "progress", "proof", "quality", "residency", "routes", "sampling", "server", "simulation",
        "slot_simulation", "text", "tiered_experts",
    },
    "cli": {"__init__", "commands", "errors", "progress"},
    "__main__": {"cli"},
    "__init__": {"conversion", "engine", "generation", "loading", "ops"},
}  # fmt: skip
LANGUAGE_PACKAGES = {"numba": {"numba", "llvmlite"}, "triton": {"triton"}, "metal": set()}
LIGHT = {
    "__init__",
    "__main__",
    "cli",
    "commands",
    "errors",
    "limits",
    "listing",
    "machine",
    "progress",
}  # parts that load nothing heavy when they are imported
POSIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt", "readline"}
LONGER = {}  # files outside kernels that may exceed 300 lines, with their limit


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def part(path):
    """The name of a source file's part: its folder in the package, or itself where it lies at the top."""
    inside = path.relative_to(PACKAGE).parts
    return inside[0].removesuffix(".py")


def imports(path, nodes):
    """The dotted names a file imports, ours in full ("halfbyte.ops.dispatch")."""
    package = ("halfbyte", *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*home, *([node.module] if node.module else [])])
            yield from ([base] if node.module else (f"{base}.{alias.name}" for alias in node.names))


def at_module_level(path):
    """Every node that runs when the file is imported; what stands under TYPE_CHECKING does not."""
    waiting = list(tree(path).body)
    while waiting:
        node = waiting.pop()
        yield node
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        lazy |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += [] if lazy else ast.iter_child_nodes(node)


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda p: p.relative_to(ROOT).as_posix())


@named(SOURCES)
def test_imports_point_down(path):
    for name in imports(path, ast.walk(tree(path))):
        top, *rest = name.split(".")
        if top != "halfbyte":
            continue
        ours = rest[0] if rest and (PACKAGE / rest[0]).is_dir() | (PACKAGE / f"{rest[0]}.py").is_file() else "__init__"
        assert ours in BELOW[part(path)] or ours == part(path) == "kernels", f"{path.name} must not import {name}"


@named([path for path in SOURCES if part(path) == "kernels"])
def test_kernels_import_only_torch_and_their_language(path):
    inside = path.relative_to(PACKAGE).parts
    language = inside[1] if len(inside) > 2 else ""
    allowed = sys.stdlib_module_names | {"torch", "numpy"} | LANGUAGE_PACKAGES.get(language, set())
    for name in imports(path, ast.walk(tree(path))):
        own = name.startswith(f"halfbyte.kernels.{language}") and language
        assert own or name.split(".")[0] in allowed, f"{path.name} must not import {name}"


@named([path for path in SOURCES if part(path) != "kernels"])
def test_languages_are_imported_only_by_kernels(path):
    """machine.py may, inside functions: it measures with Numba, and names its version."""
    nodes = at_module_level(path) if part(path) == "machine" else ast.walk(tree(path))
    assert not {name.split(".")[0] for name in imports(path, nodes)} & set.union(*LANGUAGE_PACKAGES.values())


@named(SOURCES)
def test_what_loads_at_import(path):
    loaded = {name.split(".")[0] for name in imports(path, at_module_level(path))}
    assert not loaded & POSIX_ONLY
    if part(path) in LIGHT:
        assert loaded <= sys.stdlib_module_names | {"halfbyte"}


def test_ops_were_found():
    assert len(OPS) >= 20
    names = [op.name for op in OPS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_asks_for_its_own_kernel(op):
    assert set(op.asked) == {(op.family, op.name)}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_has_a_kernel_in_every_language(op):
    assert op.languages == {"torch", *LANGUAGE_PACKAGES}


@pytest.mark.parametrize(
    ("op", "language"),
    [(op, language) for op in OPS for language, needed in LANGUAGE_PACKAGES.items() if all(map(find_spec, needed))],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_kernels_mirror_their_op(op, language):
    def parameters(module):
        found = inspect.signature(getattr(import_module(module), op.name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    assert parameters(f"halfbyte.kernels.{language}.{op.family}") == parameters(f"halfbyte.ops.{op.family}")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_has_cases(op):
    """One that is timed, and one whose memory is awkward: strided or empty."""
    cases = [case for case in CASES if case.op.__name__ == op.name]
    assert any(case.serving for case in cases)
    small = [case.inputs(torch.float32) for case in cases if not case.serving]
    assert any(not t.is_contiguous() or t.numel() == 0 for one in small for t in tensors(one))


def test_cases_have_distinct_names():
    names = [str(case) for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_public_names_are_listed_once():
    seen = [
        alias.asname
        for node in tree(PACKAGE / "__init__.py").body
        if isinstance(node, ast.If)
        for line in node.body
        for alias in line.names
    ]
    assert sorted([*seen, "__version__"]) == sorted(halfbyte.__all__) == sorted(dir(halfbyte))
    assert all(getattr(halfbyte, name) is not None for name in halfbyte.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = halfbyte.nothing


def test_the_design_lists_every_op_with_its_signature():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^\| (\w+) \| `(\w+\(.*?\))` \|", text, re.M))
    assert written == {(op.family, op.signature) for op in OPS}


@named(SOURCES)
def test_files_and_functions_stay_small(path):
    name = path.relative_to(PACKAGE).as_posix()
    limit = {"models": 199, "kernels": 500}.get(part(path), LONGER.get(name, 300))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit
    if part(path) != "kernels":
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"


def tracked():
    """The files of the repository; outside of one (an sdist), all that are not caches."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
        return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    hidden = re.compile(r"/(\.(?!ci)|__pycache__|build|dist)")
    return [path for path in ROOT.rglob("*") if path.is_file() and not hidden.search(f"/{path.relative_to(ROOT)}")]


def test_no_file_is_a_drawer():
    assert not [p for p in tracked() if p.stem in ("utils", "util", "common", "base", "helpers", "misc")]


def test_no_machine_paths():
    private = re.compile(r"(?<![\w.$}])/(?:work|tmp|root|home|Users|mnt)\b")
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path != Path(__file__).resolve():
            found = private.search(text)
            assert not found, f"{path.name}: {text[found.start() - 30 : found.end() + 30]!r}"


def test_readme_maps_every_file():
    """Families are named once, as ops; their cases and kernels are files of the same name."""
    written = set(re.findall(r"^\| `(\S+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M))
    assert not [name for name in written if not (ROOT / name).exists()]
    families = {path.name for path in (PACKAGE / "ops").glob("*.py")} | {"__init__.py", "__main__.py", "case.py"}
    mirrored = [path for path in SOURCES if path.parent.parent == PACKAGE / "kernels" or part(path) == "cases"]
    named = {path.relative_to(ROOT).as_posix() for path in SOURCES if path not in mirrored or path.name not in families}
    assert {name for name in named if not name.endswith(("/__init__.py", "/__main__.py"))} <= written


def test_readme_examples_run():
    """The Python blocks run here, the two shell commands in .ci/run, as they stand; other blocks are fenced as text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    assert {language for language, _ in blocks} <= {"sh", "python", "text"}
    assert sum(language == "sh" for language, _ in blocks) == 2
    for language, code in blocks:
        if language == "python":
            subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

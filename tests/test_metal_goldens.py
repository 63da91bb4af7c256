"""Every original Metal kernel's golden vectors, through our own Metal kernels, which docs/kernels.md names."""

import re
from pathlib import Path

import pytest
from golden_adapter import run
from golden_vectors import files, load

from halfbyte.kernels.metal import shaders

DOCUMENT = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text(encoding="utf-8")
FAMILIES = sorted(path.stem for path in (Path(shaders.__file__).parent).glob("*.metal"))


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_golden(path):
    for vector in load(path):
        got = run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language="metal")
        assert vector.misses(got) == []
        assert set(got) == set(vector.outputs)


def family_of(source):
    """The longest of the sources that this one begins with: some are what others begin with."""
    return max(
        (name for name in FAMILIES if source.startswith(shaders.source(name))), key=lambda n: len(shaders.source(n))
    )


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_the_document_names_what_is_launched(path, monkeypatch):
    launched = set()

    class Noted:
        """Kernels that are not run."""

        def __init__(self, source):
            template = re.findall(r"decltype\((\w+)<", source)[-1]
            self.name = f"{family_of(source)}.metal::{template}"

        def __getattr__(self, known_as):
            return lambda *arguments, **geometry: launched.add(self.name)

    monkeypatch.setattr(shaders, "compile_shader", Noted)
    shaders.kernel.cache_clear()
    try:
        for vector in load(path):
            run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language="metal")
    finally:
        shaders.kernel.cache_clear()
    (row,) = [line for line in DOCUMENT.splitlines() if f"`test_metal_goldens.py::test_golden[{path.stem}]`" in line]
    assert set(re.findall(r"`(\w+\.metal::\w+)`", row)) == launched

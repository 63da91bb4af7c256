"""Every original Metal kernel's golden vectors, through our own Metal kernels."""

import pytest
from golden_adapter import run
from golden_vectors import files, load
from metal import executor

executor.install()


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_golden(path):
    for vector in load(path):
        got = run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language="metal")
        assert vector.misses(got) == []
        assert set(got) == set(vector.outputs)

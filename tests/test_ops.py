"""Every case of every op: the kernel is as accurate as its torch body, in float32 and in a narrower type, and it ran.

Triton's kernels run on a GPU where there is one, else in Triton's interpreter: there not at the serving shapes, which
would take minutes each, and in float16, since the interpreter truncates what it stores as bfloat16.
"""

from importlib.util import find_spec

import pytest
import torch
from numba.core.runtime import _nrt_python

from halfbyte.cases import CASES
from halfbyte.check import LIMIT, error_ratio
from halfbyte.ops.dispatch import trace

GPU = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = {("numba", "cpu"): torch.bfloat16, ("triton", "cuda"): torch.bfloat16, ("triton", "cpu"): torch.float16}
RUNS = [
    pytest.param(case, language, device, dtype, id=f"{case}-{language}-{str(dtype).removeprefix('torch.')}")
    for language, device in (("numba", "cpu"), ("triton", GPU))
    if find_spec(language)
    for case in CASES
    if case.runs_on(device) and not (case.serving and (language, device) == ("triton", "cpu"))
    for dtype in (torch.float32, NARROW[language, device])
]


def arrays_left():
    """Arrays that CPU kernels have made and not given back."""
    return _nrt_python.memsys_get_stats_mi_alloc() - _nrt_python.memsys_get_stats_mi_free()


@pytest.fixture(scope="module", autouse=True)
def counted_arrays():
    _nrt_python.memsys_enable_stats()
    yield
    _nrt_python.memsys_disable_stats()


@pytest.mark.parametrize(("case", "language", "device", "dtype"), RUNS)
def test_kernel_is_as_accurate_as_its_reference(case, language, device, dtype):
    args, kwargs = case.inputs(dtype, device=device)
    before = arrays_left()
    with trace() as entries:
        ratio = error_ratio(case.op, args, kwargs, mutates=case.mutates, language=language)
    assert ratio <= LIMIT
    assert arrays_left() == before
    assert any(e.op == case.op.__name__ and e.language == language for e in entries)

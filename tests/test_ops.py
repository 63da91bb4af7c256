"""Every case of every op: the kernel is as accurate as its torch body, in float32 and in bfloat16, and it did run."""

import pytest
import torch

from halfbyte.cases import CASES
from halfbyte.check import LIMIT, error_ratio
from halfbyte.ops.dispatch import trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_as_accurate_as_its_reference(case, dtype):
    args, kwargs = case.inputs(dtype)
    with trace() as entries:
        ratio = error_ratio(case.op, args, kwargs, mutates=case.mutates)
    assert ratio <= LIMIT
    assert any(e.op == case.op.__name__ and e.language == "numba" for e in entries)

"""Every case of every op in Metal: as accurate as its torch body, in every float type, with the same bits whatever the
order in which simd groups run, and with nothing for the checker to find.

On a Mac the kernels run on its GPU. Elsewhere tests/metal executes them on the CPU, at all but the serving shapes.
"""

import pytest
import torch
from metal import executor

from halfbyte import listing
from halfbyte.cases import CASES
from halfbyte.check import LIMIT, bits, clone, error_ratio, outcome
from halfbyte.ops.dispatch import trace, using
from halfbyte.ops.experts import expert_qmm
from halfbyte.ops.rowwise import rope

DEVICE = executor.install()
WRITTEN = {op.name for op in listing.ops() if "metal" in op.languages}
SMALL = [case for case in CASES if case.op.__name__ in WRITTEN and case.runs_on("cpu") and not case.serving]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_kernel_is_as_accurate_as_its_reference(case, dtype):
    args, kwargs = case.inputs(dtype, device=DEVICE)
    with trace() as entries:
        ratio = error_ratio(case.op, args, kwargs, mutates=case.mutates, language="metal")
    assert ratio <= LIMIT
    assert any(e.op == case.op.__name__ and e.language == "metal" for e in entries)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_order_gives_the_same_bits(case):
    args, kwargs = case.inputs(torch.float32, device=DEVICE)
    results = []
    for order in (0, 1, 3):
        with executor.scheduled(order), using("metal"):
            results.append(outcome(case.op, clone(args), clone(kwargs), case.mutates))
    for one in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], one, strict=True))


def test_a_tile_finds_its_expert_among_many_thousands():
    w = torch.arange(20000.0, device=DEVICE).view(-1, 1, 1)
    ids = torch.tensor([*range(0, 20000, 500), 19999], device=DEVICE)[:, None]
    with using("metal"):
        assert torch.equal(expert_qmm(torch.ones(len(ids), 1, device=DEVICE), ids, w).flatten(), ids.flatten().float())


def test_an_angle_keeps_more_than_float32_near_half_a_turn():
    """Rounded to float32 on the way, angles of up to pi put 5e-7 into what the sine and cosine then do to 1e-7."""
    positions, table = torch.arange(2000, device=DEVICE), torch.linspace(0.01, 1, 64, device=DEVICE)
    x = torch.cat([torch.ones(2000, 1, 64), torch.zeros(2000, 1, 64)], -1).to(DEVICE)
    with using("metal"):
        y = rope(x, positions, table).double().cpu()[:, 0]
    angles = positions.double().cpu()[:, None] * table.double().cpu()
    assert (y - torch.cat([angles.cos(), angles.sin()], -1)).abs().max() < 2.4e-7

"""bench: what is wrong is not timed; bytes are counted; calls rotate; the read probe is honest."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from halfbyte import bench, machine
from halfbyte.bench import ROTATION, Rotation, Row, check, copies, duration, header, line, measure, moved
from halfbyte.cases import CASES, Case
from halfbyte.ops.dispatch import kernel


@pytest.fixture(scope="module")
def probe():
    return machine.ReadProbe()


def build(random, dtype):
    return (random.normal(64, 2048, dtype=dtype), random.normal(2048)), {}


def twice(x, weight):
    """An op of this test's own, without a kernel."""
    kernel("nowhere", "twice", x)
    return (x.double() * weight.double() * 2).to(x.dtype)


def drifting(x, weight):
    """As twice, but wrong wherever it is not asked for exactness or for the body."""
    from halfbyte.ops.dispatch import language

    y = twice(x, weight)
    return y if language(x) == "torch" else y + 1e-3


def test_a_wrong_kernel_is_not_timed():
    said = []
    rows = list(bench.bench([Case(drifting, "64x2048", build, serving=True)], "cpu", pytest.fail, said.append))
    assert [row.wrong for row in rows] == [True]
    assert rows[0].seconds is None
    assert said == ["checking drifting[64x2048]"]
    assert "WRONG: error ratio float32" in line(rows[0], 20)


def test_a_kernel_wrong_in_one_dtype_alone_is_wrong():
    def op(x, weight):
        return drifting(x, weight) if x.dtype == torch.bfloat16 else twice(x, weight)

    def coarse(random, dtype):
        (x, weight), _ = build(random, dtype)
        return (x * 1e-3, weight), {}

    row = check(Case(op, "bf16", coarse))
    assert row.error_ratios["float32"] <= 2 < row.error_ratios["bfloat16"]
    assert row.wrong


def test_results_that_are_not_comparable_are_wrong_and_still_json():
    def op(x, weight):
        from halfbyte.ops.dispatch import language

        return twice(x, weight) * (1.0 if language(x) == "torch" else float("nan"))

    row = check(Case(op, "nan", build))
    assert row.wrong
    assert row.as_json()["error_ratios"] == {"float32": None, "bfloat16": None}


def test_bits_that_move_are_wrong():
    calls = iter(range(100))

    def op(x, weight):
        return twice(x, weight) + next(calls) * 1e-9

    row = check(Case(op, "moving", lambda r, d: ((r.normal(4, dtype=d) * 1e-6, r.normal(4)), {})))
    assert row.wrong and not row.same_bits
    assert "two runs gave different bits" in line(row, 20)


def test_a_right_kernel_is_timed_beside_its_body(probe):
    case = next(case for case in CASES if case.serving and case.op.__name__ == "glu")
    row = check(case)
    assert not row.wrong and row.language == "numba"
    measure(case, row, probe, 0.02)
    assert 0 < row.seconds < 1 and 0 < row.torch_seconds < 1
    assert row.bytes_per_second == row.bytes_moved / row.seconds
    assert row.speedup > 0 and row.of_read > 0
    assert "numba" not in line(row, 30) and "torch" in line(row, 30)


def test_rounds_that_queued_do_not_count(probe, monkeypatch):
    """Of every two rounds the first is disturbed; then all are, and the row says so."""
    case = Case(twice, "64x2048", build)
    waits = iter([0.0, 9.0, 9.0, 9.0] * 1000)
    monkeypatch.setattr(bench, "queueing_seconds", lambda: next(waits))
    times = iter([1e-6, 1e-6, *[9e-3, 9e-3, 1e-3, 2e-3] * 1000])
    monkeypatch.setattr(bench, "turn", lambda *_: next(times))
    row = check(case)
    measure(case, row, probe, 1.0)
    assert (row.seconds, row.torch_seconds, row.speedup, row.busy) == (1e-3, 2e-3, 2.0, False)

    waits = iter(range(10_000))
    measure(case, row, probe, 0.02)
    assert row.busy
    assert line(row, 30).endswith("busy")


def test_an_op_without_a_kernel_says_so(probe):
    case = Case(twice, "64x2048", build)
    row = check(case)
    measure(case, row, probe, 0.01)
    assert row.language == "torch"
    assert "no kernel" in line(row, 30)


def test_bytes_are_counted_from_arguments_and_results():
    case = Case(twice, "64x2048", build)
    assert moved(case, case.inputs(torch.float32)) == 64 * 2048 * 4 + 2048 * 4 + 64 * 2048 * 4


def test_what_is_changed_in_place_is_read_and_written():
    def op(x, *, state):
        return state.add_(x)

    case = Case(op, "state", lambda r, d: ((r.normal(8),), {"state": r.normal(8)}), mutates=("state",))
    assert moved(case, case.inputs(torch.float32)) == 8 * 4 + 2 * 8 * 4


def test_a_case_may_count_its_own_bytes():
    case = Case(twice, "64x2048", build, touched=lambda args, kwargs: args[0].shape[0])
    assert moved(case, case.inputs(torch.float32)) == 64


@dataclass(frozen=True)
class Weight:
    words: torch.Tensor
    scales: torch.Tensor


def test_copies_rotate_weights_too_and_keep_views():
    buffer = torch.zeros(1 << 20)
    inputs = ((Weight(buffer[:512], buffer[512:1024]),), {})
    made = copies(inputs, touched=64 << 20)
    assert len(made) == 3
    starts = {one[0][0].words.untyped_storage().data_ptr() for one in made}
    assert len(starts) == 3
    assert all(one[0][0].scales.data_ptr() - one[0][0].words.data_ptr() == 2048 for one in made)


@dataclass(frozen=True)
class Remembering:
    words: torch.Tensor

    @cached_property
    def address(self):
        return self.words.data_ptr()


def test_a_copied_weight_does_not_remember_the_original_address(probe):
    def op(x, weight):
        assert weight.address == weight.words.data_ptr()
        return x * weight.words

    case = Case(op, "remembering", lambda r, d: ((r.normal(8, dtype=d), Remembering(r.normal(8))), {}))
    measure(case, check(case), probe, 0.001)


def test_copies_stay_within_count_and_memory():
    inputs = ((torch.zeros(1024),), {})
    assert len(copies(inputs, touched=4096)) == ROTATION.copies
    assert len(copies(inputs, touched=2 * ROTATION.touched)) == 1
    assert len(copies(inputs, 4096, Rotation(1 << 20, copies=128, memory=10_000))) == 2


def test_the_read_probe_verifies_its_checksum(probe):
    assert probe.bandwidth(3) > 1e8
    probe.data[12345] += 1
    with pytest.raises(RuntimeError, match="read probe"):
        probe.seconds()
    probe.data[12345] -= 1
    assert probe.seconds() > 0


def test_the_probe_reads_everything():
    """Any number of threads, any remainder."""
    import numpy as np

    read = machine.compiled_read()
    for size in (1, 63, 1024, 100_003):
        data = np.arange(size, dtype=np.int64)
        assert [read(data, threads) for threads in (1, 2, 3)] == [data.sum()] * 3


def test_workqueue_threads_are_warned_about():
    facts = {**machine.facts(), "read_bytes_per_second": 1e10}
    assert not any("warning" in text for text in header({**facts, "threading_layer": "omp"}))
    assert any("workqueue" in text for text in header({**facts, "threading_layer": "workqueue"}))


def test_durations_have_three_digits():
    assert [duration(s) for s in (3.21e-6, 45.6e-6, 789e-6, 1.5e-3, 2.0)] == [
        "3.21 us", "45.6 us", "789 us", "1.50 ms", "2.00 s"
    ]  # fmt: skip


def test_lines_align():
    fields = {"wrong": False, "torch_seconds": 9.8e-3, "speedup": 31.2, "bytes_moved": 1, "of_read": 0.72}
    row = Row("qmm[1x2048x4096-4bit]", "qmm", "numba", {}, seconds=3.1e-4, bytes_per_second=1.61e10, **fields)
    row.from_memory = True
    assert line(row, 22) == "qmm[1x2048x4096-4bit]     310 us  torch  9.80 ms   31.2x   16.10 GB/s   72%"

"""Every original Metal kernel's golden vectors, through our ops: the torch bodies, the Numba and the Triton kernels."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from golden_adapter import COMPOSITES, KERNELS, run
from golden_vectors import files, load

from halfbyte.ops import dispatch

DOCUMENT = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
FILES = {path.stem: path for path in files()}


LANGUAGES = [*filter(find_spec, ["torch", "numba", "triton"])]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", FILES)
def test_golden(name, language):
    for vector in load(FILES[name]):
        given = {key: array.copy() for key, array in vector.inputs.items()}
        got = run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language=language)
        assert vector.misses(got) == []
        assert set(got) == set(vector.outputs)
        assert all(given[key].tobytes() == vector.inputs[key].tobytes() for key in given)


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_empty_tile_changes_nothing(language):
    vector = next(load(FILES["mla_sdpa_tile_accumulate"]))
    scalars = vector.scalars | {"tile_start": 3, "tile_end": 3}
    got = run(vector.kernel, vector.inputs, scalars, vector.meta, language=language)
    assert set(got) == set(vector.outputs)
    assert all(got[name].tobytes() == vector.inputs[name].tobytes() for name in got)


@pytest.mark.parametrize("language", LANGUAGES)
def test_heads_may_share_keys_unevenly(language):
    """Three heads of two key heads, in rows that hold more than those."""
    random = np.random.default_rng(0)
    q, cache, p = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 16), (7, 37), (3, 9)))
    scalars = {"head_dim": 16, "kv_dim": 37, "seq_len": 5, "seq_stride": 9, "heads_per_kv": 2}
    shared = np.stack([cache[:5, 16 * kv : 16 * kv + 16] for kv in (0, 0, 1)])  # [H, S, D]
    given = {"Q": q, "K_cache": cache, "scores": p}
    got = run("attn_scores_batched", given, scalars | {"scale": 0.5, "num_seq_tgs": 5}, {}, language=language)
    assert np.array_equal(got["scores"][:, 5:], p[:, 5:])
    assert np.allclose(got["scores"][:, :5], np.einsum("hd,hsd->hs", q, shared) * 0.5, rtol=1e-5, atol=1e-6)
    got = run("attn_values_batched", {"scores": p, "V_cache": cache}, scalars, {}, language=language)
    assert np.allclose(got["out"], np.einsum("hs,hsd->hd", p[:, :5], shared), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("language", LANGUAGES)
def test_slots_compare_float32_probabilities(language):
    """Probabilities that float32 rounds to zero are equal, so that the first of them keeps its slot."""
    logits = np.array([[0, 200, 1, 2]], np.float32)
    got = run("moe_softmax_topk", {"logits": logits}, {"n_experts": 4, "k": 2}, {}, language=language)
    assert got["out_indices"].tolist() == [[0, 1]]
    assert got["out_weights"].tolist() == [[0.0, 1.0]]


def test_all_vectors_are_here():
    assert len(FILES) == 89
    assert {name.split("__")[0] for name in FILES} == set(KERNELS)
    assert set(COMPOSITES) <= set(KERNELS)


def test_a_wrong_result_is_a_miss():
    vector = next(load(FILES["rms_norm_f32_triple"]))
    got = run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language="torch")
    got["output_b"] = got["output_b"] * 1.0001
    assert [line.split()[0] for line in vector.misses(got)] == ["output_b"]


@pytest.mark.parametrize(
    ("name", "missing"),
    [("rms_norm_f32", "rms_norm"), ("fused_gate_up_swiglu", "qmm"), ("fused_gate_up_swiglu", "glu")],
)
def test_the_adapter_fails_where_a_kernel_is_missing(name, missing, monkeypatch):
    found = dispatch.find
    monkeypatch.setattr(
        dispatch, "find", lambda language, family, op: None if op == missing else found(language, family, op)
    )
    vector = next(load(FILES[name]))
    with pytest.raises(AssertionError, match=f"no numba kernel ran for .*{missing}"):
        run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language="numba")
    run(vector.kernel, vector.inputs, vector.scalars, vector.meta, language="torch")


def rows_of_document() -> list[list[str]]:
    """The cells of every table row that starts with a number."""
    rows = (line.strip("|").split(" | ") for line in DOCUMENT.splitlines() if re.match(r"\| \d+ \|", line))
    return [[cell.strip(" `") for cell in row] for row in rows]


def test_the_document_lists_all_99_in_order():
    rows = rows_of_document()
    assert [int(row[0]) for row in rows] == list(range(1, 100))
    named = {row[1] for row in rows}
    assert {name.split("__")[0] for name in FILES} <= named
    assert {row[1] for row in rows if "composite" in row[2]} == set(COMPOSITES)
    for number, name, _, _, test in rows:
        if name in KERNELS:
            older = "__seed004" if 37 <= int(number) <= 42 else ""
            assert f"test_goldens.py::test_golden[{name}{older}-" in test
            assert f"test_metal_goldens.py::test_golden[{name}{older}]" in test


def test_every_test_named_in_the_document_exists():
    named = set(re.findall(r"(test_\w+)\.py::(test_\w+)", DOCUMENT))
    assert named
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"), (file, test)

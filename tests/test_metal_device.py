"""The Python that runs on a Mac, on an imagined Apple GPU: all that a kernel is given lies there, nothing on it is
float64, and no launcher reads a tensor's values. What kernels compute is for the other test_metal files."""

import pytest
import torch
from metal.device import imagined
from model_goldens import FOLDER, NAMES

from halfbyte import checkpoint as checkpoints
from halfbyte.cases import CASES
from halfbyte.check import move
from halfbyte.checkpoint.ledger import Ledger
from halfbyte.checkpoint.weights import Weights
from halfbyte.kernels.metal import shaders
from halfbyte.kernels.metal.rowwise import rope
from halfbyte.models import MODELS
from halfbyte.models.rotary import Rope, frequencies
from halfbyte.ops.dispatch import reference, trace
from halfbyte.ops.quant import quantize
from halfbyte.sampling import Sampler, SamplingParams

# quantize is left out: its contract looks whether weights are finite.
SMALL = [case for case in CASES if case.runs_on("cpu") and not case.serving and case.op is not quantize]


def model_on_an_apple_gpu(folder):
    """The model of a folder, with weights that have no memory."""
    checkpoint, device = checkpoints.open(folder, set(MODELS)), torch.device("mps:0")
    build, skeleton = MODELS[checkpoint.config.model_type], checkpoint.weights("meta")
    build(checkpoint.config, skeleton)
    spans = skeleton.ledger.wanted.values()
    ready = {span.name: torch.empty(span.shape, dtype=span.dtype, device=device) for span in spans}
    return build(checkpoint.config, Weights(Ledger(checkpoint, device, ready)))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_case_runs(case):
    made = case.inputs(torch.bfloat16)
    with imagined(), trace() as entries:
        args, kwargs = move(made, "mps")
        case.op(*args, **kwargs)
    assert {entry.language for entry in entries} == {"metal"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs(name, dtype):
    with imagined(), trace() as entries:
        model = model_on_an_apple_gpu(FOLDER / name)
        model.dtype = dtype
        cache = model.new_cache(2, 32)
        for work in ([(0, list(range(9))), (1, [3])], [(0, [1]), (1, [2])]):
            logits = model(cache.plan(work), cache)
            cache.advance(work)
        cache.restore(1, cache.snapshot(0))
        cache.reset(0)
    assert logits.shape == (2, model.vocabulary) and logits.device.type == "mps"
    assert {entry.language for entry in entries} == {"metal"}


def test_a_token_is_drawn():
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, logit_bias={4: 1.0})
    with imagined(), trace() as entries:
        sampler = Sampler(2, 50, torch.device("mps:0"))
        sampler.start(0, params, [1, 2])
        ids = sampler(torch.empty(1, 50, device="mps"), [0], torch.tensor([2], device="mps"))
    assert ids.device.type == "mps"
    assert [entry.language for entry in entries] == ["metal"]


def test_a_rotary_table_of_float64_stays_on_the_cpu():
    turn = Rope(frequencies(10000.0, 64))
    with imagined():
        x, positions = torch.empty(5, 2, 64, device="mps"), torch.empty(5, dtype=torch.int32, device="mps")
        with trace() as entries:
            assert turn(x, positions).device.type == "mps"
        assert [entry.language for entry in entries] == ["metal"]
        with reference():
            assert turn(x, positions).device.type == "mps"
        with pytest.raises(ValueError, match="rope: inv_freq must be on mps:0"):
            Rope(turn.inv_freq.float())(x, positions)


def test_a_rotary_table_is_moved_once_and_again_when_it_changes(monkeypatch):
    tables = []
    monkeypatch.setattr("halfbyte.kernels.metal.rowwise.kernel", lambda *wanted: None)
    monkeypatch.setattr("halfbyte.kernels.metal.rowwise.launch", lambda *given, **sizes: tables.append(given[3:5]))
    x, positions, table = torch.ones(1, 1, 64), torch.tensor([3]), frequencies(10000.0, 64)
    rope(x, positions, table)
    rope(x, positions, table)
    table *= 2
    rope(x, positions, table)
    assert tables[0][0] is tables[1][0] and tables[0][1] is tables[1][1]
    large, small = tables[2]
    assert (large.dtype, small.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(large.double() + small.double(), table, rtol=2**-46, atol=0)


def test_float64_and_memory_of_the_cpu_are_refused():
    with imagined():
        with pytest.raises(TypeError, match="no float64"):
            torch.empty(3, device="mps").double()
        with pytest.raises(TypeError, match="cast: it is given memory of cpu"):
            shaders.launch(shaders.compile_shader("").cast, torch.empty(3), 3, groups=1, size=32)

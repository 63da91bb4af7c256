"""The training twin computes what halfbyte computes, and trains on the very weights that are exported."""

import json

import numpy as np
import pytest
import torch
from small_tokenizers import byte_level

import halfbyte
from halfbyte.chat import Tokenizer
from halfbyte.ops import dispatch, recurrent
from halfbyte.ops.quant import dequantize, quantize
from training import shape as shapes
from training import twin as twins
from training.export import export, load_weights, save_weights
from training.feed import Renderer
from training.optimiser import Optimiser, orthogonal

SHAPE = shapes.Shape(
    vocabulary=384, hidden=64, layers=4, attention_every=2, heads=2, kv_heads=1, key_heads=1, value_heads=2,
    experts=6, chosen=2, positions=512,
)  # fmt: skip
TALK = [
    {"role": "user", "content": "A fox?\nYes!"},
    {"role": "assistant", "content": "The quick brown fox.\n\nIt jumps."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": " It sleeps. "},
]


@pytest.fixture(autouse=True)
def one_thread():
    """These sizes gain nothing from more, and lose much where other work runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights():
    """Far from their first values: every tensor counts, and is no number of bfloat16."""
    torch.manual_seed(0)
    return {
        name: w * (1 + 0.2 * torch.randn_like(w)) + 0.02 * torch.randn_like(w)
        for name, w in shapes.initial(SHAPE, 0).items()
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level().save(str(path))
    return path


@pytest.fixture(scope="module")
def folder(weights, tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("exported") / "model"
    export(weights, SHAPE, tokenizer, place)
    return place


def test_the_twin_gives_the_logits_of_the_exported_model(weights, folder):
    ids = torch.randint(0, SHAPE.vocabulary, (1, 3 * twins.CHUNK + 9))
    model = halfbyte.load_model(folder)
    with dispatch.using("torch"), torch.no_grad():
        expected, _ = halfbyte.logits(model, ids[0].tolist())
        twin = twins.Twin(SHAPE, weights)
        got = twin.logits(ids, twin.weights(torch.float32, quantised=True))[0]
        loose = twin.logits(ids, twin.weights(torch.float32, quantised=False))[0]
    assert (got - expected).abs().max() < 1e-3 * expected.std()
    assert (loose - expected).abs().max() > 1e-2 * expected.std()  # rounding is no small matter, and is in both


def test_a_rows_loss_is_that_of_its_logits(weights):
    twin = twins.Twin(SHAPE, weights)
    ids = torch.randint(0, SHAPE.vocabulary, (2, 70))
    with torch.no_grad():
        w = twin.weights(torch.float32, quantised=True)
        cost, imbalance = twin.losses(ids, w)
        scores = torch.log_softmax(twin.logits(ids[:, :-1], w), -1)
    assert torch.allclose(cost, -scores.gather(-1, ids[:, 1:, None])[..., 0], atol=1e-5)
    assert 0.9 < float(imbalance) < SHAPE.experts / SHAPE.chosen


@pytest.mark.parametrize("width", [4, 8])
def test_weights_are_rounded_to_what_their_codes_stand_for(width):
    torch.manual_seed(1)
    w = torch.randn(40, 128) * torch.logspace(-6, 2, 40)[:, None]
    w[3], w[4, :64] = 0.0, 0.25
    expected = dequantize(quantize(w.bfloat16(), width, shapes.GROUP))
    assert torch.equal(twins.rounded(w.flatten(), width).view_as(w), expected)


def test_gradients_pass_straight_through_the_rounding(weights):
    twin = twins.Twin(SHAPE, weights)
    used = twin.weights(torch.float32, quantised=True)
    probe = torch.randn_like(used["layers.0.mlp.switch_mlp.up_proj.weight"])
    (used["layers.0.mlp.switch_mlp.up_proj.weight"] * probe).sum().backward()
    nothing = {key: torch.zeros_like(flat) for key, flat in twin.flat.items()}
    gradient = twin.split(nothing | {"bits4": twin.flat["bits4"].grad})
    assert torch.equal(gradient["layers.0.mlp.switch_mlp.up_proj.weight"], probe)
    assert not gradient["layers.0.mlp.switch_mlp.gate_proj.weight"].any()


def test_chunks_give_what_token_by_token_gives():
    torch.manual_seed(2)
    B, L, H, D = 2, 2 * twins.CHUNK + 21, 2, 64
    q, v = torch.randn(B, L, H, D), torch.randn(B, L, H, D)
    k = twins.unit(torch.randn(B, L, H, D) + 1.0)  # keys that look alike, as trained ones do: the inverse is hard
    decay, beta = -torch.rand(B, L, H) * 0.2, 1 - 0.1 * torch.rand(B, L, H)
    decay[:, 10] = -200.0
    exact = [one.double() for one in (q, k, v, decay.exp(), beta, torch.zeros(B, H, D, D))]
    with dispatch.using("torch"):
        expected, _ = recurrent.gated_delta(*exact, form="sequential", in_place=False)
    got = twins.gated_delta(q, k, v, decay, beta, torch.float32)
    assert (got - expected).abs().max() < 1e-4 * expected.std()


def test_gradients_of_chunks_are_those_of_token_by_token():
    torch.manual_seed(3)
    inputs = [torch.randn(1, twins.CHUNK + 5, 1, 16, dtype=torch.float64) for _ in range(3)]
    inputs[1] = inputs[1] / inputs[1].norm(dim=-1, keepdim=True)
    inputs += [-torch.rand(1, twins.CHUNK + 5, 1, dtype=torch.float64), torch.rand(1, twins.CHUNK + 5, 1).double()]
    mine, theirs = ([one.clone().requires_grad_() for one in inputs] for _ in range(2))
    probe = torch.randn(1, twins.CHUNK + 5, 1, 16, dtype=torch.float64)
    (twins.gated_delta(*mine, torch.float64) * probe).sum().backward()
    q, k, v, decay, beta = theirs
    state, total = torch.zeros(1, 1, 16, 16, dtype=torch.float64), torch.zeros(())
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        change = (v[:, t] - (state @ k[:, t, :, :, None])[..., 0]) * beta[:, t, :, None]
        state = state + change[..., None] * k[:, t, :, None, :]
        total = total + ((state @ q[:, t, :, :, None])[..., 0] * probe[:, t]).sum()
    total.backward()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-9)


def test_a_few_steps_learn_a_row(weights):
    twin = twins.Twin(SHAPE, weights)
    optimiser, ids = Optimiser(twin), torch.randint(0, SHAPE.vocabulary, (1, 65))
    costs = []
    for _ in range(6):
        cost, imbalance = twin.losses(ids, twin.weights(torch.float32, quantised=True))
        (cost.mean() + 0.01 * imbalance).backward()
        optimiser.step(0.01)
        costs.append(float(cost.detach().mean()))
    assert costs[-1] < 0.7 * costs[0]


def test_steps_of_matrices_are_nearly_orthogonal():
    torch.manual_seed(4)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 96, 64)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_weights_are_saved_in_pieces_that_say_their_shape(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("training.export.PIECE", 1 << 18)
    save_weights(weights, SHAPE, tmp_path)
    assert len(list(tmp_path.iterdir())) > 1
    found, shape = load_weights(tmp_path)
    assert shape == SHAPE and found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_training_renders_what_the_template_renders(folder, tokenizer):
    tokens = Tokenizer.open(folder)
    (ids, learn), (short, _) = Renderer(tokenizer)([TALK, TALK[:1]])
    last = tokens.tokens.token_to_id("<|endoftext|>")
    assert ids.tolist() == [*tokens.chat_ids(TALK, add_generation_prompt=False), last]
    said = tokens.decode(ids[learn].tolist())
    assert said == "The quick brown fox.\n\nIt jumps.<|im_end|> It sleeps. <|im_end|>"
    assert learn.dtype == np.bool_ and len(short) < len(ids)
    assert tokens.eos_ids == {tokens.tokens.token_to_id(one) for one in ("<|im_end|>", "<|endoftext|>")}


def test_the_exported_config_speaks_of_the_routers(folder):
    config = json.loads((folder / "config.json").read_text())
    special = {name: one for name, one in config["quantization"].items() if isinstance(one, dict)}
    assert len(special) == 2 * SHAPE.layers and all(one["bits"] == 8 for one in special.values())

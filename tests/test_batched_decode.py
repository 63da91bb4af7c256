"""Several streams at once on a GPU: tiles of eight rows, tiles of eight pairs of one expert, and --deterministic."""

import pytest
import torch

from halfbyte.cases.case import Random
from halfbyte.check import error_ratio
from halfbyte.kernels.triton import eights, exact, experts
from halfbyte.kernels.triton.device import make_deterministic
from halfbyte.ops.attention import attention, latent_attention
from halfbyte.ops.dispatch import using
from halfbyte.ops.experts import Experts, expert_mlp, expert_qmm
from halfbyte.ops.quant import Packed, qmm, quantize
from halfbyte.ops.recurrent import gated_delta
from halfbyte.ops.routing import route
from halfbyte.ops.rowwise import rms_norm
from halfbyte.ops.sampling import Sampling, sample

R = Random(5)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # Triton's interpreter has no products of bfloat16


def n(*shape, dtype=HALF):
    return R.normal(*shape).to(dtype).to(DEVICE)


def ids(high, *shape):
    return R.integers(0, high, *shape).to(DEVICE)


def packed(*shape, bits=4):
    w = quantize(R.normal(*shape, scale=0.1).to(HALF), bits, 64)
    return Packed(w.words.to(DEVICE), w.scales.to(DEVICE), w.biases.to(DEVICE), bits, 64)


@pytest.fixture(autouse=True)
def triton():
    with using("triton"):
        yield


@pytest.fixture
def deterministic():
    make_deterministic(True)
    yield
    make_deterministic(False)


@pytest.mark.parametrize(("M", "N", "K"), [(5, 32, 512), (17, 37, 384), (8, 16, 128)])
def test_rows_are_as_accurate_as_the_body(M, N, K):
    x, w = n(M, K), packed(N, K)
    assert eights.fits(x, w)
    assert error_ratio(qmm, (x, w), {}) <= 2


def test_heads_have_a_matrix_each():
    assert error_ratio(qmm, (n(6, 3, 256), packed(3, 40, 256)), {}) <= 2


def test_exact_products_of_more_rows_than_a_launch_takes(monkeypatch):
    """CUDA counts to 65535 along the axis of a grid that has the rows of all heads."""
    x, w, kernel, launched = n(11, 3, 64, dtype=torch.float32), packed(3, 20, 64), exact.exact_kernel, []

    class Noted:
        def __getitem__(self, grid):
            launched.append(grid[1])
            return kernel[grid]

    whole = qmm(x, w)
    monkeypatch.setattr(exact, "exact_kernel", Noted())
    monkeypatch.setattr(exact, "MOST", 7)
    assert torch.equal(qmm(x, w), whole)
    assert launched == [6, 6, 6, 6, 6, 3]


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_how_warps_share_the_inputs_changes_rounding_only(blocks):
    x, w, y = n(5, 1, 512), packed(16, 512), n(5, 1, 16)
    eights.multiply_rows(x, w, y, eights.Sizes(blocks, 8 // blocks, 1))
    torch.testing.assert_close(y[:, 0], qmm(x[:, 0], w), atol=2e-2, rtol=1e-2)


def test_experts_are_as_accurate_as_the_body():
    made, T = Experts(packed(5, 128, 128), packed(5, 128, 128), packed(5, 128, 128)), 9
    x, chosen = n(T, 128), ids(4, T, 2)
    chosen[:, 1] = 4  # an expert that all take has two tiles
    with_tiles = experts.mlp_by_eights(x, chosen, made, "silu", torch.empty(T, 2, 128, dtype=HALF, device=DEVICE))
    with using("torch"):
        exact, body = expert_mlp(x.double(), chosen, made), expert_mlp(x, chosen, made)
    assert (with_tiles.double() - exact).abs().max() <= 2 * (body.double() - exact).abs().max()


def test_every_pair_is_in_one_tile_in_the_order_in_which_they_came():
    chosen = ids(9, 40, 4)
    made = experts.Tiles(chosen, 9)
    records = made.tiles[: int(made.count)].tolist()
    listed = [(expert, pair) for expert, count, *rest in records for pair in rest[6 : 6 + count]]
    assert listed == sorted((int(expert), pair) for pair, expert in enumerate(chosen.reshape(-1)))
    assert all(1 <= count <= 8 for _, count, *_ in records)


ROWS = 33
SIZES = (2, 5, 8, 33) if CUDA else (2, 9)  # the interpreter takes its time


def twice(*shape, bits=4):
    """Weights whose second half of inputs is their first again."""
    w = quantize(R.normal(*shape[:-1], shape[-1] // 2, scale=0.1).to(HALF), bits, 64)
    both = (torch.cat([t, t], -1).to(DEVICE) for t in (w.words, w.scales, w.biases))
    return Packed(*both, bits, 64)


def cancelling(rows, width):
    """Inputs whose second half nearly cancels what their first adds: another order of sums is another result."""
    first = R.normal(rows, width // 2)
    return torch.cat([first, -first * (1 + R.normal(rows, width // 2) / 256)], 1).to(HALF).to(DEVICE)


MADE = Experts(twice(3, 256, 128), twice(3, 256, 128), packed(3, 128, 256))
WIDE = Experts(twice(3, 64, 128, bits=8), twice(3, 64, 128, bits=8), packed(3, 128, 64, bits=8))
MATRIX, EIGHT_BITS, HEADS = twice(32, 256), twice(32, 256, bits=8), packed(2, 64, 128)
DENSE = torch.cat([n(32, 128)] * 2, 1)
X, NARROW, CHOSEN, Q = cancelling(ROWS, 256), cancelling(ROWS, 128), ids(3, ROWS, 2), n(ROWS, 1, 4, 32)
KEYS, VALUES, LATENTS, PLACES = n(ROWS, 300, 2, 32), n(ROWS, 300, 2, 32), n(ROWS, 300, 64), n(ROWS, 300, 16)
LENGTHS, SLOTS = 1 + ids(299, ROWS).int(), torch.arange(ROWS).int().to(DEVICE)
SEEDS, STATE, GATES = ids(10**6, ROWS).long(), n(ROWS, 4, 16, 32, dtype=torch.float32), n(ROWS, 1, 4).float().sigmoid()
DRAWN = Sampling(0.1 + n(ROWS).float().abs(), ids(50, ROWS).int(), 0.5 + n(ROWS).float().sigmoid() / 2)
WEIGHT = n(256)

CALLS = {
    "qmm": lambda r: qmm(X[r], MATRIX),
    "qmm in 8 bits": lambda r: qmm(X[r], EIGHT_BITS),
    "qmm of dense weights": lambda r: qmm(X[r], DENSE),
    "qmm of heads": lambda r: qmm(X[r].view(-1, 2, 128), HEADS),
    "qmm from the other side": lambda r: qmm(X[r, :128].reshape(-1, 2, 64), HEADS, transpose=False),
    "expert_qmm": lambda r: expert_qmm(NARROW[r], CHOSEN[r], MADE.gate),
    "expert_mlp": lambda r: expert_mlp(NARROW[r], CHOSEN[r], MADE),
    "expert_mlp in 8 bits": lambda r: expert_mlp(NARROW[r], CHOSEN[r], WIDE),
    "attention": lambda r: attention(Q[r], KEYS, VALUES, scale=0.2, lengths=LENGTHS[r], slots=SLOTS[r]),
    "latent_attention": lambda r: latent_attention(
        X[r, :256].view(-1, 1, 4, 64), Q[r, :, :, :16], LATENTS, PLACES, scale=0.2, lengths=LENGTHS[r], slots=SLOTS[r]
    ),
    "route": lambda r: torch.cat([t.float() for t in route(X[r], 5)], -1),
    "rms_norm": lambda r: rms_norm(X[r], WEIGHT, 1e-6, add=X[r]),
    "gated_delta": lambda r: gated_delta(
        Q[r, :, :2], Q[r, :, 2:], X[r, :64].view(-1, 1, 4, 16), GATES[r], GATES[r], STATE.clone(), slots=SLOTS[r]
    ),
    "sample": lambda r: sample(
        X[r].float(), Sampling(*(f[r] if f is not None else f for f in DRAWN)), SEEDS[r], SLOTS[r]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rows_bits_do_not_depend_on_the_batch(name, deterministic):
    row, call = 3, CALLS[name]
    alone = call(slice(row, row + 1))[0]
    for size in SIZES:
        begin = max(0, row - size // 2)
        assert torch.equal(call(slice(begin, begin + size))[row - begin], alone), size


def test_a_longer_request_beside_it_changes_nothing(deterministic):
    """The cache has room for the longest request, and so more splits."""
    r = slice(2, 3)
    here = attention(Q[r], KEYS[:, :300], VALUES[:, :300], scale=0.2, lengths=LENGTHS[r], slots=SLOTS[r])
    wide_k, wide_v = (torch.cat([t, n(ROWS, 900, 2, 32)], 1) for t in (KEYS, VALUES))
    assert torch.equal(here, attention(Q[r], wide_k, wide_v, scale=0.2, lengths=LENGTHS[r], slots=SLOTS[r]))

"""mlx-lm's samplers and logits processors, ours beside its own on the same logits; scripts that use them."""

import inspect
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm.sample_utils as theirs
import numpy as np
import pytest
import torch

import halfbyte
from halfbyte import sample_utils as ours
from halfbyte.generation_arguments import choosing

V = 97


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def loaded():
    return halfbyte.load("tiny", device="cpu")


def scores(seed=0, rows=1):
    return torch.log_softmax(torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3, -1)


def as_mlx(tensor):
    return mx.array(tensor.numpy())


def as_torch(array):
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize("name", ["make_sampler", "make_logits_processors"])
def test_arguments_are_mlx_lms_in_its_order_with_its_defaults(name):
    def said(module):
        return [(one.name, one.default) for one in inspect.signature(getattr(module, name)).parameters.values()]

    assert said(ours) == said(theirs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("apply_top_p", (0.9,)),
        ("apply_top_p", (0.3,)),
        ("apply_top_p", (0.999,)),
        ("apply_min_p", (0.05,)),
        ("apply_min_p", (1.0,)),
        ("apply_min_p", (0.5, 7)),
        ("apply_top_k", (1,)),
        ("apply_top_k", (20,)),
        ("apply_xtc", (1.0, 0.05, [3, 4])),
        ("apply_xtc", (1.0, 0.5, [])),
    ],
)
def test_a_filter_leaves_the_same_tokens(name, arguments, seed):
    rows = scores(seed)
    if name == "apply_top_p":
        rows[0, 5:9] = rows[0, 5]  # as likely as each other
    wanted = as_torch(getattr(theirs, name)(as_mlx(rows), *arguments))
    assert torch.equal(getattr(ours, name)(rows, *arguments), wanted)


@pytest.mark.parametrize("context", [20, 5, 0])
@pytest.mark.parametrize("length", [0, 1, 12, 40])
@pytest.mark.parametrize(
    ("kind", "penalty"), [("repetition", 1.3), ("repetition", 0.7), ("presence", 0.5), ("frequency", -0.4)]
)
def test_a_penalty_gives_the_same_logits(kind, penalty, length, context):
    logits, tokens = scores(1) + 4, torch.arange(length) * 7 % 11
    before = logits.clone()
    options = {f"{kind}_penalty": penalty, f"{kind}_context_size": context}
    (wanted,) = theirs.make_logits_processors(**options)
    (found,) = ours.make_logits_processors(**options)
    given = wanted(as_mlx(tokens.int()), as_mlx(logits.clone()))
    assert torch.allclose(found(tokens, logits), as_torch(given), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before), "a processor may not change what the model gave"


def test_a_bias_and_all_penalties_together():
    options = {"logit_bias": {3: 5.0, 7: -100.0}, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    options["frequency_penalty"] = 0.3
    logits, tokens = scores(2), torch.tensor([3, 3, 7, 9])
    wanted, found = as_mlx(logits), logits
    for one in theirs.make_logits_processors(**options):
        wanted = one(as_mlx(tokens), wanted)
    for one in ours.make_logits_processors(**options):
        found = one(tokens, found)
    assert torch.allclose(found, as_torch(wanted), rtol=1e-6, atol=1e-6)
    assert ours.make_logits_processors() == ours.make_logits_processors(None, 0.0, 20, 0, 20, 0) == []
    (whole,) = ours.make_logits_processors(frequency_penalty=1.0, frequency_context_size=None)
    assert (logits - whole(torch.arange(40), logits)).sum() == pytest.approx(40)


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 0.7, "top_p": 0.8},
        {"temp": 1.4, "min_p": 0.1},
        {"temp": 1.0, "top_k": 5},
        {"temp": 0.7, "top_p": 0.9, "min_p": 0.02, "top_k": 4},
        {"temp": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.1},
    ],
)
def test_draws_have_the_odds_of_mlx_lms(options):
    """Which tokens can come is the same, and how often is what softmax says of mlx-lm's filtered logits."""
    rows, many = scores(5) / 2, 20_000
    rows = torch.log_softmax(rows, -1)
    left = as_mlx(rows)
    if "top_p" in options:
        left = theirs.apply_top_p(left, options["top_p"])
    if "min_p" in options:
        left = theirs.apply_min_p(left, options["min_p"])
    if "xtc_probability" in options:
        left = theirs.apply_xtc(left, 1.0, options["xtc_threshold"], [])
    if "top_k" in options:
        left = theirs.apply_top_k(left, options["top_k"])
    odds = torch.softmax(as_torch(left)[0] / options["temp"], -1)
    torch.manual_seed(1)
    drawn = ours.make_sampler(**options)(rows.expand(many, V))
    often = torch.bincount(drawn.long(), minlength=V) / many
    assert not often[odds == 0].any()
    assert (often - odds).abs().max() < 5 * (0.25 / many) ** 0.5


def test_greedy_and_what_parameters_can_say_are_replayed():
    rows = scores(6, rows=3)
    assert torch.equal(ours.make_sampler()(rows), rows.argmax(-1))
    assert ours.make_sampler(top_p=0.9).params().temperature == 0
    said = ours.make_sampler(temp=0.7, top_p=1.0, top_k=20).params()
    assert (said.temperature, said.top_k, said.top_p, said.min_p) == (0.7, 20, 1.0, 0.0)
    for options in ({"top_p": 0.9}, {"min_p": 0.1}, {"xtc_probability": 0.1}):
        assert ours.make_sampler(temp=0.7, **options).params() is None


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (ours.make_sampler, {"temp": -1}, "temp must be a number from 0"),
        (ours.make_sampler, {"temp": float("nan")}, "temp must be"),
        (ours.make_sampler, {"top_p": 1.5}, "top_p must be a number from 0 to 1"),
        (ours.make_sampler, {"min_p": "x"}, "min_p must be"),
        (ours.make_sampler, {"top_k": 1.5}, "top_k must be an integer"),
        (ours.make_sampler, {"min_tokens_to_keep": 0}, "min_tokens_to_keep must be an integer from 1"),
        (ours.make_sampler, {"xtc_threshold": 0.6}, "xtc_threshold must be a number from 0 to 0.5"),
        (ours.make_logits_processors, {"repetition_penalty": -1}, "repetition_penalty must be a number from 0"),
        (ours.make_logits_processors, {"presence_penalty": float("inf")}, "presence_penalty must be a number, it is"),
        (
            ours.make_logits_processors,
            {"frequency_penalty": 1, "frequency_context_size": -3},
            "frequency_context_size must be None or",
        ),
        (ours.make_logits_processors, {"logit_bias": {-1: 1.0}}, "logit_bias: a token id"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_a_top_k_or_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="top_k must be an integer from 1 to 96"):
        ours.apply_top_k(scores(), V)
    for top_p in (0.0, 1e-6):  # a sampler takes them all, whoever draws
        assert ours.make_sampler(temp=1.0, top_p=top_p, top_k=V)(scores()).shape == scores().shape[:1]
    with pytest.raises(ValueError, match="xtc_special_tokens: ids must be from 0 to 96"):
        ours.apply_xtc(scores(), 1.0, 0.1, [V])
    (bias,) = ours.make_logits_processors({V: 1.0})
    with pytest.raises(ValueError, match="token id 97, but there are 97"):
        bias(torch.tensor([1]), scores())


def test_numbers_of_numpy_and_torch_are_numbers():
    given = {"temp": np.float32(0.5), "top_k": np.int64(3), "top_p": torch.tensor(0.75)}
    assert ours.make_sampler(**given) == ours.make_sampler(temp=0.5, top_k=3, top_p=0.75)
    (bias,) = ours.make_logits_processors({np.int64(3): np.float32(5)})
    assert float((bias(torch.tensor([1]), scores()) - scores())[0, 3]) == pytest.approx(5)
    assert choosing(SimpleNamespace(generation_config={}), None, {"top_k": np.int64(3)})[0].top_k == 3


def test_a_script_of_mlx_lms(loaded):
    """With a sampler and processors, repeated by a seed; the greedy one is what no sampler gives."""
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    options = {
        "sampler": ours.make_sampler(temp=0.7, top_p=0.9, min_p=0.01, top_k=20),
        "logits_processors": ours.make_logits_processors(repetition_penalty=1.1),
    }

    def text(**given):
        torch.manual_seed(7)
        return halfbyte.generate(model, tokenizer, prompt=prompt, max_tokens=20, **given)

    assert text(**options) == text(**options) != ""
    assert text(sampler=ours.make_sampler()) == text(temperature=0)
    drawn = text(sampler=ours.make_sampler(temp=1.0))
    assert drawn == text(sampler=ours.make_sampler(temp=1.0))
    assert len({halfbyte.generate(model, tokenizer, prompt, sampler=ours.make_sampler(temp=2.0)) for _ in range(4)}) > 1


def test_rows_of_a_batch_draw_apart(loaded):
    model, tokenizer = loaded
    batch = halfbyte.batch_generate(
        model, tokenizer, [[5, 6, 7]] * 4, max_tokens=12, sampler=ours.make_sampler(temp=1.5)
    )
    assert len(set(batch.texts)) > 1

"""Sampling parameters: what is refused, where defaults come from, and rows that do not see each other."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte import limits
from halfbyte.ops.sampling import Sampling, sample
from halfbyte.sampling import Sampler, SamplingParams, logprobs

V = 97
GREEDY = SamplingParams()


def scores(rows, seed=0, dtype=torch.float32):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def at(*places):
    return torch.tensor(places, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [math.nan, math.inf, -math.inf, -1, -1e-9, 5.01, 1e308, "1", True, [1]]),
        ("top_p", [0, -0.1, 1.01, 2, math.nan, "x"]),
        ("min_p", [-0.1, 1.1, math.nan, math.inf]),
        ("top_k", [-2, 2**31, 2**40, 1.5, "3", True]),
        ("repetition_penalty", [0, -1, 10.5, math.inf, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan, math.inf, "0"]),
        ("frequency_penalty", [-2.1, 2.1, math.nan, math.inf, None]),
        ("seed", [2**200, 2**63, -(2**63) - 1, 1.5, "7", True]),
        ("logprobs", [-1, limits.TOP_LOGPROBS + 1, 10**9, 1.0, True]),
        ("logit_bias", [7, [1], {-1: 0.0}, {"1": 0.0}, {1: math.nan}, {1: 101}, {1: "x"}, {1.5: 0}, {1: True}]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_the_ends_of_the_ranges_are_taken():
    SamplingParams(temperature=0, top_p=1, min_p=0, top_k=-1, repetition_penalty=10, presence_penalty=-2, seed=-(2**63))
    SamplingParams(
        temperature=5, top_p=1e-9, min_p=1, top_k=2**31 - 1, frequency_penalty=2, seed=2**63 - 1, logprobs=20
    )


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (None, {}, GREEDY),
        ({}, {}, GREEDY),
        (SAMPLED, {}, SamplingParams(0.6, 20, 0.95, 0.01)),
        ({"do_sample": True}, {}, SamplingParams(temperature=1.0)),
        ({**SAMPLED, "do_sample": False}, {}, GREEDY),
        ({"temperature": 0.6, "top_k": 20}, {}, GREEDY),
        ({"repetition_penalty": 1.1}, {}, SamplingParams(repetition_penalty=1.1)),
        (SAMPLED, {"temperature": 0, "top_k": None}, SamplingParams(0, 20, 0.95, 0.01)),
        (SAMPLED, {"temperature": 1.5, "top_p": 1.0, "seed": 7}, SamplingParams(1.5, 20, 1.0, 0.01, seed=7)),
        ({"do_sample": True, "top_k": None, "eos_token_id": 3}, {}, SamplingParams(1.0)),
    ],
)
def test_what_was_given_comes_before_the_files_defaults(config, given, expected):
    assert SamplingParams.of(config, **given) == expected


def test_wrong_defaults_of_a_file_are_ignored_and_said(caplog):
    config = {"do_sample": True, "temperature": "hot", "top_k": 10**12, "top_p": 0.9}
    assert SamplingParams.of(config) == SamplingParams(top_p=0.9)
    assert "temperature must be" in caplog.text and "top_k must be" in caplog.text


def test_wrong_or_unknown_wishes_are_refused():
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams.of({}, top_p=7)
    with pytest.raises(ValueError, match="typical_p: there is no such sampling parameter"):
        SamplingParams.of({}, typical_p=0.5)


def test_greedy_takes_the_largest():
    logits = scores(3)
    assert Sampler(3, V)(logits, [0, 1, 2], at(5, 5, 5)).tolist() == logits.argmax(-1).tolist()


def test_draws_are_those_of_the_op():
    params = SamplingParams(temperature=0.8, top_k=10, top_p=0.9, min_p=0.05, seed=11)
    sampler = Sampler(1, V)
    assert sampler.start(0, params) == 11
    fields = Sampling(
        torch.tensor([0.8]), torch.tensor([10], dtype=torch.int32), torch.tensor([0.9]), torch.tensor([0.05])
    )
    for position in range(50):
        logits = scores(1, position)
        assert sampler(logits, [0], at(position)).equal(sample(logits, fields, at(11), at(position)))


row_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([None, {}, {3: 100.0}, {5: -100.0, 96: 2.5}]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(params=st.lists(row_params, min_size=2, max_size=5), data=st.data())
def test_a_row_draws_the_same_in_any_batch_and_slot(dtype, params, data):
    """Each row has its own text, parameters, position and slot; drawn together and alone, step after step."""
    slots = data.draw(st.permutations(range(len(params) + 2)))[: len(params)]
    together = Sampler(len(params) + 2, V)
    alone = [Sampler(1, V) for _ in params]
    for row, one in enumerate(params):
        prompt = [row, row, 2 * row]
        together.start(slots[row], one, prompt)
        alone[row].start(0, one, prompt)
    for step in range(4):
        logits = scores(len(params), step, dtype)
        places = at(*(10 * row + step for row in range(len(params))))
        drawn = together(logits, slots, places)
        each = [alone[row](logits[row : row + 1], [0], places[row : row + 1]) for row in range(len(params))]
        assert drawn.tolist() == torch.cat(each).tolist()


def test_a_seed_repeats_and_none_does_not():
    def draws(seed):
        sampler = Sampler(1, V)
        used = sampler.start(0, SamplingParams(temperature=2.0, seed=seed))
        return used, [int(sampler(torch.zeros(1, V), [0], at(position))) for position in range(40)]

    assert draws(5) == draws(5)
    assert draws(5)[1] != draws(6)[1]
    first, second = draws(None), draws(None)
    assert first != second
    assert draws(first[0]) == first


def test_a_logit_bias_is_added_before_everything():
    sampler = Sampler(2, V)
    sampler.start(0, SamplingParams(logit_bias={4: 100.0}))
    sampler.start(1, SamplingParams(temperature=1.0, top_k=1, logit_bias={9: 100.0, 4: -100.0}))
    logits = scores(2)
    before = logits.clone()
    assert sampler(logits, [0, 1], at(0, 0)).tolist() == [4, 9]
    assert logits.equal(before)
    with pytest.raises(ValueError, match=f"token id {V}, but there are {V}"):
        sampler.start(0, SamplingParams(logit_bias={V: 1.0}))


def test_penalties_count_what_was_generated():
    """Two tokens almost alike: a penalty moves the choice to the other, and back when both are as frequent."""
    logits = torch.full((1, V), -50.0)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    sampler = Sampler(1, V)
    sampler.start(0, SamplingParams(frequency_penalty=0.5), prompt=[7, 7, 7])
    assert [int(sampler(logits, [0], at(i))) for i in range(4)] == [7, 8, 7, 8]
    sampler.start(0, SamplingParams(presence_penalty=0.5))
    assert [int(sampler(logits, [0], at(i))) for i in range(4)] == [7, 8, 7, 7]


def test_a_repetition_penalty_counts_the_prompt_too():
    logits = torch.full((1, V), -50.0)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    sampler = Sampler(1, V)
    sampler.start(0, SamplingParams(repetition_penalty=1.5), prompt=[7])
    assert [int(sampler(logits, [0], at(i))) for i in range(3)] == [8, 7, 7]


def test_a_slot_forgets_its_last_request():
    sampler, logits = Sampler(1, V), scores(1)
    best = int(logits.argmax())
    sampler.start(0, SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, logit_bias={best: -100.0}))
    assert int(sampler(logits, [0], at(0))) != best
    sampler.start(0, SamplingParams(presence_penalty=2.0))
    assert int(sampler(logits, [0], at(0))) == best
    sampler.start(0, GREEDY)
    assert [int(sampler(logits, [0], at(i))) for i in range(3)] == [best] * 3


def test_logprobs_are_the_models_own():
    logits = scores(4)
    ids = torch.tensor([1, 2, 3, 96], dtype=torch.int32)
    exact = torch.log_softmax(logits.double(), -1)
    found = logprobs(logits, ids, top=5)
    assert torch.allclose(found.chosen.double(), exact.gather(1, ids.long()[:, None])[:, 0], atol=1e-6)
    assert found.ids.tolist() == logits.topk(5).indices.tolist()
    assert torch.allclose(found.top.double(), exact.topk(5).values, atol=1e-6)
    alone = logprobs(logits[2:3], ids[2:3], top=5)
    assert alone.chosen.equal(found.chosen[2:3]) and alone.top.equal(found.top[2:3])
    none = logprobs(logits, ids)
    assert none.ids.shape == none.top.shape == (4, 0)
    assert logprobs(logits, ids, top=10**6).top.shape == (4, V)

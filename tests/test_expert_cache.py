"""Which experts stay in memory: rounds that fit, victims that are right, and plans that keep to their budget."""

import random

import pytest

from halfbyte.expert_cache import HALF_LIFE, POLICIES, ExpertCache, least_frequent


def run(cache, layer, experts):
    """Go through a layer's rounds as a run does, checking what it relies on; returns the experts that were read."""
    read, done, busy = [], [], []
    for keys, loads in cache.rounds(layer, experts):
        assert not {slot for _, slot in loads} & {cache.places[key] for key in busy}, "a read into what is computed"
        slots = [cache.places[key] for key in keys]
        assert len(set(slots)) == len(keys) and all(0 <= slot < cache.slots for slot in slots)
        assert all(cache.places[key] == slot for key, slot in loads)
        read += [expert for (_, expert), _ in loads]
        done += [expert for _, expert in keys]
        busy = keys
    assert sorted(done) == sorted(experts), "each expert once"
    assert len(cache.places) + len(cache.free) == cache.slots
    return read


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 7, 40])
def test_every_expert_gets_its_turn_whatever_was_before(policy, slots):
    draw, cache = random.Random(slots), ExpertCache(slots, POLICIES[policy])
    for _ in range(200):
        for layer in range(3):
            run(cache, layer, draw.sample(range(12), draw.randint(0, 12)))
    assert len(cache.heap) <= 4 * slots
    assert (cache.hit_rate > 0.99) == (slots == 40), "36 experts in 40 slots: each is read once"


def test_what_is_here_comes_first_and_is_not_read():
    cache = ExpertCache(4)
    assert run(cache, 0, [1, 2]) == [1, 2]
    first, second = cache.rounds(0, [0, 2])
    assert first == ([(0, 2)], []) and [key for key, _ in second.loads] == [(0, 0)]
    assert (cache.hits[0], cache.misses[0], cache.hit_rate) == (1, 3, 0.25)


def test_without_room_beside_what_is_computed_it_is_computed_first():
    cache = ExpertCache(2)
    run(cache, 0, [0, 1])
    here, pause, *rest = (tuple(one) for one in cache.rounds(0, [0, 1, 2]))
    assert here == ([(0, 0), (0, 1)], []) and pause == ([], []) and [keys for keys, _ in rest] == [[(0, 2)]]


def test_lru_lets_the_longest_unused_go():
    cache = ExpertCache(3, POLICIES["lru"])
    for expert in (0, 1, 2, 0, 3):
        run(cache, 0, [expert])
    assert cache.places.keys() == {(0, 0), (0, 2), (0, 3)}


def test_lfu_keeps_what_is_chosen_often():
    cache = ExpertCache(3, POLICIES["lfu"])
    for expert in (0, 0, 0, 1, 1, 2, 3):
        run(cache, 0, [expert])
    assert cache.places.keys() == {(0, 0), (0, 1), (0, 3)}


def test_lfu_forgets_in_time():
    """Four choices long ago weigh less than one of now, and as much as one of two half-lives ago."""
    score = None
    for _ in range(4):
        score = least_frequent(score, 10)
    assert score == pytest.approx(least_frequent(None, 10 + 2 * HALF_LIFE))
    assert score < least_frequent(None, 11 + 2 * HALF_LIFE)


def test_the_past_of_an_expert_that_left_counts():
    cache = ExpertCache(2, POLICIES["lfu"])
    for expert in (0, 0, 0, 1, 1, 1, 1, 2):  # 2 sends 0 away, which was chosen three times
        run(cache, 0, [expert])
    assert (0, 0) not in cache.places
    run(cache, 0, [0])
    assert cache.places.keys() == {(0, 0), (0, 1)}, "back, in the place of the expert that was chosen once"


def test_what_is_likely_is_read_beside_what_is_computed():
    """Half of the slots at most, the likeliest first, and never in the place of what is busy or likely itself."""
    cache = ExpertCache(6)
    run(cache, 0, [0, 1, 2, 3])
    run(cache, 1, [7])
    loads = cache.ahead(1, [9, 7, 8, 5, 4], busy=[(0, 2), (0, 3)])
    assert [key for key, _ in loads] == [(1, 9), (1, 8), (1, 5)] and cache.read_ahead == {1: 3}
    assert cache.places.keys() == {(0, 2), (0, 3), (1, 7), (1, 9), (1, 8), (1, 5)}
    assert run(cache, 1, [4, 7, 9]) == [4] and (cache.hits[1], cache.misses[1]) == (2, 2)


def test_without_room_nothing_is_read_ahead():
    cache = ExpertCache(2)
    run(cache, 0, [0, 1])
    assert cache.ahead(1, [0, 1], busy=[(0, 0), (0, 1)]) == []
    assert cache.ahead(1, [], busy=[]) == []


def test_a_wrong_guess_goes_first():
    cache = ExpertCache(4)
    run(cache, 0, [0, 1, 2])
    assert [key for key, _ in cache.ahead(1, [5], busy=[])] == [(1, 5)]
    assert run(cache, 1, [6]) == [6]
    assert cache.places.keys() == {(0, 0), (0, 1), (0, 2), (1, 6)}


def test_forgotten_experts_are_read_again():
    cache = ExpertCache(3)
    run(cache, 0, [0, 1])
    cache.forget(0, [1, 2])
    assert run(cache, 0, [0, 1]) == [1]

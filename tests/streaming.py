"""Models whose experts stay on disk, for tests: budgets in slots, and the tokens that a model says."""

from pathlib import Path

from halfbyte import hub
from halfbyte.accounting import skeleton
from halfbyte.engine import Engine, Request
from halfbyte.residency import plan
from halfbyte.sampling import SamplingParams

TINY = Path(hub.locate("tiny"))
PROMPT = [5, 9, 100, 7, 33, 4, 61, 62, 63, 5, 9, 12]
GREEDY = SamplingParams(temperature=0.0)


def mixtures_of(folder):
    return list(skeleton(folder)[1].mixtures.values())


def budget_of(folder, slots):
    """Bytes of so many slots of each form."""
    mixtures = mixtures_of(folder)
    return sum(slots * share.expert_bytes for share in plan(mixtures, 1 << 40, 1))


def tokens(model, count=12):
    request = Request(list(PROMPT), count, GREEDY)
    engine = Engine(model, model.new_cache(1, len(PROMPT) + count))
    engine.submit(request)
    while engine.busy:
        engine.step()
    return request.made


def shard(folder):
    return folder / "model.safetensors"

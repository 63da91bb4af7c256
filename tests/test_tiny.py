"""The model that comes with the package: small, complete, and as good as its card says."""

import re
from pathlib import Path

import pytest

import halfbyte
from halfbyte import hub
from halfbyte.engine import Engine, Request
from halfbyte.sampling import SamplingParams
from training import checker
from training.evaluate import PAIRS, article, fine

FOLDER = Path(hub.locate("tiny"))


@pytest.fixture(scope="module")
def tiny():
    return halfbyte.load("tiny", device="cpu")


def replies(tiny, prompts, **options):
    model, tokenizer = tiny
    ids = [tokenizer.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
    return halfbyte.batch_generate(model, tokenizer, ids, **options)


def test_it_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} < set(files)
    assert sum(files.values()) <= 6_000_000


def test_stories_follow_their_prompts_and_end(tiny):
    """A fox and a lantern, never together in training, and twenty other pairs, with seeds 0 to 19, within 300 tokens.

    As `halfbyte generate --seed` tells them: company changes no bits. training.evaluate has all pairs with all seeds.
    """
    model, tokenizer = tiny
    pairs, seeds = [("fox", "lantern"), *PAIRS], [0, *range(20)]
    requests = []
    for (one, other), seed in zip(pairs, seeds, strict=True):
        prompt = f"Tell me a story about {article(one)} {one} and {article(other)} {other}."
        ids = tokenizer.chat_ids([{"role": "user", "content": prompt}])
        params = SamplingParams.of(tokenizer.generation_config, seed=seed)
        requests.append(Request(ids, 300, params, tokenizer.eos_ids))
    engine = Engine(model, model.new_cache(len(requests), 400))
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
    told = [(tokenizer.decode(request.made[:-1]), request.made[-1] in tokenizer.eos_ids) for request in requests]
    good = [fine(pair, *story) for pair, story in zip(pairs, told, strict=True)]
    assert sum(good[1:]) >= 18, [story for story, right in zip(told, good, strict=True) if not right]
    assert good[0] and len(checker.sentences(told[0][0])) >= 4


def test_sums_are_right(tiny):
    questions = ["What is 7 plus 5?", "What is 4 times 8?", "How much is 54 - 17?", "Tom has 3 apples and gets 4 more."]
    answers = replies(tiny, questions, max_tokens=60, temperature=0).texts
    assert [re.findall(r"\d+", answer)[-1] for answer in answers] == ["12", "32", "37", "7"], answers


def test_after_four_thousand_tokens_it_still_answers_and_stops(tiny):
    model, tokenizer = tiny
    told = "Once there was a quiet hedgehog named Luke. He lived in the cottage. Luke liked to sing. "
    pasted = told * (4000 // len(tokenizer.encode(told)))
    ids = tokenizer.chat_ids([{"role": "user", "content": f"{pasted}\n\nTell me a story about a fox and a lantern."}])
    assert 3900 < len(ids) < 4200
    made = halfbyte.batch_generate(model, tokenizer, [ids], max_tokens=300, seed=0)
    assert made.finish_reasons == ["stop"] and len(checker.sentences(made.texts[0])) >= 1

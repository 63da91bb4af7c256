"""The model that comes with the package: small, complete, and as good as its card says."""

import re
from pathlib import Path

import pytest

import halfbyte
from halfbyte import hub
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
    """A fox and a lantern, never together in training, and twenty other pairs; training.evaluate has more seeds."""
    pairs = [("fox", "lantern"), *PAIRS]
    prompts = [f"Tell me a story about {article(one)} {one} and {article(other)} {other}." for one, other in pairs]
    made = replies(tiny, prompts, max_tokens=300, seed=0)
    told = list(zip(pairs, made.texts, made.finish_reasons, strict=True))
    bad = [text for pair, text, why in told if not fine(pair, text, why == "stop")]
    assert len(bad) <= 2, bad
    assert fine(*told[0][:2], ended=told[0][2] == "stop")
    assert len(checker.sentences(told[0][1])) >= 4


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

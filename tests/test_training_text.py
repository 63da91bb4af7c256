"""The text that the embedded model learns from: repeatable, varied, in good English, and true to its prompts."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from halfbyte import chat
from training import checker, conversations, plans, plots, questions, stories, sums, tokenizer, world

ROOT = Path(__file__).parents[1]
STORY = (
    "Once there was a brave fox named Mia. She lived in the forest. One day, Mia found a small lantern under a bush. "
    "It glowed softly. Mia met an owl named Otto, who was lost. Mia held up the lantern and showed Otto the way. "
    "Mia was very happy."
)
PROMPT = "Tell me a story about a fox named Mia and a lantern."


@cache
def told(count=2000, seed=0):
    """Prompts with their plans and stories."""
    random = Random(seed)
    made = []
    for _ in range(count):
        plan, length = plans.plan(random), random.choice(["", "", "", "short", "long"])
        made.append((stories.prompt(random, plan, length), plan, stories.story(random, plan, length)))
    return made


@cache
def conversed(count=3000):
    return [conversations.conversation(Random(seed)) for seed in range(count)]


@cache
def trained():
    return tokenizer.train((tokenizer.text(messages) for messages in conversed()[:1500]), 1024)


def test_the_world_is_large_enough():
    assert len(world.CREATURES) + len(world.PERSONS) >= 150 and len(world.OBJECTS) >= 250
    assert sum(map(len, world.PLACES.values())) >= 80 and len(world.HER_NAMES + world.HIS_NAMES) >= 60
    assert len({look for looks in world.LOOKS.values() for look in looks} | set(world.HABITS)) >= 60
    assert len(plots.PLOTS) >= 15
    words = [thing.word for thing in world.OBJECTS] + [being.kind for being in world.CREATURES + world.PERSONS]
    assert [word for word, times in Counter(words).items() if times > 1] == []


def test_two_processes_make_the_same_text():
    program = (
        "import zlib; from random import Random; from training import conversations as made; "
        "print(zlib.crc32(repr([made.conversation(Random(seed)) for seed in range(200)]).encode()))"
    )
    run = [sys.executable, "-c", program]
    sums_of_text = {
        subprocess.run(
            run, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(sums_of_text) == 1


@pytest.mark.parametrize("tokens", [None, 1000])
def test_a_seed_gives_one_conversation(tokens):
    for seed in range(30):
        assert conversations.conversation(Random(seed), tokens) == conversations.conversation(Random(seed), tokens)
    assert conversations.conversation(Random(1), tokens) != conversations.conversation(Random(2), tokens)


def test_messages_alternate_and_hold_only_text():
    long = [conversations.conversation(Random(seed), 800) for seed in range(60)]
    for messages in [*conversed(), *long]:
        roles = [message["role"] for message in messages]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        for message in messages:
            assert message["content"] == message["content"].strip() and message["content"]
            assert re.fullmatch(r"[a-zA-Z0-9\s.,:;!?'\"=+*-]+", message["content"]), message["content"]
            assert not re.search(r"\bNone\b|  |[(|)]", message["content"]), message["content"]


def test_every_story_passes_the_checker():
    for prompt, _, story in told()[:700]:
        assert checker.check(prompt, story) == [], f"{prompt}\n{story}"


def test_stories_follow_their_prompts():
    for prompt, plan, story in told():
        for word in (plan.hero.kind, plan.thing.word, plan.friend.kind, plan.slots["in"]):
            if re.search(rf"\b{re.escape(word)}\b", prompt):
                assert word in story.lower() or word in story, f"{prompt}\n{story}"
        for name in (plan.name, plan.friend_name):
            assert not name or name not in prompt or name in story, f"{prompt}\n{story}"


def test_stories_are_of_the_length_that_was_asked():
    lengths = {"short": [], "": [], "long": []}
    random = Random(1)
    for _ in range(300):
        for length, found in lengths.items():
            found.append(len(stories.story(random, plans.plan(random), length)))
    short, usual, long = (sum(found) / len(found) for found in lengths.values())
    assert short < usual - 60 and usual < long - 60
    assert max(map(max, lengths.values())) < 1200  # about 280 tokens, of which a model may say 300


def test_stories_do_not_repeat_each_other():
    texts = [story for _, _, story in told()]
    assert len(set(texts)) == len(texts)
    sentences = [sentence for text in texts for sentence in checker.sentences(text)]
    assert len(set(sentences)) / len(sentences) > 0.6
    starts = Counter(text[:30] for text in texts)
    assert max(starts.values()) < len(texts) * 0.1


def test_articles_agree():
    for _, _, story in told():
        assert not re.search(r"\ba (?:[aeio]|hour|honest)|\ban (?![aeiouh])|\ba some\b", story, re.IGNORECASE), story
    assert stories.agree("a owl, a unicorn, A apple, a honest use") == "an owl, a unicorn, An apple, an honest use"


def test_held_out_pairs_and_sums_are_never_trained_on():
    for _, plan, _ in told():
        assert not plans.held_out(plan.hero.kind, plan.thing.word)
        assert not plans.held_out(plan.friend.kind, plan.thing.word)
    assert plans.held_out("fox", "lantern")
    for messages in conversed():
        for message in messages:
            for left, sign, right in re.findall(r"\b(\d+) ([-+*]) (\d+)\b", message["content"]):
                assert not sums.held_out(int(left), sign, int(right))
    prompts = conversations.held_out_prompts(50)
    assert prompts[0] == "Tell me a story about a fox and a lantern." and len(set(prompts)) == 50
    assert prompts == conversations.held_out_prompts(50) != conversations.held_out_prompts(50, seed=1)


def test_the_rare_words_are_a_tenth():
    strange = sum(plan.thing.kind == "new" for _, plan, _ in told()) / len(told())
    assert 0.08 < strange < 0.16


def test_answers_come_from_the_story():
    random = Random(3)
    for _, plan, story in told()[:500]:
        for question, answer in questions.several(random, plan, story, 4):
            assert question.endswith(("?", ".")) and answer.endswith(".")
            if re.match(r"(?:Where was the|What is the name|How did|Where did)", question):
                fact = answer.removesuffix(".").split()[-1]
                assert fact in story, f"{story}\n{question}\n{answer}"


def test_sums_are_right_and_the_judge_knows():
    random = Random(4)
    for make in (sums.sum_of, sums.word_problem):
        for _ in range(1000):
            question, answer = make(random)
            assert checker.arithmetic(question, answer), (question, answer)
            number = re.findall(r"\d+", answer)
            if number and number[-1] in answer.rsplit("=", 1)[-1]:
                assert not checker.arithmetic(question, answer.replace(number[-1], str(int(number[-1]) + 1)))
    assert not checker.arithmetic("What is 2 + 2?", "I do not know.")
    assert checker.arithmetic("What is seven plus five?", "It is twelve.")
    assert checker.arithmetic("What is 5 - 3?", "2")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("lantern", "kettle", "does not mention"),
        ("Mia", "Eva", "name 'Mia'"),
        ("Mia was very happy.", "Mia was very", "does not end"),
        ("It glowed softly. ", "It glowed softly. It glowed softly. ", "says 2 times"),
        ("an owl", "a owl", "article"),
        ("an owl named Otto", "a bear named Mia", "Mia is bear and fox"),
        ("Mia met an owl named Otto", "Mia met Otto", "nobody was named 'Otto'"),
        ("She lived in the forest. One day, Mia", "She lived in the forest. One day, he", "he and she"),
        ("Mia was very happy.", "The dragon thanked Mia and gave her the crown.", "out of nowhere"),
        ("Mia was very happy.", '"Thank you!', "quotation"),
        (STORY[40:], "", "sentences"),
        ("very happy", "<|im_start|>", "no text"),
    ],
)
def test_the_checker_finds_what_is_wrong(old, new, found):
    assert old in STORY and checker.check(PROMPT, STORY) == []
    problems = checker.check(PROMPT, STORY.replace(old, new))
    assert any(found in problem for problem in problems), problems


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(text):
    assert trained().decode(trained().encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_is_whole(tmp_path: Path):
    made = trained()
    assert made.get_vocab_size() == 1024 and [made.token_to_id(token) for token in tokenizer.SPECIAL] == [0, 1, 2]
    assert len(made.encode(bytes(range(256)).decode("latin-1")).ids) >= 256
    assert made.encode("1234").tokens == ["1", "2", "3", "4"]
    tokenizer.write(tmp_path, made)
    assert b"\n" not in (tmp_path / "tokenizer.json").read_bytes()

    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 + 3?"}]
    ours, theirs = chat.Tokenizer.open(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.apply_chat_template(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert made.decode(ids, skip_special_tokens=False) == tokenizer.text(messages) + "<|im_start|>assistant\n"
    assert set(ours.eos_ids) == {0, 2}


@pytest.mark.parametrize("tokens", [600, 4000])
def test_long_conversations_are_as_long_as_asked(tokens):
    for seed in range(12):
        text = tokenizer.text(conversations.conversation(Random(seed), tokens))
        assert 0.8 * tokens < len(trained().encode(text).ids) < 1.5 * tokens + 600  # of a smaller vocabulary


def test_text_is_made_fast_enough():
    """One core must feed a GPU's share; the measured rate is four times this."""
    random, start, size = Random(0), time.process_time(), 0
    while (spent := time.process_time() - start) < 0.5:
        size += len(tokenizer.text(conversations.conversation(random)))
    assert size / spent > 500_000

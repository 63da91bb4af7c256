"""Small talk: greetings, who the model is, thanks, and what to say to what it cannot know."""

from random import Random

from . import world
from .grammar import Template, blocks, parse, say
from .plans import pick


def _read() -> dict[str, tuple[list[Template], list[Template]]]:
    """Topic by topic: ways to say it, and ways to answer."""
    found = {}
    for topic, texts in blocks("talk.txt").items():
        asked = [parse(text[2:]) for text in texts if text.startswith("? ")]
        found[topic] = (asked, [parse(text[2:]) for text in texts if text.startswith("= ")])
    return found


_TALK = _read()
_TOPIC_NAMES = [*(topic for topic in _TALK if topic != "unknown"), *["unknown"] * 6]


def _slots(random: Random) -> dict:
    return {
        "country": tuple(world.WORDS["countries"]),
        "topic": tuple(world.WORDS["topics"]),
        "gibberish": tuple(world.made_up(random) for _ in range(4)),
        "number": str(int(random.random() * 900)),
        "bignumber": tuple(str(1000 + int(random.random() * 99000)) for _ in range(2)),
    }


def exchange(random: Random, topic: str | None = None) -> tuple[str, str]:
    """Something to say, and the answer."""
    asked, answers = _TALK[topic or pick(random, _TOPIC_NAMES)]
    slots = _slots(random)
    question = say(pick(random, asked), slots, random)
    if random.random() < 0.1:
        question = question.lower()
    return question, say(pick(random, answers), slots, random)

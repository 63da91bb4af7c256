"""Tells the story of a plan, and asks for it in the many ways in which people ask."""

from random import Random

from .grammar import agree, fill, sections
from .plans import Plan, counted, pick

_FRAME = sections("frame.txt")
_PROMPTS = sections("prompts.txt")
_STORY = (
    *["a story"] * 5, "a tale", "a little story", "a nice story", "a bedtime story", "a fairy tale", "a sweet story",
    "a new story", "a simple story", "a good story", "a children's story",
)  # fmt: skip
_SHORT = ("a short story", "a very short story", "a short tale", "a quick story")
_LONG = ("a long story", "a longer story", "a long tale")


def story(random: Random, plan: Plan, length: str = "") -> str:
    """The plan, told. length: "short" leaves out what may be left out, "long" tells it all."""
    extra = {"short": 0.0, "long": 1.0}.get(length, 0.45)
    lines = [pick(random, _FRAME["opening"])]
    if plan.trait and random.random() < extra:
        lines.append(pick(random, _FRAME["trait"]))
    if random.random() < extra * 0.8:
        lines.append(pick(random, _FRAME["weather " + plan.slots["weather"]]))
    for chance, ways in plan.plot.beats:
        if chance == 1 or length == "long" or (length != "short" and random.random() < chance):
            lines.append(pick(random, ways))
    if length != "short" or random.random() < 0.5:
        lines.append(pick(random, _FRAME["ending"] if plan.plot.friend else _FRAME["ending alone"]))
    if random.random() < 0.3 + extra * 0.7:
        lines.append(pick(random, plan.plot.moral))
    if random.random() < 0.2:
        lines.append(pick(random, _FRAME["last"]))
    told = []
    for line in lines:
        text = fill(line, plan.slots, random)
        told.append(text[0].upper() + text[1:])
    return agree(" ".join(told))


def _hero(random: Random, plan: Plan) -> str:
    chance, kind = random.random(), plan.hero.kind
    if plan.name and chance < 0.3:
        return f"a {kind} {pick(random, ('named', 'called'))} {plan.name}"
    if plan.name and chance < 0.36:
        return f"{plan.name} the {kind}"
    if plan.trait and chance > 0.88 and not kind.startswith(("little ", "old ")):
        return f"a {plan.trait} {kind}"
    return f"a {kind}"


def _friend(random: Random, plan: Plan) -> str:
    if plan.friend_name and random.random() < 0.5:
        return f"a {plan.friend.kind} named {plan.friend_name}"
    return f"a {plan.friend.kind}"


def _subject(random: Random, plan: Plan) -> str:
    """What the story shall be about, as a prompt says it. Whatever it names, the plan has."""
    hero, where, word = _hero(random, plan), plan.slots["in"], plan.thing.word
    what = counted(word, plan.look if random.random() < 0.08 else "")
    chance = random.random()
    if plan.plot.name == "trade" and chance < 0.15:
        return f"{what} and {plan.slots['swap']}"
    if chance < 0.5:
        return f"{hero} and {what}"
    if chance < 0.53:
        return f"{what} and {hero}"
    if chance < 0.57:
        return f"{hero} with {what}"
    if chance < 0.60:
        return f"{hero} and {plan.slots['his']} {word}"
    if chance < 0.63:
        return f"the {plan.hero.kind} and the {word}"
    if chance < 0.73:
        does = f"{hero} {fill(pick(random, plan.plot.who), plan.slots, random)}"
        return does if chance < 0.7 else f"{does} {where}"
    if chance < 0.78:
        return f"{hero} and {what} {where}"
    if chance < 0.81:
        return f"{hero} {where}"
    if chance < 0.85 and plan.name:
        return f"{plan.name} and {what}"
    if chance < 0.93 and plan.plot.friend:
        return f"{hero} and {_friend(random, plan)}" if chance < 0.89 else f"{hero}, {_friend(random, plan)} and {what}"
    return hero if chance < 0.97 else what


def prompt(random: Random, plan: Plan, length: str = "", again: bool = False) -> str:
    """A request that the plan's story fulfils."""
    stories = {"short": _SHORT, "long": _LONG}.get(length, _STORY)
    chance = random.random()
    if chance < 0.03 and not length:
        words = f"{plan.hero.kind}{pick(random, (', ', ' and '))}{plan.thing.word}"
        return pick(random, ("Story: {}", "{}", "Write a story with these words: {}", "A story, please: {}")).format(
            words
        )
    if chance < 0.06:
        asked = fill(pick(random, _PROMPTS["any"]), {"a_story": stories}, random)
    else:
        ways = _PROMPTS["again"] if again and chance < 0.6 else _PROMPTS["ask"]
        asked = fill(pick(random, ways), {"a_story": stories, "subject": _subject(random, plan)}, random)
    asked = agree(asked)
    if random.random() < 0.08:
        asked = asked.lower().rstrip(".?")
    return asked

"""Questions about a story that was told, with the answers that its plan knows."""

from random import Random

from . import world
from .grammar import agree, parse, say
from .plans import Plan, pick

_ABOUT = [
    parse(way)
    for way in (
        "Who is the story about?",
        "Who is this story about?",
        "Who was the story about?",
        "Who is the main character?",
    )
]
_SUMMARY = [
    parse(way)
    for way in (
        "What is the story about?",
        "What happens in the story?",
        "Tell it in one sentence.",
        "Can you sum up the story?",
        "What happened in the story?",
    )
]
_PLACE = [
    (parse("Where does the story take place?"), parse("The story takes place {in}.")),
    (parse("Where did {h} live?"), parse("{H} lived {in}.")),
    (parse("Where was {h}?"), parse("{H} was {in}.")),
]
_FEELING = [
    (parse("How did {h} feel in the end?"), parse("In the end {h} was {feel}.")),
    (parse("How did {h} feel at the end?"), parse("At the end {h} was {feel}.")),
    (parse("Was {h} {worry} in the end?"), parse("No, in the end {h} was {feel}.")),
]
_NAME = [
    (parse("What is the name of the {hk}?"), parse("The name of the {hk} is {name}.")),
    (parse("What is the {hk} called?"), parse("The {hk} is called {name}.")),
    (parse("Who is {name}?"), parse("{Name} is a {hk}.")),
]
_FRIEND_NAME = [
    (parse("What is the name of the {fk}?"), parse("The name of the {fk} is {fname}.")),
    (parse("Who is {fname}?"), parse("{Fname} is a {fk}.")),
]
_FRIEND_THERE = (parse("Is there a {fk} in the story?"), parse("Yes, there is a {fk} in the story."))
_THERE = [
    (parse("Is there a {hk} in the story?"), parse("Yes, the story is about a {hk}.")),
    (parse("Is there a {absent} in the story?"), parse("No, there is no {absent} in the story.")),
    (parse("What did the {absent} do?"), parse("There is no {absent} in the story.")),
    (parse("Did {h} meet a {absent}?"), parse("No, there is no {absent} in the story.")),
]


def _absent(random: Random, story: str) -> str:
    while (word := pick(random, world.CREATURES).kind) in story:
        pass
    return word


def about(random: Random, plan: Plan, story: str, named: bool = False) -> tuple[str, str]:
    """One question and its answer. `named`: the hero is in the question, so that it can be asked of many stories."""
    slots = {**plan.slots, "name": plan.name, "fname": plan.friend_name, "absent": _absent(random, story)}
    slots["h"] = plan.name or f"the {plan.hero.kind}"
    slots["f"] = plan.friend_name or f"the {plan.friend.kind}"
    pairs = list(plan.plot.questions)
    if not named:
        pairs += [
            (pick(random, _ABOUT), parse("The story is about {a_h}.")),
            (pick(random, _SUMMARY), plan.plot.summary),
        ]
        pairs += [_PLACE[0], pick(random, _THERE)]
    pairs.append(_PLACE[1])
    if f" {plan.slots['feel']}" in story:
        pairs.append(pick(random, _FEELING))
    if plan.name:
        pairs.append(pick(random, _NAME))
    if plan.plot.friend and not named:
        pairs.append(pick(random, _FRIEND_NAME) if plan.friend_name else _FRIEND_THERE)
    if named:
        pairs = [
            pair for pair in pairs if ("h", False) in pair[0] or ("hk", False) in pair[0] or ("name", False) in pair[0]
        ]
    question, answer = pick(random, pairs)
    return say(question, slots, random), say(answer, slots, random)


def several(random: Random, plan: Plan, story: str, count: int) -> list[tuple[str, str]]:
    """Up to `count` different ones."""
    found: dict[str, str] = {}
    for _ in range(count + 2):
        question, answer = about(random, plan, story)
        if len(found) < count and answer not in found.values():
            found[question] = answer
    return list(found.items())


def summary(random: Random, plan: Plan) -> str:
    slots = {
        **plan.slots,
        "h": plan.name or f"the {plan.hero.kind}",
        "f": plan.friend_name or f"the {plan.friend.kind}",
    }
    return agree(say(plan.plot.summary, slots, random))

"""The small world of the stories: its words, from words.txt and phrases.txt, by the way they behave in a sentence.

A creature has a way to move, a thing something that one does with it, a place its preposition. The words are ours.
"""

from random import Random
from typing import NamedTuple

from .grammar import blocks


def _words() -> dict[str, list[str]]:
    both = {**blocks("words.txt"), **blocks("phrases.txt")}
    return {heading: " ".join(lines).split(", ") for heading, lines in both.items()}


WORDS = _words()


def under(heading: str) -> dict[str, list[str]]:
    """The lists whose headings begin so, by the rest of the heading."""
    return {name.removeprefix(heading + " "): words for name, words in WORDS.items() if name.startswith(heading + " ")}


ANIMALS, THINGS, PLACES, SPOTS = under("animals"), under("things"), under("places"), under("spots")
MOVES = {  # to go, past, in a hurry, -ing
    "walk": ("walk", "walked", "ran", "walking"),
    "hop": ("hop", "hopped", "hurried", "hopping"),
    "crawl": ("crawl", "crawled", "hurried", "crawling"),
    "fly": ("fly", "flew", "flew quickly", "flying"),
    "swim": ("swim", "swam", "swam quickly", "swimming"),
}
HER_NAMES, HIS_NAMES = WORDS["her names"], WORDS["his names"]
USES = {  # what one does with a thing, and did
    "light": ("light", "lit"),
    "music": ("play", "played"),
    "toy": ("play with", "played with"),
    "food": ("taste", "tasted"),
    "clothing": ("wear", "wore"),
    "reading": ("read", "read"),
    "container": ("fill", "filled"),
    "treasure": ("polish", "polished"),
    "tool": ("use", "used"),
    "household": ("use", "used"),
    "plant": ("water", "watered"),
    "ride": ("steer", "steered"),
    "place": ("paint", "painted"),
    "new": ("use", "used"),  # a word that nobody has heard before
}
MANNERS, LOOKS = under("manners"), under("looks")
HEAVY = {*WORDS["heavy"], *THINGS["ride"], *THINGS["place"]}  # what nobody can carry
MASS, PLURAL = set(WORDS["mass"]), set(WORDS["plural"])
BESIDE = {word: preposition for preposition, words in under("beside").items() for word in words}
HABITS = under("habits")  # a trait, and what one sees of it
FEELINGS, WORRIES, COLOURS = WORDS["feelings"], WORDS["worries"], WORDS["colours"]
FRUITS, VEGETABLES = WORDS["fruits"], WORDS["vegetables"]


def made_up(random: Random) -> str:
    """A word that means nothing and can be said aloud: the model must copy it."""
    first = random.choice(WORDS["first sounds"]) + random.choice(("a", "e", "i", "o", "u", "oo", "ee", "ai", "ou"))
    if len(first) < 4 or random.random() < 0.3:  # short ones would often be words already
        first += random.choice("bdfgklmnprstvz") + random.choice("aeiou")
    return first + random.choice(WORDS["last sounds"])


class Creature(NamedTuple):
    kind: str
    moves: str
    she: bool | None  # None: either


class Thing(NamedTuple):
    word: str
    kind: str


CREATURES = [Creature(word, moves, None) for moves, words in ANIMALS.items() for word in words]
PERSONS = [
    *(Creature(word, "walk", True) for word in WORDS["women"]),
    *(Creature(word, "walk", False) for word in WORDS["men"]),
    *(Creature(word, "walk", None) for word in WORDS["roles"]),
]
OBJECTS = [Thing(word, kind) for kind, words in THINGS.items() for word in words]
KNOWN = {*HER_NAMES, *HIS_NAMES, *(being.kind for being in CREATURES + PERSONS), *(thing.word for thing in OBJECTS)}

"""What a story will be about, before it is told: who, with whom, what, where, and the words that its plot asks for."""

import zlib
from dataclasses import dataclass
from random import Random

from . import world
from .grammar import Slots, agree, fill, parse
from .plots import PLOTS, Plot
from .world import Creature, Thing

CLASHES = {  # traits that a plot would give the lie to
    "dark": {"brave", "proud"},
    "gift": {"lonely", "forgetful", "greedy", "proud", "grumpy"},
    "grow": {"patient"},
    "home": {"careful"},
    "learn": {"clever", "lazy", "smart"},
    "lost": {"careful", "smart"},
    "made": {"lazy"},
    "mended": {"careful", "proud"},
    "noise": {"sleepy"},
    "owner": {"greedy"},
    "party": {"lonely", "grumpy"},
    "picnic": {"greedy", "busy"},
    "race": {"lazy", "sleepy", "old", "grumpy", "greedy", "slow"},
    "rescue": {"lazy", "proud", "careless", "strong", "forgetful"},
    "share": {"kind", "friendly", "gentle", "poor"},
    "shelter": {"lazy"},
    "sorry": {"honest", "kind", "wise"},
    "storm": {"brave"},
    "stranger": {"proud", "grumpy"},
    "trade": {"greedy"},
    "wait": {"lazy", "sleepy", "old"},
}
_TRAITS = {plot.name: [trait for trait in world.HABITS if trait not in CLASHES.get(plot.name, ())] for plot in PLOTS}
_HABITS = {trait: [parse(way) for way in ways] for trait, ways in world.HABITS.items()}
_MADE_OF = world.under("made of")
_RESCUES = {
    "light": (
        "{H} held {them} up, and in its light {he} saw a safe way down.",
        "{H} waved {them} until others saw the light and came to help.",
    ),
    "music": (
        "{H} {used} {them} as loudly as {he} could, until others heard it and came to help.",
        "{H} {used} {them}, and at the sound help came from every side.",
    ),
    "clothing": (
        "{H} held {them} out, and {f} grabbed {them} and pulled {fhimself} up.",
        "{H} waved {them} like a flag, until others saw it and came to help.",
    ),
    "other": (
        "{H} held {them} out to {f}, who grabbed {them} with all {fhis} strength.",
        "With {t}, {h} could reach {f} at last.",
        "{H} used {them} to make a way out for {f}.",
    ),
}
_TROUBLES = (
    ("the well was dry", "fresh water"),
    ("the bridge had fallen down", "a new bridge"),
    ("the winter would not end", "spring"),
    ("the little ones had nothing to eat", "a big table full of food"),
    ("the flowers were all dry", "a long, soft rain"),
    ("an old man had lost his home", "a warm home for the old man"),
    ("everybody was fighting", "peace"),
    ("the school had no books", "a room full of books"),
    ("the night was too dark", "a hundred stars"),
)
_FRIENDLY = ("old", "friendly", "young", "kind", "clever", None, None, None)


def pick(random: Random, options):
    """random.choice, at a third of its time."""
    return options[int(random.random() * len(options))]


def held_out(creature: str, thing: str) -> bool:
    """Pairs that no training text has together; the story that everyone asks for first is one of them."""
    return (creature, thing) == ("fox", "lantern") or zlib.crc32(f"{creature} {thing}".encode()) % 20 == 0


@dataclass
class Plan:
    plot: Plot
    hero: Creature
    friend: Creature
    thing: Thing
    name: str | None
    friend_name: str | None
    trait: str | None  # in the words that introduce the hero
    look: str
    slots: Slots

    @property
    def made_up(self) -> list[str]:
        """Its words that mean nothing: a story may use one only where the prompt has named it."""
        words = {self.hero.kind, self.friend.kind, self.thing.word, self.name, self.friend_name} - {None}
        return [word for word in words if word not in world.KNOWN]


def creature(random: Random) -> Creature:
    chance = random.random()
    if chance < 0.12:
        return Creature(world.made_up(random), "walk", None)
    return pick(random, world.CREATURES if chance < 0.8 else world.PERSONS)


def thing(random: Random) -> Thing:
    return Thing(world.made_up(random), "new") if random.random() < 0.12 else pick(random, world.OBJECTS)


def _cast(random: Random, unseen: bool) -> tuple[Creature, Creature, Thing]:
    """Hero, friend and thing, of pairs that are all trained on; with `unseen`, hero and thing are a held-out pair."""
    while True:
        hero, friend, what = creature(random), creature(random), thing(random)
        same = hero.kind == friend.kind or what.word in (hero.kind, friend.kind)
        if same or held_out(hero.kind, what.word) != unseen or held_out(friend.kind, what.word):
            continue
        if not unseen or what.kind != "new":
            return hero, friend, what


def _fitting(what: Thing, hero: Creature) -> list[Plot]:
    heavy, wet = what.word in world.HEAVY, hero.moves == "swim"
    fit = [p for p in PLOTS if what.kind in p.kinds and not (heavy and not p.heavy) and not (wet and p.dry)]
    return fit + 2 * [p for p in fit if p.special]  # where the thing matters most


def _pronouns(she: bool, prefix: str = "") -> Slots:
    words = ("she", "her", "her", "herself") if she else ("he", "him", "his", "himself")
    return {prefix + key: word for key, word in zip(("he", "him", "his", "himself"), words, strict=True)}


def _name(random: Random, she: bool) -> str:
    if random.random() < 0.08:
        return world.made_up(random).capitalize()
    return pick(random, world.HER_NAMES if she else world.HIS_NAMES)


def _introduced(being: Creature, trait: str | None, name: str | None) -> str:
    plain = being.kind if trait is None or being.kind.startswith(("little ", "old ")) else f"{trait} {being.kind}"
    return f"a {plain} named {name}" if name else f"a {plain}"


def _called(being: Creature, name: str | None):
    """In a story: mostly the name, where there is one."""
    return (name, name, name, f"the {being.kind}") if name else f"the {being.kind}"


def counted(word: str, look: str = "") -> str:
    """The thing at its first mention: "a lantern", "some honey", "a pair of red boots"."""
    count = "some " if word in world.MASS else "a pair of " if word in world.PLURAL else "a "
    return f"{count}{look} {word}" if look else count + word


def _thing_slots(what: Thing, look: str) -> Slots:
    word, plural = what.word, what.word in world.PLURAL
    use, used = world.USES[what.kind]
    manners = world.MANNERS[what.kind]
    if plural:
        manners = ["were" + manner[3:] if manner.startswith("was ") else manner for manner in manners]
    return {
        "t": f"the {word}", "tn": word, "tn1": f"pair of {word}" if plural else word, "your_t": f"your {word}",
        "at": counted(word), "at1": counted(word, look), "by_t": f"{world.BESIDE.get(word, 'beside')} the {word}",
        "it": "they" if plural else "it", "them": "them" if plural else "it", "tis": "are" if plural else "is",
        "twas": "were" if plural else "was", "look": look, "use": use, "used": used, "manner": tuple(manners),
    }  # fmt: skip


def _where(random: Random, hero: Creature) -> tuple[str, str]:
    if hero.moves == "swim":
        kind = "water"
    else:
        chance = random.random()
        kind = "land" if chance < 0.6 else "town" if chance < 0.82 else "inside"
    return pick(random, world.PLACES[kind]), kind


def _swap(random: Random, hero: Creature, friend: Creature, what: Thing) -> str:
    """Another thing, that the hero would rather have."""
    while True:
        other = pick(random, world.OBJECTS)
        unseen = held_out(hero.kind, other.word) or held_out(friend.kind, other.word)
        if other.word != what.word and other.word not in world.HEAVY and not unseen:
            return counted(other.word)


def _being_slots(random: Random, hero: Creature, friend: Creature, name, friend_name, trait) -> Slots:
    verb, went, ran, going = world.MOVES[hero.moves]
    return {
        "h": _called(hero, name), "hk": hero.kind, "hn": name or f"dear {hero.kind}", "trait": trait or "",
        "a_h": _introduced(hero, trait, name), "go": verb, "went": went, "ran": ran, "going": going,
        "f": _called(friend, friend_name), "fk": friend.kind, "fn": friend_name or f"dear {friend.kind}",
        "a_f": _introduced(friend, pick(random, _FRIENDLY), friend_name), "fwent": world.MOVES[friend.moves][1],
    }  # fmt: skip


def _scene_slots(random: Random, hero: Creature, friend: Creature, what: Thing, she: bool) -> Slots:
    where, kind = _where(random, hero)
    while what.word in where:  # a tower in the tower
        where, kind = _where(random, hero)
    trouble, wish = pick(random, _TROUBLES)
    lived = "lived" if kind != "town" or random.random() < 0.5 else f"spent {'her' if she else 'his'} days"
    words = world.WORDS
    return {
        "in": where, "pl": where.split(" ", 1)[1], "lived": lived, "weather": kind,
        "spot": pick(random, world.SPOTS[kind]), "worry": pick(random, world.WORRIES),
        "day": [pick(random, words["first days"]), *random.sample(words["later days"], 3)],
        "evening": tuple(words["evenings"]), "nwish": pick(random, ("two", "three")), "wish": wish, "trouble": trouble,
        "feel": pick(random, world.FEELINGS), "trap": pick(random, words["traps"]),
        "goal": pick(random, words["goals"]), "job": pick(random, words["jobs"]),
        "stuff": pick(random, _MADE_OF.get(what.kind, ("glue",))), "swap": _swap(random, hero, friend, what),
    }  # fmt: skip


def plan(random: Random, unseen: bool = False) -> Plan:
    """A plan of a pair that is trained on, or of one that is held out."""
    hero, friend, what = _cast(random, unseen)
    plot = pick(random, _fitting(what, hero))
    she, friend_she = (random.random() < 0.5 if being.she is None else being.she for being in (hero, friend))
    name = _name(random, she) if random.random() < 0.6 else None
    friend_name = _name(random, friend_she) if random.random() < 0.45 else None
    if friend_name == name:
        friend_name = None
    trait = pick(random, _TRAITS[plot.name]) if random.random() < 0.7 else None
    if trait in world.COLOURS and hero in world.PERSONS:
        trait = None
    looks = [
        look
        for look in world.LOOKS["mass" if what.word in world.MASS else what.kind]
        if look.split(" ")[0] not in what.word
    ]
    look = pick(random, looks)
    slots = {
        **_pronouns(she),
        **_pronouns(friend_she, "f"),
        **_thing_slots(what, look),
        **_being_slots(random, hero, friend, name, friend_name, trait),
        **_scene_slots(random, hero, friend, what, she),
    }
    slots["rescue"] = fill(parse(pick(random, _RESCUES.get(what.kind, _RESCUES["other"]))), slots, random)
    slots["habit"] = agree(fill(pick(random, _HABITS[trait]), slots, random)) if trait else ""
    return Plan(plot, hero, friend, what, name, friend_name, trait, look, slots)

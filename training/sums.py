"""Sums, word problems, lists, counting, spelling and sorting: small exercises with one right answer."""

import zlib
from random import Random

from . import world
from .grammar import agree
from .plans import pick

_ONES, _TENS, DAYS, MONTHS = (world.WORDS[heading] for heading in ("numbers", "tens", "days", "months"))
_SEASONS = ["spring", "summer", "autumn", "winter"]
_LISTS = {
    "animals": [creature.kind for creature in world.CREATURES],
    "birds": [kind for kind in world.ANIMALS["fly"] if kind not in world.WORDS["wings but no birds"]],
    "fruits": world.FRUITS,
    "vegetables": world.VEGETABLES,
    "colours": world.COLOURS,
    "colors": world.COLOURS,
    "toys": ["ball", "kite", "doll", "teddy bear", "puppet", "yo-yo", "puzzle", "toy car", "marble", "balloon"],
    "instruments": world.THINGS["music"][:12],
    "tools": ["hammer", "saw", "axe", "shovel", "rake", "wrench", "screwdriver", "brush", "spade", "ladder"],
    "names": world.HER_NAMES + world.HIS_NAMES,
    "days of the week": DAYS,
    "months": MONTHS,
    "seasons": _SEASONS,
    "jobs": world.WORDS["roles"][:20],
    "clothes": ["hat", "scarf", "coat", "cap", "dress", "jacket", "sweater", "shirt", "skirt", "sock"],
}  # fmt: skip
_GOODS = [
    "apples",
    "pears",
    "coins",
    "books",
    "eggs",
    "nuts",
    "stones",
    "shells",
    "balls",
    "carrots",
    "cookies",
    "flowers",
    "pencils",
    "kites",
    "cakes",
    "marbles",
]


def words(number: int) -> str:
    if number == 100:
        return "one hundred"
    if number < 20:
        return _ONES[number]
    tens, ones = _TENS[number // 10 - 2], number % 10
    return f"{tens}-{_ONES[ones]}" if ones else tens


def held_out(left: int, sign: str, right: int) -> bool:
    """Sums that no training text has. The times table is learned by heart, so all of it is trained."""
    return sign != "*" and zlib.crc32(f"{left}{sign}{right}".encode()) % 20 == 0


def _operands(random: Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return int(random.random() * 13), int(random.random() * 13)
    top = 101 if random.random() < 0.7 else 21
    left = int(random.random() * top)
    if sign == "+":
        return left, int(random.random() * (top - left))
    right = int(random.random() * (left + 1))
    return left, right


def _drawn(random: Random, unseen: bool = False) -> tuple[int, str, int]:
    while True:
        chance = random.random()
        sign = "+" if chance < 0.45 else "-" if chance < 0.85 else "*"
        left, right = _operands(random, sign)
        if held_out(left, sign, right) == unseen:
            return left, sign, right


def result(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right


_ASKED = (
    "What is {}?",
    "What is {}?",
    "{} = ?",
    "How much is {}?",
    "Calculate {}.",
    "{}",
    "Please calculate {}.",
    "Tell me what {} is.",
    "Can you tell me {}?",
    "{}?",
    "What's {}?",
    "{} =",
)
_SIGNS = {"+": ("+", "+", "plus"), "-": ("-", "-", "minus"), "*": ("*", "x", "times")}


def sum_of(random: Random, unseen: bool = False) -> tuple[str, str]:
    """A sum in digits or words; the answer says it again, then its result."""
    left, sign, right = _drawn(random, unseen)
    value = result(left, sign, right)
    if sign != "*" and random.random() < 0.12:
        verb = {"+": "plus", "-": "minus"}[sign]
        asked, answer = f"{words(left)} {verb} {words(right)}", words(value)
        return pick(random, ("What is {}?", "How much is {}?")).format(asked), f"{asked} is {answer}.".capitalize()
    said = f"{left} {pick(random, _SIGNS[sign])} {right}"
    plain = said if random.random() < 0.9 or "plus" in said or "minus" in said else said.replace(" ", "")
    equals = "=" if said.split(" ")[1] in "+-*x" else "is"
    return pick(random, _ASKED).format(plain), f"{said} {equals} {value}."


def word_problem(random: Random) -> tuple[str, str]:
    """A small sum in a small story."""
    while True:
        sign = "+" if random.random() < 0.5 else "-"
        left = 1 + int(random.random() * 30)
        right = 1 + int(random.random() * (20 if sign == "+" else left))
        if not held_out(left, sign, right):
            break
    she = random.random() < 0.5
    name, he = (pick(random, world.HER_NAMES), "she") if she else (pick(random, world.HIS_NAMES), "he")
    goods = pick(random, _GOODS)
    if sign == "+":
        change = pick(
            random, (f"gets {right} more", f"finds {right} more", f"buys {right} more", f"picks {right} more")
        )
    else:
        change = pick(random, (f"gives away {right}", f"loses {right}", f"sells {right}", f"gives {right} to a friend"))
    value = result(left, sign, right)
    amount = f"{value} {goods}" if value != 1 else f"1 {goods[:-1]}"
    own = f"{left} {goods}" if left != 1 else f"1 {goods[:-1]}"
    ending = pick(
        random,
        (
            f"How many {goods} does {name} have now?",
            f"How many {goods} does {he} have?",
            f"How many {goods} are there now?",
        ),
    )
    link = pick(random, (" and ", f". {he.capitalize()} "))
    return f"{name} has {own}{link}{change}. {ending}", f"{left} {sign} {right} = {value}. {name} has {amount} now."


def _joined(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else items[0]


def listing(random: Random) -> tuple[str, str]:
    kind = pick(random, list(_LISTS))
    known = _LISTS[kind]
    count = 2 + int(random.random() * min(6, len(known) - 1))
    items = random.sample(known, count)
    number = words(count) if random.random() < 0.7 else str(count)
    asked = pick(
        random,
        (
            "List {} {}.",
            "Name {} {}.",
            "Tell me {} {}.",
            "Can you name {} {}?",
            "Give me {} {}.",
            "Please list {} {}.",
            "Write down {} {}.",
        ),
    )
    question = asked.format(number, kind)
    if random.random() < 0.25:
        return question, "\n".join(f"{index}. {item}" for index, item in enumerate(items, 1))
    text = _joined(items)
    return question, text[0].upper() + text[1:] + "."


def counting(random: Random) -> tuple[str, str]:
    start = int(random.random() * 60)
    step = 1 if random.random() < 0.8 else pick(random, (2, 5, 10))
    count = 3 + int(random.random() * 9)
    end = start + step * (count - 1)
    by = f" in steps of {step}" if step > 1 else ""
    if step == 1 and random.random() < 0.2:
        return f"Count down from {end} to {start}.", ", ".join(map(str, range(end, start - 1, -1))) + "."
    asked = pick(random, ("Count from {} to {}{}.", "Can you count from {} to {}{}?", "Please count from {} to {}{}."))
    return asked.format(start, end, by), ", ".join(map(str, range(start, end + 1, step))) + "."


def _any_word(random: Random) -> str:
    if random.random() < 0.25:
        return world.made_up(random)
    word = pick(random, world.CREATURES).kind if random.random() < 0.5 else pick(random, world.OBJECTS).word
    return word.split(" ")[-1]


def spelling(random: Random) -> tuple[str, str]:
    word = _any_word(random)
    chance = random.random()
    if chance < 0.6:
        return pick(random, ("Spell {}.", "How do you spell {}?", "Can you spell {}?", "Spell the word {}.")).format(
            word
        ), "-".join(word)
    if chance < 0.8:
        return pick(random, ("What is the first letter of {}?", "Which letter does {} start with?")).format(
            word
        ), f"The first letter of {word} is {word[0]}."
    return pick(random, ("What is the last letter of {}?", "Which letter does {} end with?")).format(
        word
    ), f"The last letter of {word} is {word[-1]}."


def sorting(random: Random) -> tuple[str, str]:
    count = 3 + int(random.random() * 3)
    if random.random() < 0.4:
        numbers = random.sample(range(100), count)
        given = ", ".join(map(str, numbers))
        chance = random.random()
        if chance < 0.5:
            return f"Sort these numbers: {given}", ", ".join(map(str, sorted(numbers)))
        which, value = ("biggest", max(numbers)) if chance < 0.75 else ("smallest", min(numbers))
        return f"Which number is the {which}: {given}?", f"The {which} number is {value}."
    items = list(dict.fromkeys(_any_word(random) for _ in range(count)))
    given = ", ".join(items)
    if random.random() < 0.5:
        return f"Sort these words: {given}", ", ".join(sorted(items))
    if random.random() < 0.5:
        return f"What is the last word of this list: {given}?", f"The last word is {items[-1]}."
    return f"What is the first word of this list: {given}?", f"The first word is {items[0]}."


def calendar(random: Random) -> tuple[str, str]:
    names, kind = (DAYS, "day") if random.random() < 0.5 else (MONTHS, "month")
    index = int(random.random() * len(names))
    chance = random.random()
    if chance < 0.45:
        return (
            f"Which {kind} comes after {names[index]}?",
            f"After {names[index]} comes {names[(index + 1) % len(names)]}.",
        )
    if chance < 0.8:
        return f"Which {kind} comes before {names[index]}?", f"Before {names[index]} comes {names[index - 1]}."
    whole = {"day": "days of the week", "month": "months of the year"}[kind]
    return pick(random, ("What are the {}?", "Name all the {}.", "List the {}.")).format(
        whole
    ), f"The {whole} are {_joined(names)}."


def fact(random: Random) -> tuple[str, str]:
    """What kind of thing a word is."""
    chance = random.random()
    if chance < 0.5:
        word, kind = pick(random, world.CREATURES).kind, "animal"
        if word in ("robot", "fairy", "mermaid", "troll", "dragon", "unicorn"):
            return agree(f"What is a {word}?"), agree(f"A {word} is a creature from stories.")
    elif chance < 0.8:
        word, kind = pick(random, world.FRUITS), "fruit"
    else:
        word, kind = pick(random, world.VEGETABLES), "vegetable"
    if random.random() < 0.5:
        return agree(f"What is a {word}?"), agree(f"A {word} is a {kind}.")
    other = kind if random.random() < 0.5 else pick(random, [k for k in ("animal", "fruit", "vegetable") if k != kind])
    answer = f"Yes, a {word} is a {kind}." if other == kind else f"No, a {word} is a {kind}."
    return agree(f"Is a {word} a {other}?"), agree(answer)


_EXERCISES = ((0.3, listing), (0.45, counting), (0.6, spelling), (0.75, sorting), (0.85, calendar), (1.0, fact))


def exercise(random: Random) -> tuple[str, str]:
    """Something other than a sum."""
    chance = random.random()
    return next(make for upto, make in _EXERCISES if chance < upto)(random)

"""Judges a model's stories and sums as far as a program can: by words and lexicons, whatever they were told from."""

import re
from collections import Counter

from . import sums, world

_SAID = "said|asked|cried|called|shouted|whispered|thought|answered|replied|laughed|sighed"
_ADJECTIVES = {
    *world.HABITS,
    *(word for looks in world.LOOKS.values() for look in looks for word in look.split()),
    *world.FEELINGS, *world.WORRIES, *world.COLOURS, "big", "own", "new", "dear", "great", "whole", "magic", "broken",
}  # fmt: skip
_CHARACTERS = {*(one.kind for one in world.CREATURES), *(one.kind for one in world.PERSONS)}
_OBJECTS = {one.word for one in world.OBJECTS}
_THINGS = {
    word
    for kind in ("light", "music", "toy", "food", "clothing", "reading", "treasure", "tool", "ride")
    for word in world.THINGS[kind]
}
# Words that may be "the" ones without being told of first: the world has them.
_ALWAYS_THERE = set(world.WORDS["always there"])
_NOBODY = {"others", "echo", "neighbours", "voice", "wind"}
_CAPITALS = {"I", "O", "Story", *sums.DAYS, *sums.MONTHS}
_ASKED_FOR = re.compile(r"\b(?:about|words?:|please:|story:|happened to)\s", re.IGNORECASE)
_PHRASE_END = re.compile(
    r"\s(?:who|whose|that|which|in|on|at|by|near|under|among|named|called|behind|into)\s|[?.!\n]|\bplease\b",
    re.IGNORECASE,
)
_NAME_THE_KIND = re.compile(rf"\b([A-Z]\w+) the ({'|'.join(sorted(_CHARACTERS, key=len, reverse=True))})\b")
_SENTENCE = re.compile(r"(?<=[.!?])(?<!\bMr\.)\"?\s+(?=[\"A-Z])")


def _phrases(prompt: str) -> list[str]:
    """What the prompt wants the story to be about: the bare nouns."""
    *_, text = _ASKED_FOR.split(prompt)
    if text == prompt and (len(prompt.split()) > 6 or re.search("story|tale", prompt, re.IGNORECASE)):
        return []
    text, *clauses = re.split(r"\s(?:who|whose)\s", text)
    clause = " ".join(clauses)
    nouns = []
    for part in re.split(r",\s*|\s+and\s+|\s+with\s+", text):
        the_kind = re.match(r"\w+ the (\w.*)", part)
        words = _PHRASE_END.split((the_kind.group(1) if the_kind else part) + " ", maxsplit=1)[0].split()
        if words and words[0].lower() in ("the", "a", "an", "some", "his", "her", "their", "my", "one", "two"):
            words = words[1:]
        if words[:2] == ["pair", "of"]:
            words = words[2:]
        while len(words) > 1 and words[0].lower() in _ADJECTIVES and " ".join(words) not in _CHARACTERS | _OBJECTS:
            words = words[1:]
        nouns.append(" ".join(words).strip("\"'").lower())
    found = [noun for noun in nouns if noun and noun.count(" ") < 4]
    return (
        found
        if not clause
        else found
        + [
            word
            for word in _OBJECTS - _ALWAYS_THERE
            if re.search(rf"\b(?:an?|some|of|his|her) (?:\w+ )?{re.escape(word)}\b", clause)
        ]
    )


def _names(prompt: str) -> set[str]:
    named = re.findall(r"\b(?:named|called)\s+(\w+)", prompt, re.IGNORECASE)
    return {name.capitalize() for name in named} | set(re.findall(r"\b([A-Z]\w+) the \w", prompt)) - {"Tell", "Write"}


def _times(word: str, text: str) -> int:
    return len(re.findall(rf"\b{re.escape(word)}(?:s|es)?\b", text, re.IGNORECASE))


def sentences(story: str) -> list[str]:
    return [sentence.strip() for sentence in _SENTENCE.split(story.strip()) if sentence.strip()]


def _follows(prompt: str, story: str) -> list[str]:
    found = []
    for place, noun in enumerate(_phrases(prompt)):
        times = _times(noun, story)
        if times == 0:
            found.append(f"the prompt asks for {noun!r}, which the story does not mention")
        elif (
            times == 1
            and (place == 0 or noun in _OBJECTS)
            and not re.search(rf"\b(?:{re.escape(noun)} named|named {re.escape(noun)})\b", story, re.IGNORECASE)
        ):
            found.append(f"{noun!r} is mentioned once and does not matter")
    found += [f"the name {name!r} of the prompt is not used" for name in _names(prompt) if name not in story]
    return found


def _shape(story: str) -> list[str]:
    found = []
    told = sentences(story)
    if not 4 <= len(told) <= 20:
        found.append(f"{len(told)} sentences")
    if not re.search(r"[.!?]\"?$", story.strip()):
        found.append("the last sentence does not end")
    for sentence, times in Counter(sentence.strip('"').lower() for sentence in told).items():
        if times > 1:
            found.append(f"says {times} times: {sentence}")
    words = re.findall(r"\w+", story.lower())
    runs = Counter(tuple(words[at : at + 9]) for at in range(len(words) - 8))
    if any(times > 1 for times in runs.values()):
        found.append("repeats nine words in a row")
    if "<|" in story or "�" in story:
        found.append("has marks that are no text")
    if story.count('"') % 2:
        found.append("a quotation does not end")
    found += [f"article: {wrong}" for wrong in re.findall(r"\ba [aeio]\w+|\ban [bcdfgjklmnpqrstvwxyz]\w+", story)]
    return found


def _characters(prompt: str, story: str) -> set[str]:
    """The kinds of beings in it, known to us or not: who has a name or speaks is one."""
    speaking = re.findall(rf"(?:{_SAID}) the (\w+)|\bthe (\w+) (?:{_SAID})\b", story, re.IGNORECASE)
    named = re.findall(r"\b(\w+)(?: named [A-Z]|, who)", story)
    kinds = {*named, *(one or other for one, other in speaking), *_phrases(prompt)}
    return {kind.lower() for kind in kinds} - _ADJECTIVES - _THINGS - _NOBODY | {k for k in _CHARACTERS if k in story}


def _out_of_nowhere(prompt: str, story: str) -> list[str]:
    """ "the bear" before any bear was told of, and names that nobody was given."""
    found = []
    lower, asked = story.lower(), prompt.lower()
    watched = _characters(prompt, story) | {thing for thing in _THINGS if thing in lower} - _ALWAYS_THERE
    for word in watched:
        first = re.search(rf"\bthe {re.escape(word)}\b", lower)
        if first is None or re.search(rf"\b\w+ {re.escape(word)}\b", lower[: first.start() + 4]):
            continue
        whole = any(word in other and other != word and f"the {other}" in lower for other in watched)
        if not whole and f"the {word}" not in asked and lower[first.end() : first.end() + 1] != "'":
            found.append(f"'the {word}' comes out of nowhere")
    given = re.findall(r"\b(?:named|called) (\w+)", story) + [name for name, _ in _NAME_THE_KIND.findall(story)]
    known = {*given, *_names(prompt), *_CAPITALS}
    known |= {word.capitalize() for word in re.findall(r"\w+", prompt)}
    used = re.findall(r"(?<![.!?\"\n] )(?<![.!?]\" )(?<=[\w,;:] )([A-Z]\w+)", story)
    return found + [f"nobody was named {name!r}" for name in sorted(set(used) - known)]


def _kinds_of_names(prompt: str, story: str) -> list[str]:
    """A name stands for one being of one kind."""
    text = f"{prompt}\n{story}"
    pairs = re.findall(r"\b(\w+) (?:named|called) ([A-Z]\w+)", text)
    names = {name for _, name in pairs} | {*world.HER_NAMES, *world.HIS_NAMES}
    pairs += [(kind, name) for name, kind in _NAME_THE_KIND.findall(text) if name in names]
    kinds: dict[str, set[str]] = {}
    for kind, name in pairs:
        kinds.setdefault(name, set()).add(kind.lower().split()[-1])
    return [f"{name} is {' and '.join(sorted(found))}" for name, found in kinds.items() if len(found) > 1]


def _pronouns(prompt: str, story: str) -> list[str]:
    """Until a second being comes, "he" or "she" is the first one, and does not change."""
    kinds = "|".join(sorted(map(re.escape, _characters(prompt, story)), key=len, reverse=True))
    beings = (
        [match.start() for match in re.finditer(rf"\b(?:an?|his|her|some|two) (?:[\w-]+ )?(?:{kinds})\b", story, re.I)]
        if kinds
        else []
    )
    alone = story[: beings[1]] if len(beings) > 1 else story
    genders = {
        bool(word.lower().startswith("s") or word.lower().startswith("her"))
        for word in re.findall(r"\b(?:he|she|his|her|him|herself|himself)\b", alone, re.I)
    }
    return ["the hero changes between he and she"] if len(genders) > 1 and len(beings) > 1 else []


def check(prompt: str, story: str) -> list[str]:
    """What is wrong with a story told for a prompt; nothing where it is accepted."""
    judges = (_follows, _out_of_nowhere, _kinds_of_names, _pronouns)
    return [*_shape(story), *(problem for judge in judges for problem in judge(prompt, story))]


_NUMBER_WORDS = {sums.words(number): number for number in range(101)}
_NUMBER = r"\d+|" + "|".join(sorted(_NUMBER_WORDS, key=len, reverse=True))
_SUM = re.compile(rf"\b({_NUMBER})\s*(\+|-|\*|x|plus|minus|times)\s*({_NUMBER})\b", re.IGNORECASE)
_SIGNS = {"plus": "+", "minus": "-", "times": "*", "x": "*"}
_LESS = re.compile(r"\b(?:gives|loses|sells|eats|away|drops)\b")


def _value(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else _NUMBER_WORDS[text.lower()]


def arithmetic(question: str, answer: str) -> bool:
    """Whether the answer to a sum, or to a small story with two numbers, is right: its last number counts."""
    if asked := _SUM.search(question):
        left, sign, right = asked.groups()
    else:
        left, right = re.findall(r"\d+", question)[:2]
        sign = "-" if _LESS.search(question) else "+"
    expected = sums.result(_value(left), _SIGNS.get(sign.lower(), sign), _value(right))
    said = re.findall(rf"(?<![\w-])(?:-\d+|{_NUMBER})(?![\w-])", answer, re.IGNORECASE)
    return bool(said) and _value(said[-1]) == expected

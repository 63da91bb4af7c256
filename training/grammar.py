"""Sentences with choices: `{slot}` takes the story's word, `(one|other)` takes one of them, and articles agree.

A slot whose name begins with a capital gives its word with a capital. A slot's value is a word, a tuple to choose from,
or a list that is used up from the front (its last word stays).
"""

import re
from pathlib import Path
from random import Random

_PART = re.compile(r"\{(\w+)\}|\(([^()|]*\|[^()]*)\)")
# Not before a "u" that is said as "you".
_ARTICLE = re.compile(r"\b([Aa]) (?=hour|honest|[aeio]|u(?!ni[cfqtv]|kulele|se))")
Template = list  # of str, (slot, capital) and lists of templates
Slots = dict  # of str, tuple and list


def parse(text: str) -> Template:
    parts: Template = []
    end = 0
    for match in _PART.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        slot, choices = match.groups()
        if slot:
            parts.append((slot[0].lower() + slot[1:], slot[0].isupper()))
        else:
            parts.append([parse(choice) for choice in choices.split("|")])
        end = match.end()
    return [*parts, text[end:]] if end < len(text) else parts


def fill(template: Template, slots: Slots, random: Random) -> str:
    """The template's text, without the agreement of articles: `agree` sees to a whole story at once."""
    out = []
    for part in template:
        if type(part) is str:
            out.append(part)
        elif type(part) is tuple:
            word = slots[part[0]]
            if type(word) is tuple:
                word = word[int(random.random() * len(word))]
            elif type(word) is list:
                word = word.pop(0) if len(word) > 1 else word[0]
            out.append(word[0].upper() + word[1:] if part[1] else word)
        else:
            out.append(fill(part[int(random.random() * len(part))], slots, random))
    return "".join(out)


def agree(text: str) -> str:
    """ "a owl" to "an owl"."""
    return _ARTICLE.sub(r"\1n ", text)


def say(template: Template, slots: Slots, random: Random) -> str:
    """One sentence, agreed and with a capital."""
    text = agree(fill(template, slots, random))
    return text[0].upper() + text[1:]


def blocks(name: str) -> dict[str, list[str]]:
    """A text file beside this one: its lines under their headings, blocks apart by an empty line."""
    found = {}
    for block in (Path(__file__).parent / name).read_text(encoding="utf-8").split("\n\n"):
        heading, *lines = block.strip().splitlines()
        found[heading] = lines
    return found


def sections(name: str) -> dict[str, list[Template]]:
    """The same, of templates."""
    return {heading: [parse(line) for line in lines] for heading, lines in blocks(name).items()}

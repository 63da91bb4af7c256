"""Conversations: what the embedded model is trained on, made from a random generator without end.

The pairs of creature and thing, and the sums, that are held out (plans.held_out, sums.held_out) are in no conversation;
the prompts and sums at the end of this file are made of nothing else.
"""

from random import Random

from . import plans, questions, stories, sums, talk
from .plans import pick

Message = dict[str, str]

# Of a hundred conversations. Sums are short, so they need more of them than their share of the text.
MIX = {"one_story": 38, "story_and_questions": 20, "some_sums": 18, "some_exercises": 8, "some_talk": 8, "all_sorts": 8}
LONG_MIX = {"many_turns": 40, "pasted_stories": 45, "pasted_list": 15}
SYSTEM_SHARE = 0.2
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful, honest assistant. Use simple words.",
    "You are a friendly assistant.",
    "You are a kind storyteller.",
    "You are tiny, a small model that comes with halfbyte.",
    "You tell stories.",
    "Answer briefly.",
    "Be kind.",
)
CHARACTERS_A_TOKEN = {
    "many_turns": 3.0,
    "pasted_stories": 3.8,
    "pasted_list": 1.9,
}  # measured, with the marks between turns


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _length(random: Random) -> str:
    chance = random.random()
    return "short" if chance < 0.1 else "long" if chance < 0.16 else ""


def _story(random: Random, again: bool = False) -> tuple[list[Message], plans.Plan]:
    """A request and its story. Words that mean nothing come from the request: the model copies them, it coins none."""
    while True:
        plan, length = plans.plan(random), _length(random)
        asked, told = stories.prompt(random, plan, length, again), stories.story(random, plan, length)
        if not any(word in told and word.lower() not in asked.lower() for word in plan.made_up):
            return _turn(asked, told), plan


def one_story(random: Random) -> list[Message]:
    return _story(random)[0]


def story_and_questions(random: Random, again: bool = False) -> list[Message]:
    turns, plan = _story(random, again)
    for question, answer in questions.several(random, plan, turns[-1]["content"], 1 + int(random.random() * 5)):
        turns += _turn(question, answer)
    return turns


def some_sums(random: Random) -> list[Message]:
    turns = []
    for _ in range(1 + int(random.random() * 8)):
        turns += _turn(*(sums.sum_of(random) if random.random() < 0.8 else sums.word_problem(random)))
    return turns


def some_exercises(random: Random) -> list[Message]:
    return [message for _ in range(1 + int(random.random() * 4)) for message in _turn(*sums.exercise(random))]


def some_talk(random: Random) -> list[Message]:
    return [message for _ in range(1 + int(random.random() * 3)) for message in _turn(*talk.exchange(random))]


def all_sorts(random: Random, characters: int = 0) -> list[Message]:
    """Turns of every kind, in any order, up to about this many characters."""
    turns: list[Message] = _turn(*talk.exchange(random, "greeting")) if random.random() < 0.3 else []
    wanted = characters or 800 + int(random.random() * 2400)
    size = 0
    while size < wanted:
        chance = random.random()
        if chance < 0.4:
            new = story_and_questions(random, again=bool(turns))
        elif chance < 0.65:
            new = some_sums(random)[:4]
        elif chance < 0.85:
            new = some_exercises(random)[:4]
        else:
            new = _turn(*talk.exchange(random))
        size += sum(len(message["content"]) for message in new)
        turns += new
    return turns


def many_turns(random: Random, characters: int) -> list[Message]:
    return all_sorts(random, characters)


def _asked_of(random: Random, text: str, told: list[tuple[plans.Plan, str]]) -> tuple[str, str]:
    """A long text, and at its end something to do: a question about one of its stories, or a story of its own."""
    chance = random.random()
    if chance < 0.45:
        turns, _ = _story(random)
        question, answer = turns[0]["content"], turns[1]["content"]
    elif chance < 0.9:
        plan, story = pick(random, told)
        question, answer = questions.about(random, plan, story, named=True)
    else:
        (plan, _), which = (told[0], "first") if chance < 0.95 else (told[-1], "last")
        question, answer = f"What is the {which} story about?", questions.summary(random, plan)
    if random.random() < 0.2:
        return f"{question}\n\n{text}", answer
    return f"{text}\n\n{question}", answer


def pasted_stories(random: Random, characters: int) -> list[Message]:
    """No two of its stories have the same hero, so a question that names one has one answer."""
    told: list[tuple[plans.Plan, str]] = []
    heroes: set[str | None] = set()
    size, numbered = 0, random.random() < 0.3
    while size < characters:
        plan = plans.plan(random)
        cast = {plan.hero.kind, plan.friend.kind, plan.name, plan.friend_name} - {None}
        if cast & heroes:
            if random.random() < 0.1:
                characters -= 100  # the names are nearly used up
            continue
        heroes |= cast
        told.append((plan, stories.story(random, plan)))
        size += len(told[-1][1]) + 2
    texts = [f"Story {index}\n{story}" if numbered else story for index, (_, story) in enumerate(told, 1)]
    opening = pick(random, ("", "", "Read this:\n\n", "Here are some stories.\n\n", "This is a long text.\n\n"))
    turns = _turn(*_asked_of(random, opening + "\n\n".join(texts), told))
    if random.random() < 0.5:
        plan, story = pick(random, told)
        turns += _turn(*questions.about(random, plan, story, named=True))
    return [*turns, *one_story(random)] if random.random() < 0.3 else turns


def pasted_list(random: Random, characters: int) -> list[Message]:
    items = []
    size = 0
    while size < characters:
        word = plans.creature(random).kind if random.random() < 0.5 else plans.thing(random).word
        items.append(word)
        size += len(word) + 2
    text = pick(random, (", ", "\n")).join(items)
    chance = random.random()
    if chance < 0.3:
        which, item = ("first", items[0]) if chance < 0.15 else ("last", items[-1])
        return _turn(f"{text}\n\nWhat is the {which} word of this list?", f"The {which} word is {item}.")
    if chance < 0.8:
        turns = one_story(random)
    else:
        turns = _turn(*sums.sum_of(random))
    return _turn(f"{text}\n\n{turns[0]['content']}", turns[1]["content"])


def conversation(random: Random, tokens: int | None = None) -> list[Message]:
    """Messages of a conversation: a short one, or one of about `tokens` tokens."""
    mix = MIX if tokens is None else LONG_MIX
    kind = random.choices(list(mix), list(mix.values()))[0]
    make = globals()[kind]
    turns = make(random) if tokens is None else make(random, int(tokens * CHARACTERS_A_TOKEN[kind]))
    if random.random() < SYSTEM_SHARE:
        turns = [{"role": "system", "content": pick(random, SYSTEM)}, *turns]
    return turns


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Requests for stories about pairs that were never trained on; the first is the one that everybody tries."""
    random = Random(f"held out {seed}")
    asked = ["Tell me a story about a fox and a lantern."]
    while len(asked) < count:
        plan = plans.plan(random, unseen=True)
        prompt = stories.prompt(random, plan)
        if plan.thing.word in prompt and plan.hero.kind in prompt:
            asked.append(prompt)
    return asked[:count]


def held_out_sums(count: int, seed: int = 0) -> list[str]:
    """Questions for sums that were never trained on; checker.arithmetic knows the answers."""
    random = Random(f"held out {seed}")
    return [sums.sum_of(random, unseen=True)[0] for _ in range(count)]

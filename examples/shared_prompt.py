"""A long beginning, computed once: its state is kept, and every question goes on from a copy of it."""

import sys
import time
from itertools import takewhile

import halfbyte

STORY = """Once upon a time, there was a fox named Toby who lived in the woods. Every night Toby lit a shiny lantern
before he went to sleep. One night, a strange voice called from outside: "Help! I am lost!" Toby took the lantern and
walked out into the night. There sat a clever owl. "I saw your light!" she cried. The lantern showed them every turn of
the way, and soon they were safe."""

model, tokenizer = halfbyte.load(sys.argv[1] if len(sys.argv) > 1 else "tiny")
questions = ["Where did Toby live?", "Who is the story about?", "Is there an owl in the story?"]
prompts = [tokenizer.apply_chat_template([{"role": "user", "content": f"{STORY}\n\n{each}"}]) for each in questions]
shared = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))]

start = time.perf_counter()
logits, cache = halfbyte.logits(model, shared)  # [tokens, vocabulary]: what the model expects after each of them
beginning = cache.snapshot(0)
print(f"{len(shared)} shared tokens in {time.perf_counter() - start:.2f} s")

for question, prompt in zip(questions, prompts, strict=True):
    cache.restore(0, beginning)
    start = time.perf_counter()
    reply = halfbyte.generate(model, tokenizer, prompt[len(shared) :], max_tokens=30, temperature=0, prompt_cache=cache)
    print(f"{question} {reply} ({len(prompt) - len(shared)} new tokens, {time.perf_counter() - start:.2f} s)")

if model.device.type == "cpu":  # there a kept state equals a recomputed one, bit for bit
    assert reply == halfbyte.generate(model, tokenizer, prompt, max_tokens=30, temperature=0)

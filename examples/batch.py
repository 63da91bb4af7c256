"""Several prompts at once: weights are read once for all. On a CPU every reply is the one it would be alone."""

import sys

from halfbyte import batch_generate, generate, load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "tiny")
pairs = ["a fox and a lantern", "an owl and a key", "a bear and a boat", "a mouse and a drum"]
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": f"Tell me a story about {pair}."}]) for pair in pairs
]

replies = batch_generate(model, tokenizer, prompts, max_tokens=300, seed=1)
for pair, text in zip(pairs, replies.texts, strict=True):
    print(f"{pair}: {text}\n")
print(f"{replies.stats.generation_tokens} tokens, {replies.stats.generation_tps:.0f} a second together")

if model.device.type == "cpu":  # a reply's bits do not depend on its neighbours, so this holds exactly
    assert generate(model, tokenizer, prompts[0], max_tokens=300, seed=1) == replies.texts[0]

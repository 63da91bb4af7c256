"""Convert a model to other bits, and measure what that cost: perplexity, and the distance from the original."""

import sys
import tempfile
from pathlib import Path

from halfbyte import convert, generate, load
from halfbyte.hub import locate
from halfbyte.quality import quality

original = locate(sys.argv[1] if len(sys.argv) > 1 else "tiny")
base, tokenizer = load(original)

# A text to measure on: here a reply of the original itself. For a model of your own, take text that you care about.
turns = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
reply = generate(base, tokenizer, tokenizer.apply_chat_template(turns), seed=1)
turns.append({"role": "assistant", "content": reply})
ids = tokenizer.apply_chat_template(turns, add_generation_prompt=False)
print(f"original   perplexity {quality(base, ids).perplexity:6.2f}")

with tempfile.TemporaryDirectory() as folder:
    for bits in (6, 3, 2):
        copy = Path(folder) / f"{bits}bit"
        plan = convert(original, copy, quantize=True, q_bits=bits, q_group_size=64)  # mlx-lm loads the result, too
        model, _ = load(copy)
        found = quality(model, ids, base)
        print(
            f"{plan.bits_per_weight:.1f} bits   perplexity {found.perplexity:6.2f}   "
            f"{found.kl:.4f} nats from the original, same guess {found.agreement:.0%}"
        )

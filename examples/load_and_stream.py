"""Load a model and print its reply as it comes. `tiny` is built in; any MLX checkpoint's folder or hub name will do."""

import sys

from halfbyte import load, stream_generate

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "tiny")
question = {"role": "user", "content": "Tell me a story about a fox and a lantern."}
prompt = tokenizer.apply_chat_template([question])

for piece in stream_generate(model, tokenizer, prompt, max_tokens=300, seed=1):
    print(piece.text, end="", flush=True)

print(f"\n\n{piece.generation_tokens} tokens, {piece.generation_tps:.0f} a second; it ended by {piece.finish_reason!r}")

"""A model that memory has no room for: most experts stay in its files, and the reply is the same to the last bit.

python examples/bigger_than_memory.py [MODEL] [SIZE in bytes]
"""

import sys

import halfbyte

name = sys.argv[1] if len(sys.argv) > 1 else "tiny"
budget = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000  # of experts in memory; the tiny model has 3.5 MB
question = "Tell me a story about a fox and a lantern."

model, tokenizer = halfbyte.load(name, device="cpu", expert_cache=budget)
prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
before = model.residency.reads
reply = halfbyte.generate(model, tokenizer, prompt, max_tokens=60, temperature=0)
print(reply)

reads = model.residency.reads - before
print(f"\n{model.residency.nbytes / 1e6:.1f} MB of experts in memory: {reads.hit_rate:.0%} of those that were needed")
print(f"{reads.bytes / 1e6:.1f} MB read from the files, at {reads.bytes / reads.seconds / 1e9:.2f} GB/s")

if name == "tiny":  # which has room, so the claim can be checked
    whole, _ = halfbyte.load(name, device="cpu")
    assert reply == halfbyte.generate(whole, tokenizer, prompt, max_tokens=60, temperature=0)
    print("the reply is that of the whole model")

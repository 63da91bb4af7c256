"""Small real tokenizers of the kinds that models ship, trained on a few sentences, and model folders around them."""

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Weather in Oslo? Minus three degrees, and snow tomorrow!\n\nBring a coat.",
    "naïve café, 東京 and Москва, 🙂 smiles",
    'def main():\n    return {"city": "Oslo", "days": 2}',
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<b>"]  # noqa: RUF001 (DeepSeek's)

TEMPLATE = """\
{%- macro turn(role, text) -%}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- set state = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}{% set state.last = loop.index0 %}{% endfor %}
{%- if tools %}{{ turn('system', '<tools>' ~ tools | tojson ~ '</tools>') }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected role ' ~ message.role) }}
    {%- endif %}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- turn('assistant', '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' + message.content) }}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- turn('assistant', message.content.split('</think>')[-1].lstrip('\\n')) }}
        {%- continue %}
    {%- endif %}
    {{- turn(message.role, message.content | trim) }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{% endif %}
{%- endif %}"""


def _with_added(tokenizer):
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    return tokenizer


@cache
def byte_level():
    """As Qwen's and DeepSeek's: characters are bytes, and may span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _with_added(tokenizer)


@cache
def byte_fallback(strip=0):
    """As Gemma's (strip 0) and Llama's (strip 1): a sign for spaces, bytes for what has no token.

    Control tokens stand in the model's own vocabulary too, as there.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    learner.train_from_iterator([SENTENCES[0], SENTENCES[1]], trainer)
    learned = json.loads(learner.to_str())["model"]
    first = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*first, *learned["vocab"]]
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", strip, 0)] if strip else []
    start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*start, *ends])
    return _with_added(tokenizer)


@cache
def metaspace():
    """As T5's: the space before a word is in its token, and the first one is dropped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    return _with_added(tokenizer)


def save(folder, tokenizer=None, template=TEMPLATE, **files):
    """A model folder: tokenizer.json, chat_template.jinja, and each of `files` (name without .json) as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder

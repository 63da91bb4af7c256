"""The embedded model's tokenizer: byte-level BPE, digits one by one, and the files that stand around it in a folder.

python -m training.tokenizer FOLDER
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .conversations import conversation

END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
POSITIONS = 8192
# Qwen's: letters with the sign or space before them, single digits (so that sums can be learned), signs, white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


def train(samples: Iterable[str], size: int = 3072) -> Tokenizer:
    """A tokenizer of at most `size` tokens. No normaliser: every text comes back as it went in, by its bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def text(messages: list[dict[str, str]]) -> str:
    """A whole conversation as the chat template writes it."""
    return "".join(f"{TURN_START}{one['role']}\n{one['content']}{TURN_END}\n" for one in messages)


def write(folder: Path, tokenizer: Tokenizer, sampling: Mapping[str, Any] = SAMPLING) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    generation = {"eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT], **sampling}
    for name, value in (("tokenizer_config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    random = Random("tokenizer")
    write(Path(sys.argv[1]), train(text(conversation(random)) for _ in range(30_000)))

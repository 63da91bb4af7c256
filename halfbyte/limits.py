"""Every limit on what comes from outside, once. Beyond one, input is refused before memory is taken for it."""

from __future__ import annotations

# Files of a checkpoint, in bytes.
CONFIG_BYTES = 16 << 20
INDEX_BYTES = 64 << 20
HEADER_BYTES = 100_000_000  # the safetensors package's own
TOKENIZER_BYTES = 256 << 20

# Recorded routes of a model.
ROUTES_BYTES = 256 << 20

# What may stand in them.
JSON_DEPTH = 64
NAME_CHARACTERS = 1024
INTEGER_DIGITS = 20  # enough for 64 bits
DIMENSIONS = 8
DIMENSION = 1 << 31  # below
FILE_BYTES = 1 << 62

# Sizes of a model.
LAYERS = 1024
EXPERTS = 65_536
VOCABULARY = 4 << 20
HIDDEN = 131_072
CONTEXT = 1 << 27
SIZE = 1 << 20  # of what is not named
SIZES = {  # by key of config.json
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": HIDDEN,
    "max_position_embeddings": CONTEXT,
}

# A chat template: seconds, bytes of memory, bytes of text.
TEMPLATE_SECONDS = 2.0
TEMPLATE_MEMORY = 256 << 20
TEMPLATE_OUTPUT = 16 << 20

# A schema or a grammar: seconds, bytes of memory, bytes of what is said of it.
SCHEMA_SECONDS = 2.0
SCHEMA_MEMORY = 512 << 20
SCHEMA_OUTPUT = 1 << 16

# A request.
STOP_STRINGS = 16
STOP_BYTES = 1024
LOGIT_BIASES = 1024
TOP_LOGPROBS = 20
TEMPERATURE = 5.0
PENALTY = 2.0  # presence and frequency, either sign
REPETITION = 10.0

# A saved conversation.
CONVERSATION_BYTES = 8_000_000
MESSAGES = 4096

# A message that lists names stops here.
NAMES_SHOWN = 10

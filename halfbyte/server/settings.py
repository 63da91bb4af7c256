"""Every setting and limit of the server, once. Each is a flag of `halfbyte serve` of the same name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .. import limits


def limit(default: Any, help: str, metavar: str = "N", least: int = 1) -> Any:
    """`least`: what a whole number may be; other numbers are above 0, or 0 with a `least` of 0."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "least": least})


@dataclass(frozen=True)
class Settings:
    """Beyond a limit a request is refused, before memory or time is spent on it."""

    max_concurrency: int = limit(32, "requests that are answered at a time")
    max_queue: int = limit(1024, "requests that may wait; more get 429", least=0)
    max_connections: int = limit(1024, "open connections; more get 503")
    max_context: int = limit(
        0, "tokens of a prompt and its reply; 0: the model's context, as far as memory goes", least=0
    )
    prompt_cache_bytes: int = limit(
        -1, "of the beginnings of prompts that are kept; -1: a tenth of memory", "BYTES", least=-1
    )
    max_body_mb: float = limit(8.0, "of a request", "MB")
    max_json_depth: int = limit(64, "levels of a request's JSON")
    max_header_kb: int = limit(64, "of a request's headers", "KB")
    max_headers: int = limit(100, "lines of a request's headers")
    header_seconds: float = limit(
        10.0, "a client may take to send its headers, and again for each 64 KB of its body", "S"
    )
    max_tokens_default: int = limit(1024, "of a reply that asks for no number")
    max_n: int = limit(8, "replies that one request may ask for, over all its prompts")
    max_top_logprobs: int = limit(limits.TOP_LOGPROBS, "of the likeliest tokens told with each token", least=0)
    max_stop: int = limit(limits.STOP_STRINGS, "stop strings of a request", least=0)
    max_stop_bytes: int = limit(limits.STOP_BYTES, "of a stop string", "BYTES")
    max_logit_bias: int = limit(limits.LOGIT_BIASES, "tokens that a request may make likelier or less likely", least=0)
    max_tools: int = limit(128, "tools of a request", least=0)
    max_schema_kb: int = limit(64, "of a schema or a grammar, and of a tool", "KB")
    schema_seconds: float = limit(limits.SCHEMA_SECONDS, "of compiling a schema or a grammar", "S")
    max_messages: int = limit(4096, "of a conversation")
    max_parts: int = limit(256, "of one message")
    max_items: int = limit(8192, "of a conversation: messages, their parts and calls of tools together")
    template_seconds: float = limit(limits.TEMPLATE_SECONDS, "of the chat template over a conversation", "S")
    template_mb: int = limit(limits.TEMPLATE_MEMORY >> 20, "of memory that the chat template may take", "MB")
    template_output_mb: int = limit(limits.TEMPLATE_OUTPUT >> 20, "of text that the chat template may make", "MB")
    stream_buffer_kb: int = limit(1024, "of a reply that its reader has not taken", "KB")
    slow_reader_seconds: float = limit(60.0, "a reader may take nothing, then it is dropped", "S")
    ping_seconds: float = limit(15.0, "of silence in a stream, then a comment keeps it alive", "S")
    step_seconds: float = limit(60.0, "of one step of the engine; longer is hung", "S")
    drain_seconds: float = limit(30.0, "that replies under way are given to end after SIGTERM", "S", least=0)

    @property
    def body_bytes(self) -> int:
        return int(self.max_body_mb * 1e6)

    def prompt_bytes(self, context: int) -> int:
        """No text of more bytes can be a prompt: it is not even tokenised."""
        return min(self.body_bytes, 16 * context)

    @classmethod
    def flags(cls) -> list[tuple[str, type, Any, str, str, int]]:
        """Name, type, default, metavar, help and the least value of each."""
        kinds = {"int": int, "float": float}
        told = ("metavar", "help", "least")
        return [(one.name, kinds[str(one.type)], one.default, *(one.metadata[name] for name in told))
                for one in fields(cls)]  # fmt: skip

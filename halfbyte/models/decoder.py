"""What every model here is: an embedding, layers, a norm and a head. A family makes the layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import limits
from ..cache import Cache, Kept
from ..checkpoint import Weights
from ..checkpoint.mapping import Guard
from ..config import Config
from ..device_experts import DeviceResidency
from ..ops.dispatch import cpu_activations
from ..residency import Residency
from ..step import Step
from ..tiered_experts import TieredResidency
from .layers import Embedding, Linear, Norm


class Mixer(Protocol):
    """What lets tokens see each other: attention in one of its forms, or a recurrence."""

    @property
    def kept(self) -> Kept: ...

    def __call__(self, x: Tensor, step: Step, kept: dict[str, Tensor]) -> Tensor: ...


class Layer:
    """h + mixer(norm h), then h + mlp(norm h)."""

    def __init__(
        self,
        weights: Weights,
        H: int,
        eps: float,
        mixer: Mixer,
        mlp: Callable[[Tensor], Tensor],
    ) -> None:
        self.before = Norm(weights, "input_layernorm", H, eps)
        self.between = Norm(weights, "post_attention_layernorm", H, eps)
        self.mixer, self.mlp, self.kept = mixer, mlp, mixer.kept
        self.foresee: Callable[[Tensor, torch.dtype], None] | None = None  # told of h, where experts may come early

    def __call__(self, h: Tensor, r: Tensor | None, step: Step, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The stream h and what the layer before adds to it, to the same of this layer."""
        x, h = self.before.after(h, r, step.dtype)
        x, h = self.between.after(h, self.mixer(x, step, kept), step.dtype)
        if self.foresee is not None:
            self.foresee(h, step.dtype)
        return h, self.mlp(x)


class Decoder:
    """ids -> logits. `context` is the longest text the model was made for; `kept` what its layers keep of a request.

    `own_head`: a head in the file counts, whatever the config says of tied ones.
    """

    USUAL_CONTEXT = 131072  # where the config does not say, as mlx-lm takes it

    def __init__(
        self, config: Config, weights: Weights, H: int, eps: float, *, tied: bool = False, own_head: bool = False
    ) -> None:
        self.model_type, self.device, self.dtype = config.model_type, weights.device, torch.float32
        self.vocabulary = config.integer("vocab_size", 1, limits.VOCABULARY)
        self.context = config.integer("max_position_embeddings", 1, default=self.USUAL_CONTEXT)
        self.embedding = Embedding(weights, "embed_tokens", self.vocabulary, H)
        self.norm = Norm(weights, "norm", H, eps)
        self.tied = config.flag("tie_word_embeddings", default=tied) and not (own_head and "lm_head" in weights)
        self.head = self.embedding.project if self.tied else Linear(weights, "lm_head", self.vocabulary, H)
        if self.tied:
            weights.skip("lm_head")
        self.expert_count = self.experts_per_token = 0  # of a layer; a mixture says how many
        self.fingerprint = ""  # of the checkpoint, once it is loaded
        self.nbytes: int | None = None  # of all weights, then
        # Where its experts are, if not all in one memory.
        self.residency: Residency | DeviceResidency | TieredResidency | None = None
        self._turns = RLock()
        self.guard: Guard | None = None  # of the files, where weights are maps of them
        self.compiled = False  # whether compilation.py has seen to its kernels
        self.layers: list[Any] = []
        self.further = 0  # layers of the file behind these that are no part of the model

    @staticmethod
    def places(config: Config, weights: Weights) -> list[Weights]:
        """The weights of each layer."""
        count = config.integer("num_hidden_layers", 1, limits.LAYERS)
        return [weights / f"layers.{index}" for index in range(count)]

    @property
    def further_layers(self) -> range:
        """Layers in the file, behind the model's, that predict tokens beyond the next: not used."""
        return range(len(self.layers), len(self.layers) + self.further)

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Around a step. Threads whose experts are lent to one step at a time wait for each other here."""
        return nullcontext() if self.residency is None else self._turns

    @property
    def kept(self) -> list[Kept]:
        return [layer.kept for layer in self.layers]

    @property
    def made_by(self) -> str:
        """Whose states it makes: those of a checkpoint and, on a CPU, also of how products are rounded."""
        rounded = self.device.type == "cpu" and cpu_activations() != "f32"
        return f"{self.fingerprint} {cpu_activations()}" if rounded else self.fingerprint

    @property
    def chunk(self) -> int:
        """Tokens that a request may bring in one step, where nobody says how many."""
        return 512 if self.device.type == "cpu" else 2048

    def owns(self, cache: Cache) -> bool:
        """Whether it can go on with the states of a cache: those of another model it would read without a word."""
        return self.made(cache.made_by, cache.dtype, cache.device.type, list(cache.kept))

    def made(self, made_by: str, dtype: torch.dtype, device: str, kept: list[Kept]) -> bool:
        """Whether states that are said to be so are this model's."""
        return (made_by, dtype, device, kept) == (self.made_by, self.dtype, self.device.type, self.kept)

    def new_cache(
        self, slots: int = 1, capacity: int = 0, chunk: int | None = None, padding: int | None = None
    ) -> Cache:
        """Room for requests of this model. `chunk` is how many tokens a request may bring in one step."""
        chunk = chunk or self.chunk
        if self.device.type != "cpu":  # GPU kernels are compiled anew for a size that 16 does not divide
            capacity = -(-capacity // 16) * 16
        cache = Cache(self.kept, slots, capacity, chunk=chunk, device=self.device, dtype=self.dtype, padding=padding)
        cache.made_by = self.made_by
        return cache

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """The logits [wanted, V] of a step, in the dtype of the activations. The cache takes in the step's tokens."""
        h, r = self.embedding(step.ids, torch.float32), None
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            h, r = layer(h, r, step, kept)
        return self.logits(h, r, step)

    def logits(self, h: Tensor, r: Tensor | None, step: Step) -> Tensor:
        if step.wanted is not None:
            h, r = h[step.wanted], None if r is None else r[step.wanted]
        return self.head(self.norm.after(h, r, step.dtype)[0])

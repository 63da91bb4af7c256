"""What models are built from: the tensors of a checkpoint, by name, below a prefix.

A skeleton, `w = checkpoint.weights("meta")`, reads nothing and collects every fault of what is asked for; after
`model = Model(config, w)`, `w.finish(further)` raises with all that is missing, misshapen or left over, and
`Model(config, w.load("cuda"))` is the same model, filled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .. import limits, memory
from ..errors import CheckpointError, UsageError, shown
from ..ops.experts import Experts, Lender
from ..ops.formats import Packed
from . import finite, names
from .finite import Check
from .ledger import PARTS, Ledger, Mixture
from .mapping import map_files
from .quantisation import FLOAT_KINDS, Mismatch
from .reading import STAGING, Progress, read
from .spans import Span, stacked

log = logging.getLogger(__name__)
Load = Literal["read", "map"]


class Weights:
    def __init__(self, ledger: Ledger, prefix: str = "") -> None:
        self.ledger, self.prefix = ledger, prefix

    @property
    def device(self) -> torch.device:
        return self.ledger.device

    def __truediv__(self, name: str) -> Weights:
        return Weights(self.ledger, f"{self._full(name)}.")

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor or a module of this name."""
        return self.ledger.checkpoint.has(self._full(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape of a tensor; None where there is none of this name."""
        stored = self.ledger.checkpoint.tensors.get(self._full(name))
        return None if stored is None else stored.shape

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A float tensor of exactly this shape; `name` is the whole name, as "norm.weight" or "A_log"."""
        full = self._full(name)
        return self._dense(full, shape, self.ledger.span(full))

    def linear(self, name: str, N: int, K: int, lead: tuple[int, ...] = ()) -> Packed | Tensor:
        """The weight [*lead, N, K] of a module: quantised if it has scales, else dense."""
        full = self._full(name)
        return self._matrix(full, (*lead, N, K), self._parts(full), [full])

    def experts(self, name: str, E: int, I: int, H: int) -> Experts | Lender:  # noqa: E741
        """Gate and up [E, I, H] and down [E, H, I], stacked as mlx does, or gathered into stacks; or who lends them."""
        full = self._full(name)
        if full in self.ledger.lenders:
            return self.ledger.lenders[full]
        shapes = {"gate_proj": (E, I, H), "up_proj": (E, I, H), "down_proj": (E, H, I)}
        (gate, of_gate), (up, of_up), (down, of_down) = (self._projection(full, *one) for one in shapes.items())
        found = Experts(gate, up, down)
        if self.ledger.skeleton:
            self.ledger.mixtures[full] = Mixture(found, (of_gate, of_up, of_down))
        return found

    def skip(self, name: str) -> None:
        """Leave out a module or tensor that this model has no use for (a tied lm_head, keys of a layer that shares)."""
        full = self._full(name)
        tensors = self.ledger.checkpoint.tensors
        self.ledger.taken |= {one for one in tensors if one == full or one.startswith(f"{full}.")}

    def finish(self, further: range = range(0)) -> None:
        """Raise with everything found wrong, leftovers included. Layers that are `further` ones are left out."""
        checkpoint, problems = self.ledger.checkpoint, list(self.ledger.problems)
        out: Counter[str] = Counter()
        for name in sorted(checkpoint.tensors.keys() - self.ledger.taken):
            reason = names.left_out(name, further)
            if reason is None:
                problems.append(f"{shown(name)}: the model has no use for this tensor")
            else:
                out[reason] += 1
        if problems:
            many = f"\n  and {len(problems) - limits.NAMES_SHOWN} more" if len(problems) > limits.NAMES_SHOWN else ""
            said = "".join(f"\n  {problem}" for problem in problems[: limits.NAMES_SHOWN])
            raise CheckpointError(
                f"{checkpoint.folder}: its tensors are not those of this model. Either config.json is another "
                f"model's, or files are damaged or missing; `halfbyte pull --force` fetches them anew:{said}{many}"
            )
        if out:
            said = ", ".join(f"{count} of {reason}" for reason, count in out.items())
            log.info("%s: tensors left out: %s", checkpoint.folder, said)

    @property
    def size(self) -> int:
        """Bytes of all tensors that were asked for."""
        return sum(span.size for span in self.ledger.wanted.values())

    def plan(self, device: torch.device | str, *, experts: bool = True) -> dict[torch.device, int]:
        """Bytes that loading a skeleton takes, by device; without `experts`, of all else."""
        target = torch.device(device)
        need = sum(span.size for span in self._spans(experts))
        return {target: need} if target.type == "cpu" else {target: need, torch.device("cpu"): STAGING}

    def _spans(self, experts: bool) -> list[Span]:
        wanted = self.ledger.wanted.values()
        return [span for span in wanted if experts or span.name not in self.ledger.stacks]

    def load(
        self,
        device: torch.device | str = "cpu",
        *,
        load: Load = "read",
        check: Check = "sampled",
        progress: Progress | None = None,
        lenders: Mapping[str, Lender] | None = None,
    ) -> Weights:
        """A skeleton's tensors, all read at once in the order of the files.

        `load`: "read" copies into our memory, "map" shows the files themselves (CPU only; see mapping.py).
        `check`: whether floats are finite: of a few experts and all else, of everything, of nothing.
        progress(done, total) counts bytes; the threads that read call it, one at a time.
        `lenders`: who has the experts, by the names of `Ledger.mixtures`; theirs are not read.
        """
        target, checkpoint, experts = torch.device(device), self.ledger.checkpoint, lenders is None
        spans = self._spans(experts)
        if load == "map" and target.type != "cpu":
            raise UsageError(
                f"weights that stay in the files (map) are for the CPU, not for {target}: run on it (--device cpu), or "
                "read them (--load read)"
            )
        for where, need in self.plan(target, experts=experts).items():
            memory.require(need, where, f"{checkpoint.folder}: loading it")
        if load == "map":
            ready = map_files(checkpoint.states, spans, progress)
        else:
            ready = read(checkpoint.states, spans, target, progress)
        finite.check(checkpoint.folder, ready, self.ledger.stacks, self.ledger.modes, check)
        return Weights(Ledger(checkpoint, target, ready, lenders))

    def _full(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def _parts(self, full: str) -> dict[str, Span]:
        found = {part: self.ledger.span(f"{full}.{part}") for part in PARTS}
        return {part: span for part, span in found.items() if span is not None}

    def _dense(self, full: str, shape: tuple[int, ...], span: Span | None) -> Tensor:
        if span is None:
            self.ledger.complain(full, f"missing; {list(shape)} was expected")
        elif span.kind not in FLOAT_KINDS:
            self.ledger.complain(full, f"{span.kind}; {', '.join(FLOAT_KINDS)} are read")
        elif span.shape != shape:
            self.ledger.complain(full, f"shape {list(span.shape)}; the config makes it {list(shape)}")
        else:
            return self.ledger.fetch(span)
        return torch.empty(shape, device="meta")

    def _matrix(self, full: str, shape: tuple[int, ...], parts: dict[str, Span], paths: list[str]) -> Packed | Tensor:
        weight, quantisation = parts.get("weight"), self.ledger.checkpoint.quantisation
        try:
            if weight is not None and "scales" in parts:
                formats = {quantisation.format(path, shape, parts) for path in paths}
                found = formats.pop()
                self.ledger.note(full, shape, str(found), parts)
                return self._packed(parts, *found)
            for path in paths if weight is not None else ():
                quantisation.check_dense(path)
            if weight is not None and weight.kind == "U32":
                raise Mismatch(".weight is U32, packed codes, but there are no .scales")
            if weight is not None and len(parts) > 1:
                raise Mismatch(f"it has .{list(parts)[1]} but no .scales")
        except Mismatch as mismatch:
            self.ledger.complain(full, str(mismatch))
            return torch.empty(shape, device="meta")
        self.ledger.note(full, shape, weight.kind if weight is not None else "", parts)
        return self._dense(f"{full}.weight", shape, weight)

    def _packed(self, parts: dict[str, Span], bits: int, group: int, mode: str) -> Packed:
        words, scales, *rest = (self.ledger.fetch(parts[part]) for part in PARTS if part in parts)
        biases = rest.pop(0) if mode == "affine" else None
        if mode != "affine":
            self.ledger.modes[parts["scales"].name] = mode
        if biases is not None and biases.dtype != scales.dtype:
            scales, biases = scales.float(), biases.float()
        return Packed(words, scales, biases, bits, group, mode, rest.pop() if rest else None)

    def _projection(
        self, full: str, projection: str, shape: tuple[int, int, int]
    ) -> tuple[Packed | Tensor, dict[str, Span]]:
        path = f"{full}.{projection}"
        parts, paths = self._expert_parts(full, projection, shape)
        self.ledger.stacks |= {span.name for span in parts.values()}
        return self._matrix(path, shape, parts, paths), parts

    def _expert_parts(
        self, full: str, projection: str, shape: tuple[int, int, int]
    ) -> tuple[dict[str, Span], list[str]]:
        E, N, _ = shape
        path, apart, has = f"{full}.{projection}", names.unstacked(full), self.ledger.checkpoint.has
        if has(path):
            return self._parts(path), [path]
        for alias in names.PROJECTIONS[projection]:
            if has(f"{apart}.0.{alias}"):
                paths = [f"{apart}.{expert}.{alias}" for expert in range(E)]
                return self._gathered(path, paths), paths
        fused = f"{apart}.{names.FUSED}"
        if projection != "down_proj" and has(fused):
            start = 0 if projection == "gate_proj" else N
            parts = self._bare_parts(fused)
            halves = {
                part: span.rows(start, start + N) if span.shape[-2:-1] == (2 * N,) else span
                for part, span in parts.items()
            }
            return {part: replace(span, name=f"{path}.{part}") for part, span in halves.items()}, [fused]
        bare = f"{apart}.{projection}"
        return self._bare_parts(bare), [bare]

    def _bare_parts(self, path: str) -> dict[str, Span]:
        """Parts of a stack; Hugging Face names the weight itself without `.weight`."""
        plain = self.ledger.span(path)
        return self._parts(path) if plain is None else {"weight": plain}

    def _gathered(self, path: str, paths: list[str]) -> dict[str, Span]:
        each = [self._parts(one) for one in paths]
        result = {}
        for part in PARTS:
            spans = [parts[part] for parts in each if part in parts]
            for one, parts in zip(paths, each, strict=True):
                if spans and part not in parts:
                    self.ledger.complain(f"{one}.{part}", "missing, while other experts have it")
                elif spans and (parts[part].kind, parts[part].shape) != (spans[0].kind, spans[0].shape):
                    self.ledger.complain(f"{one}.{part}", "other in dtype or shape than that of the first expert")
            if spans:
                result[part] = stacked(f"{path}.{part}", spans)
        return result

"""Qwen3.5, Qwen3.5/3.6-MoE and Qwen3-Next: three layers of gated delta rule to one of gated attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from ..cache import Kept
from ..checkpoint import Weights
from ..config import REQUIRED, Config
from ..ops.quant import Packed, qmm
from ..ops.recurrent import causal_conv, delta_gates, gated_delta
from ..ops.rowwise import rms_norm
from ..step import Run, Step
from . import rotary
from .decoder import Decoder, Layer, Mixer
from .layers import Attention, GatedMLP, Linear, MixtureBlock, Norm, wide_on_cpu
from .qwen3 import expert_counts, sizes, softmax_mixture

DENSE = ("qwen3_5", "qwen3_5_text")  # by name: files of mlx-lm may have experts all the same
THETA = 1e5  # of Qwen3.5, where rope_parameters do not say; files of mlx-lm rely on it
QK_EPS = 1e-6  # added to the sum of squares of a query or key, not to their mean


class Qwen3_5(Decoder):
    def __init__(self, config: Config, weights: Weights) -> None:
        H, heads, kv_heads, D, eps = sizes(config)
        config.must_be("attn_output_gate", True)
        # mlx-lm asks text_config alone; files that it wrote with a head have one, whatever is said outside.
        outside = bool(config.nested) and "tie_word_embeddings" not in config.nested
        super().__init__(config, weights, H, eps, own_head=outside)
        older = config.model_type == "qwen3_next"
        said = rotary.section(config) if older else config.section("rope_parameters") or rotary.section(config)
        turn = rotary.read(config, D, weights.device, partial=0.25, theta=1e4 if older else THETA, settings=said)
        usual = 0 if config.model_type in DENSE else REQUIRED
        mixture = config.integer("num_experts", 0, limits.EXPERTS, default=usual) > 0
        biased = config.flag("attention_bias", default=False)
        if mixture:
            self.expert_count, self.experts_per_token = expert_counts(config)
        # Qwen3.5 has no layers without experts, whatever its config says.
        dense = config.list_of("mlp_only_layers", int, default=[]) if older else []
        every = config.integer("decoder_sparse_step", 1, limits.LAYERS, default=1) if older else 1
        for index, (kind, here) in enumerate(zip(self.kinds(config), self.places(config, weights), strict=True)):
            if kind == "full_attention":
                mixer: Mixer = Attention(
                    here / "self_attn", H, heads, kv_heads, D, eps, turn, gated=True, biased=biased
                )
            else:
                mixer = GatedDeltaNet(config, here / "linear_attn", H, eps)
            if mixture and index not in dense and (index + 1) % every == 0:
                mlp: MixtureBlock | GatedMLP = softmax_mixture(
                    config, here / "mlp", H, renormalise=not older, shared=True
                )
            else:
                mlp = GatedMLP(here / "mlp", H, config.integer("intermediate_size", 1, limits.HIDDEN * 8))
            self.layers.append(Layer(here, H, eps, mixer, mlp))

    @staticmethod
    def kinds(config: Config) -> list[str]:
        count = config.integer("num_hidden_layers", 1, limits.LAYERS)
        interval = config.integer("full_attention_interval", 1, limits.LAYERS, default=4)
        usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
        kinds = config.list_of("layer_types", str, count, default=usual)
        if unknown := set(kinds) - {"linear_attention", "full_attention"}:
            config.refuse("layer_types", f"linear_attention and full_attention are implemented, not {unknown.pop()!r}")
        return kinds


class GatedDeltaNet:
    """A short convolution, then the gated delta rule: a state of a fixed size, however long the text."""

    def __init__(self, config: Config, weights: Weights, H: int, eps: float) -> None:
        self.Hk, self.Hv = (config.integer(f"linear_num_{name}_heads", 1, 4096) for name in ("key", "value"))
        self.Dk, self.Dv = (config.integer(f"linear_{name}_head_dim", 1, 512) for name in ("key", "value"))
        if self.Hv % self.Hk:
            config.refuse("linear_num_value_heads", f"{self.Hv} is no multiple of the {self.Hk} key heads")
        self.width = config.integer("linear_conv_kernel_dim", 2, 64, default=4)
        self.C = 2 * self.Hk * self.Dk + self.Hv * self.Dv
        if "in_proj_qkvz" in weights:
            self.qkv, self.z, self.b, self.a = self._unmixed(weights, H)
        else:
            self.qkv, self.z = (
                weights.linear("in_proj_qkv", self.C, H),
                weights.linear("in_proj_z", self.Hv * self.Dv, H),
            )
            self.b, self.a = weights.linear("in_proj_b", self.Hv, H), weights.linear("in_proj_a", self.Hv, H)
        self.conv = weights.tensor("conv1d.weight", self.C, self.width, 1)
        self.a_log, self.dt_bias = (wide_on_cpu(weights.tensor(name, self.Hv)) for name in ("A_log", "dt_bias"))
        self.norm = Norm(weights, "norm", self.Dv, eps)
        self.out = Linear(weights, "out_proj", H, self.Hv * self.Dv)

    def _unmixed(self, weights: Weights, H: int) -> tuple[Packed | Tensor, ...]:
        """Qwen3-Next stores the projections in one, key head by key head; rows are put in the order of Qwen3.5."""
        per, v = self.Hv // self.Hk, self.Hv // self.Hk * self.Dv
        mixed = weights.linear("in_proj_qkvz", self.C + self.Hv * self.Dv, H)
        rows = torch.arange(mixed.shape[0]).view(self.Hk, -1)
        q, k, v_rows, z = (part.flatten() for part in rows.split([self.Dk, self.Dk, v, v], 1))
        gates = weights.linear("in_proj_ba", 2 * self.Hv, H)
        b, a = (part.flatten() for part in torch.arange(2 * self.Hv).view(self.Hk, -1).split([per, per], 1))
        return select(mixed, torch.cat([q, k, v_rows])), select(mixed, z), select(gates, b), select(gates, a)

    @property
    def kept(self) -> Kept:
        state = (self.Hv, self.Dv, self.Dk)
        return Kept(fixed={"conv": ((self.width - 1, self.C), None), "state": (state, torch.float32)})

    def __call__(self, x: Tensor, step: Step, kept: dict[str, Tensor]) -> Tensor:
        def convolve(run: Run, x: Tensor) -> Tensor:
            if step.count is None:
                return causal_conv(x, self.conv, kept["conv"], slots=run.slots)
            slots, row = run.slots.long(), torch.arange(run.B, device=x.device)[:, None]
            past = torch.cat([kept["conv"][slots], x], 1)
            y = causal_conv(x, self.conv, kept["conv"], slots=run.slots)
            tail = step.count[:, None] + torch.arange(self.width - 1, device=x.device)
            kept["conv"].index_copy_(0, slots, past[row, tail])
            return y

        mixed = step.each_run(convolve, qmm(x, self.qkv))
        keys, T = self.Hk * self.Dk, len(x)
        q, k, v = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        q, k = (
            rms_norm(part.view(T, self.Hk, self.Dk), None, QK_EPS / self.Dk, scale=scale)
            for part, scale in ((q, 1 / self.Dk), (k, self.Dk**-0.5))
        )
        g, beta = delta_gates(qmm(x, self.a), qmm(x, self.b), self.a_log, self.dt_bias)
        if step.count is not None:  # behind it the state stays as it is
            real = torch.arange(T // len(step.count), device=x.device) < step.count[:, None]
            g, beta = torch.where(real.view(T, 1), g, 1.0), torch.where(real.view(T, 1), beta, 0.0)

        def recur(run: Run, *inputs: Tensor) -> Tensor:
            o: Tensor = gated_delta(*inputs, kept["state"], slots=run.slots)  # type: ignore[misc]
            return o

        o = step.each_run(recur, q, k, v.view(T, self.Hv, self.Dv), g, beta)
        gate = qmm(x, self.z).view(T, self.Hv, self.Dv)
        return self.out(self.norm(o, gate=gate).view(T, -1))


def select(w: Packed | Tensor, rows: Tensor) -> Packed | Tensor:
    """Rows of a weight, codes as they are."""
    rows = rows.to(w.device)
    if isinstance(w, Tensor):
        return w[rows]
    biases = None if w.biases is None else w.biases[rows]
    return Packed(w.words[rows], w.scales[rows], biases, w.bits, w.group, w.mode, w.global_scale)

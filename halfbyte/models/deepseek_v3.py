"""DeepSeek-V3 and Cogito-V2: latent attention (MLA), and experts chosen by biased sigmoid scores in groups.

A token's keys and values are one latent vector. Queries are brought into its space and results out of it ("absorbed"),
for one token as for many: a row's bits do not depend on how a prompt is cut.
"""

from __future__ import annotations

from torch import Tensor

from .. import limits
from ..cache import Kept
from ..checkpoint import Weights
from ..config import Config
from ..ops.attention import latent_attention
from ..ops.cache import append
from ..ops.quant import Packed, qmm
from ..ops.routing import route
from ..step import Run, Step
from . import rotary
from .decoder import Decoder, Layer
from .layers import EPS, GatedMLP, Linear, MixtureBlock, Norm

INNER_EPS = 1e-6  # of the norms inside attention, whatever the config says


class DeepseekV3(Decoder):
    USUAL_CONTEXT = 2048

    def __init__(self, config: Config, weights: Weights) -> None:
        H, eps = config.integer("hidden_size", 1, limits.HIDDEN), config.number("rms_norm_eps", 0.0, 1.0, EPS)
        config.must_be("hidden_act", "silu")
        config.must_be("topk_method", "noaux_tc")
        config.must_be("scoring_func", "sigmoid")
        config.must_be("rope_interleave", True)
        super().__init__(config, weights, H, eps, own_head=True)
        self.further = config.integer("num_nextn_predict_layers", 0, limits.LAYERS, default=1)
        self.expert_count = config.integer("n_routed_experts", 1, limits.EXPERTS, default=0)
        if self.expert_count:
            self.experts_per_token = config.integer("num_experts_per_tok", 1, self.expert_count)
        dense = config.integer("first_k_dense_replace", 0, limits.LAYERS, default=0)
        every = config.integer("moe_layer_freq", 1, limits.LAYERS, default=1)
        for index, here in enumerate(self.places(config, weights)):
            mixer = LatentAttention(config, here / "self_attn", H)
            if not self.expert_count or index < dense or index % every:
                mlp: MixtureBlock | GatedMLP = GatedMLP(
                    here / "mlp", H, config.integer("intermediate_size", 1, limits.HIDDEN * 8)
                )
            else:
                mlp = mixture(config, here / "mlp", H)
            self.layers.append(Layer(here, H, eps, mixer, mlp))


class LatentAttention:
    def __init__(self, config: Config, weights: Weights, H: int) -> None:
        self.heads = config.integer("num_attention_heads", 1, 4096)
        self.rank, self.turned = config.integer("kv_lora_rank", 1, 512), config.integer("qk_rope_head_dim", 2, 512)
        self.nope, self.v = config.integer("qk_nope_head_dim", 1, 512), config.integer("v_head_dim", 1, 512)
        width, q_rank = self.heads * (self.nope + self.turned), config.integer("q_lora_rank", 1, default=None)
        biased = config.flag("attention_bias", default=False)
        if q_rank is None:
            self.q_norm, self.q = None, Linear(weights, "q_proj", width, H)
        else:
            self.q_a, self.q_norm = (
                Linear(weights, "q_a_proj", q_rank, H, biased),
                Norm(weights, "q_a_layernorm", q_rank, INNER_EPS),
            )
            self.q = Linear(weights, "q_b_proj", width, q_rank)
        self.kv_a = Linear(weights, "kv_a_proj_with_mqa", self.rank + self.turned, H, biased)
        self.kv_norm = Norm(weights, "kv_a_layernorm", self.rank, INNER_EPS)
        self.o = Linear(weights, "o_proj", H, self.heads * self.v, biased)
        self.inward, self.outward, self.inward_transposed = self._absorbed(weights)
        self.rope = rotary.read(config, self.turned, weights.device, interleaved=True)
        said = rotary.section(config)
        sharper = rotary.yarn_scale(said.number("factor", default=1.0), said.number("mscale_all_dim", default=0.0))
        self.scale = (self.nope + self.turned) ** -0.5 * sharper**2

    def _absorbed(self, weights: Weights) -> tuple[Packed | Tensor, Packed | Tensor, bool]:
        """The projections into and out of the latent space, head by head, with the codes of the file.

        Newer files store them apart, the first one [heads, rank, nope]. Older ones have kv_b_proj, whose rows are,
        head by head, [nope | v] outputs of the latent: the first is then to be used from its other side.
        """
        if "kv_b_proj" not in weights:
            inward = weights.linear("embed_q", self.rank, self.nope, lead=(self.heads,))
            return inward, weights.linear("unembed_out", self.v, self.rank, lead=(self.heads,)), True
        joined = weights.linear("kv_b_proj", self.heads * (self.nope + self.v), self.rank)
        return (*split_heads(joined, self.heads, self.nope), False)

    @property
    def kept(self) -> Kept:
        return Kept(rows={"latent": (self.rank,), "k_pe": (self.turned,)})

    def __call__(self, x: Tensor, step: Step, kept: dict[str, Tensor]) -> Tensor:
        q = self.q(x if self.q_norm is None else self.q_norm(self.q_a(x))).unflatten(-1, (self.heads, -1))
        q_nope, q_pe = q.split([self.nope, self.turned], -1)
        latent, k_pe = self.kv_a(x).split([self.rank, self.turned], -1)
        latent = self.kv_norm(latent)
        q_pe = self.rope(q_pe, step.positions)
        k_pe = self.rope(k_pe.unsqueeze(1), step.positions).squeeze(1)
        inward = qmm(q_nope, self.inward, transpose=self.inward_transposed)

        def work(run: Run, q: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
            append(kept["latent"], latent, slots=run.slots, lengths=run.lengths)
            append(kept["k_pe"], k_pe, slots=run.slots, lengths=run.lengths)
            o: Tensor = latent_attention(
                q, q_pe, kept["latent"], kept["k_pe"], scale=self.scale, lengths=run.lengths, slots=run.slots
            )
            return o

        return self.o(qmm(step.each_run(work, inward, q_pe, latent, k_pe), self.outward).flatten(1))


def split_heads(w: Packed | Tensor, heads: int, first: int) -> tuple[Packed | Tensor, Packed | Tensor]:
    """Rows [heads · N, K] as two weights [heads, first, K] and [heads, N - first, K]."""

    def cut(t: Tensor) -> tuple[Tensor, Tensor]:
        t = t.unflatten(0, (heads, -1))
        return t[:, :first].contiguous(), t[:, first:].contiguous()

    if isinstance(w, Tensor):
        return cut(w)
    words, scales = cut(w.words), cut(w.scales)
    biases = (None, None) if w.biases is None else cut(w.biases)
    a, b = (Packed(words[i], scales[i], biases[i], w.bits, w.group, w.mode, w.global_scale) for i in (0, 1))
    return a, b


def mixture(config: Config, weights: Weights, H: int) -> MixtureBlock:
    E = config.integer("n_routed_experts", 1, limits.EXPERTS)
    inner, shared = (
        config.integer("moe_intermediate_size", 1, limits.HIDDEN),
        config.integer("n_shared_experts", 0, 64, default=0),
    )
    beside = ("shared_experts", shared * inner) if shared else None
    return MixtureBlock(weights, H, inner, E, SigmoidRouter(config, weights / "gate", H, E), shared=beside)


class SigmoidRouter:
    """Scores are sigmoids; a bias, and the best groups of experts, decide who is chosen but not how much he counts."""

    def __init__(self, config: Config, weights: Weights, H: int, E: int) -> None:
        self.gate, self.bias = weights.tensor("weight", E, H), weights.tensor("e_score_correction_bias", E)
        self.k = config.integer("num_experts_per_tok", 1, E)
        self.groups, self.kept = (
            config.integer("n_group", 1, E, default=1),
            config.integer("topk_group", 1, E, default=1),
        )
        if E % self.groups:
            config.refuse("n_group", f"{self.groups} groups cannot have the same number of {E} experts")
        if self.groups > 1 and self.k > (some := self.kept * (E // self.groups)):
            config.refuse("num_experts_per_tok", f"{self.k} are more than the {some} experts of topk_group groups")
        # One expert alone counts by its score, as in DeepSeek's own code; transformers would make it 1.
        self.renormalise = self.k > 1 and config.flag("norm_topk_prob", default=True)
        self.scaling = config.number("routed_scaling_factor", default=1.0)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        several = self.groups > 1
        return route(
            qmm(x, self.gate), self.k, kind="sigmoid", bias=self.bias, groups=self.groups if several else None,
            keep_groups=self.kept if several else None, renormalise=self.renormalise, scaling=self.scaling,
        )  # fmt: skip

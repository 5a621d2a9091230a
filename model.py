"""Orthros: attention that changes with the phase of the work, in one file.

A Transformer pays T x T attention to *read* a prompt, although reading predicts nothing. Orthros
splits every sequence into two streams that run through the same layers and the same weights:

  base tokens    every position x_1..x_T. Sliding-window attention. Only they write keys and values.
  output tokens  copies x'_t of the positions that predict a next token. They see the whole cache.

     base     x1   x2   x3   x4   x5   x6          window W = 3:  x6 sees x4 x5 x6
              |    |    |    |    |    |
     cache   kv1  kv2  kv3  kv4  kv5  kv6          one per layer, written in time linear in T
              :    :    :    :    :    :
     output                       x'5  x'6         all of it:     x'6 sees x1 x2 x3 x4 x5 x6
                                  |    |
                                  x6?  x7?         predictions

How many output tokens there are is the whole difference between the phases:

  phase          base tokens in the call   T_out             attention cost
  pre-training   T                         T                 T*W + T*T/2
  SFT, RL        prompt + response         the response      T*W + T*T_out
  prefill        the prompt                1 (at its end)    T*W + T
  decoding       1                         1                 W + S, a pair of tokens a step

Letters: B batch, T base tokens in this call, T_out output tokens, S keys visible (the cache's and
this call's), H heads, Hk key/value heads, D head size, C width, W window, V vocabulary, L layers;
Tq queries of one call of `attend`, G = H / Hk query heads a KV head. Tensors inside attention are
(B, T, H, D).

The paper's symbols: alpha, beta -> alpha_base, beta_base; alpha', beta' -> alpha_out, beta_out;
W_Q, W_K, W_V, W_O -> q_proj, k_proj, v_proj, o_proj; x' -> the last T_out rows of `h`.
Source: Orthros: Phase-Aware Heterogeneous Attention for Efficient Transformers, NeurIPS 2026.
"""

import functools
import importlib
import math
import os
import shutil
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

# ------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class GPTConfig:
    """The shape of a model. Values that cannot work raise a ValueError that names the field."""

    block_size: int = 256  # default length for training; the cache sets the limit for inference
    vocab_size: int = 257
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None  # None: n_head
    n_embd: int = 128
    head_dim: int | None = None  # None: n_embd / n_head
    n_hidden: int | None = None  # None: 8/3 n_embd, rounded up to 64s: SwiGLU as dear as a 4x MLP
    window: int = 32  # keys a base token sees, itself included
    sink: int = 0  # first keys that stay visible to every base token; ours, 0 is the paper
    attention: str = "orthros"  # or 'full', 'swa', or a repeating pattern such as 'swa,swa,full'
    scale_offset: bool = True  # False: the paper's ablation without alpha and beta
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # None, or Llama 3.1's
    norm_eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.sink < 0:
            raise ValueError(f"sink must be 0 or more, not {self.sink}")
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head must be a multiple of n_kv_head: {self.n_head} is not one of "
                f"{self.n_kv_head}"
            )
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                raise ValueError(
                    f"n_embd must be a multiple of n_head, or head_dim be given: "
                    f"{self.n_embd} is not a multiple of {self.n_head}"
                )
            self.head_dim = self.n_embd // self.n_head
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE turns pairs), not {self.head_dim}")
        if self.n_hidden is None:
            self.n_hidden = -(-8 * self.n_embd // (3 * 64)) * 64
        if self.n_hidden < 1:
            raise ValueError(f"n_hidden must be at least 1, not {self.n_hidden}")
        kinds = self.attention.split(",")
        if self.attention != "orthros" and not set(kinds) <= {"swa", "full"}:
            raise ValueError(
                f"attention must be 'orthros', 'full', 'swa' or a pattern of swa and full such as "
                f"'swa,swa,swa,full', not '{self.attention}'"
            )
        if self.rope_scaling is not None and self.rope_scaling.get("rope_type") != "llama3":
            raise ValueError(
                f"rope_scaling must be None or of rope_type 'llama3', not {self.rope_scaling}"
            )

    def kind(self, layer):
        """'orthros', 'full' or 'swa' for one layer."""
        kinds = self.attention.split(",")
        return kinds[layer % len(kinds)]


# The paper gives sizes, not shapes, and no window: the 160m, 1.3b and 6.8b shapes are ours.
PRESETS = {
    "laptop": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, window=32),
    "gpt2": dict(
        n_layer=12, n_head=12, n_embd=768, block_size=1024, window=256, vocab_size=50304
    ),
    "160m": dict(
        n_layer=12, n_head=12, n_embd=768, block_size=2048, window=512, vocab_size=50304,
        tie_embeddings=False,
    ),
    "1.3b": dict(
        n_layer=24, n_head=16, n_embd=2048, n_hidden=5632, block_size=2048, window=512,
        vocab_size=50304,
    ),
    "6.8b": dict(
        n_layer=32, n_head=32, n_embd=4096, n_hidden=10880, block_size=2048, window=512,
        vocab_size=50304, tie_embeddings=False,
    ),
    "llama3.1-8b": dict(
        n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_hidden=14336, block_size=8192,
        window=512, vocab_size=128256, rope_theta=500000.0, norm_eps=1e-5, tie_embeddings=False,
        rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "qwen3-8b": dict(
        n_layer=36, n_head=32, n_kv_head=8, n_embd=4096, head_dim=128, n_hidden=12288,
        block_size=8192, window=512, vocab_size=151936, rope_theta=1000000.0, qk_norm=True,
        tie_embeddings=False,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Small parts. Weights may be float32 masters while activations are bf16: each part casts its own
# weight to the activation's dtype, so the dtype chosen at the embedding holds through the model.


class Linear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """Casts nothing: GPT.forward does. It differs from PyTorch's on the meta device alone."""

    def reset_parameters(self):
        if not self.weight.is_meta:  # normal_ there is Python that loads the compiler, for seconds
            super().reset_parameters()


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rope_angles(config, positions):
    """cos and sin of the rotary angles at `positions` (n,), each (n, 1, D/2), always float32.

    In bf16 position 8193 would round to 8192. Nothing is stored, so nothing can be cast.
    """
    angles = (positions.float()[:, None] * rope_frequencies(config, positions.device))[:, None]
    # called outside of the compiler, an operator of ours would load it, for seconds
    return cos_sin(angles) if torch.compiler.is_compiling() else (angles.cos(), angles.sin())


@torch.library.custom_op("orthros::cos_sin", mutates_args=())
def cos_sin(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator of its own, since the compiler would fuse it into every layer's kernels and
    compute each cosine again for every head of every token: a quarter of a training step."""
    return angles.cos(), angles.sin()


@cos_sin.register_fake
def _(angles):
    return torch.empty_like(angles), torch.empty_like(angles)


def rope_frequencies(config, device):
    """Radians a position turns each of the D/2 pairs by."""
    D, scaling = config.head_dim, config.rope_scaling
    pairs = torch.arange(0, D, 2, device=device, dtype=torch.float32)
    freq = config.rope_theta ** (-pairs / D)
    if scaling is not None:  # Llama 3.1: stretch slow waves, keep fast ones, blend in between
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / scaling["factor"]
    return freq


def apply_rope(x, cos, sin):
    """Turn x (B, T, H, D) by its positions' angles. Half-split pairs, as in Llama and Qwen."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


# ------------------------------------------------------------------------------------------------
# Attention: one contract, three backends.
#
#   attend(q, k, v, window, sink): q (B, Tq, H, D); k, v (B, S, Hk, D) -> (B, Tq, H, D)
#
# The queries are the last Tq of the S positions: query i sits at p = S - Tq + i. It sees key j when
# j <= p and, if there is a window, p - j < window or j < sink. Query head h reads KV head
# h // (H // Hk). No other masking exists in this project.


def visible(Tq, S, window=None, sink=0, device=None):
    """The contract as a mask: (Tq, S), True where the query may see the key."""
    p = torch.arange(S - Tq, S, device=device)[:, None]
    j = torch.arange(S, device=device)
    mask = j <= p
    return mask if window is None else mask & ((p - j < window) | (j < sink))


def attend_masked(q, k, v, window=None, sink=0):
    """The truth every other backend is tested against: softmax(q k^T / sqrt(D)) v, Tq x S, slow."""
    G = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(G, dim=2), v.repeat_interleave(G, dim=2)  # (B, S, H, D)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    mask = visible(q.size(1), k.size(1), window, sink, q.device)
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def attend_torch(q, k, v, window=None, sink=0):
    """PyTorch alone, on any device. The window costs time and memory linear in Tq."""
    Tq, S = q.size(1), k.size(1)
    if window is None or S <= window + sink:
        # Nothing is hidden yet: what a window drops first is sink keys, and those stay.
        return sdpa_causal(q, k, v)
    if Tq == 1:
        keys, values = (torch.cat((x[:, :sink], x[:, S - window :]), 1) for x in (k, v))
        return sdpa_grouped(q, keys, values)
    # The first queries see all before them. From position `first` on, a query's window holds no
    # sink key (which would count twice), so one small mask serves every block. Without sinks W - 1
    # would do, but from W on a text of whole windows is a number of whole blocks.
    first = window + max(0, sink - 1)
    head = max(0, first - (S - Tq))
    y = sdpa_blocked(q[:, head:], k, v, window, sink)
    if head:
        y = torch.cat((sdpa_causal(q[:, :head], k[:, :first], v[:, :first]), y), dim=1)
    return y


def sdpa_causal(q, k, v):
    """Every query sees every key up to its own position."""
    Tq, S = q.size(1), k.size(1)
    if Tq < S and q.device.type != "cuda":  # fused kernels for this shape exist on CUDA alone
        return sdpa_grouped(q, k, v, None if Tq == 1 else visible(Tq, S, device=q.device))
    mask = None
    if 1 < Tq < S:
        from torch.nn.attention.bias import causal_lower_right  # here, for it takes seconds to load

        mask = causal_lower_right(Tq, S)
    y = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        # is_causal counts positions from the first key, so it is right for the square case alone
        is_causal=1 < Tq == S,
        attn_mask=mask,
        enable_gqa=q.size(2) != k.size(2),
    )
    return y.transpose(1, 2)


def sdpa_grouped(q, k, v, mask=None):
    """SDPA where the G query heads that share a KV head become rows of one head, so that k and v
    are never repeated. mask (Tq, S) as in `visible`, or None where every query sees every key."""
    B, Tq, H, D = q.shape
    Hk = k.size(2)
    G = H // Hk
    q = q.reshape(B, Tq, Hk, G, D).permute(0, 2, 3, 1, 4).reshape(B, Hk, G * Tq, D)
    mask = mask if mask is None else mask.repeat(G, 1)  # (G * Tq, S)
    y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return y.view(B, Hk, G, Tq, D).permute(0, 3, 1, 2, 4).reshape(B, Tq, H, D)


def sdpa_blocked(q, k, v, window, sink):
    """Sliding window in linear time: blocks of b queries, each with its own window - 1 + b keys.

    Key columns of a block: the sink keys, the keys before the block, the block's own. Counted so
    that the block's own start at 0, row a sees column c of the last two when a - window < c <= a.
    """
    B, Tq, H, D = q.shape
    b = min(window, Tq)
    n = -(-Tq // b)
    pad = n * b - Tq  # zero queries at the end, cut off again; their keys are hidden by causality
    lead = window - 1
    lead += -(sink + lead + b) % 16  # hidden keys before the window: kernels like such widths
    start = k.size(1) - Tq - lead  # of the first block's keys; below 0 those are zeros
    q = F.pad(q, (0, 0, 0, 0, 0, pad)).view(B * n, b, H, D)

    def blocks(x):  # (B, S, Hk, D) -> (B * n, sink + lead + b, Hk, D)
        own = F.pad(x[:, max(0, start) :], (0, 0, 0, 0, max(0, -start), pad))
        own = own.unfold(1, lead + b, b).movedim(-1, 2)  # (B, n, lead + b, Hk, D), a view
        if sink:
            own = torch.cat((x[:, None, :sink].expand(-1, n, -1, -1, -1), own), dim=2)
        return own.flatten(0, 1)

    a = torch.arange(b, device=q.device)[:, None]
    c = torch.arange(-sink - lead, b, device=q.device)
    mask = (c < -lead) | ((a - window < c) & (c <= a))
    y = sdpa_grouped(q, blocks(k), blocks(v), mask)
    return y.reshape(B, n * b, H, D)[:, :Tq]


_flash = None  # what load_flash found


def load_flash():
    """{generation: flash_attn_func} of what is installed: 2 is flash-attn, 4 is flash-attn-4.

    A package that is there but broken is left out with one warning. (A global keeps the result, not
    functools.cache, through which the compiler would trace again.)
    """
    global _flash
    if _flash is None:
        _flash = {}
        for generation, name in ((2, "flash_attn"), (4, "flash_attn.cute")):
            try:
                module = importlib.import_module(name)
                if hasattr(module, "flash_attn_func"):  # flash_attn alone may be the 4's folder
                    _flash[generation] = module.flash_attn_func
                warnings.filterwarnings("ignore", "Argument aux_data")  # the 4's compiler, often
            except Exception as error:  # a build for another torch raises almost anything
                absent = isinstance(error, ModuleNotFoundError)
                if not absent or (generation == 2 and error.name != "flash_attn"):
                    why = f"{type(error).__name__}: {error}"
                    warn_once(f"{name} is installed but broken ({why}); going on without it")
    return _flash


def attend_flash(q, k, v, window=None, sink=0):
    """flash-attn where it can do the call, SDPA where that is as fast, else the torch backend."""
    Tq, S = q.size(1), k.size(1)
    if window is not None and S <= window + sink:
        window, sink = None, 0
    flash, why = load_flash(), None
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    generation = 4 if 4 in flash else 2
    # SDPA is the faster one for a single query, and where all is causal, up to a length with the 4
    if Tq == 1 or (window is None and Tq == S and (generation == 2 or S <= 8192)):
        return attend_torch(q, k, v, window, sink)
    if q.device.type != "cuda":
        why = "flash-attn needs an NVIDIA GPU"
    elif q.dtype not in (torch.bfloat16, torch.float16):
        why = f"flash-attn computes in bfloat16 or float16, not {q.dtype}"
    elif q.size(-1) > 256:
        why = f"flash-attn's largest head_dim is 256, not {q.size(-1)}"
    elif not flash:
        why = "flash-attn is not installed (pip install -e '.[flash]')"
    if why:
        warn_once(f"{why}; using the torch backend")
    if why or (sink and gradients and generation == 2):  # it gives no gradient of what weighs them
        return attend_torch(q, k, v, window, sink)
    try:
        return call_flash(generation, q, k, v, window, sink)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # not built for this GPU or head size
        if torch.compiler.is_compiling():
            raise
        warn_once(f"flash-attn ({generation}) failed ({str(error).strip()}); going on without it")
        del flash[generation]
        return attend_flash(q, k, v, window, sink)


def call_flash(generation, q, k, v, window=None, sink=0):
    """The contract in flash-attn's words. Sink keys are merged in afterwards."""
    from fast import flash4, merge_sink

    # flash-attn counts the keys to the left of the query, so W keys with its own are W - 1
    if generation == 4:
        y, lse = flash4(q, k, v, (window or 0) - 1)
    else:
        reach = (window - 1, 0) if window else (-1, -1)
        y = load_flash()[2](q, k, v, causal=True, window_size=reach, return_attn_probs=sink > 0)
        y, lse, _ = y if sink else (y, None, None)
    return merge_sink(y, lse, q, k[:, :sink], v[:, :sink], window, k.size(1)) if sink else y


BACKENDS = {"masked": attend_masked, "torch": attend_torch, "flash": attend_flash}
_backend = None


def choose_backend(name=None):
    """Choose the attention backend for this process and return its name.

    name: 'masked', 'torch', 'flash', or None for $ORTHROS_BACKEND, else flash where it works.
    """
    global _backend
    name = name or os.environ.get("ORTHROS_BACKEND")
    if not name:
        name = "flash" if torch.cuda.is_available() and load_flash() else "torch"
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not '{name}'")
    _backend = name
    return name


def attend(q, k, v, window=None, sink=0):
    """Attention of the last Tq of S positions; see the contract above.

    q (B, Tq, H, D), k and v (B, S, Hk, D), one dtype -> (B, Tq, H, D). window None is the paper's
    o'_t (all keys up to t), window W its o_t (the last W of them).
    """
    if q.size(1) > k.size(1):
        raise ValueError(f"{q.size(1)} queries cannot be the last of {k.size(1)} positions")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a token sees itself), not {window}")
    return BACKENDS[_backend or choose_backend()](q, k, v, window, sink)


@functools.cache
def warn_once(message):
    warnings.warn(message, stacklevel=3)


# ------------------------------------------------------------------------------------------------
# The model


class KVCache:
    """Keys and values of every layer, preallocated. Base tokens alone write to it.

    k, v: (L, B, max_len, Hk, D). length: positions filled, the same in all layers between calls.
    """

    def __init__(self, config, batch_size, max_len, device=None, dtype=None):
        shape = (config.n_layer, batch_size, max_len, config.n_kv_head, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.length = 0

    @classmethod
    def of(cls, model, batch_size, max_len):
        """A cache for what this model computes, on its device."""
        weight = model.wte.weight
        dtype = model.compute_dtype or weight.dtype
        return cls(model.config, batch_size, max_len, weight.device, dtype)

    @property
    def max_len(self):
        return self.k.size(2)

    @property
    def nbytes(self):
        return self.k.nbytes + self.v.nbytes

    def check(self, n):
        """Raise ValueError unless n more positions fit. Nothing has been written by then."""
        if self.length + n > self.max_len:
            raise ValueError(
                f"the cache holds {self.max_len} positions, but {self.length + n} are needed "
                f"({self.length} in it and {n} more)"
            )

    def append(self, layer, k, v):
        """Write k, v (B, T, Hk, D) behind one layer's filled part; return all of it, (B, S, Hk, D).

        The length moves once per call of the model, after its last layer.
        """
        S = self.length + k.size(1)
        self.k[layer, :, self.length : S] = k
        self.v[layer, :, self.length : S] = v
        return self.k[layer, :, :S], self.v[layer, :, :S]


class OrthrosAttention(nn.Module):
    """Both streams through one set of projections: window for base, everything for output tokens.

    In a 'full' or 'swa' layer there is one stream, and this is ordinary attention.
    """

    def __init__(self, config, layer):
        super().__init__()
        C, H, Hk, D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.n_head, self.head_dim, self.layer = H, D, layer
        self.kind = config.kind(layer)
        self.is_last = layer == config.n_layer - 1
        self.window, self.sink = config.window, config.sink
        self.q_proj, self.o_proj = Linear(C, H * D), Linear(H * D, C)
        self.k_proj, self.v_proj = Linear(C, Hk * D), Linear(C, Hk * D)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.streams = []
        if self.kind == "orthros" and config.scale_offset:
            # the last layer's base tokens ask nothing, so it has no base alpha and beta
            self.streams = ["out"] if self.is_last else ["base", "out"]
        for stream in self.streams:
            self.register_parameter(f"alpha_{stream}", nn.Parameter(torch.ones(H, D)))
            self.register_parameter(f"beta_{stream}", nn.Parameter(torch.zeros(H, D)))

    def project(self, h, T, T_out, rope):
        """h (B, N, C) -> queries base (B, N - first - n_out, H, D), out (B, n_out, H, D); k, v.

        k, v are (B, T, Hk, D). n_out is T_out in an orthros layer, else 0. Rows ask from `first`
        on: 0, but in the last layer only the last T_out rows, which predict.
        """
        B, N, _ = h.shape
        cos, sin = rope
        v = self.v_proj(h[:, :T]).view(B, T, -1, self.head_dim)
        k = self.k_norm(self.k_proj(h[:, :T]).view(B, T, -1, self.head_dim))
        k = apply_rope(k, cos[:T], sin[:T]).type_as(v)

        first = N - T_out if self.is_last else 0
        n_out = T_out if self.kind == "orthros" else 0
        heads = (self.n_head, self.head_dim)
        q = self.q_norm(self.q_proj(h[:, first:]).unflatten(-1, heads))
        base, out = q.split((N - first - n_out, n_out), dim=1)
        if "base" in self.streams:
            base = self.alpha_base * base + self.beta_base  # q_i = alpha * (x_i W_Q) + beta
        if "out" in self.streams:
            out = self.alpha_out * out + self.beta_out  # q'_i = alpha' * (x'_i W_Q) + beta'
        q = apply_rope(torch.cat((base, out), dim=1), cos[first:], sin[first:]).type_as(v)
        return *q.split((N - first - n_out, n_out), dim=1), k, v

    def forward(self, h, T, T_out, rope, cache=None):
        """h (B, N, C): T base tokens, then (orthros) T_out output tokens -> (B, Nq, C).

        Nq is N, and T_out in the last layer: its other tokens leave their keys and values, and
        nobody reads more of them. rope: cos and sin for all N rows.
        """
        base, out, k, v = self.project(h, T, T_out, rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, S, Hk, D)
        y = []
        if base.size(1):
            window = None if self.kind == "full" else self.window
            y.append(attend(base, k, v, window, self.sink if window else 0))
        if out.size(1):
            y.append(attend(out, k, v))
        if not y:  # last layer, T_out = 0: keys and values are written, nobody asks
            return h[:, h.size(1) :]
        y = torch.cat(y, dim=1) if len(y) > 1 else y[0]  # cat would copy a lone tensor too
        return self.o_proj(y.flatten(2))


class MLP(nn.Module):
    """SwiGLU, token by token: it cannot tell the streams apart and need not."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.n_hidden)
        self.up_proj = Linear(config.n_embd, config.n_hidden)
        self.down_proj = Linear(config.n_hidden, config.n_embd)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = OrthrosAttention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, h, T, T_out, rope, cache=None):
        y = self.attn(self.attn_norm(h), T, T_out, rope, cache)
        return self.feed(h[:, h.size(1) - y.size(1) :], y)  # the last layer goes on with T_out rows

    def feed(self, h, y):
        """h + y, then the MLP. Apart from forward, so that fast.fuse can compile it."""
        h = h + y
        return h + self.mlp(self.mlp_norm(h))


MAX_LOGITS = 2**27  # the loss holds at most so many at a time


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(x W^T)[target] over the targets that are not -1; 0 if there are none.

    x (N, C), weight (V, C), targets (N,). Logits exist for a few rows at a time: each chunk's
    gradient is computed with its loss, while its logits are at hand. (N, V) floats never exist.
    """

    @staticmethod
    def forward(ctx, x, weight, targets):
        w, V = weight.to(x.dtype), weight.size(0)
        count = (targets >= 0).sum().clamp(min=1)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx, dw = [], None
        if any(ctx.needs_input_grad):  # sums are float32, even of bf16 weights
            dw = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        n_chunks = -(-x.size(0) * V // MAX_LOGITS)
        for xs, ts in zip(x.chunk(n_chunks), targets.chunk(n_chunks)):
            logits = (xs @ w.T).to(torch.promote_types(x.dtype, torch.float32))
            lse = logits.logsumexp(dim=-1, keepdim=True)
            keep, ts = ts[:, None] >= 0, ts[:, None].clamp(min=0)
            loss = loss + ((lse - logits.gather(1, ts)) * keep).sum()
            if dw is not None:
                hit = torch.arange(V, device=x.device) == ts
                dlogits = (((logits - lse).exp() - hit.to(logits.dtype)) * keep).to(x.dtype)
                dx.append(dlogits @ w)
                dw += dlogits.T @ xs
        if dw is not None:
            ctx.save_for_backward(torch.cat(dx), dw.to(weight.dtype), count)
        return loss / count

    @staticmethod
    def backward(ctx, grad):
        dx, dw, count = ctx.saved_tensors
        scale = grad / count  # divided here, not before: float16 would lose what is that small
        return (dx * scale).to(dx.dtype), dw * scale, None


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.compute_dtype = None  # of activations; None: the weights' own
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        with torch.no_grad():
            for block in self.blocks:  # each layer adds two terms to the residual stream
                for proj in (block.attn.o_proj, block.mlp.down_proj):
                    proj.weight /= math.sqrt(2 * config.n_layer)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            # 1 / sqrt(columns): a Linear keeps the scale of its input, a row of the embedding has
            # length 1. GPT-2's 0.02 is half of that at its width, but far too little for the small
            # models here: with it they learn no look-ups in time
            nn.init.normal_(module.weight, std=module.weight.size(1) ** -0.5)

    def forward(self, idx, targets=None, T_out=None, cache=None):
        """One forward for all four phases.

        idx (B, T) token ids, behind what `cache` holds. T_out: how many of the last positions
        predict a next token; None means all T, 0 only fills the cache.
        Returns (logits (B, T_out, V), None); with targets (B, T_out), where -1 is ignored,
        (None, mean cross-entropy in nats); with T_out=0 (None, None).
        Loss: L = -sum_t log P(x_{t+1} | x'_t), as the mean over the targets given.
        """
        B, T = idx.shape
        T_out = T if T_out is None else T_out
        if not 0 <= T_out <= T:
            raise ValueError(f"T_out must be from 0 to T = {T}, not {T_out}")
        if targets is not None and (T_out == 0 or targets.shape != (B, T_out)):
            raise ValueError(
                f"targets must be (B, T_out) = ({B}, {T_out}) with T_out > 0, "
                f"not {tuple(targets.shape)}"
            )
        start = 0
        if cache is not None:
            if B != cache.k.size(1):
                raise ValueError(f"the cache is for a batch of {cache.k.size(1)}, not of {B}")
            cache.check(T)
            start = cache.length
        positions = torch.arange(start, start + T, device=idx.device)
        h = self.wte(idx)
        h = h if self.compute_dtype is None else h.to(self.compute_dtype)
        if self.config.attention == "orthros":
            # the output tokens: copies of the last T_out positions, joined at the tail
            positions = torch.cat((positions, positions[T - T_out :]))
            h = torch.cat((h, h[:, T - T_out :]), dim=1)  # (B, T + T_out, C)
        rope = rope_angles(self.config, positions)
        for block in self.blocks:
            h = block(h, T, T_out, rope, cache)
        if cache is not None:
            cache.length += T
        if T_out == 0:
            return None, None
        h = self.norm(h)  # (B, T_out, C)
        if targets is None:
            return self.lm_head(h), None
        weight = self.lm_head.weight
        return None, ChunkedCrossEntropy.apply(h.flatten(0, 1), weight, targets.flatten())

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def optimizer_groups(self, weight_decay):
        """Parameter groups for AdamW: matrices decay; norms, alpha and beta do not."""
        scale = ("alpha_base", "beta_base", "alpha_out", "beta_out")
        decay, keep = [], []
        for name, p in self.named_parameters():
            is_matrix = p.dim() >= 2 and not name.endswith(scale)  # alpha, beta are (H, D)
            (decay if is_matrix else keep).append(p)
        return [
            {"params": decay, "weight_decay": weight_decay},
            {"params": keep, "weight_decay": 0.0},
        ]


# ------------------------------------------------------------------------------------------------
# Checkpoints and devices


def save_checkpoint(out_dir, checkpoint):
    """Write a plain dict to out_dir/ckpt.pt. If that fails, the old file is still there, whole."""
    path = os.path.join(out_dir, "ckpt.pt")
    tmp = path + ".tmp"
    try:
        with open(tmp, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        free = shutil.disk_usage(out_dir).free / 2**20
        raise OSError(f"cannot save {path} ({free:.0f} MiB free there): {error}") from error
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def warn_replaced(out_dir):
    """Say that an earlier run's checkpoint is there, before it is lost."""
    if os.path.exists(os.path.join(out_dir, "ckpt.pt")):
        print(f"an earlier run in {out_dir} will be replaced", file=sys.stderr)


def load_checkpoint(out_dir, device="cpu", **overrides):
    """(model, checkpoint) from out_dir/ckpt.pt. overrides: fields of GPTConfig to change."""
    checkpoint = read_checkpoint(out_dir, mmap=True)  # optimizer state stays on the disk
    return model_of(checkpoint, out_dir, device, **overrides), checkpoint


def read_checkpoint(out_dir, mmap=False):
    """The dict in out_dir/ckpt.pt. mmap: tensors are read from the disk when they are used."""
    path = os.path.join(out_dir, "ckpt.pt")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"no checkpoint {path}; train one with train.py --out_dir={out_dir}"
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        checkpoint["model"]["wte.weight"], checkpoint["tokenizer"]
        GPTConfig(**checkpoint["config"])
    except Exception as error:  # unpickling a damaged file raises almost anything
        why = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        why = "" if "mmap" in why else f" ({why})"  # about how it was read, not what is wrong
        raise ValueError(f"{path} is not a checkpoint of ours, or is damaged{why}") from error
    return checkpoint


def model_of(checkpoint, out_dir, device="cpu", **overrides):
    """The model in a checkpoint, which came from out_dir. overrides: fields of GPTConfig to change.

    Strict, except that one set of weights runs as full, swa or orthros: alphas and betas that are
    missing become 1 and 0, and those that nothing uses are dropped with one line.
    """
    old, state = checkpoint["config"], dict(checkpoint["model"])
    config = GPTConfig(**{**old, **overrides})
    with torch.device("meta"):
        model = GPT(config)
    own = model.state_dict()
    is_scale = lambda name: name.rsplit(".")[-1].startswith(("alpha_", "beta_"))
    wrong = [n for n in own.keys() ^ state.keys() if not is_scale(n)]
    wrong += [n for n in own.keys() & state.keys() if own[n].shape != state[n].shape]
    if config.tie_embeddings and not old.get("tie_embeddings", True):
        wrong.append("lm_head.weight")  # it would be lost
    if wrong:
        changed = [f"{k} {old.get(k)} -> {v}" for k, v in overrides.items() if old.get(k) != v]
        why = ", ".join(changed) or ", ".join(sorted(wrong)[:5])
        raise ValueError(f"{out_dir}/ckpt.pt does not fit the model asked for ({why})")
    surplus = state.keys() - own.keys()
    if surplus:
        print(f"attention {config.attention} has no scale and offset: {len(surplus)} tensors of "
              f"{out_dir}/ckpt.pt are not used", file=sys.stderr)  # fmt: skip
    dtype = state["wte.weight"].dtype
    for name in own.keys() - state.keys():
        fill = torch.ones if ".alpha_" in name else torch.zeros
        state[name] = fill(own[name].shape, dtype=dtype)
    state = {name: state[name].to(device, copy=True) for name in own}
    model.load_state_dict(state, assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    return model


def pick_device(device=None, dtype=None):
    """(device, dtype) as a torch.device and torch.dtype; None or 'auto' finds what suits.

    bf16 where the GPU computes it natively, float16 on older GPUs, float32 elsewhere.
    """
    if device in (None, "auto"):
        mps = torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(device)
        torch.zeros(1, device=device).item()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton and CUDA graphs go to the current one
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"device '{device}' cannot be used here: {why}") from error
    if dtype in (None, "auto"):
        dtype = "float32"
        if device.type == "cuda":
            native = torch.cuda.get_device_capability(device) >= (8, 0)
            dtype = "bfloat16" if native else "float16"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not '{dtype}'")
    if dtype == "float16" and device.type != "cuda":
        raise ValueError(f"dtype float16 needs an NVIDIA GPU; on {device.type} use float32")
    return device, getattr(torch, dtype)

"""What is only faster: a reader of model.py may skip this file.

Each function has a plain twin that it is tested against in test_equivalence.py:

    flash4        flash-attn-4 as one operator with a gradient, which torch.compile leaves whole
    merge_sink    attention over a window and sink keys, from attention over the window alone
    fuse          a model whose elementwise work is compiled, for prefill
    FastStep      a decoding step as one launch of few kernels, for the loop in sample.py
"""

import math

import torch
import torch.nn.functional as F

from model import load_flash, rope_angles

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU, or a platform without Triton: the plain functions serve
    triton = None


# ------------------------------------------------------------------------------------------------
# Reading: whole sequences, and chunks of prompts


@torch.library.custom_op("orthros::flash4", mutates_args=())
def flash4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash-attn-4: y (B, Tq, H, D), lse (B, H, Tq). left: keys before a query's own, or -1."""
    reach = (left, 0) if left >= 0 else (None, None)
    y, lse, *_ = load_flash()[4](q, k, v, causal=True, window_size=reach, return_lse=True)
    return y, lse


@torch.library.custom_op("orthros::flash4_backward", mutates_args=())
def flash4_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, lse: torch.Tensor,
    dy: torch.Tensor, dlse: torch.Tensor | None, left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    reach = dict(window_size_left=left, window_size_right=0) if left >= 0 else {}
    dq, dk, dv = _flash_attn_bwd(q, k, v, y, dy, lse, causal=True, dlse=dlse, **reach)
    return dq, dk, dv


empty = lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
flash4.register_fake(lambda q, k, v, left: (empty(q), empty(q[..., 0].transpose(1, 2)).float()))
flash4_backward.register_fake(
    lambda q, k, v, y, lse, dy, dlse, left: (empty(q), empty(k), empty(v))
)


def save_for_backward(ctx, inputs, output):
    *tensors, ctx.left = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, dlse):
    """Gradients of q, k, v, given those of y and of lse (None: lse was not used)."""
    dlse = None if dlse is None else dlse.contiguous()
    return *flash4_backward(*ctx.saved_tensors, dy, dlse, ctx.left), None


flash4.register_autograd(backward, setup_context=save_for_backward)


def merge_sink(y, lse, q, k, v, window, S):
    """Add sink keys to a window's attention without computing it again. Twin: attend_masked.

    y, q (B, Tq, H, D): the window's result and its queries, the last Tq of S positions; lse
    (B, H, Tq): the logarithm of the softmax's denominator; k, v (B, sink, Hk, D). Returns the
    merged y; without gradients on a GPU that is y itself, changed in place. Both parts are softmax
    averages, so their denominators e^lse say how much each one weighs, as in ring attention. A sink
    key that is still inside the window has been counted there.
    """
    B, Tq, H, D = q.shape
    sink, Hk = k.size(1), k.size(2)
    fits = D & (D - 1) == 0 and q.stride()[2:] == y.stride()[2:]
    if y.is_cuda and triton and fits and not (torch.is_grad_enabled() and y.requires_grad):
        rows = 32
        merge_kernel[(triton.cdiv(Tq, rows), B * H)](
            y, lse, q, k, v, *y.stride()[:2], *lse.stride()[:2], *q.stride()[:2], *k.stride()[:3],
            *v.stride()[:3], Tq, S - Tq, window, H, H // Hk, 1 / math.sqrt(D), sink, D, rows,
        )  # fmt: skip
        return y
    grouped = lambda x: x.view(B, Tq, Hk, H // Hk, D).float()
    p = torch.arange(S - Tq, S, device=q.device)[:, None, None]
    total = lse.transpose(1, 2).reshape(B, Tq, Hk, H // Hk)
    merged = grouped(y)
    for j in range(sink):
        key, value = k[:, j, :, None].float()[:, None], v[:, j, :, None].float()[:, None]
        score = (grouped(q) * key).sum(-1) / math.sqrt(D)
        score = score.masked_fill(p - j < window, -math.inf)
        new = torch.logaddexp(total, score)
        merged = merged * (total - new).exp()[..., None] + value * (score - new).exp()[..., None]
        total = new
    return merged.view(B, Tq, H, D).to(y.dtype)


if triton:

    @triton.jit
    def merge_kernel(
        y, lse, q, k, v, y_b, y_t, lse_b, lse_h, q_b, q_t, k_b, k_t, k_h, v_b, v_t, v_h,
        Tq, start, window, H, G, scale, sink: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """The loop above for ROWS queries of one head, read once and written once, y in place."""
        b, h = tl.program_id(1) // H, tl.program_id(1) % H
        t, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
        inside = t < Tq
        y_at = y + b.to(tl.int64) * y_b + t.to(tl.int64)[:, None] * y_t + h * D + d[None]
        q_at = q + b.to(tl.int64) * q_b + t.to(tl.int64)[:, None] * q_t + h * D + d[None]
        query = tl.load(q_at, inside[:, None], 0).to(tl.float32)
        merged = tl.load(y_at, inside[:, None], 0).to(tl.float32)
        total = tl.load(lse + b * lse_b + h * lse_h + t, inside, 0)
        for j in tl.static_range(sink):
            key = tl.load(k + b.to(tl.int64) * k_b + j * k_t + h // G * k_h + d).to(tl.float32)
            value = tl.load(v + b.to(tl.int64) * v_b + j * v_t + h // G * v_h + d).to(tl.float32)
            score = tl.sum(query * key[None], axis=1) * scale
            score = tl.where(start + t - j < window, -float("inf"), score)
            largest = tl.maximum(total, score)
            new = largest + tl.log(tl.exp(total - largest) + tl.exp(score - largest))
            merged *= tl.exp(total - new)[:, None]
            merged += tl.exp(score - new)[:, None] * value[None]
            total = new
        tl.store(y_at, merged.to(y.dtype.element_ty), inside[:, None])


def fuse(model):
    """Compile what lies between the matrix products of each layer; attention and cache stay eager.

    Norms, rotations, scales and SwiGLU each read and write whole activations, and one by one they
    cost much beside the matrix products. Shapes are symbolic, so that chunks and prompts of any
    length share the compiled code. Returns the model, changed in place.
    """
    for block in model.blocks:
        block.attn.project = torch.compile(block.attn.project, dynamic=True)
        block.feed = torch.compile(block.feed, dynamic=True)
    return model


# ------------------------------------------------------------------------------------------------
# Writing. A step reads every weight and the whole cache once, for a few numbers of arithmetic each,
# so memory traffic sets its time. R rows a sequence go through: 2 for Orthros (base and output), 1
# for a plain Transformer. Two read no more than one does: that is how the pair comes for the price
# of one. Launches cost as well, so a layer is nine kernels and a step is one CUDA graph.


def why_not(model):
    """Why FastStep cannot serve this model, or None if it can."""
    c, weight = model.config, model.wte.weight
    if not weight.is_cuda or triton is None:
        return "fast.py needs an NVIDIA GPU and Triton"
    if weight.dtype == torch.float16 or model.compute_dtype not in (None, weight.dtype):
        return (f"its kernels need weights and activations of one dtype, bfloat16 or float32, not "
                f"{weight.dtype} and {model.compute_dtype or weight.dtype}")  # fmt: skip
    if c.head_dim & (c.head_dim - 1) or c.head_dim < 16:
        return f"its kernels need a head_dim of 16, 32, 64, ..., not {c.head_dim}"
    return None


class FastStep:
    """One new token for each sequence of a cache. Twin: GPT.forward, called as sample.decode does.

    The cache's length lives on the device too: one graph serves all lengths, since the kernels find
    the keys by it and never touch the rest of the cache.
    """

    def __init__(self, model, cache):
        reason = why_not(model)
        if reason:
            raise ValueError(reason)
        cache.check(1)
        c, weight = model.config, model.wte.weight
        self.model, self.cache = model, cache
        self.B, self.R = cache.k.size(1), 1 + (c.attention == "orthros")
        self.ids = torch.zeros(self.B, dtype=torch.long, device=weight.device)
        self.length = torch.zeros(1, dtype=torch.int32, device=weight.device)
        self.scales = [self.scale_rows(block.attn) for block in model.blocks]
        self.length.fill_(cache.length)
        self.run()  # compiles the kernels; what it writes to the cache is overwritten later
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run()

    def __call__(self, ids, T_out=1, cache=None):
        """ids (B, 1) -> (logits (B, 1, V), None). The logits are overwritten by the next call."""
        if ids.shape != (self.B, 1) or T_out != 1 or cache is not self.cache:
            raise ValueError("a FastStep takes one token a sequence, and the cache it was made for")
        cache.check(1)
        self.ids.copy_(ids[:, 0])
        self.length.fill_(cache.length)
        self.graph.replay()
        cache.length += 1
        return self.logits[:, None], None

    def scale_rows(self, attn):
        """alpha and beta of a layer's R rows, each (R, H, D); 1 and 0 where it has none."""
        like = attn.q_proj.weight.new_zeros(attn.n_head, attn.head_dim)
        names = ("base", "out") if self.R > 1 else ("",)
        return [
            torch.stack([getattr(attn, f"{kind}_{name}", like + one).detach() for name in names])
            for kind, one in (("alpha", 1), ("beta", 0))
        ]

    @torch.no_grad()
    def run(self):
        """The step: forward for one position. Row b * R + r of `h` is row r of sequence b."""
        model, c, B, R = self.model, self.model.config, self.B, self.R
        rope = rope_angles(c, self.length)
        h = model.wte(self.ids).repeat_interleave(R, dim=0)  # (B * R, C)
        for block, scales in zip(model.blocks, self.scales):
            attn, mlp = block.attn, block.mlp
            weights = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
            qkv = linear(normed(h, block.attn_norm), weights)
            k, v = self.cache.k[attn.layer], self.cache.v[attn.layer]
            q = place_heads(qkv, k, v, attn, scales, rope, self.length, R)
            window = None if attn.kind == "full" else attn.window
            y = attend_step(q, k, v, self.length, window, attn.sink)
            h = linear(y.view(B * R, -1), [attn.o_proj.weight], add=h)
            weights = [mlp.gate_proj.weight, mlp.up_proj.weight]
            gated = linear(normed(h, block.mlp_norm), weights, gated=True)
            h = linear(gated, [mlp.down_proj.weight], add=h)
        return linear(normed(h[R - 1 :: R], model.norm), [model.lm_head.weight])


def linear(x, weights, add=None, gated=False):
    """x (n, K) times each of up to three weights (N, K), side by side: (n, sum of N).

    add: what is added after. gated: silu(x W1^T) * (x W2^T). Beyond 16 rows PyTorch's is as fast.
    """
    (n, K), first = x.shape, weights[0]
    if n > 16:
        parts = [F.linear(x, w) for w in weights]
        y = F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, dim=1)
        return y if add is None else y + add
    sizes = [len(w) for w in weights] + [0, 0]
    total = sizes[0] if gated else sum(sizes)
    y = x.new_empty(n, total)
    BLOCK, STEP, warps, stages = TILE
    blocks = sum(triton.cdiv(size, BLOCK) for size in (sizes[:1] if gated else sizes))
    linear_kernel[(blocks,)](
        x, *(*weights, first, first)[:3], x if add is None else add, y, n, *sizes[:3], K,
        x.stride(0), total, add is not None, gated, EARLY, BLOCK, STEP, 8 if n <= 8 else 16,
        num_warps=warps, num_stages=stages if x.element_size() == 2 else 2, launch_pdl=EARLY,
    )  # fmt: skip
    return y


TILE = (16, 256, 1, 4)  # of a weight; warps; tiles on their way at once: the fastest on an H200
EARLY = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def normed(x, norm):
    """norm, an RMSNorm, of x (n, K)."""
    y = x.new_empty(x.shape)
    size = triton.next_power_of_2(x.size(1))
    norm_kernel[(len(x),)](
        x, norm.weight, y, x.size(1), x.stride(0), norm.eps, EARLY, size, num_warps=8,
        launch_pdl=EARLY,
    )  # fmt: skip
    return y


def place_heads(qkv, k, v, attn, scales, rope, length, R):
    """qkv (B * R, (H + 2 Hk) D) -> queries (B, R, H, D), and the base rows' keys and values into
    k, v (B, max_len, Hk, D) at `length`: what OrthrosAttention.project does after its matrices."""
    (B, _, Hk, D), H = k.shape, attn.n_head
    q, has_norm = qkv.new_empty(B, R, H, D), hasattr(attn.q_norm, "weight")
    gains = (attn.q_norm.weight, attn.k_norm.weight) if has_norm else (qkv, qkv)
    heads_kernel[(B * R, H + 2 * Hk)](
        qkv, q, k, v, *gains, *scales, *rope, length, *k.stride()[:3],
        attn.q_norm.eps if has_norm else 0.0, R, H, Hk, D, has_norm, EARLY, launch_pdl=EARLY,
    )  # fmt: skip
    return q


def attend_step(q, k, v, length, window, sink):
    """Attention of the R queries at position `length` (on the device). Twin: attend_masked.

    q (B, R, H, D); k, v (B, max_len, Hk, D), of which positions 0 to length are read -> like q.
    Row 0 sees the window and the sink keys, or everything if window is None; row 1 sees everything.
    Keys are split among programs, whose partial results are then weighed as in merge_sink.
    """
    (B, R, H, D), Hk = q.shape, k.size(2)
    G = H // Hk
    cores = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = 1 << max(1, 2 * cores // (B * Hk)).bit_length() - 1  # two programs a core, or fewer
    part = q.new_empty((B * R * H, splits, D), dtype=torch.float32)
    lse, y = part.new_empty(part.shape[:2]), torch.empty_like(q)
    reach = 2**30 if window is None else window
    alone = R == 1 and window is not None  # a window with no row beside it that sees everything
    BLOCK, stages = 64, 3 if D * q.element_size() <= 256 else 1  # what fits into shared memory
    attend_kernel[(B * Hk, splits)](
        q, k, v, part, lse, length, *k.stride()[:3], reach, sink, 1 / math.sqrt(D), Hk, G, R,
        max(16, triton.next_power_of_2(R * G)), D, alone, EARLY, BLOCK, splits, num_warps=4,
        num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
    combine_kernel[(B * R * H,)](
        part, lse, y, length, reach, sink, D, alone, EARLY, BLOCK, splits, launch_pdl=EARLY
    )
    return y


if triton:

    @triton.jit
    def wait(EARLY: tl.constexpr):
        """For the kernel before: on Hopper and later, ours starts while that one still ends."""
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def norm_kernel(x, gain, y, K, x_n, eps, EARLY: tl.constexpr, SIZE: tl.constexpr):
        d = tl.arange(0, SIZE)
        g = tl.load(gain + d, d < K, 0).to(tl.float32)
        wait(EARLY)
        row = tl.load(x + tl.program_id(0) * x_n + d, d < K, 0).to(tl.float32)
        row = row * tl.rsqrt(tl.sum(row * row) / K + eps) * g
        tl.store(y + tl.program_id(0) * K + d, row.to(y.dtype.element_ty), d < K)

    @triton.jit
    def linear_kernel(
        x, w1, w2, w3, add, y, n, N1, N2, N3, K, x_n, y_n, ADD: tl.constexpr, GATED: tl.constexpr,
        EARLY: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """BLOCK columns of y, for n rows of x. Each weight is read once. The tensor cores multiply
        ROWS rows at least, so that one row takes as long as a pair: what the memory takes."""
        block, w, N = tl.program_id(0), w1, N1
        start = N * 0
        if not GATED:
            if block >= tl.cdiv(N1, BLOCK):
                block, w, N, start = block - tl.cdiv(N1, BLOCK), w2, N2, N1
                if block >= tl.cdiv(N2, BLOCK):
                    block, w, N, start = block - tl.cdiv(N2, BLOCK), w3, N3, N1 + N2
        i, d, r = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STEP), tl.arange(0, ROWS)
        w_at, inside = i.to(tl.int64)[:, None] * K + d[None], (i < N)[:, None]
        x_at, real = x + r[:, None] * x_n + d[None], (r < n)[:, None]
        total = tl.zeros([BLOCK, ROWS], tl.float32)
        gate = total
        wait(EARLY)
        for k in range(0, K, STEP):
            keep = (k + d < K)[None]
            row = tl.trans(tl.load(x_at + k, real & keep, 0))
            tile = load_once(w + w_at + k, inside & keep)
            total = tl.dot(tile, row, total, input_precision="ieee")
            if GATED:
                tile = load_once(w2 + w_at + k, inside & keep)
                gate = tl.dot(tile, row, gate, input_precision="ieee")
        if GATED:
            total = total * tl.sigmoid(total) * gate
        at, real = r[None] * y_n + start + i[:, None], (r < n)[None] & inside
        if ADD:
            total += tl.load(add + at, real, 0).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), real)

    @triton.jit
    def load_once(at, inside):
        """Weights that nobody else reads should not push out of the cache what all read."""
        return tl.load(at, inside, 0, eviction_policy="evict_first")

    @triton.jit
    def heads_kernel(
        qkv, q, k, v, q_gain, k_gain, alpha, beta, cos, sin, length, c_b, c_t, c_h, eps,
        R: tl.constexpr, H: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """One head of one row, in halves, which RoPE turns against each other."""
        wait(EARLY)
        row, head = tl.program_id(0), tl.program_id(1)
        b, r = (row // R).to(tl.int64), row % R
        d = tl.arange(0, D // 2)
        at = qkv + (row * (H + 2 * Hk) + head) * D + d
        one, two = tl.load(at).to(tl.float32), tl.load(at + D // 2).to(tl.float32)
        cached = b * c_b + tl.load(length).to(tl.int64) * c_t + (head - H) % Hk * c_h + d
        if head >= H + Hk:
            if r == 0:
                tl.store(v + cached, one.to(v.dtype.element_ty))
                tl.store(v + cached + D // 2, two.to(v.dtype.element_ty))
        else:
            is_query = head < H
            if NORM:
                gain = q_gain if is_query else k_gain
                norm = tl.rsqrt((tl.sum(one * one) + tl.sum(two * two)) / D + eps)
                one, two = one * norm * tl.load(gain + d), two * norm * tl.load(gain + D // 2 + d)
            if is_query:
                s = (r * H + head) * D + d
                one = tl.load(alpha + s) * one + tl.load(beta + s)
                two = tl.load(alpha + s + D // 2) * two + tl.load(beta + s + D // 2)
            c, s = tl.load(cos + d), tl.load(sin + d)
            one, two = one * c - two * s, two * c + one * s
            if is_query:
                at = q + (row * H + head) * D + d
                tl.store(at, one.to(q.dtype.element_ty))
                tl.store(at + D // 2, two.to(q.dtype.element_ty))
            elif r == 0:
                tl.store(k + cached, one.to(k.dtype.element_ty))
                tl.store(k + cached + D // 2, two.to(k.dtype.element_ty))

    @triton.jit
    def load_cached(x, at, inside):
        """A tile of keys or values for the arithmetic. An 8-bit cache would be scaled here."""
        return tl.load(x + at, inside, 0)

    @triton.jit
    def blocks_seen(S, window, sink, ALONE: tl.constexpr, BLOCK: tl.constexpr):
        """How many blocks of keys anybody sees, how many of those hold sink keys, and how many are
        left out behind these: none unless the window is ALONE."""
        seen = tl.cdiv(S, BLOCK)
        sinks = seen * 0
        hidden = seen * 0
        if ALONE:
            sinks = tl.minimum(tl.cdiv(sink, BLOCK), seen)
            hidden = tl.maximum(tl.maximum(S - window, 0) // BLOCK - sinks, 0)
        return seen - hidden, sinks, hidden

    @triton.jit
    def attend_kernel(
        q, k, v, part, lse, length, c_b, c_t, c_h, window, sink, scale, Hk, G: tl.constexpr,
        R: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ALONE: tl.constexpr,
        EARLY: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    ):  # fmt: skip
        """All R * G queries of one KV head over one split of its keys, with a running softmax."""
        wait(EARLY)
        b, h, split = tl.program_id(0) // Hk, tl.program_id(0) % Hk, tl.program_id(1)
        S = tl.load(length) + 1
        blocks, sinks, hidden = blocks_seen(S, window, sink, ALONE, BLOCK)
        size = tl.cdiv(blocks, SPLITS)
        i, d, j = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
        row = (b * R + i // G) * Hk * G + h * G + i % G  # of q and part: row of the pair, head
        valid, unlimited = i < R * G, i // G == 1
        query = tl.load(q + row[:, None] * D + d[None], valid[:, None], 0)
        largest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        y = tl.zeros([ROWS, D], tl.float32)
        offset = b.to(tl.int64) * c_b + h * c_h
        for block in range(split * size, tl.minimum(blocks, (split + 1) * size)):
            key = block * BLOCK + j
            if ALONE:
                key += tl.where(block < sinks, 0, hidden * BLOCK)
            at = offset + key.to(tl.int64)[:, None] * c_t + d[None]
            keys = load_cached(k, at, (key < S)[:, None])
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            near = (S - 1 - key < window) | (key < sink)
            seen = (key < S)[None] & (near[None] | unlimited[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(largest, tl.max(scores, axis=1))
            base = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
            weights, shrink = tl.exp(scores - base[:, None]), tl.exp(largest - base)
            values = load_cached(v, at, (key < S)[:, None])
            y = y * shrink[:, None]
            y = tl.dot(weights.to(values.dtype), values, y, input_precision="ieee")
            total, largest = total * shrink + tl.sum(weights, axis=1), new
        at = row * SPLITS + split
        tl.store(lse + at, largest + tl.log(total), valid)
        y = y / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(part + at[:, None] * D + d[None], y, valid[:, None])

    @triton.jit
    def combine_kernel(
        part, lse, y, length, window, sink, D: tl.constexpr, ALONE: tl.constexpr,
        EARLY: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    ):  # fmt: skip
        """One query's result from its splits, each weighed by its share of the denominator."""
        wait(EARLY)
        row, s, d = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, D)
        S = tl.load(length) + 1
        blocks, _, _ = blocks_seen(S, window, sink, ALONE, BLOCK)
        live = s * tl.cdiv(blocks, SPLITS) < blocks
        share = tl.load(lse + row * SPLITS + s, live, -float("inf"))
        share = tl.exp(share - tl.max(share))
        parts = tl.load(part + (row * SPLITS + s[:, None]) * D + d[None], live[:, None], 0)
        result = tl.sum(parts * share[:, None], axis=0) / tl.sum(share)
        tl.store(y + row * D + d, result.to(y.dtype.element_ty))

"""What is only faster: a reader of model.py may skip this file.

Each function has a plain twin that it is tested against in test_equivalence.py:

    merge_sink    attention over a window and sink keys, from attention over the window alone
    fuse          a model whose elementwise work is compiled, for prefill
"""

import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU, or a platform without Triton: the plain functions serve
    triton = None


def merge_sink(y, lse, q, k, v, window, S):
    """Add sink keys to a window's attention without computing it again. Twin: attend_masked.

    y, q (B, Tq, H, D): the window's result and its queries, the last Tq of S positions; lse
    (B, H, Tq): the logarithm of the softmax's denominator; k, v (B, sink, Hk, D). Returns y.
    Both parts are softmax averages, so their denominators e^lse say how much each one weighs, as
    in ring attention. A sink key that is still inside the window has been counted there. Forward
    only: flash-attn gives no gradient with respect to lse.
    """
    B, Tq, H, D = q.shape
    sink, Hk = k.size(1), k.size(2)
    if y.is_cuda and triton and D & (D - 1) == 0 and q.stride()[2:] == y.stride()[2:]:
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
            key = tl.load(k + b * k_b + j * k_t + h // G * k_h + d).to(tl.float32)
            value = tl.load(v + b * v_b + j * v_t + h // G * v_h + d).to(tl.float32)
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

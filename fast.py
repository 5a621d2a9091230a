"""What is only faster: a reader of model.py may skip this file.

Each function has a plain twin that it is tested against in test_equivalence.py:

    merge_sink    attention over a window and sink keys, from attention over the window alone
    fuse          a model whose elementwise work is compiled, for prefill
"""

import functools
import math

import torch


def merge_sink(y, lse, q, k, v, window, S):
    """Add sink keys to a window's attention without computing it again. Twin: attend_masked.

    y, q (B, Tq, H, D): the window's result and its queries, the last Tq of S positions; lse
    (B, H, Tq): the logarithm of the softmax's denominator; k, v (B, sink, Hk, D). Returns y.
    Both parts are softmax averages, so their denominators e^lse say how much each one weighs, as
    in ring attention. A sink key that is still inside the window has been counted there. Forward
    only: the gradient with respect to lse is not what flash-attn gives.
    """
    fused = y.is_cuda and not torch.compiler.is_compiling()
    return (compiled(merge) if fused else merge)(y, lse, q, k, v, window, S)


@functools.cache
def compiled(function):
    return torch.compile(function, dynamic=True)


def merge(y, lse, q, k, v, window, S):
    B, Tq, H, D = q.shape
    Hk = k.size(2)
    grouped = lambda x: x.view(B, Tq, Hk, H // Hk, D).float()
    p = torch.arange(S - Tq, S, device=q.device)[:, None, None]
    total = lse.transpose(1, 2).reshape(B, Tq, Hk, H // Hk)
    y32, q32 = grouped(y), grouped(q)
    for j in range(k.size(1)):  # one by one: the compiler makes a single kernel of it
        kj, vj = k[:, j, :, None].float()[:, None], v[:, j, :, None].float()[:, None]
        score = (q32 * kj).sum(-1) / math.sqrt(D)
        score = score.masked_fill(p - j < window, -math.inf)
        new = torch.logaddexp(total, score)
        y32 = y32 * (total - new).exp()[..., None] + vj * (score - new).exp()[..., None]
        total = new
    return y32.view(B, Tq, H, D).to(y.dtype)


def fuse(model):
    """Compile what lies between the matrix products of each layer; attention and cache stay eager.

    Norms, rotations, scales and SwiGLU each read and write whole activations, which costs as much
    as a third of the matrix products when run one by one. Shapes are symbolic, so that chunks and
    prompts of any length share the compiled code. Returns the model, changed in place.
    """
    for block in model.blocks:
        block.attn.project = torch.compile(block.attn.project, dynamic=True)
        block.feed = torch.compile(block.feed, dynamic=True)
    return model

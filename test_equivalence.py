"""Chapter two: the paper's claims, each as a sentence that must hold.

All but the last section is float32 on the CPU; that one needs a GPU and is skipped without one.
The dense masked reference, `attend_masked`, is the truth.
"""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

import model as M
from fast import FastStep, attend_step, fuse, merge_sink
from model import GPT, GPTConfig, KVCache, apply_rope, attend, attend_masked, attend_torch, visible
from sample import generate, prefill

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(M, "_backend", "torch")


def tiny(**changes):
    """A small model whose alphas and betas differ, as after training."""
    shape = dict(vocab_size=256, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, window=4)
    model = GPT(GPTConfig(**{**shape, **changes}))
    for name, p in model.named_parameters():
        if name.rsplit(".")[-1].startswith(("alpha_", "beta_")):
            p.data += 0.3 * torch.randn_like(p)
    return model.eval()


def tokens(B, T, vocab=256):
    return torch.randint(vocab, (B, T))


def qkv(Tq, S, H=4, Hk=2, D=8, B=2):
    shapes = ((B, Tq, H, D), (B, S, Hk, D), (B, S, Hk, D))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def close(a, b, tolerance=1e-5):
    assert a.shape == b.shape and (a - b).abs().max() <= tolerance, (a - b).abs().max()


# ------------------------------------------------------------------------------------------------
# 1. What a query sees


def test_a_window_counts_the_token_itself():
    assert visible(10, 10, window=4).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert visible(10, 10, window=4)[9].nonzero().flatten().tolist() == [6, 7, 8, 9]
    assert torch.equal(visible(10, 10, window=1), torch.eye(10, dtype=torch.bool))
    assert torch.equal(visible(10, 10, window=10), visible(10, 10))


def test_sink_keys_stay_visible_and_count_once():
    mask = visible(10, 10, window=4, sink=2)
    assert mask[3].sum() == 4 and mask[9].sum() == 6
    assert mask[9].nonzero().flatten().tolist() == [0, 1, 6, 7, 8, 9]


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match="window"):
        attend(*qkv(3, 3), window=window)
    with pytest.raises(ValueError, match="window"):
        GPTConfig(window=window)


@pytest.mark.parametrize("backend", [attend_masked, attend_torch])
def test_queries_are_the_last_positions(backend):
    q, k, v = qkv(3, 10, H=1, Hk=1, B=1)
    for i in range(3):
        n = 8 + i  # keys 0 .. 7 + i
        weights = (k[0, :n, 0] @ q[0, i, 0] / 8**0.5).softmax(0)
        close(backend(q, k, v)[0, i, 0], weights @ v[0, :n, 0], 1e-6)


@pytest.mark.parametrize("backend", [attend_masked, attend_torch])
@pytest.mark.parametrize("Tq,window", [(6, None), (6, 2), (1, None), (3, None), (3, 2), (1, 2)])
def test_neighbouring_query_heads_share_a_key_value_head(backend, Tq, window):
    q, k, v = qkv(Tq, 6)
    values = torch.tensor([3.0, 7.0])[:, None].expand_as(v)
    heads = backend(q, k, values, window).mean((0, 1, 3))
    close(heads, torch.tensor([3.0, 3.0, 7.0, 7.0]))


@pytest.mark.parametrize("window", [None, 1, 3, 8, 16])
@pytest.mark.parametrize("sink", [0, 1, 4])
def test_the_torch_backend_equals_the_masked_reference_forward_and_backward(window, sink):
    if window is None and sink:
        pytest.skip("a sink belongs to a window")
    for S, Tq, Hk in itertools.product((1, 7, 8, 9, 16, 17, 24, 33), (1, 5, 8, 17, 33), (1, 2, 4)):
        if Tq > S:
            continue
        inputs = qkv(Tq, S, Hk=Hk)
        want, got = (f(*inputs, window, sink) for f in (attend_masked, attend_torch))
        close(got, want, 2e-6)
        push = torch.randn_like(want)
        for a, b in zip(*(torch.autograd.grad(y, inputs, push) for y in (got, want))):
            close(a, b)


def test_no_sink_is_bit_identical_to_sink_zero():
    q, k, v = qkv(20, 20)
    assert torch.equal(attend_torch(q, k, v, 4, 0), attend_torch(q, k, v, 4))


# ------------------------------------------------------------------------------------------------
# 2. One function, four phases


def test_with_a_window_as_long_as_the_text_orthros_is_a_plain_transformer():
    """Against a Transformer written out here. Only RoPE and RMSNorm are the model's own code; those
    are held against transformers in tests/test_weights.py."""
    model = GPT(GPTConfig(vocab_size=256, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, window=16))
    idx, T = tokens(2, 16), 16
    rope = M.rope_angles(model.config, torch.arange(T))
    x = model.wte.weight[idx]
    for block in model.blocks:
        h, a = block.attn_norm(x), block.attn
        q = apply_rope((h @ a.q_proj.weight.T).view(2, T, 4, 16), *rope).transpose(1, 2)
        k = apply_rope((h @ a.k_proj.weight.T).view(2, T, 2, 16), *rope).transpose(1, 2)
        v = (h @ a.v_proj.weight.T).view(2, T, 2, 16).transpose(1, 2)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ a.o_proj.weight.T
        h, m = block.mlp_norm(x), block.mlp
        gate, up = h @ m.gate_proj.weight.T, h @ m.up_proj.weight.T
        x = x + (F.silu(gate) * up) @ m.down_proj.weight.T
    close(model(idx)[0], model.norm(x) @ model.wte.weight.T)


@pytest.mark.parametrize("attention", ["orthros", "full", "swa", "swa,full"])
@pytest.mark.parametrize("T_out", [1, 5, 16])
def test_sft_logits_are_the_last_rows_of_pretraining(attention, T_out):
    model, idx = tiny(attention=attention), tokens(2, 16)
    close(model(idx, T_out=T_out)[0], model(idx)[0][:, -T_out:])


@pytest.mark.parametrize("attention", ["orthros", "full", "swa"])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("prompt", [2, 4, 13])  # shorter than, equal to and longer than the window
@pytest.mark.parametrize("chunk", [3, 100])
def test_prefill_and_decode_equal_pretraining_at_every_step(
    attention, sink, qk_norm, prompt, chunk
):
    model = tiny(attention=attention, sink=sink, qk_norm=qk_norm, n_layer=3)
    idx = tokens(2, prompt + 20)
    want = model(idx)[0]
    cache = KVCache(model.config, 2, prompt + 20)
    for start in range(0, prompt, chunk):
        piece = idx[:, start : min(prompt, start + chunk)]
        is_last = start + chunk >= prompt
        logits, _ = model(piece, T_out=int(is_last), cache=cache)
    for t in range(prompt, prompt + 20):
        close(logits[:, 0], want[:, t - 1], 1e-4)
        assert torch.equal(logits[:, 0].argmax(-1), want[:, t - 1].argmax(-1))
        assert cache.length == t
        logits, _ = model(idx[:, t : t + 1], cache=cache)


def test_greedy_generation_equals_the_uncached_model():
    model, idx = tiny(window=5), tokens(2, 11)
    text = idx
    for ids, _ in generate(model, idx, 15, temperature=0, prefill_chunk=4):
        assert torch.equal(ids, model(text, T_out=1)[0][:, 0].argmax(-1))
        text = torch.cat((text, ids[:, None]), 1)


def test_a_pair_shares_one_position_and_adds_one_key():
    """With W >= S and equal scales, base and output token of a pair are the same computation."""
    model = GPT(GPTConfig(vocab_size=256, n_layer=2, n_head=4, n_embd=64, window=64)).eval()
    cache = KVCache(model.config, 1, 20)
    model(tokens(1, 9), T_out=0, cache=cache)
    rows = []
    model.blocks[0].register_forward_hook(lambda module, args, out: rows.append(out))
    model(tokens(1, 1), cache=cache)
    assert cache.length == 10
    close(rows[0][:, 0], rows[0][:, 1], 1e-6)


def test_in_decoding_the_base_token_keeps_its_window_and_the_output_token_sees_all():
    model, idx = tiny(), tokens(1, 13)
    rows = []
    model.blocks[0].register_forward_hook(lambda module, args, out: rows.append(out))
    for bump in (0.0, 1.0):
        cache = KVCache(model.config, 1, 20)
        model(idx[:, :12], T_out=0, cache=cache)
        cache.v[0, :, 0] += bump
        model(idx[:, 12:], cache=cache)
    before, after = rows[1], rows[3]
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


# ------------------------------------------------------------------------------------------------
# 3. Causality and padding


@pytest.mark.parametrize("attention", ["orthros", "full", "swa"])
def test_future_tokens_change_nothing(attention):
    model, idx = tiny(attention=attention), tokens(1, 16)
    changed = idx.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(idx)[0], model(changed)[0]
    close(before[:, :9], after[:, :9], 1e-6)
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_right_padding_changes_no_real_position_and_makes_no_nan():
    model, idx = tiny(window=2), tokens(2, 8)
    targets = tokens(2, 8)
    targets[0, 3:] = -1
    logits, _ = model(idx)
    close(logits[:1, :3], model(idx[:1, :3])[0])
    model(idx, targets)[1].backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# ------------------------------------------------------------------------------------------------
# 4. What makes Orthros Orthros


def test_one_layer_logits_do_not_depend_on_the_window():
    """A single layer's output tokens read keys that no window has touched."""
    model, idx = tiny(n_layer=1), tokens(2, 16)
    want = model(idx)[0]
    model.blocks[0].attn.window = 1
    close(model(idx)[0], want)


def test_deeper_logits_do_depend_on_the_window():
    model, idx = tiny(), tokens(2, 16)
    want = model(idx)[0]
    model.blocks[0].attn.window = 1
    assert (model(idx)[0] - want).abs().max() > 1e-3


def test_keys_and_values_come_from_base_tokens_alone():
    """Prefill's cache does not change with the number of output tokens."""
    model, idx = tiny(n_layer=3), tokens(1, 12)
    caches = [KVCache(model.config, 1, 12) for _ in range(3)]
    for T_out, cache in zip((0, 1, 12), caches):
        model(idx, T_out=T_out, cache=cache)
    for cache in caches[1:]:
        close(caches[0].k, cache.k)
        close(caches[0].v, cache.v)


def test_scale_and_offset_start_as_nothing_and_matter_once_trained():
    config = GPTConfig(vocab_size=256, n_layer=2, n_head=4, n_embd=64, window=4)
    model, idx = GPT(config), tokens(4, 16)
    without = GPT(GPTConfig(**{**vars(config), "scale_offset": False}))
    without.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(idx)[0], without(idx)[0])
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=1e-2)
    model(idx, tokens(4, 16))[1].backward()
    for name, p in model.named_parameters():
        # the paper adds alpha, beta to queries; every one of them must learn
        assert p.grad.abs().sum() > 0, name
    optimizer.step()
    without.load_state_dict(model.state_dict(), strict=False)
    assert (model(idx)[0] - without(idx)[0]).abs().max() > 1e-3


def test_the_last_layer_has_no_base_scale_and_offset():
    names = [name for name, _ in tiny(n_layer=3).named_parameters()]
    assert "blocks.1.attn.alpha_base" in names and "blocks.2.attn.alpha_out" in names
    assert not any(name.startswith("blocks.2") and name.endswith("_base") for name in names)
    assert not any("alpha" in name for name, _ in tiny(attention="full").named_parameters())


def test_every_kind_of_attention_asks_only_at_T_out_positions_in_the_last_layer():
    for attention in ("orthros", "full", "swa"):
        model, rows = tiny(attention=attention), []
        model.blocks[-1].mlp.register_forward_hook(lambda m, args, out: rows.append(out.size(1)))
        model(tokens(1, 16), T_out=3)
        assert rows == [3]


# ------------------------------------------------------------------------------------------------
# 5. The loss


def test_the_chunked_loss_equals_cross_entropy_forward_and_backward(monkeypatch):
    monkeypatch.setattr(M, "MAX_LOGITS", 700)  # a few rows a chunk
    model, idx, targets = tiny(tie_embeddings=False), tokens(2, 9), tokens(2, 9)
    targets[0, :4] = -1
    loss = model(idx, targets)[1]
    want = F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten(), ignore_index=-1)
    close(loss, want)
    weights = list(model.parameters())
    for a, b in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(want, weights)):
        close(a, b)


def test_a_batch_without_targets_has_loss_zero_and_gradients_of_zero():
    model = tiny()
    loss = model(tokens(2, 5), torch.full((2, 5), -1))[1]
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())


def test_impossible_T_out_and_targets_are_refused():
    model, idx = tiny(), tokens(1, 4)
    for bad in (dict(T_out=5), dict(T_out=-1), dict(T_out=0, targets=idx[:, :0])):
        with pytest.raises(ValueError, match="T_out"):
            model(idx, **bad)
    assert model(idx, T_out=0) == (None, None)


# ------------------------------------------------------------------------------------------------
# 6. What is faster changes nothing


@pytest.mark.parametrize("Tq,S,sink", [(12, 12, 1), (5, 20, 2), (9, 9, 3)])
def test_sink_keys_merged_into_a_window_equal_attention_over_both(Tq, S, sink):
    q, k, v = qkv(Tq, S)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    lse = scores.masked_fill(~visible(Tq, S, 4), -torch.inf).logsumexp(dim=-1)
    y = merge_sink(attend_masked(q, k, v, 4), lse, q, k[:, :sink], v[:, :sink], 4, S)
    want = attend_masked(q, k, v, 4, sink)
    close(y, want)
    push = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), push) for x in (y, want))):
        close(a, b)


@pytest.mark.slow  # the compiler takes most of a minute
@pytest.mark.parametrize("attention", ["orthros", "full"])
def test_a_fused_model_prefills_as_a_plain_one(attention):
    model, idx = tiny(attention=attention, qk_norm=True), tokens(1, 23)
    with torch.no_grad():
        want = model(idx, T_out=1)[0]
        for chunk in (23, 7):
            got = prefill(fuse(model), idx, KVCache(model.config, 1, 23), chunk)
            close(got, want)


def test_a_broken_flash_attn_is_left_out_with_one_warning(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(M, "_flash", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(UserWarning, match="undefined symbol"):
        assert M.load_flash() == {}


# ------------------------------------------------------------------------------------------------
# 7. On a GPU. bf16 keeps 8 bits of mantissa: 2e-2 relative is a few roundings.


def near(got, want, tolerance=2e-2):
    assert got.shape == want.shape
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm()


@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "flash"])
@pytest.mark.parametrize("window,sink,Tq", [(128, 0, 1025), (128, 2, 1025), (None, 0, 300)])
def test_bf16_backends_stay_near_the_masked_reference_forward_and_backward(
    backend, window, sink, Tq
):
    inputs = [x.detach().cuda() for x in qkv(Tq, 1025, H=4, Hk=2, D=64)]
    exact = [x.double().requires_grad_() for x in inputs]
    rough = [x.bfloat16().requires_grad_() for x in inputs]
    push = torch.randn_like(inputs[0])
    want, got = attend_masked(*exact, window, sink), M.BACKENDS[backend](*rough, window, sink)
    near(got, want)
    want_grads = torch.autograd.grad(want, exact, push.double())
    for a, b in zip(torch.autograd.grad(got, rough, push.bfloat16()), want_grads):
        near(a, b)


@needs_gpu
@pytest.mark.parametrize("generation", [2, 4])
@pytest.mark.parametrize("window,sink", [(128, 0), (128, 1), (128, 4), (None, 0)])
@pytest.mark.parametrize("Tq,S", [(1025, 1025), (300, 1025), (7, 4000)])
def test_each_flash_attn_answers_as_the_masked_reference(generation, window, sink, Tq, S):
    if generation not in M.load_flash():
        pytest.skip(f"flash-attn {generation} is not installed")
    exact = [x.detach().cuda().requires_grad_() for x in qkv(Tq, S, H=8, Hk=2, D=128)]
    rough = [x.detach().bfloat16().requires_grad_() for x in exact]
    want = attend_masked(*exact, window, sink)
    with torch.no_grad():
        near(M.call_flash(generation, *rough, window, sink), want)
    if generation == 2 and sink:
        return  # it has no gradient of the log-sum-exp that weighs the sink keys
    got, push = M.call_flash(generation, *rough, window, sink), torch.randn_like(want)
    wanted = torch.autograd.grad(want, exact, push)
    for a, b in zip(torch.autograd.grad(got, rough, push.bfloat16()), wanted):
        near(a, b)


@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "flash"])
@pytest.mark.parametrize("sink", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_bf16_prefill_and_decode_stay_near_pretraining(backend, sink, fused, monkeypatch):
    model = tiny(n_embd=512, head_dim=64, n_head=8, window=64, sink=sink).cuda()
    idx = tokens(1, 420).cuda()
    with torch.no_grad():
        want = model(idx)[0][:, 399:]
        monkeypatch.setattr(M, "_backend", backend)
        model.bfloat16()
        cache = KVCache(model.config, 1, 420, "cuda", torch.bfloat16)
        got = [prefill(fuse(model) if fused else model, idx[:, :400], cache, 150)]
        got += [model(idx[:, t : t + 1], cache=cache)[0] for t in range(400, 420)]
    near(torch.cat(got, dim=1), want, 3e-2)  # rounded weights too, and two layers of roundings


@needs_gpu
def test_a_kernel_that_fails_is_dropped_with_one_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(M, "_flash", {2: broken})
    q, k, v = (x.detach().cuda().bfloat16() for x in qkv(20, 30))
    with pytest.warns(UserWarning, match="no kernel image"):
        got = M.attend_flash(q, k, v, 4)
    assert torch.equal(got, attend_torch(q, k, v, 4)) and M._flash == {}


@needs_gpu
@pytest.mark.parametrize("sink,batch", [(0, 1), (2, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("G", [1, 2, 4, 8])
def test_the_pair_kernel_answers_as_the_masked_reference_at_any_context(G, sink, batch):
    W, H, D = 64, 8, 64
    k, v = (torch.randn(batch, 131072, H // G, D, device="cuda").bfloat16() for _ in "kv")
    q = torch.randn(batch, 2, H, D, device="cuda").bfloat16()
    for S in (1, W - 1, W, W + 1, 4097, 131071):
        length = torch.tensor([S - 1], dtype=torch.int32, device="cuda")
        got = attend_step(q, k, v, length, W, sink)
        seen = [x[:, :S].float() for x in (k, v)]
        for row, window in ((0, W), (1, None)):
            near(
                got[:, row : row + 1],
                attend_masked(q[:, row : row + 1].float(), *seen, window, sink),
            )


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(sink=2, qk_norm=True), dict(scale_offset=False), dict(attention="full"),
     dict(attention="swa,full"), dict(attention="swa", sink=2)],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_200_steps_under_one_graph_equal_the_eager_steps(dtype, changes, batch):
    model = tiny(n_embd=128, head_dim=64, n_head=4, n_kv_head=2, window=32, **changes).cuda()
    model.to(dtype)
    idx = tokens(batch, 250).cuda()
    eager, fast = (KVCache(model.config, batch, 300, "cuda", dtype) for _ in "ab")
    with torch.no_grad():
        for cache in (eager, fast):
            prefill(model, idx[:, :50], cache, 64)
        step = FastStep(model, fast)
        step.run = None  # whatever would compile or capture again fails
        for t in range(50, 250):
            want = model(idx[:, t : t + 1], T_out=1, cache=eager)[0]
            got = step(idx[:, t : t + 1], T_out=1, cache=fast)[0]
            near(got, want, 1e-5 if dtype == torch.float32 else 3e-2)
    near(fast.k, eager.k, 1e-5 if dtype == torch.float32 else 3e-2)


@needs_gpu
def test_text_decoded_under_a_graph_is_the_eager_text():
    model = tiny(n_embd=128, head_dim=64, n_head=4, n_kv_head=2, window=32, block_size=300).cuda()
    prompt, texts = tokens(1, 40).cuda(), []
    for fast in (False, True):
        cache = KVCache(model.config, 1, 240, "cuda")
        step = FastStep(model, cache) if fast else None
        texts.append([int(i) for i, _ in generate(model, prompt, 200, 0.0, cache=cache, step=step)])
    assert texts[0] == texts[1]

"""The command lines: data, training, checkpoints, sampling, and what a user's mistake does."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench
import model as M
import prepare
import sample
import train
from model import GPT, GPTConfig, KVCache
from sample import generate, pick_token

ROOT = pathlib.Path(__file__).parent.parent
bench.Limits = functools.cache(bench.Limits)  # what the machine does at best, measured once


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.fixture
def text():
    """A small prepared dataset named 'text'."""
    os.makedirs("src")
    for i in range(40):
        body = "".join(f"def f{j}(x):\n    return x + {i * j}\n" for j in range(20))
        pathlib.Path(f"src/{i}.py").write_text(body)
    call(prepare.main, "src", "--name=text", "--glob=*.py", "--val_fraction=0.2")


SMALL = ["--dataset=text", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32",
         "--window=8", "--batch_size=2", "--max_iters=6", "--eval_interval=3", "--eval_windows=4",
         "--warmup_iters=2", "--log_interval=1", "--device=cpu"]  # fmt: skip


def call(main, *argv):
    """Run a script's main as the command line would; exit code 0 or 2 and its stderr line."""
    sys.argv = [f"{main.__module__}.py", *map(str, argv)]
    prepare.run_cli(main)


def fails(capsys, main, *argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call(main, *argv)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "error:" in error
    return error


def tiny(**changes):
    shape = dict(vocab_size=256, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, window=4)
    return GPT(GPTConfig(**{**shape, **changes})).eval()


def state(out_dir):
    return torch.load(f"{out_dir}/ckpt.pt", weights_only=True, map_location="cpu")


# ------------------------------------------------------------------------------------------------
# Shards and text


@pytest.mark.parametrize("dtype,ids", [("uint16", [0, 65535]), ("uint32", [128000, 151643])])
def test_shards_round_trip(dtype, ids):
    prepare.write_shard("a_train.bin", ids, dtype)
    assert prepare.read_shard("a_train.bin").tolist() == ids
    header = np.fromfile("a_train.bin", dtype="<i4", count=3).tolist()
    assert header == [*prepare.FORMATS[dtype], len(ids)]


def test_ids_that_do_not_fit_are_refused_and_nothing_is_written():
    with pytest.raises(ValueError, match="do not fit"):
        prepare.write_shard("a.bin", [128009], "uint16")
    assert os.listdir() == []


@pytest.mark.parametrize("content", [b"", b"123", b"\0" * 1024])
def test_broken_shards_are_refused_with_their_name(content):
    pathlib.Path("x_train.bin").write_bytes(content)
    with pytest.raises(ValueError, match="x_train.bin"):
        prepare.read_shard("x_train.bin")


def test_a_truncated_shard_is_refused():
    prepare.write_shard("x.bin", range(100), "uint16")
    os.truncate("x.bin", 1024 + 150)
    with pytest.raises(ValueError, match="100 tokens"):
        prepare.read_shard("x.bin")


def test_headerless_nanogpt_files_load():
    np.arange(1000, dtype="<u2").tofile("train.bin")
    assert prepare.read_shard("train.bin").tolist() == list(range(1000))


def test_preparing_twice_gives_the_same_bytes(text):
    first = {p.name: p.read_bytes() for p in pathlib.Path("data/text").iterdir()}
    call(prepare.main, "src", "--name=text", "--glob=*.py", "--val_fraction=0.2")
    assert first == {p.name: p.read_bytes() for p in pathlib.Path("data/text").iterdir()}
    assert not list(pathlib.Path("data").glob("*.tmp"))


def test_odd_text_becomes_tokens_and_comes_back():
    tokenizer = prepare.ByteTokenizer()
    assert tokenizer.decode_bytes(tokenizer.encode("a\udbc0b")) == "a\ufffdb".encode()
    assert tokenizer.decode_bytes(tokenizer.encode("狗守地獄門")).decode() == "狗守地獄門"


def test_chinese_text_is_prepared_alike_in_the_C_locale():
    os.makedirs("zh")
    for i in range(30):
        pathlib.Path(f"zh/{i}.txt").write_bytes(f"第{i}章 雙頭犬\r\n".encode() * 5)
    found = []
    for name, env in (("a", {"LC_ALL": "C", "PYTHONUTF8": "0"}), ("b", {"LC_ALL": "C.UTF-8"})):
        command = [sys.executable, ROOT / "prepare.py", "zh", f"--name={name}", "--val_fraction=.2"]
        subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True)
        found.append(pathlib.Path(f"data/{name}/train_000000.bin").read_bytes())
    assert found[0] == found[1]


def test_a_failed_preparation_keeps_the_old_dataset(text, capsys):
    before = sorted(os.listdir("data/text"))
    pathlib.Path("empty.txt").write_text("")
    assert "empty" in fails(capsys, prepare.main, "empty.txt", "--name=text")
    assert sorted(os.listdir("data/text")) == before


def test_gpt2_without_network_or_cache_says_what_to_do(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match="TIKTOKEN_CACHE_DIR"):
        prepare.GPT2Tokenizer()


# ------------------------------------------------------------------------------------------------
# Training


def test_training_lowers_the_loss_logs_and_resumes_bit_for_bit(text):
    call(train.main, *SMALL, "--out_dir=whole")
    log = [json.loads(line) for line in open("whole/log.jsonl")]
    assert log[-1]["val_loss"] < 5.5 and log[-1]["step"] == 6

    class Stop(KeyboardInterrupt):
        pass

    save, train.save_checkpoint = train.save_checkpoint, None

    def save_then_stop(*args):
        save(*args)
        raise Stop

    train.save_checkpoint = save_then_stop
    try:
        with pytest.raises(SystemExit) as stop:
            call(train.main, *SMALL, "--out_dir=parts")
    finally:
        train.save_checkpoint = save
    assert stop.value.code == 130 and state("parts")["step"] == 3
    call(train.main, "--out_dir=parts", "--init_from=resume", "--device=cpu")
    whole, parts = state("whole")["model"], state("parts")["model"]
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    logs = [[json.loads(x) for x in open(f"{d}/log.jsonl")] for d in ("whole", "parts")]
    losses = [[r["loss"] for r in log if r["step"] > 3] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_a_checkpoint_of_a_compiled_run_has_plain_names(text, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: real(m, backend="eager"))  # no C++ needed
    call(train.main, *SMALL, "--out_dir=out", "--compile=True", "--max_iters=3")
    assert not any("_orig_mod" in name for name in state("out")["model"])
    assert M.load_checkpoint("out")[0].config.n_layer == 2


def test_a_missing_compiler_is_one_line_that_names_the_flag(text, capsys, monkeypatch):
    def compile(model):
        def fail(*args):
            raise RuntimeError("no C++ compiler")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    error = fails(capsys, train.main, *SMALL, "--compile=True")
    assert "no C++ compiler" in error and "--compile=False" in error


def test_evaluating_more_often_changes_no_training_batch(text):
    for every in (2, 5):
        call(train.main, *SMALL, f"--out_dir=e{every}", f"--eval_interval={every}")
    a, b = state("e2")["model"], state("e5")["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_validation_does_not_move_with_batch_size_or_number_of_shards(text):
    model, whole = tiny(vocab_size=257), train.TextData("text", 32)
    want = train.evaluate(model, whole, 2, 8, "cpu")
    shard = whole.shards["val"][0][0]
    for i, piece in enumerate(np.array_split(np.array(shard), 3)):
        prepare.write_shard(f"data/text/val_{i:06d}.bin", piece, "uint16")
    parts = train.TextData("text", 32)
    assert len(parts.shards["val"][0]) == 3
    for batch_size in (2, 3):
        assert abs(train.evaluate(model, parts, batch_size, 8, "cpu") - want) <= 1e-5


def test_accumulated_micro_batches_weigh_their_targets():
    """Responses of 11 and 101 tokens: two micro-batches of one equal one batch of two."""
    model, x, y = tiny(), torch.randint(256, (2, 101)), torch.randint(256, (2, 101))
    y[0, 11:] = -1
    scaler, grads = torch.amp.GradScaler("cpu", enabled=False), []
    for batches in ([(x, y)], [(x[:1], y[:1]), (x[1:], y[1:])]):
        model.zero_grad()
        train.backward(model, scaler, batches, "cpu")
        grads.append([p.grad.clone() for p in model.parameters()])
    assert max((a - b).abs().max() for a, b in zip(*grads)) <= 1e-6


@pytest.mark.parametrize("warmup,decay", [(0, 10), (10, 10), (3, 10)])
def test_the_learning_rate_starts_above_zero_and_peaks_after_warm_up(warmup, decay):
    args = train.build_parser().parse_args(["--learning_rate=1", "--min_lr=0.1"])
    args.warmup_iters, args.lr_decay_iters = warmup, decay
    rates = [train.learning_rate(step, args) for step in range(15)]
    assert rates[0] > 0 and max(rates) == 1 and rates[max(0, warmup - 1)] == 1
    assert rates[-1] == pytest.approx(0.1) and np.isfinite(rates).all()


def test_scales_offsets_and_norms_are_not_decayed_and_every_parameter_is_in_one_group():
    model = tiny(qk_norm=True)
    decay, keep = (group["params"] for group in model.optimizer_groups(0.1))
    ids = [id(p) for p in decay + keep]
    assert len(ids) == len(set(ids)) == len(list(model.parameters()))
    kept = {id(p) for p in keep}
    for name, p in model.named_parameters():
        is_scale = name.rsplit(".")[-1].startswith(("alpha", "beta"))
        assert (id(p) in kept) == (is_scale or "norm" in name), name


def test_recall_cannot_be_answered_through_stacked_windows():
    config = GPTConfig(n_layer=2, window=8, block_size=96, attention="swa")
    data = train.RecallData(config)
    (x, y), *_ = data.val_batches(4, 4)
    reach = config.n_layer * (config.window - 1)
    for row in range(4):
        for t in (y[row] >= 0).nonzero().flatten().tolist():
            where = (x[row, :t] == x[row, t]).nonzero().flatten().tolist()
            where = [i for i in where if i < t - reach]
            assert len(where) == 1 and y[row, t] == x[row, where[0] + 1]
            assert t - (where[0] + 1) > reach


# ------------------------------------------------------------------------------------------------
# Sampling


def test_temperature_zero_is_greedy_and_tiny_temperatures_work():
    logits = torch.randn(3, 65)
    assert torch.equal(pick_token(logits, 0)[0], logits.argmax(-1))
    assert torch.equal(pick_token(logits, 1e-4)[0], logits.argmax(-1))


def test_top_k_one_is_greedy_and_a_large_top_k_is_none():
    logits = -torch.rand(3, 65) - 1
    assert torch.equal(pick_token(logits, 1.0, top_k=1)[0], logits.argmax(-1))
    draw = lambda k: pick_token(logits, 1.0, k, None, torch.Generator().manual_seed(1))[0]
    assert torch.equal(draw(200), draw(None))


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(500, 1)
    assert set(pick_token(logits, top_p=0.7)[0].tolist()) == {0, 1}
    assert set(pick_token(logits, top_p=0.1)[0].tolist()) == {0}


def test_log_probabilities_are_those_at_the_temperature_before_any_cut():
    model, idx = tiny(), torch.randint(256, (2, 7))
    steps = list(generate(model, idx, 9, temperature=0.6, top_k=5))
    text = torch.cat([idx] + [ids[:, None] for ids, _ in steps], 1)
    logits = model(text[:, :-1], T_out=9)[0]
    want = (logits / 0.6).log_softmax(-1).gather(2, text[:, 7:, None])[..., 0]
    got = torch.stack([logprobs for _, logprobs in steps], 1)
    assert (got - want).abs().max() <= 1e-4


def test_rows_end_at_their_stop_id_and_generation_with_the_last(monkeypatch):
    script = iter([[7, 1], [2, 3], [2, 4], [2, 8], [2, 9]])
    picked = lambda *args: (torch.tensor(next(script)), torch.zeros(2))
    monkeypatch.setattr(sample, "pick_token", picked)
    steps = [ids.tolist() for ids, _ in generate(tiny(), torch.zeros(2, 3).long(), 9, stop=[7, 8])]
    assert steps == [[7, 1], [7, 3], [7, 4], [7, 8]]


def test_a_stop_text_may_be_any_letter_or_an_escape():
    letters = SimpleNamespace(name="letters", encode=lambda text: [ord(c) for c in text])
    for text, want in (("é", "é"), ("猫", "猫"), ("\\n", "\n"), ("x", "x")):
        assert sample.stop_id(text, letters) == ord(want)


def test_loading_and_running_a_model_do_not_load_the_compiler():
    """It takes seconds, which every start of sample.py would pay."""
    code = ("import sys, torch; from sample import *; from model import *\n"
            "with torch.device('meta'): GPT(GPTConfig())\n"
            "list(generate(GPT(GPTConfig()), torch.zeros(1, 40).long(), 2))\n"
            "assert 'torch._dynamo' not in sys.modules")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_padded_vocabulary_ids_are_never_sampled():
    model = tiny(vocab_size=300, window=8)
    ids = [int(i) for i, _ in generate(model, torch.zeros(1, 1).long(), 250, vocab_size=257)]
    assert len(ids) == 250 and max(ids) < 257


def test_overflow_is_one_early_error_and_nothing_is_written():
    model = tiny()
    cache = KVCache(model.config, 1, 16)
    for prompt in (12, 20):
        with pytest.raises(ValueError, match=f"16 positions, but {prompt + 9}"):
            generate(model, torch.zeros(1, prompt).long(), 10, cache=cache)
    assert cache.length == 0 and not cache.k.any()
    with pytest.raises(ValueError, match="16 positions"):
        model(torch.zeros(1, 17).long(), cache=cache)
    assert cache.length == 0 and not cache.k.any()


def test_going_past_block_size_with_room_in_the_cache_is_allowed_and_said():
    model = tiny(block_size=8)
    with pytest.warns(UserWarning, match="block_size"):
        assert len(list(generate(model, torch.zeros(1, 6).long(), 10))) == 10


def test_a_stream_shows_whole_characters_only():
    tokenizer, out = prepare.ByteTokenizer(), []

    class Terminal:
        write, flush = staticmethod(out.append), staticmethod(lambda: None)

    steps = [(torch.tensor([i]), None) for i in [*"é狗".encode(), 0xE7]]
    sample.write_stream(tokenizer, steps, Terminal)
    assert "".join(out) == "é狗\ufffd\n" and out[0] == "" and out[1] == "é"


def test_rope_angles_stay_float32_in_a_bf16_model():
    model = tiny().bfloat16()
    positions = torch.arange(8192, 8200)
    cos, _ = M.rope_angles(model.config, positions)
    freq = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    exact = (positions.double()[:, None] * freq).cos()
    assert cos.dtype == torch.float32 and (cos[:, 0] - exact).abs().max() <= 1e-2
    logits, _ = model(torch.zeros(1, 4).long())
    assert logits.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------
# Checkpoints


def checkpoint_of(model, out_dir="ckpt", **more):
    os.makedirs(out_dir, exist_ok=True)
    content = {"model": model.state_dict(), "config": vars(model.config), "tokenizer": "bytes"}
    M.save_checkpoint(out_dir, {**content, **more})


def test_one_set_of_weights_runs_as_orthros_full_and_swa():
    model, idx = tiny(window=64, vocab_size=257), torch.randint(256, (1, 9))
    checkpoint_of(model)
    for attention in ("full", "swa", "orthros"):
        other, _ = M.load_checkpoint("ckpt", attention=attention)
        assert (other.eval()(idx)[0] - model(idx)[0]).abs().max() <= 1e-5
    checkpoint_of(M.load_checkpoint("ckpt", attention="full")[0])
    back, _ = M.load_checkpoint("ckpt", attention="orthros")
    assert (back.blocks[0].attn.alpha_base == 1).all() and (back.blocks[0].attn.beta_out == 0).all()


def test_a_failed_save_keeps_the_old_checkpoint(monkeypatch):
    checkpoint_of(tiny(), step=1)

    def full_disk(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_of(tiny(), step=2)
    assert state("ckpt")["step"] == 1 and os.listdir("ckpt") == ["ckpt.pt"]


# ------------------------------------------------------------------------------------------------
# Speed


@pytest.mark.parametrize("command", ["prefill", "train", "decode"])
def test_bench_compares_three_kinds_that_agree_with_the_reference(command):
    flags = ["--T=64", "--n_layer=2", "--window=8", "--repeats=1", "--chunk=32"]
    flags += [] if command == "prefill" else ["--batch_size=1"]
    flags += ["--max_new_tokens=3"] if command == "decode" else []
    call(bench.main, command, *flags, "--device=cpu", "--out_dir=b")
    record = json.load(open(f"b/{command}.json"))
    rows, answers = record["rows"], record["answers"]
    assert [row["written"] for row in answers] == ([3, 3, 3] if command == "decode" else [])
    assert [row["kind"] for row in rows] == ["full", "swa", "orthros"]
    assert all(row["error"] < 1e-4 and row["limit ms"] > 0 for row in rows)


def test_a_short_T_out_is_compared_with_predicting_everywhere():
    flags = ["--T=64", "--n_layer=2", "--repeats=1", "--batch_size=1", "--T_out=4", "--device=cpu"]
    call(bench.main, "train", *flags, "--attention=orthros", "--out_dir=b")
    short, whole = json.load(open("b/train.json"))["rows"]
    assert (short["kind"], whole["kind"]) == ("orthros", "orthros, T_out = T")
    assert short["limit ms"] < whole["limit ms"] and short["x full"] is None


def test_masks_are_drawn(capsys, monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert "'.[plot]'" in fails(capsys, bench.main, "mask", "--out_dir=b")
    pytest.importorskip("matplotlib")
    call(bench.main, "mask", "--window=3", "--sink=1", "--out_dir=b")
    assert {"masks.png", "reach.png"} <= set(os.listdir("b"))


def test_bench_measures_the_attention_alone(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    flags = ["--kernels", "--T=64,96", "--window=8", "--repeats=1", "--chunk=32", "--device=cpu"]
    call(bench.main, "prefill", *flags, "--out_dir=b")
    assert "plot" in capsys.readouterr().err and not os.path.exists("b/kernels.png")
    rows = json.load(open("b/kernels.json"))["rows"]
    calls = ["window", "window, 1 sink", "full", "one query"]
    assert [(row["T"], row["call"]) for row in rows] == [(T, c) for T in (64, 96) for c in calls]
    assert all(row["error"] < 1e-4 and row["ms"] > 0 for row in rows)


def test_what_does_not_fit_is_refused_before_it_starts(capsys):
    for command, lower in (("prefill", "--n_layer or --T"), ("train", "--batch_size")):
        flags = ["--preset=qwen3-8b", "--T=100000000", "--device=cpu"]
        message = fails(capsys, bench.main, command, *flags)
        assert "GiB" in message and lower in message


@pytest.mark.parametrize("flags", [
    "prefill --T=0", "prefill --T=x", "train --kernels", "train --T=1,2", "train --T_out=999",
    "prefill --chunk=0", "prefill --window=0", "prefill --T_out=4", "train --max_new_tokens=7",
    "prefill --batch_size=2",
])  # fmt: skip
def test_a_wrong_bench_flag_is_one_line_and_exit_code_2(capsys, flags):
    command, flag = flags.split()
    assert flag.split("=")[0].lstrip("-") in fails(
        capsys, bench.main, command, flag, "--device=cpu"
    )


def test_keys_seen_counts_what_the_mask_shows():
    for Tq, S, window, sink in (
        (5, 9, None, 0),
        (9, 9, 4, 2),
        (3, 20, 4, 2),
        (7, 9, 3, 0),
        (0, 4, 2, 0),
    ):
        mask = M.visible(Tq, S, window, sink)
        assert bench.keys_seen(Tq, S, window, sink) == mask.sum()


def test_flops_of_a_model_whose_window_hides_nothing_are_those_of_full_attention_and_the_copies():
    shape = dict(n_layer=1, n_head=2, n_embd=8, n_hidden=16, vocab_size=10, window=100)
    full, orthros = (GPTConfig(**shape, attention=kind) for kind in ("full", "orthros"))
    # one layer: keys and values 2*T*C*2C; at T_out queries W_Q, W_O, MLP; attention; the head
    want = 2 * 5 * 8 * 16 + 2 * 5 * 8 * (16 + 48) + 4 * 8 * 15 + 2 * 5 * 8 * 10
    assert bench.forward_flops(full, 5, 5) == bench.forward_flops(orthros, 5, 5) == want


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize("flag,word", [
    ("--dataset=nowhere", "unknown dataset"), ("--preset=huge", "unknown preset"),
    ("--window=0", "window"), ("--n_kv_head=3", "n_kv_head"), ("--block_size=100000", "block_size"),
    ("--dtype=float16", "float16"), ("--device=tpu9", "device"), ("--batchsize=3", "--batch_size"),
    ("--batch_size=0", "batch_size"), ("--attention=sparse", "attention"),
    ("--init_from=resume", "no checkpoint"), ("--vocab_size=50", "vocab_size"),
    ("--backend=magic", "backend"), ("--compile=maybe", "True or False"),
])  # fmt: skip
def test_a_wrong_training_flag_is_one_line_and_exit_code_2(text, capsys, flag, word):
    assert word in fails(capsys, train.main, *SMALL, flag)


def test_an_out_dir_that_cannot_be_made_is_one_line(text, capsys):
    pathlib.Path("file").write_text("")
    assert "file" in fails(capsys, train.main, *SMALL, "--out_dir=file")
    assert "file" in fails(capsys, train.main, *SMALL, "--out_dir=file/below")


def test_broken_data_is_named(text, capsys):
    os.truncate("data/text/val_000000.bin", 1500)
    assert "val_000000.bin" in fails(capsys, train.main, *SMALL)
    prepare.write_shard("data/text/val_000000.bin", [5] * 100 + [300], "uint16")
    assert "300" in fails(capsys, train.main, *SMALL)
    prepare.write_shard("data/text/val_000000.bin", [5] * 32, "uint16")
    assert "33" in fails(capsys, train.main, *SMALL)
    prepare.write_shard("data/text/val_000000.bin", [5] * 33, "uint16")
    call(train.main, *SMALL, "--max_iters=1")  # block_size + 1 tokens are enough
    pathlib.Path("data/text/meta.json").write_text("{")
    assert "meta.json" in fails(capsys, train.main, *SMALL)


def test_sampling_mistakes_are_one_line(capsys):
    checkpoint_of(tiny(vocab_size=257))
    assert "temperature" in fails(capsys, sample.main, "--out_dir=ckpt", "--temperature=-1")
    assert "no checkpoint" in fails(capsys, sample.main, "--out_dir=none")
    assert "top_p" in fails(capsys, sample.main, "--out_dir=ckpt", "--top_p=0")
    pathlib.Path("ckpt/ckpt.pt").write_bytes(b"not a checkpoint")
    assert "damaged" in fails(capsys, sample.main, "--out_dir=ckpt")
    checkpoint_of(tiny(vocab_size=257))
    with zipfile.ZipFile("ckpt/ckpt.pt") as whole, zipfile.ZipFile("cut.pt", "w") as cut:
        for name in whole.namelist():  # its error has no message
            cut.writestr(name, b"" if name.endswith("data.pkl") else whole.read(name))
    os.replace("cut.pt", "ckpt/ckpt.pt")
    assert "damaged (" in fails(capsys, sample.main, "--out_dir=ckpt")


def test_an_empty_prompt_starts_from_end_of_text(capsys):
    checkpoint_of(tiny(vocab_size=257))
    call(sample.main, "--out_dir=ckpt", "--max_new_tokens=5", "--stats", "--device=cpu")
    assert "cache" in capsys.readouterr().err


def test_ctrl_c_keeps_the_checkpoint_and_says_how_to_resume(text):
    command = [sys.executable, ROOT / "train.py", *SMALL, "--max_iters=100000", "--out_dir=o"]
    run = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job of `&` ignores it
    )  # fmt: skip
    deadline = time.time() + 40
    while not os.path.exists("o/ckpt.pt") and time.time() < deadline:
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    error = run.communicate(timeout=30)[1]
    assert run.returncode == 130 and "--init_from=resume" in error and "Traceback" not in error
    assert state("o")["step"] >= 3


def test_full_memory_is_said_in_one_line_and_a_fault_of_ours_is_not_hidden(capsys):
    def main():
        raise error

    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried\n2 GiB"), MemoryError()):
        assert "a smaller batch" in fails(capsys, main)
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        call(main)

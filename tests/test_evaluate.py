"""What measures quality: look-ups, needles, comparisons, and the harness around any checkpoint."""

import json
import os
import pathlib
import sys
from types import SimpleNamespace

import pytest
import torch
from test_cli import call, fails, tiny, workdir  # noqa: F401 (a fixture)

import evaluate
import prepare
import train
from model import GPT, GPTConfig, save_checkpoint

BYTES = prepare.load_tokenizer("bytes")

# ------------------------------------------------------------------------------------------------
# Look-ups, needles, comparisons


def recall_data():
    shape = dict(n_layer=2, n_head=2, n_embd=16, block_size=48, window=8, vocab_size=65)
    return evaluate.SpreadRecall(GPTConfig(**shape))


def test_look_ups_are_scored_by_the_distance_to_their_answer():
    data = recall_data()

    class Oracle:  # answers right within 20 tokens alone
        def __call__(self, x):
            logits = torch.zeros(*x.shape, 65)
            for row, ids in enumerate(x):
                for t, key in enumerate(ids):
                    place = (ids == key).nonzero()[0, 0] + 1
                    if place < x.size(1) and t - place <= 20:
                        logits[row, t, ids[place]] = 1
            return logits, None

    distances, right = evaluate.recall_by_distance(Oracle(), data, 60, "cpu")
    assert (right == (distances <= 20)).all()
    assert distances.min() < 8 and distances.max() > 30 and right.any() and not right.all()


def test_recall_trains_each_variant_and_keeps_its_table(capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "EPISODES", 128)
    call(evaluate.main, "recall", "--variants=full;swa", "--max_iters=2", "--json=new/r.json")
    rows = json.loads(pathlib.Path("new/r.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["full", "swa"]
    assert all(0 <= share <= 0.5 for row in rows for share in row["right"])
    assert "reach of all windows 14" in capsys.readouterr().out


def test_compare_trains_on_the_same_batches_and_reports_mean_and_spread(capsys, monkeypatch):
    seen = []
    load = train.TextData.train_batch
    monkeypatch.setattr(
        train.TextData, "train_batch",
        lambda self, *a: seen.append((a, load(self, *a)[0].sum().item())) or load(self, *a),
    )  # fmt: skip
    pathlib.Path("a.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    call(prepare.main, "a.txt", "--name=text")
    flags = ["--dataset=text", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32",
             "--window=8", "--max_iters=2", "--eval_windows=4", "--device=cpu"]  # fmt: skip
    flags += ["--seeds=1,2", "--json=c.json"]
    call(evaluate.main, "compare", "--variants=full;orthros --sink=1", *flags)
    full, orthros = json.loads(pathlib.Path("c.json").read_text())["rows"]
    assert len(set(full["losses"])) == 2 and full["spread"] > 0
    assert abs(full["mean"] - sum(full["losses"]) / 2) < 1e-9 and orthros["flops"] > full["flops"]
    assert abs(sum(full["quarters"]) / 4 - full["mean"]) < 0.01
    half = len(seen) // 2
    assert half >= 4 and sorted(seen[:half]) == sorted(seen[half:])


def test_a_peers_layer_takes_the_place_of_attention_and_answers_at_T_out(monkeypatch):
    class Mean(torch.nn.Module):  # as the layers of flash-linear-attention are called
        def __init__(self, hidden_size, num_heads, layer_idx):
            super().__init__()
            self.o_proj = torch.nn.Linear(hidden_size, hidden_size, bias=False)

        def forward(self, h):
            return self.o_proj(h).cumsum(1), None, None

    monkeypatch.setitem(sys.modules, "fla.layers", SimpleNamespace(GatedLinearAttention=Mean))
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, attention="full")
    model = GPT(config)
    for layer, block in enumerate(model.blocks):
        block.attn = evaluate.Peer("gla", config, layer)
    idx = torch.randint(64, (2, 12))
    assert torch.allclose(model(idx, T_out=3)[0], model(idx)[0][:, -3:], atol=1e-6)
    model(idx, idx)[1].backward()
    assert all(block.attn.layer.o_proj.weight.grad.abs().sum() > 0 for block in model.blocks)


def test_a_variant_that_cannot_run_costs_nothing_of_what_was_trained(capsys, monkeypatch):
    def trained(variant, *others, real=evaluate.trained):
        if variant == "swa":
            table = json.loads(pathlib.Path("c.json").read_text())  # is there after each row
            assert [row["variant"] for row in table["rows"]] == ["full"]
            raise RuntimeError("a kernel\nrefuses")
        return real(variant, *others)

    monkeypatch.setattr(evaluate, "trained", trained)
    flags = "--dataset=recall --max_iters=2 --eval_windows=4 --device=cpu --json=c.json".split()
    with pytest.raises(SystemExit):
        call(evaluate.main, "compare", "--variants=full;swa;orthros", *flags)
    error = capsys.readouterr().err
    assert "swa failed (RuntimeError: a kernel refuses)" in error
    assert error.endswith("error: the table lacks what failed: swa\n")
    rows = json.loads(pathlib.Path("c.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["full", "orthros"]


def test_variants_that_no_table_can_hold_are_refused_before_the_first_is_trained(capsys):
    tiny = "--n_layer=2 --n_head=2 --n_embd=32 --max_iters=1 --device=cpu".split()
    for variants, why in {
        "full;gla": "gla need an NVIDIA GPU", "full;full": "full twice",
        "full;full --n_head=5": "multiple of", "full --seed=3": "--seed is --seeds here",
        "full --attention=swa": "first word", "full --out_dir=x": "--out_dir is chosen",
        "full --init_from=resume": "start anew", "full;": "'' is no variant",
        'full "': "is no variant", "full;swa --dataset=text": "dataset text of 'swa",
        "full;swa --block_size=96": "block_size 96 of",
    }.items():  # fmt: skip
        flags = ["--dataset=recall", f"--variants={variants}", *tiny]
        assert why in fails(capsys, evaluate.main, "compare", *flags)
    for flag in ("--window=7", "--n_layer=3"):
        error = fails(capsys, evaluate.main, "recall", f"--variants=full;swa {flag}")
        assert "one table cannot hold" in error
    assert "of its own" in fails(capsys, evaluate.main, "recall", "--dataset=stdlib")
    assert "different" in fails(capsys, evaluate.main, "compare", "--seeds=1,1")
    assert "below" in fails(capsys, evaluate.main, "compare", f"--seeds=1,{2**64}", *tiny)
    assert not os.path.exists("out/evaluate")


def test_a_table_replaces_tables_alone(capsys):
    pathlib.Path("a.txt").write_text("some text")
    flags = ["--dataset=recall", "--variants=swa", "--max_iters=1", "--device=cpu"]
    error = fails(capsys, evaluate.main, "compare", "--json=a.txt", *flags)
    assert "would be lost" in error and pathlib.Path("a.txt").read_text() == "some text"
    fails(capsys, evaluate.main, "compare", "--json=new.json", "--variants=foo")
    assert not os.path.exists("new.json")
    for _ in range(2):
        call(evaluate.main, "compare", "--json=new.json", *flags)


def test_variants_of_like_names_are_kept_apart():
    folder = lambda *variant: evaluate.variant_args(*variant)[1].out_dir
    plus, minus = (folder(f"full --learning_rate=1e{sign}3", [], 1) for sign in "+-")
    assert plus != minus and plus == folder("full --learning_rate=1e+3", [], 1)
    assert len(folder("full " + " ".join(["--sink=1"] * 90), [], 1)) < 150


def test_a_needle_is_found_by_a_model_that_copies_and_not_by_one_that_cannot():
    class Copier:
        config = SimpleNamespace(n_layer=1, n_kv_head=1, head_dim=2, attention="full")
        wte, compute_dtype = SimpleNamespace(weight=torch.zeros(1)), None
        reach = 10**6

        def __call__(self, idx, T_out=None, cache=None):
            start, cache.text = (
                cache.length,
                torch.cat((getattr(cache, "text", idx[0, :0]), idx[0])),
            )
            cache.length += idx.size(1)
            if T_out == 0:
                return None, None
            text = BYTES.decode_bytes(cache.text[: start + 1].tolist()).decode()
            name = text.rsplit("of ", 1)[1].split(" is")[0]
            place = text.find(f"of {name} is ")
            number = text[place:].split(" is ")[1][:4] if start - place < self.reach else "????"
            logits = torch.zeros(1, idx.size(1), 257)
            for i, byte in enumerate(f" {number}".encode()):
                logits[0, i, byte] = 1
            return logits, None

    hay, model = BYTES.encode("some words of no use. " * 60).tolist(), Copier()
    found = lambda depth: evaluate.needle_found(model, BYTES, hay, 400, depth, 3, "cpu")
    assert all(found(depth) for depth in (0.0, 0.5, 1.0))
    model.reach = 150
    assert found(1.0) and not found(0.0)


def test_what_cannot_be_evaluated_is_said_in_one_line(capsys):
    save_checkpoint(".", {"model": tiny().state_dict(), "config": vars(tiny().config),
                          "tokenizer": None, "step": 0, "args": {}})  # fmt: skip
    pathlib.Path("a.txt").write_text("some text " * 100)
    error = fails(capsys, evaluate.main, "needle", "a.txt", "--out_dir=.")
    assert "no tokenizer" in error and "--tokenizer=" in error
    error = fails(capsys, evaluate.main, "needle", "a.txt", "--out_dir=.", "--tokenizer=bytes")
    assert "257 tokens" in error
    checkpoint = {"config": vars(tiny().config), "tokenizer": "gpt2", "model": tiny().state_dict()}
    save_checkpoint(".", checkpoint)
    error = fails(capsys, evaluate.main, "needle", "a.txt", "--out_dir=.", "--tokenizer=bytes")
    assert "has the tokenizer gpt2, not bytes" in error
    assert "full twice" in fails(capsys, evaluate.main, "loss", "a.txt", "--attention=full;full")
    assert "'foo'" in fails(capsys, evaluate.main, "loss", "a.txt", "--attention=full;foo")
    save_checkpoint(".", {**checkpoint, "model": [1]})
    assert "damaged" in fails(capsys, evaluate.main, "needle", "a.txt", "--out_dir=.")
    flags = ["--dataset=recall", "--init_from=."]
    save_checkpoint(".", checkpoint)
    assert "made with none" in fails(capsys, train.main, *flags)
    assert "meta" in fails(capsys, evaluate.main, "recall", "--device=meta")
    assert "files" in fails(capsys, evaluate.main, "recall", "a.txt")
    assert "--max_itres" in fails(capsys, evaluate.main, "recall", "--max_itres=3")
    assert "unrecognized" in fails(capsys, evaluate.main, "loss", "a.txt", "--max_iters=3")
    assert "one seed" in fails(capsys, evaluate.main, "recall", "--seeds=1,2")
    assert ".png" in fails(capsys, evaluate.main, "recall", "--json=t.png")
    for command in ("recall", "compare"):  # before the first variant is trained
        assert "'foo'" in fails(capsys, evaluate.main, command, "--variants=orthros;foo")
        assert "--windw" in fails(capsys, evaluate.main, command, "--variants=full;swa --windw=3")
    assert "whole numbers" in fails(capsys, evaluate.main, "compare", "--seeds=a")
    assert not os.path.exists("out/evaluate")


# ------------------------------------------------------------------------------------------------
# The harness

pytest.importorskip("lm_eval")
import harness  # noqa: E402


def ours(batch_size=3, **changes):
    model = tiny(vocab_size=257, block_size=600, **changes)
    for name, p in model.named_parameters():
        p.data *= 3 if "proj" in name else 1  # sharper, so that texts differ
    return harness.Harness(model, BYTES, batch_size)


def directly(lm, context, continuation):
    """One request by T_out = T, unbatched."""
    ids = torch.tensor([(context + continuation)[-lm.max_length - 1 :]])
    row = lm.model(ids[:, :-1])[0][0, -len(continuation) :].log_softmax(-1)
    targets = ids[0, -len(continuation) :]
    greedy = bool((row.argmax(-1) == targets).all())
    return row.gather(1, targets[:, None]).sum().item(), greedy


@torch.no_grad()
@pytest.mark.parametrize("attention", ["orthros", "full"])
def test_scores_equal_a_direct_computation_whatever_the_batch_and_the_sharing(attention):
    lm = ours(attention=attention)
    sizes = [(5, 1), (40, 7), (3, 9), (300, 4), (300, 2), (300, 6), (300, 1), (590, 30), (700, 5)]
    texts = [
        (torch.randint(256, (n,)).tolist(), torch.randint(256, (m,)).tolist()) for n, m in sizes
    ]
    shared = texts[3][0]
    texts = [(shared if len(c) == 300 else c, a) for c, a in texts]
    best = lm.model(torch.tensor([texts[0][0]]))[0][0, -1].argmax().item()
    texts.append((texts[0][0], [best]))  # greedy
    got = lm._loglikelihood_tokens([(None, *pair) for pair in texts], disable_tqdm=True)
    for (score, greedy), pair in zip(got, texts):
        want = directly(lm, *pair)
        assert abs(score - want[0]) <= 1e-3 and greedy == want[1]
    assert got[-1][1]


@torch.no_grad()
def test_a_documents_likelihood_is_that_of_its_windows():
    lm = ours()
    lm.max_length = 50
    request = SimpleNamespace(args=("a text of some length. " * 5,))
    ids = BYTES.encode(request.args[0]).tolist()
    want = directly(lm, [BYTES.eot], ids[:50])[0]
    want += directly(lm, ids[49:50], ids[50:100])[0]
    want += directly(lm, ids[len(ids) - 51 : 100], ids[100:])[0]
    assert abs(lm.loglikelihood_rolling([request], disable_tqdm=True)[0] - want) <= 1e-3


@torch.no_grad()
def test_texts_are_greedy_and_end_before_what_stops_them():
    lm = ours()
    prompts = ["some words", "other text", "a longer text than those"]
    whole = []
    for prompt in prompts:
        ids = BYTES.encode(prompt).tolist()
        for _ in range(20):
            ids.append(lm.model(torch.tensor([ids]))[0][0, -1].argmax().item())
        new = ids[len(prompt) :]
        new = new[: new.index(BYTES.eot)] if BYTES.eot in new else new
        whole.append(BYTES.decode_bytes(new).decode("utf-8", "replace"))
    ask = lambda **options: lm.generate_until(
        [SimpleNamespace(args=(p, {"max_gen_toks": 20, **options})) for p in prompts], True
    )
    assert ask(until=[]) == whole and len(set(whole)) == 3
    stop = whole[0][3]
    assert ask(until=[stop, ""]) == [text.split(stop)[0] for text in whole]


def task(name, output_type, **more):
    """A task of the harness's own YAML kind, over docs.jsonl."""
    os.makedirs("tasks", exist_ok=True)
    files = {"data_files": {"test": os.path.abspath("docs.jsonl")}}
    fields = dict(task=name, dataset_path="json", dataset_kwargs=files, output_type=output_type,
                  test_split="test", doc_to_text="{{q}}", **more)  # fmt: skip
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
    pathlib.Path(f"tasks/{name}.yaml").write_text("\n".join(lines))


def docs():
    words = "river stone tree house light green".split()
    records = [{"q": " ".join(words[(i + j) % 6] for j in range(3 + 9 * i)), "choices": words[:4],
                "gold": i % 4} for i in range(8)]  # fmt: skip
    pathlib.Path("docs.jsonl").write_text("\n".join(map(json.dumps, records)))
    return records


@pytest.mark.slow  # the harness loads its data sets through much machinery
def test_a_local_task_gives_what_a_direct_computation_gives(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", os.path.abspath("home"))
    records = docs()
    task("choose", "multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{gold}}",
         metric_list=[{"metric": "acc"}])  # fmt: skip
    task("write", "generate_until", doc_to_target="{{choices[gold]}}",
         generation_kwargs={"until": ["e"], "max_gen_toks": 8},
         metric_list=[{"metric": "exact_match"}])  # fmt: skip
    lm = ours()
    config = vars(lm.model.config)
    save_checkpoint(".", {"model": lm.model.state_dict(), "config": config, "tokenizer": "bytes"})
    call(evaluate.main, "harness", "--out_dir=.", "--tasks=choose,write", "--include_path=tasks",
         "--device=cpu", "--json=h.json")  # fmt: skip
    record = json.loads(pathlib.Path("h.json").read_text())["rows"][0]["results"]
    results = record["results"]
    assert record["n-shot"] and record["versions"] and record["configs"]
    encode = lambda text: BYTES.encode(text).tolist()
    right = 0
    with torch.no_grad():
        for record in records:
            scores = [
                directly(lm, encode(record["q"]), encode(f" {c}"))[0] for c in record["choices"]
            ]
            right += scores.index(max(scores)) == record["gold"]
    assert results["choose"]["acc,none"] == right / len(records)
    assert results["write"]["exact_match,none"] == 0
    assert "choose" in capsys.readouterr().out
    error = fails(
        capsys, evaluate.main, "harness", "--out_dir=.", "--tasks=chose", "--include_path=tasks"
    )
    assert "near names" in error and "choose" in error
    error = fails(capsys, evaluate.main, "harness", "--out_dir=.", "--tasks=piqa")
    assert "HF_HOME" in error and os.path.abspath("home") in error


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("begins", ["", "put first", "named"])
def test_full_attention_scores_as_the_harnesss_own_model_of_the_same_weights(begins):
    import tokenizers
    from lm_eval.models.huggingface import HFLM
    from test_weights import imported, theirs, tokenizer_of_bytes

    imported(theirs(vocab_size=300, max_position_embeddings=600))
    tokenizer_of_bytes()
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if begins:  # as Llama's does, with a token of its own
        tokenizer = tokenizers.Tokenizer.from_file("hf/tokenizer.json")
        tokenizer.add_special_tokens(["<s>"])
        if begins == "put first":
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            )
        tokenizer.save("hf/tokenizer.json")
        names["bos_token"] = "<s>"
    pathlib.Path("hf/tokenizer_config.json").write_text(json.dumps(names))
    theirs_lm = HFLM(pretrained="hf", device="cpu", batch_size=2, dtype="float32")
    model = evaluate.load_checkpoint("ours", attention="full")[0].eval()
    lm = harness.Harness(model, prepare.load_tokenizer(os.path.abspath("hf/tokenizer.json")), 3)
    request = lambda *args: SimpleNamespace(args=args)
    pairs = [request("some context " * n, " an answer" * m) for n, m in ((1, 1), (9, 2), (30, 1))]
    pairs += [request("", "no context"), request("some context " * 30, " other")]
    pairs += [request("too long " * 80, " answer")]  # loses its beginning
    assert lm.tok_encode("some text") == theirs_lm.tok_encode("some text")
    assert lm.prefix_token_id == theirs_lm.prefix_token_id
    for a, b in zip(lm.loglikelihood(pairs), theirs_lm.loglikelihood(pairs)):
        assert abs(a[0] - b[0]) <= 1e-2 and a[1] == b[1]
    texts = [request("one text " * 20), request("a document " * 90)]
    rolled = zip(lm.loglikelihood_rolling(texts), theirs_lm.loglikelihood_rolling(texts))
    assert all(abs(a - b) <= 2e-2 for a, b in rolled)

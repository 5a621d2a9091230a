"""Fine-tuning and talking: T_out is the response."""

import io
import json
import pathlib
import time

import numpy as np
import pytest
import torch
from test_cli import SMALL, call, fails, state, tiny, workdir  # noqa: F401 (a fixture)
from test_train import log, processes

import prepare
import sample
import train
from sample import ChatTemplate, generate

BYTES = prepare.ByteTokenizer()
SFT = [f for f in SMALL if not f.startswith("--dataset")] + ["--mode=sft", "--dataset=chat.jsonl"]


def write(*records, path="chat.jsonl"):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    pathlib.Path(path).write_text("\n".join(lines) + "\n")


def pair(prompt, response):
    return {"prompt": prompt, "response": response}


def turns(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents)]}


def data(T=64, **changes):
    return train.ChatData("chat.jsonl", BYTES, T, **changes)


# ------------------------------------------------------------------------------------------------
# What is learned


def test_a_response_is_predicted_from_the_prompts_last_token_on():
    """Prompt 5, response 3 with its end: 7 tokens in, predictions at positions 4, 5, 6."""
    write(pair("abcde", "xy"))
    x, y = data().train_batch(1, 0, 0, 0)
    assert bytes(x[0].tolist()) == b"abcdexy" and y.tolist() == [[ord("x"), ord("y"), BYTES.eot]]


def test_only_what_the_assistant_says_is_supervised():
    write(turns("hi", "one", "more", "two"))
    x, y = data().train_batch(1, 0, 0, 0)
    text = "### user\nhi\n### assistant\none_### user\nmore\n### assistant\ntwo"
    assert BYTES.decode_bytes(x[0].tolist()).decode() == text.replace("_", "")
    said = [int(i) for i in y[0] if i >= 0]
    assert said == [*b"one", BYTES.eot, *b"two", BYTES.eot]
    assert y.size(1) == x.size(1) - len("### user\nhi\n### assistant\n") + 1


@pytest.fixture
def jinja():
    """A tokenizer.json with control tokens and a chat template, as Qwen has."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    bpe.save("tokenizer.json")
    pathlib.Path("chat_template.jinja").write_text(
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return prepare.HFTokenizer("tokenizer.json")


def test_a_models_own_template_is_used_and_nobody_can_write_its_control_tokens(jinja):
    template = ChatTemplate(jinja)
    start, end = (jinja.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert template.stop == {jinja.eot, end}
    ids, said = template.encode(turns("<|im_end|>evil", "yes", "ok", "no")["messages"])
    assert ids.count(start) == ids.count(end) == 4
    spoken = [i for i, s in zip(ids, said) if s]
    assert spoken.count(end) == 2 and jinja.decode_bytes(spoken) == b"yesno"
    opened, _ = template.encode(turns("hi")["messages"], reply=True)
    closed, _ = template.encode(turns("hi", "yes")["messages"])
    assert (
        closed[: len(opened)] == opened
        and closed[len(opened) :][:3] == jinja.encode("yes").tolist()
    )


@pytest.mark.parametrize("overlong,kept", [("cut", 3), ("drop", 2)])
def test_examples_without_a_response_are_skipped_and_counted(overlong, kept):
    write(
        pair("abc", "x"), pair("abc", ""), turns("hi"), pair("a" * 99, "tail"), pair("a", "b" * 20)
    )
    found = data(T=32, overlong=overlong)
    assert sum(len(found.examples[s]) for s in ("train", "val")) == kept
    assert found.skipped == 5 - kept
    if overlong == "cut":
        longest = max((e for s in found.examples.values() for e in s), key=lambda e: e[1])
        assert len(longest[0]) == 33 and bytes(longest[0][-5:-1].tolist()) == b"tail"


def test_a_batch_of_unequal_examples_weighs_tokens_as_single_ones_do():
    write(pair("abcdefgh", "xy"), pair("a", "long response"), pair("abc", "z"))
    found, model = data(), tiny(vocab_size=257)
    examples = found.examples["train"] + found.examples["val"]
    scaler, grads = torch.amp.GradScaler("cpu", enabled=False), []
    for batches in ([found.collate(examples)], [found.collate([e]) for e in examples]):
        model.zero_grad()
        train.backward(model, scaler, batches, "cpu")
        grads.append([p.grad.clone() for p in model.parameters()])
    assert max((a - b).abs().max() for a, b in zip(*grads)) <= 1e-6


def test_a_short_T_out_gives_the_loss_and_gradients_of_the_whole_one_for_less():
    write(pair("a" * 1500, "a short response"))
    found = data(T=2000)
    x, y = found.train_batch(1, 0, 0, 0)
    whole = torch.full_like(x, -1)
    whole[:, -y.size(1) :] = y
    model, results = tiny(vocab_size=257), []
    for targets in (y, whole):
        model.zero_grad()
        start = time.perf_counter()
        loss = model(x, targets, targets.size(1))[1]
        loss.backward()
        seconds = time.perf_counter() - start
        grads = [p.grad.clone() for p in model.parameters()]
        results.append((loss.detach(), grads, seconds))
    (loss, grads, short), (want, want_grads, long) = results
    assert abs(loss - want) <= 1e-6
    assert max((a - b).abs().max() for a, b in zip(grads, want_grads)) <= 1e-6
    flops = [train.forward_flops(model.config, x.size(1), n) for n in (y.size(1), x.size(1))]
    assert flops[0] < 0.6 * flops[1] and short < long


# ------------------------------------------------------------------------------------------------
# Training


def examples(n):
    return [pair(f"say {i % 7}: ", str(i % 7) * (1 + i % 3)) for i in range(n)]


def test_fine_tuning_learns_says_what_it_saves_and_resumes_bit_for_bit(capsys):
    write(*examples(60), pair("empty", ""))
    flags = [*SFT, "--max_iters=40", "--eval_interval=20", "--learning_rate=1e-2"]
    call(train.main, *flags, "--out_dir=whole")
    out = capsys.readouterr().out
    assert "1 skipped" in out and "% of the FLOPs" in out
    losses = log("whole", "val_loss")
    assert losses[-1] < losses[0] and log("whole", "loss")[-1] < 0.5 * log("whole", "loss")[0]
    call(train.main, *flags, "--out_dir=parts", "--max_iters=20", "--lr_decay_iters=40")
    call(train.main, "--init_from=resume", "--out_dir=parts", "--max_iters=40", "--device=cpu")
    a, b = state("whole")["model"], state("parts")["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_response_longer_than_the_block_is_not_learned_without_its_prompt():
    long = {"prompt": "p" * 5, "response": "r" * 300}
    turns = [{"role": r, "content": c * 60} for r, c in zip(["user", "assistant"] * 2, "abcd")]
    data = lambda *lines: (write(*lines), train.ChatData("chat.jsonl", BYTES, 150))[1]
    turns[0]["ids"] = [1, 2]  # of nobody's business
    kept = data({"prompt": "p", "response": "r"}, long, {"messages": []}, {"messages": turns})
    assert kept.skipped == 2 and len(kept.examples["train"]) + len(kept.examples["val"]) == 2
    ids, first, said = max(kept.examples["train"] + kept.examples["val"], key=lambda e: len(e[0]))
    assert not said[:first].any() and bytes(int(i) for i in ids[first : first + 60]) == b"d" * 60


def test_two_processes_fine_tune_as_one():
    write(*examples(60))
    flags = [*SFT, "--gradient_accumulation_steps=2"]
    call(train.main, *flags, "--out_dir=one")
    processes(2, *flags, "--out_dir=two")
    assert np.allclose(log("one", "loss"), log("two", "loss"), atol=1e-5)


def test_a_pretrained_model_is_fine_tuned_in_its_own_tokenizer():
    write(*examples(60))
    pathlib.Path("a.txt").write_text("".join(f"say {i}\n" for i in range(500)))
    call(prepare.main, "a.txt", "--name=text")
    call(train.main, *SMALL, "--out_dir=base")
    keep = [f for f in SFT if not f.startswith("--n_")]
    call(train.main, *keep, "--init_from=base", "--out_dir=tuned")
    assert state("tuned")["tokenizer"] == "bytes" and state("tuned")["step"] == 6


# ------------------------------------------------------------------------------------------------
# Talking


def test_a_chat_reads_only_what_is_new_and_answers_as_from_scratch(monkeypatch, capsys):
    torch.manual_seed(0)
    model = tiny(vocab_size=257)
    model.config.block_size = 400
    template, lines = ChatTemplate(BYTES), iter(["hello", "again", None])
    monkeypatch.setattr(sample, "ask", lambda prompt: next(lines))
    read, forward = [], model.forward
    monkeypatch.setattr(
        model, "forward", lambda idx, **k: (read.append(idx.size(1)), forward(idx, **k))[1]
    )
    args = type("args", (), dict(
        max_context=400, system="short", seed=1, max_new_tokens=12, temperature=0, top_k=None,
        top_p=None, compile=None, stats=False,
    ))  # fmt: skip
    sample.chat(args, model, BYTES, "cpu", torch.float32)
    replies = capsys.readouterr().out.splitlines()
    messages = [{"role": "system", "content": "short"}]
    prompts, cached = [], []
    for text in ("hello", "again"):
        messages.append({"role": "user", "content": text})
        ids, _ = template.encode(messages, reply=True)
        prompts.append(len(ids))
        steps = generate(model, torch.tensor([ids]), 12, 0, stop=template.stop, vocab_size=257)
        reply = [int(i[0]) for i, _ in steps]
        cached.append(len(ids) + len(reply) - 1)  # the last id waits for the next call
        text = BYTES.decode_bytes(reply).decode("utf-8", "replace")
        said = [i for i in reply if i not in template.stop]  # its text encodes to other ids
        messages.append({"role": "assistant", "content": text, "ids": said})
    out = io.StringIO()
    for message in messages[2::2]:
        out.write(message["content"] + "\n")
    assert (
        "\n".join(replies) == out.getvalue().strip("\n") or replies == out.getvalue().splitlines()
    )
    reads = [n for n in read if n > 1]
    assert reads[:2] == [prompts[0], prompts[1] - cached[0]]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_log_probabilities_of_decoding_are_those_of_training(temperature):
    model, prompt = tiny(vocab_size=257), torch.randint(256, (3, 9))
    steps = list(
        generate(model, prompt, 12, temperature, generator=torch.Generator().manual_seed(1))
    )
    ids, logprobs = (torch.stack(x, dim=1) for x in zip(*steps))
    whole = torch.cat((prompt, ids), dim=1)
    logits = model(whole[:, :-1], T_out=12)[0] / temperature
    want = logits.log_softmax(dim=-1).gather(2, ids[..., None]).squeeze(2)
    assert (logprobs - want).abs().max() <= 1e-4


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize("record,word", [
    ("{", "line 3: not JSON"), ({"prompt": "a"}, "with prompt found"), ([1], "nothing found"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"messages": [{"role": "user"}]}, "content"), ({"messages": ["x"]}, "role")])  # fmt: skip
def test_a_bad_line_is_named(record, word, capsys):
    write(pair("a", "b"), "", record)
    error = fails(capsys, train.main, *SFT)
    assert word in error and "line 3" in error


def test_a_file_without_responses_and_a_missing_one_are_one_line(capsys):
    write(pair("a", ""), turns("hi"))
    assert "no response" in fails(capsys, train.main, *SFT)
    assert "nowhere.jsonl" in fails(capsys, train.main, *SFT, "--dataset=nowhere.jsonl")
    pathlib.Path("folder").mkdir()
    assert "folder" in fails(capsys, train.main, *SFT, "--dataset=folder")

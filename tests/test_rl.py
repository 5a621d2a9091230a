"""Policy optimisation."""

import json
import pathlib

import pytest
import torch
from test_cli import call, fails, state, tiny, workdir  # noqa: F401 (a fixture)

import prepare
import rl

BYTES = prepare.ByteTokenizer()
QUICK = ["--max_iters=2", "--batch_size=2", "--group_size=4", "--device=cpu", "--out_dir=rl"]


class Args:
    group_size, max_new_tokens, temperature = 6, 5, 0.7


@torch.no_grad()
def test_the_first_ratio_is_one_and_padding_does_not_count():
    model, generator = tiny(vocab_size=260), torch.Generator().manual_seed(0)
    ids, old, counts, texts = rl.rollout(model, BYTES, ["3+4=", "1+1="], Args, generator)
    assert ids.shape == (12, 9) and ids.max() < 257 and len(texts) == 12
    new = rl.response_logprobs(model, ids, 5, 0.7, BYTES.vocab_size)
    assert ((new - old) * counts).abs().max() <= 1e-4
    for row, count in zip(ids[:, 4:], counts):
        ends = (row == BYTES.eot).nonzero().flatten().tolist()
        assert count.sum() == (ends[0] + 1 if ends else 5)


def test_advantages_compare_a_group_with_itself():
    rewards = torch.tensor([0.0, 1, 0, 1, 5, 5, 5, 5])
    assert rl.advantages_of(rewards, 4).round(decimals=3).tolist() == [-1, 1, -1, 1, 0, 0, 0, 0]


def test_the_loss_is_clipped_on_the_side_that_would_go_too_far():
    logprobs = torch.tensor([[0.5, 0.0, -0.5]]).log_softmax(0).zero_().requires_grad_()
    old = torch.tensor([[-0.5, 0.0, 0.5]])  # ratios e^0.5, 1, e^-0.5
    counts = torch.ones(1, 3)
    for sign, moved in ((1.0, [False, True, True]), (-1.0, [True, True, False])):
        loss, _ = rl.policy_loss(logprobs, old, None, torch.tensor([sign]), counts, 0.2, 0.0)
        grad = torch.autograd.grad(loss, logprobs)[0][0]
        assert [bool(g) for g in grad != 0] == moved
    _, kl = rl.policy_loss(logprobs, old, logprobs.detach(), torch.ones(1), counts, 0.2, 1.0)
    assert kl == 0


def test_a_step_makes_rewarded_responses_likelier():
    torch.manual_seed(0)
    model = tiny(vocab_size=257)
    args = type("args", (Args,), dict(
        kl=0.0, learning_rate=1e-2, seed=1, max_iters=15, batch_size=2, updates=2, clip=0.2,
        max_new_tokens=1, group_size=64, temperature=1.0,
    ))  # fmt: skip
    reward = lambda prompt, response: float(response.isascii())
    records = list(rl.optimise(model, BYTES, ["ab", "abc"], reward, args, torch.device("cpu")))
    assert records[-1]["reward"] > records[0]["reward"] + 0.2


@pytest.mark.parametrize("other", ["B12", "B123"])  # in one batch with A12, or in one of its own
def test_rollouts_that_teach_nothing_count_in_the_mean(other, monkeypatch):
    """However prompts fall into batches, the loss is the mean over all tokens of all responses."""
    torch.manual_seed(0)
    model, norms = tiny(vocab_size=257), []
    args = type("args", (Args,), dict(
        kl=0.0, learning_rate=0.0, seed=1, max_iters=1, batch_size=2, updates=1, clip=0.2,
        max_new_tokens=2, group_size=2,
    ))  # fmt: skip

    def rollout(model, tokenizer, prompts, args, generator):
        said = torch.tensor([[65, 66], [67, 68]]).repeat(len(prompts), 1)
        asked = torch.tensor([list(p.encode()) for p in prompts]).repeat_interleave(2, dim=0)
        texts = ["AB", "CD"] * len(prompts)
        return torch.cat((asked, said), dim=1), -torch.ones(said.shape), said > 0, texts

    monkeypatch.setattr(rl, "rollout", rollout)
    monkeypatch.setattr(rl.random.Random, "choice", lambda self, prompts: prompts.pop())
    clip = torch.nn.utils.clip_grad_norm_
    keep = lambda parameters, limit: norms.append(clip(parameters, limit)) or norms[-1]
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    reward = lambda prompt, response: float(prompt[0] == "B" or response == "AB")
    prompts, device = ["A12", other], torch.device("cpu")
    list(rl.optimise(model, BYTES, prompts, reward, args, device))
    ids = torch.tensor([[65, 49, 50, 65, 66], [65, 49, 50, 67, 68]])
    model.zero_grad()
    logprobs = rl.response_logprobs(model, ids, 2, 0.7, 257)
    parts = -torch.ones(2, 2), None, rl.advantages_of(torch.tensor([1.0, 0.0]), 2)
    loss, _ = rl.policy_loss(logprobs, *parts, torch.ones(2, 2), 0.2, 0.0)
    (loss / 8).backward()  # two prompts of two rollouts of two tokens
    want = clip(model.parameters(), 1e9)
    assert abs(norms[0] - want) <= 1e-5 * want


def test_the_built_in_task_runs_and_leaves_a_checkpoint_and_a_record():
    call(rl.main, *QUICK, "--warmup_iters=2", "--kl=0.1")
    assert state("rl")["tokenizer"] == "bytes"
    records = [json.loads(line) for line in open("rl/log.jsonl")]
    assert [r["step"] for r in records] == [1, 2] and all(0 <= r["reward"] <= 1 for r in records)


def test_a_reward_function_of_ones_own_is_called_with_prompt_and_response():
    pathlib.Path("mine.py").write_text("def f(prompt, response):\n    return len(prompt)\n")
    pathlib.Path("p.jsonl").write_text('{"prompt": "abcde"}\n')
    call(rl.main, *QUICK, "--dataset=p.jsonl", "--reward=mine.py:f")
    assert json.loads(open("rl/log.jsonl").readline())["reward"] == 5


@pytest.mark.parametrize("code,word", [
    ("def f(p, r): return 1 / 0", "ZeroDivisionError"), ("def f(p, r): return float('nan')", "nan"),
    ("def g(p, r): return 1", "no function f"),
    ("import nothing_like_it", "cannot be imported"),
])  # fmt: skip
def test_a_reward_function_that_fails_names_the_prompt(code, word, capsys):
    pathlib.Path("mine.py").write_text(code)
    pathlib.Path("p.jsonl").write_text('{"prompt": "abcde"}\n')
    error = fails(capsys, rl.main, *QUICK, "--dataset=p.jsonl", "--reward=mine.py:f")
    assert word in error and ("abcde" in error or "mine.py" in error)


@pytest.mark.parametrize("flags,word", [
    (["--group_size=1"], "group_size"), (["--temperature=0"], "temperature"),
    (["--reward=none"], "--reward"), (["--dataset=bad.jsonl"], "line 2"),
    (["--max_iters=0"], "max_iters"),
    (["--dataset=p.jsonl", "--warmup_iters=1"], "trains on sums"),
    (["--reward=none.py:f", "--dataset=p.jsonl"], "no file none.py"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(flags, word, capsys):
    pathlib.Path("p.jsonl").write_text('{"prompt": "a"}\n')
    pathlib.Path("bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert word in fails(capsys, rl.main, *QUICK, *flags)

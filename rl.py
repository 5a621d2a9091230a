"""Policy optimisation on rollouts: group-relative (GRPO), in its simplest honest form.

    python rl.py --warmup_iters=300 --out_dir=out-rl      sums of two digits, from nothing, on a CPU
    python rl.py --init_from=DIR --dataset=PROMPTS.jsonl --reward=FILE.py:function

A step: some rollouts of each prompt (--group_size), decoded in pairs; a reward for each; the
advantage of a rollout is its reward less its group's mean, over the group's deviation; then the
policy is moved where advantages are positive, with T_out = the response. The log-probabilities that
decoding returns are those that training computes (the test that says so is in tests/test_chat.py),
so the first ratio is 1.

    L = -mean_t min(r_t A, clip(r_t, 1 - e, 1 + e) A) + beta KL,   r_t = p(y_t) / p_rollout(y_t)

A is the rollout's advantage, e --clip, beta --kl; the mean is over all response tokens of a step.

reward is a plain Python function (prompt, response) -> float.
"""

import copy
import importlib.util
import itertools
import json
import math
import os
import random

import torch
from tqdm import tqdm

from model import (
    GPT,
    PRESETS,
    GPTConfig,
    choose_backend,
    load_checkpoint,
    pick_device,
    save_checkpoint,
    warn_replaced,
)
from prepare import Parser, carry_tokenizer, load_tokenizer, run_cli, tokenizer_of
from sample import generate
from train import ChatData, backward


def addition(prompt, response):
    """1 for the right sum, as in '3+4=' -> '7', else 0."""
    a, b = prompt.rstrip("=").split("+")
    return float(response.strip() == str(int(a) + int(b)))


ADDITION_PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]


def load_reward(text):
    """'addition', or FILE.py:function."""
    if text == "addition":
        return addition
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"--reward must be addition or FILE.py:function, not '{text}'")
    if not os.path.isfile(path):
        raise ValueError(f"--reward: there is no file {path}")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name}")
    return getattr(module, name)


def rewarded(reward, prompt, response):
    try:
        value = float(reward(prompt, response))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the reward function failed on the prompt {prompt!r} ({type(error).__name__}: {error})"
        ) from error
    if not math.isfinite(value):
        raise ValueError(f"the reward function gave {value} for the prompt {prompt!r}")
    return value


def load_prompts(path):
    prompts = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    prompts.append(json.loads(line)["prompt"] + "")
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f'{path}, line {number}: a line is {{"prompt": text}} ({error})'
                    ) from error
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


@torch.no_grad()
def rollout(model, tokenizer, prompts, args, generator):
    """group_size responses to each of some prompts that are equally long in tokens: the rows.

    Returns ids (rows, T + R), log-probabilities (rows, R), which of those R tokens count (up to the
    one that ends the text, included), and the texts.
    """
    ids = [tokenizer.encode(prompt).tolist() or [tokenizer.eot] for prompt in prompts]
    idx = torch.tensor(ids, device=model.wte.weight.device)
    idx = idx.repeat_interleave(args.group_size, dim=0)
    stop = list(tokenizer.stop)
    steps = generate(model, idx, args.max_new_tokens, args.temperature, stop=stop,
                     generator=generator, vocab_size=tokenizer.vocab_size)  # fmt: skip
    said, logprobs = (torch.stack(x, dim=1) for x in zip(*steps))
    is_end = torch.isin(said, torch.tensor(stop, device=said.device))
    counts = is_end.cumsum(dim=1) - is_end.long() == 0  # nothing ended before it
    texts = [
        tokenizer.decode_bytes(row[keep].tolist()).decode("utf-8", "replace")
        for row, keep in zip(said, counts)
    ]
    return torch.cat((idx, said), dim=1), logprobs, counts, texts


def advantages_of(rewards, group_size):
    """(rows,) -> (rows,): each reward less its group's mean, over the group's deviation."""
    groups = rewards.view(-1, group_size)
    std = groups.std(dim=1, correction=0, keepdim=True)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-6)).flatten()


def response_logprobs(model, ids, R, temperature, vocab_size):
    """Log-probabilities (rows, R) of the last R of ids (rows, T + R): T_out = R."""
    logits = model(ids[:, :-1], T_out=R)[0][..., :vocab_size].float() / temperature
    return logits.log_softmax(dim=-1).gather(2, ids[:, -R:, None]).squeeze(2)


def policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, counts, clip, kl):
    """(sum of the loss over the tokens that count, sum of the KL).

    All are (rows, R), advantages (rows,); ref_logprobs is None without a penalty.
    """
    ratio = (logprobs - old_logprobs).exp()
    gain = advantages[:, None] * ratio
    gain = torch.minimum(gain, advantages[:, None] * ratio.clamp(1 - clip, 1 + clip))
    loss, penalty = -gain, torch.zeros_like(gain)
    if ref_logprobs is not None:
        less = ref_logprobs - logprobs
        penalty = less.exp() - less - 1  # an estimate of the KL that is never negative
        loss = loss + kl * penalty
    return (loss * counts).sum(), (penalty * counts).sum()


def warm_up(model, tokenizer, args, device):
    """Supervised steps on sums of which most are wrong: the form of an answer, and a hint."""
    chance = random.Random(args.seed)
    lines = []
    for prompt in ADDITION_PROMPTS * 20:
        a, b = int(prompt[0]), int(prompt[2])
        answer = a + b if chance.random() < 0.3 else chance.randrange(19)
        lines.append(json.dumps({"prompt": prompt, "response": str(answer)}))
    path = os.path.join(args.out_dir, "warmup.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    data = ChatData(path, tokenizer, model.config.block_size)
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    for step in tqdm(range(args.warmup_iters), desc="warm-up", disable=None):
        backward(model, scaler, [data.train_batch(64, args.seed, step, 0)], device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def optimise(model, tokenizer, prompts, reward, args, device):
    """The loop. Yields a record a step."""
    ref_model = copy.deepcopy(model).requires_grad_(False) if args.kl else None
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.0), lr=args.learning_rate)
    generator = torch.Generator(device).manual_seed(args.seed)
    order = random.Random(args.seed)
    for step in range(1, args.max_iters + 1):
        chosen = [order.choice(prompts) for _ in range(args.batch_size)]
        by_length = sorted((len(tokenizer.encode(prompt)), prompt) for prompt in chosen)
        batches, rewards, total = [], [], 0
        for _, same in itertools.groupby(by_length, key=lambda pair: pair[0]):
            same = [prompt for _, prompt in same]
            ids, old_logprobs, counts, texts = rollout(model, tokenizer, same, args, generator)
            total += counts.sum()  # also of those that teach nothing: the mean is over all
            asked = [prompt for prompt in same for _ in range(args.group_size)]
            values = [rewarded(reward, *pair) for pair in zip(asked, texts)]
            rewards.append(torch.tensor(values, device=device))
            advantages, ref_logprobs = advantages_of(rewards[-1], args.group_size), None
            if ref_model is not None:
                R = old_logprobs.size(1)
                with torch.no_grad():
                    ref_logprobs = response_logprobs(
                        ref_model, ids, R, args.temperature, tokenizer.vocab_size
                    )
            if advantages.any() or ref_model is not None:  # else there is nothing to learn from it
                batches.append((ids, old_logprobs, ref_logprobs, advantages, counts))
        kl = 0.0
        for _ in range(args.updates if batches else 0):
            kl += update(model, tokenizer, optimizer, batches, total, args, step) / args.updates
        reward_of_step = torch.cat(rewards).mean().item()
        yield {"step": step, "reward": reward_of_step, "kl": kl if args.kl else None}


def update(model, tokenizer, optimizer, batches, total, args, step):
    """Move the policy once by all rollouts of a step, `total` tokens. Returns a token's mean KL."""
    kl = 0.0
    for ids, old_logprobs, ref_logprobs, advantages, counts in batches:
        R = old_logprobs.size(1)
        logprobs = response_logprobs(model, ids, R, args.temperature, tokenizer.vocab_size)
        loss, kl_sum = policy_loss(
            logprobs, old_logprobs, ref_logprobs, advantages, counts, args.clip, args.kl
        )
        (loss / total).backward()
        kl += kl_sum.item() / total.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise ValueError(f"the gradient was not finite at step {step}; lower --learning_rate")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return kl


def build_parser():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--init_from", default="scratch", help="folder of a checkpoint (default: a small new model)"
    )
    add("--out_dir", default="out-rl")
    add("--dataset", help="a .jsonl file of prompts (default: the sums of two digits)")
    add("--reward", default="addition", help="addition, or FILE.py:function (default addition)")
    add("--warmup_iters", type=int, default=0, help="supervised steps first, for addition")
    add("--max_iters", type=int, default=100, help="steps")
    add("--batch_size", type=int, default=8, help="prompts a step")
    add("--group_size", type=int, default=16, help="rollouts of a prompt")
    add("--max_new_tokens", type=int, default=4, help="longest response")
    add("--temperature", type=float, default=1.0)
    add("--learning_rate", type=float, default=3e-4)
    add("--updates", type=int, default=2, help="optimizer steps on one set of rollouts")
    add("--clip", type=float, default=0.2, help="how far a ratio may move")
    add("--kl", type=float, default=0.0, help="weight of the KL to the starting model")
    add("--seed", type=int, default=1337)
    add("--device", help="cpu, cuda, mps (default: the best there is)")
    add("--backend", help="attention backend: torch, flash or masked")
    return parser


def main():
    args = build_parser().parse_args()
    for name in ("max_iters", "batch_size", "max_new_tokens", "updates"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    for name in ("warmup_iters", "learning_rate", "clip", "kl", "seed"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} must be a number from 0 on, not {getattr(args, name)}")
    if args.group_size < 2:
        raise ValueError("--group_size must be at least 2: an advantage compares rollouts")
    if args.warmup_iters and (args.dataset or args.reward != "addition"):
        raise ValueError("--warmup_iters trains on sums: it is for the built-in prompts and reward")
    if not args.temperature > 0:
        raise ValueError("--temperature must be above 0: greedy rollouts are all alike")
    reward = load_reward(args.reward)
    prompts = load_prompts(args.dataset) if args.dataset else ADDITION_PROMPTS
    if args.reward != "addition" and not args.dataset:
        raise ValueError("a reward function of your own needs --dataset, the prompts")
    device, _ = pick_device(args.device, "float32")
    choose_backend(args.backend)
    os.makedirs(args.out_dir, exist_ok=True)
    torch.manual_seed(args.seed)
    if args.init_from == "scratch":
        tokenizer = load_tokenizer("bytes")
        model = GPT(GPTConfig(**{**PRESETS["laptop"], "window": 4})).to(device)
    else:
        model, checkpoint = load_checkpoint(args.init_from, device)
        tokenizer, model = tokenizer_of(checkpoint, args.init_from), model.float()
    warn_replaced(args.out_dir)
    if args.warmup_iters:
        warm_up(model, tokenizer, args, device)
    write_log(optimise(model, tokenizer, prompts, reward, args, device), args)
    save_checkpoint(args.out_dir, {
        "model": model.state_dict(), "config": vars(model.config), "step": args.max_iters,
        "best_val_loss": math.inf, "args": {},
        "tokenizer": carry_tokenizer(tokenizer.name, args.out_dir),
    })  # fmt: skip


def write_log(records, args):
    """Each step's record to out_dir/log.jsonl; every tenth time their means to the screen."""
    bar, recent = tqdm(records, total=args.max_iters, desc="steps", disable=None), []
    with open(os.path.join(args.out_dir, "log.jsonl"), "w", encoding="utf-8") as log:
        for record in bar:
            log.write(json.dumps(record) + "\n")
            log.flush()
            recent.append(record["reward"])
            if record["step"] % 10 == 0 or record["step"] == args.max_iters:
                mean = sum(recent) / len(recent)
                kl = f"  kl {record['kl']:.4f}" if args.kl else ""
                bar.write(f"step {record['step']:>5}  reward {mean:.3f}{kl}")
                recent.clear()


if __name__ == "__main__":
    run_cli(main)

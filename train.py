"""Training. In pre-training every position is a base and an output token, T_out = T; in fine-tuning
the prompt is only read, and T_out is the response.

python train.py                                    a small model of Python source, on any machine
python train.py --dataset=recall --attention=swa   look-ups farther away than a window reaches
python train.py --init_from=resume                 go on from out_dir/ckpt.pt
python train.py --preset=gpt2 --dataset=NAME       a folder data/NAME that prepare.py made
python train.py --init_from=DIR --out_dir=NEW      continue from another run's weights
python train.py --mode=sft --dataset=FILE.jsonl --init_from=DIR    teach it to answer
torchrun --nproc_per_node=8 train.py ...           several GPUs: DDP, or --fsdp for large models
"""

import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as by_name
from torch.nn.parallel import DistributedDataParallel

from model import (
    GPT,
    PRESETS,
    GPTConfig,
    choose_backend,
    model_of,
    pick_device,
    read_checkpoint,
    save_checkpoint,
    warn_replaced,
)
from prepare import (
    DATA_DIR,
    Parser,
    carry_tokenizer,
    load_meta,
    load_split,
    load_tokenizer,
    parse_bool,
    prepare_stdlib,
    run_cli,
    tokenizer_identity,
    tokenizer_of,
    tokenizer_path,
)
from sample import ChatTemplate, generate, write_stream

# What suits a preset or a dataset; flags on the command line override it.
RECIPES = {
    "laptop": dict(
        batch_size=4, max_iters=700, learning_rate=3e-3, warmup_iters=50, eval_interval=350,
    ),
    "recall": dict(
        n_layer=2, n_head=2, n_embd=64, block_size=48, window=8, batch_size=64, max_iters=700,
        learning_rate=3e-3, warmup_iters=50, eval_interval=350, log_interval=50,
    ),
    "gpt2": dict(batch_size=32, gradient_accumulation_steps=16, eval_interval=1000),
    "160m": dict(
        batch_size=16, gradient_accumulation_steps=16, max_iters=19000, learning_rate=6e-4,
    ),
    "1.3b": dict(
        batch_size=8, gradient_accumulation_steps=64, max_iters=95000, learning_rate=2e-4,
        warmup_iters=2000,
    ),
    "6.8b": dict(
        batch_size=4, gradient_accumulation_steps=128, max_iters=9500, learning_rate=1.2e-4,
        warmup_iters=1000,
    ),
    "sft": dict(
        batch_size=4, gradient_accumulation_steps=8, max_iters=500, learning_rate=2e-5,
        warmup_iters=20, eval_interval=100,
    ),
    # continued pre-training: the paper's length and number of steps; its rate is not known
    "continue": dict(
        block_size=32768, batch_size=1, gradient_accumulation_steps=240, max_iters=10000,
        learning_rate=1e-5, warmup_iters=100, eval_windows=16,
    ),
}  # fmt: skip

# Dense bf16 TFLOP/s by the makers' data sheets (fp16 where there is no bf16); the first name whose
# words are in the GPU's counts.
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835,
    "H100": 989, "A100": 312, "A10G": 70, "A10": 125, "A40": 150, "L40S": 362, "L40": 181,
    "L4": 121, "RTX 4090": 165, "RTX 3090": 71, "RTX A6000": 155, "V100": 125, "T4": 65,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Data


def parse_mix(text):
    """'a' or 'a:3,b:1' -> names ['a', 'b'], shares [0.75, 0.25]."""
    names, weights = [], []
    for item in text.split(","):
        name, _, weight = item.partition(":")
        names.append(name)
        try:
            weights.append(float(weight or 1))
        except ValueError:
            raise ValueError(
                f"--dataset: the weight of {name} must be a number, not '{weight}'"
            ) from None
    if not all(0 < w < math.inf for w in weights):
        raise ValueError(f"--dataset: weights must be above 0, as in owt:3,code:1, not '{text}'")
    return names, np.array(weights) / sum(weights)


class TextData:
    """Text windows, T + 1 tokens each, of a dataset's shards, or of several mixed by weight.

    Training batches depend on (seed, step, micro-batch) alone, validation windows on nothing but
    their number.
    """

    def __init__(self, dataset, T):
        self.names, self.shares = parse_mix(dataset)
        self.T, metas = T, [load_meta(name) for name in self.names]
        self.meta = metas[0] | {"vocab_size": max(meta["vocab_size"] for meta in metas)}
        for name, meta in zip(self.names, metas):
            if len({tokenizer_identity(m["tokenizer"]) for m in (meta, metas[0])}) > 1:
                raise ValueError(
                    f"{name} was made with the tokenizer {meta['tokenizer']}, but {self.names[0]} "
                    f"with {metas[0]['tokenizer']}: they cannot be mixed"
                )
        self.shards, self.ends = {}, {}
        for split in ("train", "val"):
            self.shards[split] = [load_split(n, split, m) for n, m in zip(self.names, metas)]
            self.ends[split] = [np.cumsum([len(x) for x in s]) for s in self.shards[split]]
            for name, ends in zip(self.names, self.ends[split]):
                if ends[-1] < T + 1:
                    raise ValueError(
                        f"{DATA_DIR}/{name}: the {split} split has {ends[-1]} tokens, but one "
                        f"block needs block_size + 1 = {T + 1}; lower --block_size or prepare more "
                        f"text"
                    )

    def window(self, split, which, start):
        """T + 1 tokens from `start` of a dataset's shards, read as one long stream."""
        shards, ends = self.shards[split][which], self.ends[split][which]
        i = np.searchsorted(ends, start, side="right")
        start -= ends[i] - len(shards[i])
        tokens = shards[i][start : start + self.T + 1].astype(np.int64)
        while len(tokens) <= self.T:  # a window that crosses into the next shard
            i += 1
            more = shards[i][: self.T + 1 - len(tokens)].astype(np.int64)
            tokens = np.concatenate((tokens, more))
        if tokens.max() >= self.meta["vocab_size"]:
            raise ValueError(
                f"{DATA_DIR}/{self.names[which]}: token id {tokens.max()} >= vocab_size "
                f"{self.meta['vocab_size']}; prepare.py info {self.names[which]} names the shard"
            )
        return tokens

    def windows(self, split, which, starts):
        both = np.stack([self.window(split, w, s) for w, s in zip(which, starts)])
        both = torch.from_numpy(both)
        return both[:, :-1], both[:, 1:].contiguous()

    def train_batch(self, B, seed, step, m):
        rng = np.random.default_rng((seed, step, m))
        several = len(self.names) > 1
        which = rng.choice(len(self.names), size=B, p=self.shares) if several else np.zeros(B, int)
        lengths = np.array([ends[-1] for ends in self.ends["train"]])
        return self.windows("train", which, rng.integers(lengths[which] - self.T))

    def val_batches(self, B, n_windows):
        places = []
        for which, (share, ends) in enumerate(zip(self.shares, self.ends["val"])):
            n = max(1, round(share * n_windows))
            starts = np.linspace(0, ends[-1] - self.T - 1, n).astype(np.int64)
            places += [(which, start) for start in starts]
        for i in range(0, len(places), B):
            yield self.windows("val", *zip(*places[i : i + B]))


class RecallData:
    """Look-ups: pairs (key, value), a gap, then the keys once more in another order.

    At each of those the model must name the key's value. The gap is longer than the windows of all
    layers reach together, so stacked windows cannot carry an answer across. Targets are -1 but at
    look-ups, and no answer stands in the text: from answers given, a model learns to tell which are
    left before it learns to look up.
    """

    KEYS = VALUES = 32
    meta = {"vocab_size": KEYS + VALUES + 1, "tokenizer": None}

    def __init__(self, config):
        self.T = config.block_size
        self.gap = config.n_layer * (config.window - 1) + 1
        self.pairs = min((self.T - self.gap) // 3, self.KEYS)
        if self.pairs < 2:
            raise ValueError(
                f"recall needs block_size >= {self.gap + 6}: the gap outreaches n_layer = "
                f"{config.n_layer} windows of {config.window}, and pairs and look-ups go around it"
            )

    def episodes(self, rng, sizes, starts=0):
        """One episode a row; sizes (B, 1): how many of the pairs it has, filler for the rest;
        starts (B, 1): where its first pair stands. At 0 all look-ups go farther than the reach."""
        B, n, T = len(sizes), self.pairs, self.T
        filler = self.KEYS + self.VALUES
        keys = rng.permuted(np.tile(np.arange(self.KEYS), (B, 1)), axis=1)[:, :n]
        values = rng.integers(self.KEYS, filler, size=(B, n))
        keys, values = (np.where(np.arange(n) < sizes, ids, filler) for ids in (keys, values))
        order = rng.permuted(np.tile(np.arange(n), (B, 1)), axis=1)
        asked, answers = (np.take_along_axis(ids, order, axis=1) for ids in (keys, values))
        x, y = np.full((B, T + 2 * n), filler), np.full((B, T), -1)  # room for filler beyond T
        pairs = np.stack((keys, values), axis=2).reshape(B, 2 * n)
        np.put_along_axis(x, starts + np.tile(np.arange(2 * n), (B, 1)), pairs, axis=1)
        x = x[:, :T].copy()
        x[:, T - n :], y[:, T - n :] = asked, np.where(answers == filler, -1, answers)
        return torch.from_numpy(x), torch.from_numpy(y)

    def train_batch(self, B, seed, step, m):
        # small episodes teach the large: without them full attention stays at guessing for long
        rng = np.random.default_rng((seed, step, m))
        return self.episodes(rng, self.small_and_large(rng, B))

    def small_and_large(self, rng, B):
        return (2 + (self.pairs - 1) * rng.random((B, 1)) ** 2).astype(int)

    def val_batches(self, B, n_windows):
        x, y = self.episodes(np.random.default_rng(2**40), np.full((n_windows, 1), self.pairs))
        yield from zip(x.split(B), y.split(B))


class ChatData:
    """Fine-tuning: lines of {"prompt", "response"} or {"messages": [{"role", "content"}, ...]}.

    A batch's T_out runs from its earliest supervised position to its end; targets are -1 where
    others speak. So batches hold examples of like response and prompt lengths. Padding is on the
    right, where nothing looks. Batches depend on (seed, step, micro-batch) alone.
    """

    def __init__(self, path, tokenizer, T, overlong="cut", micro_batches=1):
        self.meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        self.T, self.template, self.skipped = T, ChatTemplate(tokenizer), 0
        self.micro_batches = micro_batches  # of a step, over all processes
        examples = []
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        example = self.fit(*self.read(line, f"{path}, line {number}"), overlong)
                        examples += [example] if example else []
                        self.skipped += example is None
        except IsADirectoryError:
            raise ValueError(
                f"--mode=sft takes a .jsonl file as --dataset, not the folder {path}"
            ) from None
        if not examples:
            raise ValueError(f"{path} has no response to learn from ({self.skipped} lines skipped)")
        lengths = lambda example: (len(example[0]) - example[1], example[1])  # response, prompt
        examples.sort(key=lengths)
        self.examples = {
            "val": examples[::20],
            "train": [e for i, e in enumerate(examples) if i % 20],
        }
        self.examples["train"] = self.examples["train"] or examples

    def read(self, line, where):
        """(token ids, whether each is supervised) of one line."""
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        fields = record if isinstance(record, dict) else {}
        messages, tokenizer = fields.get("messages"), self.template.tokenizer
        if isinstance(messages, list):
            for message in messages:
                role = message.get("role") if isinstance(message, dict) else None
                if role not in ChatTemplate.ROLES or not isinstance(message.get("content"), str):
                    roles = ", ".join(ChatTemplate.ROLES)
                    raise ValueError(f"{where}: a message needs content, and a role of {roles}; "
                                     f"not {str(message)[:80]}")  # fmt: skip
            messages = [{name: m[name] for name in ("role", "content")} for m in messages]
            try:
                ids, said = self.template.encode(messages)
            except Exception as error:  # templates raise what they like
                raise ValueError(
                    f"{where}: the model's chat template refuses it ({error})"
                ) from error
            empty = not any(m["content"] for m in messages if m["role"] == "assistant")
            return ids, [s and not empty for s in said]
        if not all(isinstance(fields.get(name), str) for name in ("prompt", "response")):
            raise ValueError(f"{where}: a line is {{\"prompt\", \"response\"}} or {{\"messages\"}}"
                             f", with {', '.join(fields) or 'nothing'} found")  # fmt: skip
        prompt = tokenizer.encode(fields["prompt"]).tolist() or [tokenizer.eot]
        response = tokenizer.encode(fields["response"]).tolist()
        response = response + [tokenizer.eot] if response else []
        return prompt + response, [False] * len(prompt) + [True] * len(response)

    def fit(self, ids, said, overlong):
        """(ids, first supervised index, supervised) in T + 1 tokens, or None: nothing to learn."""
        if len(ids) > self.T + 1:
            if overlong == "drop":
                return None
            ids, said = ids[-self.T - 1 :], said[-self.T - 1 :]  # the prompt loses its beginning
        for i in itertools.takewhile(lambda i: said[i], range(len(said))):
            said[i] = False  # what it answers has been cut off
        return (np.array(ids), said.index(True), np.array(said)) if any(said) else None

    def collate(self, examples):
        """x (B, T), y (B, T_out), the last T_out positions' next tokens or -1."""
        T = max(len(ids) for ids, _, _ in examples) - 1
        start = min(first for _, first, _ in examples) - 1  # the position that predicts it
        x, y = np.zeros((len(examples), T), int), np.full((len(examples), T), -1)
        for row, (ids, _, said) in enumerate(examples):
            x[row, : len(ids) - 1] = ids[:-1]
            y[row, : len(ids) - 1] = np.where(said[1:], ids[1:], -1)
        return torch.from_numpy(x), torch.from_numpy(y[:, start:].copy())

    def train_batch(self, B, seed, step, m):
        examples = self.examples["train"]
        n = -(-len(examples) // B)  # batches an epoch, each of neighbours in length
        epoch, place = divmod(step * self.micro_batches + m, n)
        k = np.random.default_rng((seed, epoch)).permutation(n)[place]
        return self.collate(examples[k * B : (k + 1) * B])

    def val_batches(self, B, n_windows):
        examples = self.examples["val"][:n_windows]
        for i in range(0, len(examples), B):
            yield self.collate(examples[i : i + B])


@torch.no_grad()
def evaluate(model, data, batch_size, n_windows, device, accuracy=False, shared=False):
    """Mean validation loss in nats a target, or with accuracy=True the share of targets that
    have the largest logit. shared: each process takes its share of the batches."""
    rank, ranks = world() if shared else (0, 1)
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for i, (x, y) in enumerate(data.val_batches(batch_size, n_windows)):
        if i % ranks != rank:
            continue
        x, y = x.to(device), y.to(device)
        n = (y >= 0).sum().item()
        if accuracy:
            part = (model(x, T_out=y.size(1))[0].argmax(dim=-1) == y).sum().item()
        else:
            part = model(x, y, y.size(1))[1].item() * n
        sums += torch.tensor([part, n], dtype=torch.float64)
    model.train()
    if shared:
        sums = all_reduced(sums.float().to(device))
    return (sums[0] / sums[1]).item()


# ------------------------------------------------------------------------------------------------
# Training


def learning_rate(step, args):
    """Linear warm-up to args.learning_rate, then a cosine down to args.min_lr."""
    if step < args.warmup_iters:
        return args.learning_rate * (step + 1) / args.warmup_iters
    least = args.learning_rate / 10 if args.min_lr is None else args.min_lr
    end = args.max_iters if args.lr_decay_iters is None else args.lr_decay_iters
    span = end - args.warmup_iters
    done = min(1.0, (step - args.warmup_iters) / span) if span > 0 else 1.0
    return least + 0.5 * (1 + math.cos(math.pi * done)) * (args.learning_rate - least)


def backward(model, scaler, batches, device):
    """Gradients of the mean loss over all targets of the micro-batches, over all processes.

    A micro-batch weighs what it has of the targets, so splitting a batch changes nothing. Returns
    this process's part of the loss; the parts add up to it.
    """
    count = torch.tensor(float(sum((y >= 0).sum().item() for _, y in batches)), device=device)
    ranks = world()[1]
    count = all_reduced(count).clamp(min=1)
    loss = torch.zeros((), device=device)
    for i, (x, y) in enumerate(batches):
        if ranks > 1:  # gradients travel once, with the last micro-batch
            is_last = i + 1 == len(batches)
            inner = getattr(model, "_orig_mod", model)  # of torch.compile
            if isinstance(inner, DistributedDataParallel):
                inner.require_backward_grad_sync = is_last
            else:
                inner.set_requires_gradient_sync(is_last)
        share = (y >= 0).sum().item() / count
        x, y = (t.to(device, non_blocking=True) for t in (x, y))
        part = model(x, y, y.size(1))[1] * share
        scaler.scale(part * ranks).backward()  # since gradients are averaged over the processes
        loss += part.detach()
    return loss


def world():
    """(rank of this process, number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduced(tensor):
    """The sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def load_ahead(data, args, step, device):
    """Yield the micro-batches of each step. A thread reads the next step's while this one runs."""

    rank, ranks = world()

    def load(step):
        micro = range(rank, args.gradient_accumulation_steps, ranks)
        batches = [data.train_batch(args.batch_size, args.seed, step, m) for m in micro]
        if args.T_out:
            batches = [(x, y[:, -args.T_out :].contiguous()) for x, y in batches]
        if device.type == "cuda":  # from pinned memory the copy runs beside the computation
            batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
        return batches

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(load, step)
        while True:
            batches = coming.result()
            step += 1
            coming = pool.submit(load, step)
            yield batches


def build_parser():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--mode",
        default="pt",
        choices=("pt", "sft"),
        help="pre-training or fine-tuning (default pt)",
    )
    add("--dataset", default="stdlib", help="a folder of data/, several with weights as in "
        "owt:3,code:1, or recall (default stdlib); in fine-tuning a .jsonl file")  # fmt: skip
    add("--preset", default="laptop", help=f"model shape: {', '.join(PRESETS)} (default laptop)")
    add("--out_dir", default="out", help="folder of ckpt.pt and log.jsonl (default out)")
    add("--init_from", default="scratch", help="scratch, resume (from out_dir), or a folder whose "
        "weights to start from")  # fmt: skip
    run = parser.add_argument_group("optimisation")
    add = run.add_argument
    add("--batch_size", type=int, default=8, help="sequences a micro-batch")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches a step")
    add("--max_iters", type=int, default=20000, help="steps in all")
    add("--learning_rate", type=float, default=6e-4)
    add("--min_lr", type=float, help="at the end of the cosine (default learning_rate / 10)")
    add("--warmup_iters", type=int, default=700)
    add("--lr_decay_iters", type=int, help="end of the cosine (default max_iters)")
    add("--weight_decay", type=float, default=0.1)
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.95)
    add("--grad_clip", type=float, default=1.0, help="largest gradient norm; 0 is off")
    add("--seed", type=int, default=1337)
    add("--eval_interval", type=int, default=1000, help="steps between validations and checkpoints")
    add("--eval_windows", type=int, default=128, help="validation sequences, always the same")
    add("--log_interval", type=int, default=10)
    add("--T_out", type=int, help="predict at the last N positions of a block only (default all)")
    add("--overlong", default="cut", choices=("cut", "drop"), help="fine-tuning examples longer "
        "than block_size: cut the prompt's beginning, or drop (default cut)")  # fmt: skip
    add("--full_until", type=float, default=0.0, help="share of the steps trained with full "
        "attention before it becomes --attention; 0 is the paper")  # fmt: skip
    run = parser.add_argument_group("machine")
    add, switch = run.add_argument, dict(type=parse_bool, nargs="?", const=True)
    add("--device", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    add("--fsdp", **switch, default=False, help="shard weights over the GPUs (FSDP2)")
    add("--activation_checkpointing", **switch, help="compute activations twice instead of "
        "keeping them (default: with --fsdp)")  # fmt: skip
    add("--peak_tflops", type=float, help="of this device, for MFU (default: a table of GPUs)")
    add("--dtype", help="float32, bfloat16, float16 (default: what suits the device)")
    add("--compile", **switch, help="torch.compile (default: on a GPU, in pre-training)")
    add("--backend", help="attention backend: torch, flash or masked")
    model = parser.add_argument_group("model (default: the preset's)")
    for field in fields(GPTConfig):  # its type is a class, or a union with None: those are all int
        kind = {"bool": parse_bool, "str": str, "float": float}.get(field.type.__name__, int) \
            if isinstance(field.type, type) else int  # fmt: skip
        if field.name != "rope_scaling":
            start = field.default if field.name == "attention" else None
            model.add_argument(f"--{field.name}", type=kind, default=start)
    return parser


MACHINE = ("out_dir", "init_from", "device", "compile", "backend", "fsdp",
           "activation_checkpointing", "peak_tflops")  # fmt: skip # change no mathematics


def parse_args(argv=None):
    """Flags over the resumed checkpoint's, over the preset's or dataset's recipe, over defaults."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.preset not in PRESETS:
        raise ValueError(f"unknown preset '{args.preset}'; known are {', '.join(PRESETS)}")
    if args.init_from == "resume":
        checkpoint = read_checkpoint(args.out_dir, mmap=True)
        saved = checkpoint["args"]
        if not saved:
            raise ValueError(
                f"{args.out_dir} holds weights, not a run that can go on; start from them with "
                f"--init_from={args.out_dir} --out_dir=NEW"
            )
        parser.set_defaults(**{k: v for k, v in saved.items() if k not in MACHINE})
        args = parser.parse_args(argv)
        changed = [k for k, v in saved.items() if k not in MACHINE and getattr(args, k) != v]
        if "preset" in changed:
            raise ValueError(f"the run in {args.out_dir} has the shape of {saved['preset']} for "
                             f"good; --preset={args.preset} is for a new one")  # fmt: skip
        if "full_until" in changed and checkpoint["config"]["attention"] != "full":
            raise ValueError(f"the run in {args.out_dir} has no full attention left to train with; "
                             f"--full_until is for a new one")  # fmt: skip
        if changed and os.environ.get("RANK", "0") == "0":
            changes = ", ".join(f"{k} {saved[k]} -> {getattr(args, k)}" for k in changed)
            print(f"changed since the run was started: {changes}")
    elif args.init_from == "scratch":
        recipe = "recall" if args.dataset == "recall" else args.preset
        parser.set_defaults(**PRESETS[args.preset])
        parser.set_defaults(**RECIPES.get(recipe, {}))
        args = parser.parse_args(argv)
    elif os.path.isdir(args.init_from):
        if args.preset != parser.get_default("preset"):
            raise ValueError(f"--preset is for a new model; {args.init_from} has a shape already")
        parser.set_defaults(**read_checkpoint(args.init_from, mmap=True)["config"])
        parser.set_defaults(**RECIPES["continue" if args.mode == "pt" else "sft"])
        args = parser.parse_args(argv)
    else:
        raise ValueError(f"--init_from must be scratch, resume or a folder; '{args.init_from}' is "
                         f"none of these")  # fmt: skip
    check_flags(args)
    return args


def check_flags(args):
    """A ValueError that names the flag whose value cannot be meant."""
    for name in ("batch_size", "gradient_accumulation_steps", "max_iters", "eval_interval",
                 "eval_windows", "log_interval"):  # fmt: skip
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    for name in ("seed", "warmup_iters", "grad_clip", "weight_decay", "learning_rate", "min_lr",
                 "lr_decay_iters", "peak_tflops"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:  # nan is refused too
            raise ValueError(f"--{name} must be a number from 0 on, not {value}")
    if args.seed >= 2**63:
        raise ValueError(f"--seed must be below 2**63, not {args.seed}")
    if args.mode == "sft" and args.T_out is not None:
        raise ValueError("--T_out is the response in fine-tuning; the flag is for pre-training")
    if not 0 <= args.full_until <= 1:
        raise ValueError(f"--full_until must be from 0 to 1, not {args.full_until}")
    if args.T_out is not None and not 1 <= args.T_out <= args.block_size:
        raise ValueError(
            f"--T_out must be from 1 to block_size {args.block_size}, not {args.T_out}"
        )


def open_data(args):
    """The dataset that the flags name."""
    if args.mode == "sft":
        return open_chats(args)
    if args.dataset == "recall":
        return RecallData(config_of(args))
    if args.dataset == "stdlib" and not os.path.exists(f"{DATA_DIR}/stdlib/meta.json"):
        if not dist.is_initialized() or dist.get_rank() == 0:
            prepare_stdlib()
        if dist.is_initialized():
            dist.barrier()
    return TextData(args.dataset, args.block_size)


def open_chats(args):
    """Examples in the tokenizer of the model that is to learn them."""
    folder = args.out_dir if args.init_from == "resume" else args.init_from
    if folder == "scratch":
        tokenizer = load_tokenizer("bytes")
    else:
        tokenizer = tokenizer_of(read_checkpoint(folder, mmap=True), folder)
    micro = args.gradient_accumulation_steps
    return ChatData(args.dataset, tokenizer, args.block_size, args.overlong, micro)


def config_of(args, data=RecallData, attention=None):
    """The model's config; without --vocab_size as large as the dataset needs. RecallData needs the
    config first, so its class stands in for it by default."""
    given = {f.name: getattr(args, f.name, None) for f in fields(GPTConfig)}
    given = {name: value for name, value in given.items() if value is not None}
    needed = data.meta["vocab_size"]
    config = GPTConfig(**{"vocab_size": needed, **given, "attention": attention or args.attention})
    if config.vocab_size < needed:
        raise ValueError(
            f"vocab_size {config.vocab_size} is too small for {args.dataset}, which needs {needed}"
        )
    return config


def keys_seen(Tq, S, window=None, sink=0):
    """How many (query, key) pairs the contract of `attend` lets through."""
    if window is None:
        return Tq * S - Tq * (Tq - 1) // 2
    reach = window + sink
    short = max(0, min(Tq, reach - (S - Tq)))  # queries that still see all before them
    return (Tq - short) * reach + keys_seen(short, S - Tq + short)


def forward_flops(config, T, T_out):
    """FLOPs of one forward over T new tokens: 2 a weight and token, 4 D a head, query and key.

    Counts what runs: output tokens, the window, and the last layer's queries at T_out alone.
    """
    c, total = config, 0
    H, D = c.n_head, c.head_dim
    for layer in range(c.n_layer):
        kind, is_last = c.kind(layer), layer == c.n_layer - 1
        n_out = T_out if kind == "orthros" else 0
        n_base = T if not is_last else 0 if kind == "orthros" else T_out
        window, sink = (None, 0) if kind == "full" else (c.window, c.sink)
        total += 2 * T * c.n_embd * 2 * c.n_kv_head * D
        total += 2 * c.n_embd * (n_base + n_out) * (2 * H * D + 3 * c.n_hidden)
        total += 4 * H * D * (keys_seen(n_base, T, window, sink) + keys_seen(n_out, T))
    return total + 2 * T_out * c.n_embd * c.vocab_size


def closing_sample(model, data, device):
    """Continue the first words of the validation text, by a page at most."""
    tokenizer = load_tokenizer(data.meta["tokenizer"])
    T = min(data.T, 256)
    prompt = next(data.val_batches(1, 1))[0][:, : max(1, T // 4)].to(device)
    text = tokenizer.decode_bytes(prompt[0].tolist()).decode("utf-8", "replace")
    print(f"\n--- validation text, and after the bar a sample decoded in pairs\n{text}|", end="")
    steps = generate(
        model.eval(), prompt, max(1, T - prompt.size(1)), temperature=0.8,
        generator=torch.Generator(device).manual_seed(1), vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    write_stream(tokenizer, steps)


def start_processes(args):
    """(device, dtype). Under torchrun each process takes a GPU of its own."""
    if "RANK" not in os.environ:
        if args.fsdp:
            raise ValueError(
                "--fsdp shards over processes: torchrun --nproc_per_node=N train.py ..."
            )
        return pick_device(args.device, args.dtype)
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    name = args.device
    if torch.cuda.is_available() and name in (None, "auto", "cuda"):
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"{os.environ.get('LOCAL_WORLD_SIZE', ranks)} processes, but "
                f"{torch.cuda.device_count()} GPUs here: lower torchrun's --nproc_per_node"
            )
        torch.cuda.set_device(local)  # before anything touches the first GPU
        name = f"cuda:{local}"
    device, dtype = pick_device(name, args.dtype)
    if args.gradient_accumulation_steps % ranks:
        raise ValueError(
            f"--gradient_accumulation_steps counts the micro-batches of all processes: "
            f"{args.gradient_accumulation_steps} do not divide among {ranks}"
        )
    if args.fsdp and dtype == torch.float16:
        raise ValueError("--fsdp needs --dtype=bfloat16 or float32")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, dtype


class Run:
    """A model in training, and all that is saved of it."""

    def __init__(self, args, data, device, dtype):
        self.args, self.data, self.device, self.dtype = args, data, device, dtype
        self.step, self.best_val_loss, self.saved, self.switched = 0, math.inf, None, False
        self.tokens = self.flops = 0  # of this process since it started
        self.first_bad = torch.tensor(-1, device=device)  # step whose loss was not finite
        if args.init_from == "resume":
            self.load()
        else:
            self.build()

    def attention(self):
        """full attention for the first part of the run, if --full_until says so; never again once
        it has ended, though a resumed run may be longer."""
        args = self.args
        early = self.step < round(args.full_until * args.max_iters) and not self.switched
        return "full" if early else args.attention

    def build(self, checkpoint=None):
        """Model and optimizer: new, or from another run's folder, or from this run's checkpoint."""
        args, device = self.args, self.device
        config = config_of(args, self.data, self.attention())
        torch.manual_seed(args.seed)
        start = "cpu" if args.fsdp else device
        if checkpoint is None and args.init_from == "scratch":
            self.model = GPT(config).to(start)
        else:
            folder = args.out_dir if checkpoint else args.init_from
            loaded = checkpoint or read_checkpoint(folder)
            self.model = model_of(loaded, folder, start, **asdict(config))
            theirs = tokenizer_path(loaded["tokenizer"], folder)
            ours = self.data.meta["tokenizer"]
            if theirs and tokenizer_identity(theirs) != tokenizer_identity(ours):
                raise ValueError(
                    f"{folder} has the tokenizer {theirs}, but {args.dataset} was made with "
                    f"{ours or 'none'}"
                )
            self.model.float()
        self.model.compute_dtype = self.dtype
        self.forward = self.wrap()
        self.optimizer = torch.optim.AdamW(
            self.model.optimizer_groups(args.weight_decay), lr=args.learning_rate,
            betas=(args.beta1, args.beta2), fused=True,
        )  # fmt: skip
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        if checkpoint:
            options = by_name.StateDictOptions(full_state_dict=True, strict=False)
            state = checkpoint["optimizer"]  # by name: alphas and betas that are new start afresh
            by_name.set_optimizer_state_dict(self.model, self.optimizer, state, options=options)
            for group, decay in zip(self.optimizer.param_groups, (args.weight_decay, 0.0)):
                group.update(weight_decay=decay, betas=(args.beta1, args.beta2))  # flags may change
            for name, p in self.model.named_parameters():
                if name not in state["state"] and p in self.optimizer.state:
                    self.optimizer.state[p]["step"].zero_()
            if checkpoint["scaler"]:  # empty, if the run had none until now
                self.scaler.load_state_dict(checkpoint["scaler"])

    def wrap(self):
        """What a training step calls: the model, over all processes, compiled."""
        args, model = self.args, self.model
        recompute = args.activation_checkpointing
        if args.fsdp if recompute is None else recompute:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(block)
        forward = model
        if args.fsdp:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # inputs stay as they are: the rotary angles must not be rounded
            policy = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        elif dist.is_initialized():
            ids = [self.device.index] if self.device.type == "cuda" else None
            forward = DistributedDataParallel(model, device_ids=ids)
        default = self.device.type == "cuda" and args.mode == "pt"  # one shape; chats have many
        self.compiled = default if args.compile is None else args.compile
        return torch.compile(forward) if self.compiled else forward

    def train_step(self, batches):
        """One step of the optimizer. Returns (this process's part of the loss, gradient norm)."""
        lr = learning_rate(self.step, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for x, y in batches:
            self.tokens += x.numel()
            self.flops += 3 * len(x) * forward_flops(self.model.config, x.size(1), y.size(1))
        loss = backward(self.forward, self.scaler, batches, self.device)
        self.scaler.unscale_(self.optimizer)
        limit = self.args.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        good = torch.isfinite(loss)
        if not self.scaler.is_enabled():  # a scaler skips the step itself
            good &= torch.isfinite(norm)
        bad = ~good & (self.first_bad < 0)  # looked at later: no waiting here
        self.first_bad = torch.where(bad, self.step, self.first_bad)
        return loss, norm

    def check_finite(self):
        first = self.first_bad
        if dist.is_initialized():
            dist.all_reduce(first, dist.ReduceOp.MAX)
        if first >= 0:
            kept = "none was saved" if self.saved is None else f"the last is of step {self.saved}"
            raise ValueError(
                f"the loss or its gradient was not finite at step {int(first)}; the checkpoint is "
                f"kept ({kept}); lower --learning_rate or raise --warmup_iters"
            )

    def save(self):
        """Write out_dir/ckpt.pt, the whole state whatever the number of processes."""
        self.check_finite()
        rank, ranks = world()
        options = by_name.StateDictOptions(full_state_dict=True, cpu_offload=ranks > 1)
        model = by_name.get_model_state_dict(self.model, options=options)
        optimizer = by_name.get_optimizer_state_dict(self.model, self.optimizer, options=options)
        if rank == 0:
            save_checkpoint(self.args.out_dir, {
                "model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict(),
                "config": asdict(self.model.config), "step": self.step,
                "best_val_loss": self.best_val_loss,
                "tokenizer": carry_tokenizer(self.data.meta["tokenizer"], self.args.out_dir),
                "args": vars(self.args),
            })  # fmt: skip
        if ranks > 1:
            dist.barrier()  # who reads it next must find it whole
        self.saved = self.step

    def load(self):
        """Go on from out_dir/ckpt.pt."""
        self.model = self.forward = self.optimizer = None  # room for the new ones
        checkpoint = read_checkpoint(self.args.out_dir, mmap=world()[1] > 1)  # one copy for all
        self.switched = checkpoint["config"]["attention"] != "full"
        self.step, self.best_val_loss = checkpoint["step"], checkpoint["best_val_loss"]
        self.saved = self.step
        self.build(checkpoint)


def show_saving(data, config, args):
    """What reading the prompts in linear time saves, over the batches of an epoch."""
    short = whole = 0
    examples, B = data.examples["train"], args.batch_size
    for k in range(0, len(examples), B):
        x, y = data.collate(examples[k : k + B])
        short += len(x) * forward_flops(config, x.size(1), y.size(1))
        whole += len(x) * forward_flops(config, x.size(1), x.size(1))
    print(f"{len(examples)} examples, {len(data.examples['val'])} to validate, {data.skipped} "
          f"skipped (no response, or too long); T_out = response takes {short / whole:.0%} of the "
          f"FLOPs of T_out = T")  # fmt: skip


def device_name(device):
    """What results name as the machine: the GPU, or the kind of device and PyTorch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()}, {torch.get_num_threads()} threads"


def peak_flops(args, device):
    """FLOP/s of the device by its data sheet, or None where it is not known."""
    if args.peak_tflops:
        return 1e12 * args.peak_tflops
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    name = "" if "Laptop" in name else name  # slower cards under the same name
    is_this = lambda gpu: re.search(rf"\b{gpu}\b", name)
    return next((1e12 * peak for gpu, peak in PEAK_TFLOPS.items() if is_this(gpu)), None)


class Log:
    """What is printed and written to out_dir/log.jsonl, by the first process alone."""

    def __init__(self, run):
        self.run, self.rank = run, world()[0]
        args = run.args
        self.peak = peak_flops(args, run.device)
        if self.rank == 0:
            mode = "ab+" if args.init_from == "resume" else "wb"
            self.file = open(os.path.join(args.out_dir, "log.jsonl"), mode)
            if self.file.tell():  # a kill may have left half a line
                self.file.seek(-1, os.SEEK_END)
                self.file.write(b"" if self.file.read() == b"\n" else b"\n")
        self.first, self.began = run.step, time.perf_counter()
        self.start_clock()

    def start_clock(self):
        """Evaluation and saving are not part of a step's time."""
        self.clock, self.clock_tokens, self.clock_flops = (
            time.perf_counter(),
            self.run.tokens,
            self.run.flops,
        )

    def training(self, loss, norm):
        run, args = self.run, self.run.args
        loss = all_reduced(loss).item()
        now, lr = time.perf_counter(), learning_rate(run.step - 1, args)
        speed = world()[1] * (run.tokens - self.clock_tokens) / (now - self.clock)
        flops = (run.flops - self.clock_flops) / (now - self.clock)
        mfu = flops / self.peak if self.peak else None
        gpu = run.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(run.device) / 2**20 if gpu else None
        left = (now - self.began) / (run.step - self.first) * (args.max_iters - run.step)
        self.start_clock()
        record = {"step": run.step, "loss": loss, "lr": lr, "grad_norm": norm.item(),
                  "tokens_per_s": speed, "mfu": mfu, "memory_mib": memory}  # fmt: skip
        use = "unknown" if mfu is None else f"{mfu:.0%}"
        self.say(
            f"loss {loss:.4f}  lr {lr:.1e}  {record['tokens_per_s']:,.0f} tokens/s  MFU {use}  "
            f"{left / 60:.1f} min left"
        )
        return record

    def say(self, text):
        if self.rank == 0:
            print(f"step {self.run.step:>6}/{self.run.args.max_iters}  {text}", flush=True)

    def write(self, record):
        if self.rank == 0 and record:
            self.file.write(json.dumps(record).encode() + b"\n")
            self.file.flush()


def read_log(run):
    """The records of a run's log.jsonl, but for a line that a kill cut off."""
    path, records = os.path.join(run, "log.jsonl"), []
    if not os.path.exists(path):
        raise ValueError(f"no {path}: plot takes the --out_dir of training runs")
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                records.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                continue
    return records


def train(run, log):
    """The loop: step, log, validate and save, until max_iters or a SIGTERM."""
    args, asked_to_stop = run.args, []
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        before = signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(1))
    coming = load_ahead(run.data, args, run.step, run.device)
    first = run.step
    try:
        while run.step < args.max_iters:
            if run.attention() != run.model.config.attention:  # the end of --full_until
                run.save()
                run.load()
                log.start_clock()
                log.say(f"attention is {args.attention} from here")
            loss, norm = careful_step(run, next(coming), is_first=run.step == first)
            step, record = run.step, {}
            last = step == args.max_iters
            if step % args.log_interval == 0 or step == first + 1 or last:
                record = log.training(loss, norm)
                run.check_finite()
            stop = bool(asked_to_stop)
            if world()[1] > 1:  # all must agree; steps of several GPUs are long enough to ask
                stop = bool(all_reduced(torch.tensor(float(stop), device=run.device)))
            if step % args.eval_interval == 0 or last:
                record |= {"step": step, "val_loss": validate(run, log)}
                run.save()
                log.start_clock()
            elif stop:
                run.save()
            log.write(record)
            if stop:
                raise KeyboardInterrupt
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def careful_step(run, batches, is_first):
    """A step of the optimizer; if it is the first and the compiler fails, an error that says so."""
    try:
        return run.train_step(batches)
    except RuntimeError as error:
        if not (run.compiled and is_first) or isinstance(error, torch.OutOfMemoryError):
            raise
        # no Triton, no C++ compiler, or a fault of the compiler's: the eager step may well run
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the first compiled step failed ({why}); try --compile=False") from error


def validate(run, log):
    """The validation loss, which must be finite."""
    args = run.args
    val_loss = evaluate(
        run.model, run.data, args.batch_size, args.eval_windows, run.device,
        shared=world()[1] > 1 and not args.fsdp,  # a sharded forward needs all of them
    )  # fmt: skip
    run.check_finite()
    if not math.isfinite(val_loss):
        raise ValueError(
            f"the validation loss is {val_loss} at step {run.step}; the checkpoint before is kept"
        )
    run.best_val_loss = min(run.best_val_loss, val_loss)
    log.say(f"val loss {val_loss:.4f}")
    return val_loss


def main():
    args = parse_args()
    device, dtype = start_processes(args)
    rank, ranks = world()
    os.makedirs(args.out_dir, exist_ok=True)
    data = open_data(args)
    backend = choose_backend(args.backend)
    run = Run(args, data, device, dtype)
    if rank == 0 and args.init_from != "resume":
        warn_replaced(args.out_dir)
    args.dtype = str(dtype)[6:]  # a resumed run keeps it, wherever it runs
    log, config = Log(run), run.model.config
    if run.step >= args.max_iters and rank == 0:
        print(f"nothing is left to train: {args.out_dir} is at step {run.step}; raise --max_iters")
    if rank == 0:
        print(
            f"{config.attention} on {args.dataset}: {run.model.num_params():,} parameters, "
            f"block_size {config.block_size}, window {config.window}, sink {config.sink}; "
            f"{ranks} x {device.type}, {str(dtype)[6:]}, backend {backend}, compile {run.compiled}"
        )
        if args.mode == "sft":
            show_saving(data, config, args)
    try:
        train(run, log)
    except KeyboardInterrupt:
        flags = f"--init_from=resume --out_dir={args.out_dir}"
        state = f"{args.out_dir}/ckpt.pt holds step {run.saved}; go on with: train.py {flags}"
        state = "no checkpoint was saved yet" if run.saved is None else state
        print(f"\nstopped at step {run.step}: {state}", file=sys.stderr)
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0 and not args.fsdp:
        if args.dataset == "recall":
            share = evaluate(run.model, data, args.batch_size, args.eval_windows, device, True)
            print(f"accuracy {share:.3f}")
        elif args.mode == "pt":
            closing_sample(run.model, data, device)


if __name__ == "__main__":
    run_cli(main)

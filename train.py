"""Pre-training: every position is a base token and an output token, T_out = T.

python train.py                                    a small model of Python source, on any machine
python train.py --dataset=recall --attention=swa   look-ups farther away than a window reaches
python train.py --init_from=resume                 go on from out_dir/ckpt.pt
python train.py --preset=gpt2 --dataset=NAME       a folder data/NAME that prepare.py made
"""

import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields

import numpy as np
import torch

from model import (
    GPT,
    PRESETS,
    GPTConfig,
    choose_backend,
    load_checkpoint,
    pick_device,
    save_checkpoint,
)
from prepare import (
    DATA_DIR,
    Parser,
    load_meta,
    load_split,
    load_tokenizer,
    parse_bool,
    prepare_stdlib,
    run_cli,
)
from sample import generate, write_stream

# What suits a preset or a dataset; flags on the command line override it.
RECIPES = {
    "laptop": dict(batch_size=4, max_iters=700, learning_rate=3e-3, warmup_iters=50, eval_interval=350),
    "recall": dict(
        n_layer=2, n_head=2, n_embd=64, block_size=48, window=8, batch_size=64, max_iters=700,
        learning_rate=3e-3, warmup_iters=50, eval_interval=350, log_interval=50,
    ),
    "gpt2": dict(batch_size=32, gradient_accumulation_steps=16, eval_interval=1000),
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
    """Windows of a dataset's shards, or of several datasets mixed by weight.

    Training batches depend on (seed, step, micro-batch) alone, validation windows on nothing but
    their number.
    """

    def __init__(self, dataset, T):
        self.names, self.shares = parse_mix(dataset)
        self.T, metas = T, [load_meta(name) for name in self.names]
        self.meta = metas[0] | {"vocab_size": max(meta["vocab_size"] for meta in metas)}
        for name, meta in zip(self.names, metas):
            if meta["tokenizer"] != metas[0]["tokenizer"]:
                raise ValueError(
                    f"{name} was made with the tokenizer {meta['tokenizer']}, but {self.names[0]} with "
                    f"{metas[0]['tokenizer']}: they cannot be mixed"
                )
        self.shards, self.ends = {}, {}
        for split in ("train", "val"):
            self.shards[split] = [load_split(n, split, m) for n, m in zip(self.names, metas)]
            self.ends[split] = [np.cumsum([len(x) for x in s]) for s in self.shards[split]]
            for name, ends in zip(self.names, self.ends[split]):
                if ends[-1] < T + 1:
                    raise ValueError(
                        f"{DATA_DIR}/{name}: the {split} split has {ends[-1]} tokens, but one block "
                        f"needs block_size + 1 = {T + 1}; lower --block_size or prepare more text"
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
                f"{config.n_layer} windows of {config.window}, and pairs and look-ups stand around it"
            )

    def episodes(self, rng, sizes):
        """One episode a row; sizes (B, 1): how many of the pairs it has, filler for the rest."""
        B, n, T = len(sizes), self.pairs, self.T
        filler = self.KEYS + self.VALUES
        keys = rng.permuted(np.tile(np.arange(self.KEYS), (B, 1)), axis=1)[:, :n]
        values = rng.integers(self.KEYS, filler, size=(B, n))
        keys, values = (np.where(np.arange(n) < sizes, ids, filler) for ids in (keys, values))
        order = rng.permuted(np.tile(np.arange(n), (B, 1)), axis=1)
        asked, answers = (np.take_along_axis(ids, order, axis=1) for ids in (keys, values))
        x, y = np.full((B, T), filler), np.full((B, T), -1)
        x[:, 0 : 2 * n : 2], x[:, 1 : 2 * n : 2], x[:, T - n :] = keys, values, asked
        y[:, T - n :] = np.where(answers == filler, -1, answers)
        return torch.from_numpy(x), torch.from_numpy(y)

    def train_batch(self, B, seed, step, m):
        # small episodes teach the large: without them full attention stays at guessing for long
        rng = np.random.default_rng((seed, step, m))
        sizes = 2 + (self.pairs - 1) * rng.random((B, 1)) ** 2
        return self.episodes(rng, sizes.astype(int))

    def val_batches(self, B, n_windows):
        x, y = self.episodes(np.random.default_rng(2**40), np.full((n_windows, 1), self.pairs))
        yield from zip(x.split(B), y.split(B))


@torch.no_grad()
def evaluate(model, data, batch_size, n_windows, device, accuracy=False):
    """Mean validation loss in nats a target, or with accuracy=True the share of targets that
    have the largest logit."""
    model.eval()
    total = count = 0.0
    for x, y in data.val_batches(batch_size, n_windows):
        x, y = x.to(device), y.to(device)
        n = (y >= 0).sum().item()
        if accuracy:
            total += (model(x)[0].argmax(dim=-1) == y).sum().item()
        else:
            total += model(x, y)[1].item() * n
        count += n
    model.train()
    return total / count


# ------------------------------------------------------------------------------------------------
# Training


def learning_rate(step, args):
    """Linear warm-up to args.learning_rate, then a cosine down to args.min_lr."""
    if step < args.warmup_iters:
        return args.learning_rate * (step + 1) / args.warmup_iters
    span = args.lr_decay_iters - args.warmup_iters
    done = min(1.0, (step - args.warmup_iters) / span) if span > 0 else 1.0
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (args.learning_rate - args.min_lr)


def backward(model, scaler, batches, device):
    """Gradients of the mean loss over all targets of the micro-batches; returns that loss.

    A micro-batch weighs what it has of the targets, so splitting a batch changes nothing.
    """
    total = sum((y >= 0).sum().item() for _, y in batches)
    loss = torch.zeros((), device=device)
    for x, y in batches:
        share = (y >= 0).sum().item() / max(1, total)
        x, y = (t.to(device, non_blocking=True) for t in (x, y))
        part = model(x, y)[1] * share
        scaler.scale(part).backward()
        loss += part.detach()
    return loss


def load_ahead(data, args, step, device):
    """Yield the micro-batches of each step. A thread reads the next step's while this one runs."""

    def load(step):
        micro = range(args.gradient_accumulation_steps)
        batches = [data.train_batch(args.batch_size, args.seed, step, m) for m in micro]
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
    add("--dataset", default="stdlib", help="a folder of data/, several with weights as in "
        "owt:3,code:1, or recall (default stdlib)")  # fmt: skip
    add("--preset", default="laptop", help=f"model shape: {', '.join(PRESETS)} (default laptop)")
    add("--out_dir", default="out", help="folder of ckpt.pt and log.jsonl (default out)")
    add("--init_from", default="scratch", help="scratch, or resume (from out_dir)")
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
    run = parser.add_argument_group("machine")
    add = run.add_argument
    add("--device", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    add("--dtype", help="float32, bfloat16, float16 (default: what suits the device)")
    add("--compile", type=parse_bool, help="torch.compile (default: on a GPU)")
    add("--backend", help="attention backend: torch, flash or masked")
    model = parser.add_argument_group("model (default: the preset's)")
    for field in fields(GPTConfig):
        kind = {"bool": parse_bool, "str": str, "float": float}.get(field.type.__name__, int) \
            if isinstance(field.type, type) else int  # fmt: skip
        if field.name != "rope_scaling":
            model.add_argument(f"--{field.name}", type=kind)
    return parser


def parse_args(argv=None):
    """Flags, over the checkpoint's on resume, over the preset's or dataset's recipe, over defaults."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.preset not in PRESETS:
        raise ValueError(f"unknown preset '{args.preset}'; known are {', '.join(PRESETS)}")
    if args.init_from not in ("scratch", "resume"):
        raise ValueError(f"--init_from must be scratch or resume, not '{args.init_from}'")
    if args.init_from == "resume":
        saved = load_checkpoint(args.out_dir)[1]["args"]
        machine = ("out_dir", "init_from", "device", "dtype", "compile", "backend")
        parser.set_defaults(**{k: v for k, v in saved.items() if k not in machine})
        args = parser.parse_args(argv)
        changed = [k for k, v in saved.items() if k not in machine and getattr(args, k) != v]
        if changed:
            changes = ", ".join(f"{k} {saved[k]} -> {getattr(args, k)}" for k in changed)
            print(f"not the run it was: {changes}")
    else:
        recipe = "recall" if args.dataset == "recall" else args.preset
        parser.set_defaults(**PRESETS[args.preset])
        parser.set_defaults(**RECIPES.get(recipe, {}))
        args = parser.parse_args(argv)
    for name in ("batch_size", "gradient_accumulation_steps", "max_iters", "eval_interval",
                 "eval_windows", "log_interval"):  # fmt: skip
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.seed < 0 or args.warmup_iters < 0 or args.grad_clip < 0:
        raise ValueError("--seed, --warmup_iters and --grad_clip must not be negative")
    if args.min_lr is None:
        args.min_lr = args.learning_rate / 10
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.max_iters
    return args


def open_data(args):
    """The dataset, and the model's config once the vocabulary is known."""
    given = {f.name: getattr(args, f.name, None) for f in fields(GPTConfig)}
    given["rope_scaling"] = PRESETS[args.preset].get("rope_scaling")
    given = {name: value for name, value in given.items() if value is not None}
    if args.dataset == "recall":
        config = GPTConfig(**{**given, "vocab_size": RecallData.meta["vocab_size"]})
        return RecallData(config), config
    if args.dataset == "stdlib" and not os.path.exists(f"{DATA_DIR}/stdlib/meta.json"):
        prepare_stdlib()
    data = TextData(args.dataset, given["block_size"])
    given.setdefault("vocab_size", data.meta["vocab_size"])
    config = GPTConfig(**given)
    if config.vocab_size < data.meta["vocab_size"]:
        raise ValueError(
            f"vocab_size {config.vocab_size} is too small for {args.dataset}, which needs "
            f"{data.meta['vocab_size']}"
        )
    return data, config


def closing_sample(model, data, device):
    """Continue the first words of the validation text, up to block_size."""
    tokenizer = load_tokenizer(data.meta["tokenizer"])
    prompt = next(data.val_batches(1, 1))[0][:, : max(1, data.T // 4)].to(device)
    text = tokenizer.decode_bytes(prompt[0].tolist()).decode("utf-8", "replace")
    print(f"\n--- validation text, and after the bar a sample decoded in pairs\n{text}|", end="")
    steps = generate(
        model.eval(), prompt, max(1, data.T - prompt.size(1)), temperature=0.8,
        generator=torch.Generator(device).manual_seed(1), vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    write_stream(tokenizer, steps)


def main(argv=None):
    args = parse_args(argv)
    device, dtype = pick_device(args.device, args.dtype)
    os.makedirs(args.out_dir, exist_ok=True)
    log = open(os.path.join(args.out_dir, "log.jsonl"), "a", encoding="utf-8")
    data, config = open_data(args)
    torch.manual_seed(args.seed)
    step, best_val_loss, checkpoint = 0, math.inf, None
    if args.init_from == "resume":
        model, checkpoint = load_checkpoint(args.out_dir, device)
        config = model.config
        step, best_val_loss = checkpoint["step"], checkpoint["best_val_loss"]
    else:
        model = GPT(config).to(device)
    model.compute_dtype = dtype
    optimizer = torch.optim.AdamW(
        model.optimizer_groups(args.weight_decay), lr=args.learning_rate,
        betas=(args.beta1, args.beta2), fused=True,
    )  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
    compiled = device.type == "cuda" if args.compile is None else args.compile
    forward = torch.compile(model) if compiled else model
    backend = choose_backend(args.backend)
    print(
        f"{config.attention} on {args.dataset}: {model.num_params():,} parameters, "
        f"block_size {config.block_size}, window {config.window}, sink {config.sink}; "
        f"{device}, {str(dtype)[6:]}, backend {backend}, compile {compiled}"
    )

    def save():
        save_checkpoint(args.out_dir, {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(), "config": asdict(config), "step": step,
            "best_val_loss": best_val_loss, "tokenizer": data.meta["tokenizer"],
            "args": vars(args),
        })  # fmt: skip

    tokens_per_step = args.gradient_accumulation_steps * args.batch_size * config.block_size
    coming = load_ahead(data, args, step, device)
    started, first, saved = time.time(), step, step if checkpoint else None
    try:
        while step < args.max_iters:
            tick = time.time()
            lr = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = backward(forward, scaler, next(coming), device)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            record = {}
            if step % args.log_interval == 0 or step in (first + 1, args.max_iters):
                record = {"step": step, "loss": loss.item(), "lr": lr, "grad_norm": norm.item()}
                record["tokens_per_s"] = tokens_per_step / (time.time() - tick)
                left = (time.time() - started) / (step - first) * (args.max_iters - step)
                print(
                    f"step {step:>6}/{args.max_iters}  loss {record['loss']:.4f}  lr {lr:.1e}  "
                    f"{record['tokens_per_s']:,.0f} tokens/s  {left / 60:.1f} min left", flush=True,
                )  # fmt: skip
            if step % args.eval_interval == 0 or step == args.max_iters:
                val_loss = evaluate(model, data, args.batch_size, args.eval_windows, device)
                best_val_loss = min(best_val_loss, val_loss)
                record |= {"step": step, "val_loss": val_loss}
                print(f"step {step:>6}/{args.max_iters}  val loss {val_loss:.4f}", flush=True)
                save()
                saved = step
            if record:
                log.write(json.dumps(record) + "\n")
                log.flush()
    except RuntimeError as error:
        if not compiled or step > first:
            raise
        # no Triton, no C++ compiler, or a fault of the compiler's: the eager step may well run
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"the first compiled step failed ({why}); try --compile=False") from error
    except KeyboardInterrupt:
        flags = f"--init_from=resume --out_dir={args.out_dir}"
        state = "no checkpoint was saved yet" if saved is None else \
            f"{args.out_dir}/ckpt.pt holds step {saved}; go on with: train.py {flags}"  # fmt: skip
        print(f"\nstopped at step {step}: {state}", file=sys.stderr)
        sys.exit(130)
    if args.dataset == "recall":
        share = evaluate(model, data, args.batch_size, args.eval_windows, device, accuracy=True)
        print(f"accuracy {share:.3f}")
    else:
        closing_sample(model, data, device)


if __name__ == "__main__":
    run_cli(main)

"""How good, rather than how fast.

    python evaluate.py loss --out_dir=DIR FILE...    one set of weights as full, swa and orthros
    python evaluate.py recall                        look-ups near and far, by models trained here
    python evaluate.py needle --out_dir=DIR FILE...  a sentence hidden in a long text
    python evaluate.py harness --out_dir=DIR --tasks=paper    EleutherAI's lm-eval (extra eval)
    python evaluate.py compare --variants='full;orthros;orthros --sink=1' --seeds=1,2 [...]
                                       takes train.py's flags; also gla, gated_deltanet, retnet
                                       on a GPU (extra peers)

A table is printed as it comes; --json keeps it, with a picture beside it (extra plot).

Columns of loss
  nats      mean loss of a token        perplexity   e to that power
  bits/byte the loss per byte of text, the same for every tokenizer
  from ...  mean loss of the tokens from that position of a text window (--T tokens) on, to the next
            column's
Columns of recall: the share of look-ups answered right, by the distance from the question to
  its answer
Rows of needle: the length of the text; columns: how deep the needle lies in it (0 first, 1 last)
Columns of compare: validation loss in nats (mean and standard deviation over seeds), mean loss of
  each quarter of the block, tokens/s of training, FLOPs of the run over those of the first variant;
  with --dataset=recall also the share of look-ups answered right, by seed. --json adds the seconds
  of a seed, training and evaluation
"""

import argparse
import contextlib
import functools
import json
import math
import os
import shlex
import statistics
import sys
import time
import zlib

import numpy as np
import torch

import train
from model import GPT, GPTConfig, KVCache, choose_backend, load_checkpoint, pick_device
from prepare import (
    Parser,
    brief,
    decoded,
    load_tokenizer,
    local_files,
    needed,
    run_cli,
    tokenizer_identity,
    tokenizer_of,
    tokenizer_path,
)
from sample import prefill

# ------------------------------------------------------------------------------------------------
# loss


@torch.no_grad()
def token_losses(model, idx, chunk=512):
    """Nats of each next token: idx (B, T + 1) -> (B, T). Read in chunks through a cache, so that
    the logits of a chunk alone exist; the same as one pass of pre-training."""
    cache, losses = KVCache.of(model, idx.size(0), idx.size(1) - 1), []
    for x, y in zip(idx[:, :-1].split(chunk, dim=1), idx[:, 1:].split(chunk, dim=1)):
        logits = model(x, cache=cache)[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits.mT, y, reduction="none"))
    return torch.cat(losses, dim=1)


def text_tokens(tokenizer, args, limit):
    """Token ids of the files, one after the other, until there are more than `limit`."""
    ids = []
    for _, _, fetch in local_files(args.files, args.glob):
        with open(fetch(), "rb") as file:
            try:
                text = "".join(decoded(file))
            except OSError as error:
                raise ValueError(f"{file.name} cannot be read: {error}") from error
            ids += tokenizer.encode(text).tolist() + [tokenizer.eot]
        if len(ids) > limit:
            break
    return ids


def windows(tokenizer, args):
    """(number of windows, T + 1) token ids of the files, and the bytes of their text."""
    T = args.T
    ids = text_tokens(tokenizer, args, args.max_windows * T)
    n = min(args.max_windows, (len(ids) - 1) // T)
    if n < 1:
        raise ValueError(f"{len(ids)} tokens are less than a window of {T} and one more: lower --T")
    rows = torch.tensor([ids[i * T : (i + 1) * T + 1] for i in range(n)])
    return rows, len(tokenizer.decode_bytes(ids[1 : n * T + 1]))


def kinds_of(args, default):
    """The kinds of attention asked for, each looked at before the first is run."""
    kinds = (args.attention or default).split(";")
    no_doubles("--attention", kinds)
    for kind in filter(None, kinds):  # "" is the checkpoint's own
        GPTConfig(attention=kind)
    return kinds


def load(args, kind, device, dtype):
    """(model, tokenizer) of --out_dir, as one kind of attention or its own."""
    changes = {n: getattr(args, n) for n in ("window", "sink") if getattr(args, n) is not None}
    changes |= {"attention": kind} if kind else {}
    model, checkpoint = load_checkpoint(args.out_dir, device, **changes)
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
        own = tokenizer_path(checkpoint["tokenizer"], args.out_dir)
        if own and tokenizer_identity(own) != tokenizer_identity(args.tokenizer):
            raise ValueError(f"{args.out_dir} has the tokenizer {own}, not {args.tokenizer}")
    elif checkpoint["tokenizer"] is None:
        raise ValueError(f"{args.out_dir} has no tokenizer: give one, as in --tokenizer=gpt2")
    else:
        tokenizer = tokenizer_of(checkpoint, args.out_dir)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} tokens, the model of "
                         f"{args.out_dir} {model.config.vocab_size}")  # fmt: skip
    longest = {"loss": args.T, "needle": max(args.lengths)}.get(args.command, 0)
    if longest > model.config.block_size:
        print(f"{longest} tokens are more than the {model.config.block_size} (block_size) that the "
              f"model was trained on", file=sys.stderr)  # fmt: skip
    return model.to(dtype).eval(), tokenizer


def evaluate_loss(args, device, dtype):
    text = None
    for kind in kinds_of(args, "full;swa;orthros"):
        model = None  # free the one before
        model, tokenizer = load(args, kind, device, dtype)
        if text is None:
            text, n_bytes = windows(tokenizer, args)
            print(f"{len(text)} windows of {args.T} tokens, {n_bytes / 1e6:.2f} MB of text; "
                  f"{device}, {str(dtype)[6:]}, backend {choose_backend(args.backend)}, W "
                  f"{model.config.window}, sink {model.config.sink}")  # fmt: skip
            starts = [0] + [2**i for i in range(8, 20) if 2**i < args.T]
            print(f"{'attention':12}{'nats':>9}{'perplexity':>12}{'bits/byte':>11}"
                  + "".join(f"{f'from {start}':>12}" for start in starts))  # fmt: skip
        losses = torch.cat([token_losses(model, x.to(device)) for x in text.split(args.batch_size)])
        mean = losses.double().mean().item()
        parts = [losses[:, a:b].mean().item() for a, b in zip(starts, [*starts[1:], args.T])]
        print(f"{kind:12}{mean:>9.4f}{math.exp(mean):>12.3f}"
              f"{mean * losses.numel() / math.log(2) / n_bytes:>11.4f}"
              + "".join(f"{part:>12.4f}" for part in parts), flush=True)  # fmt: skip
        yield {"attention": kind, "nats": mean, "starts": starts, "by position": parts}


def draw_loss(rows, axes):
    for row in rows:
        axes.plot(range(len(row["starts"])), row["by position"], "o-", label=row["attention"])
    axes.set_xticks(range(len(row["starts"])), [f"{start:,}" for start in row["starts"]])
    axes.set(xlabel="position in the window, from ... to the next", ylabel="nats a token")
    axes.grid(alpha=0.3)
    axes.legend()


# ------------------------------------------------------------------------------------------------
# recall

EPISODES = 4096  # of the test
# a hybrid has full attention in every other layer here, since the models have two
RECALL_VARIANTS = "full;swa;swa,full;orthros;orthros --scale_offset=False"


class SpreadRecall(train.RecallData):
    """Look-ups at all distances: the pairs stand anywhere before the questions."""

    def spread(self, rng, sizes):
        room = self.T - self.pairs - 2 * sizes + 1  # places for the first pair
        return self.episodes(rng, sizes, (room * rng.random(sizes.shape)).astype(int))

    def train_batch(self, B, seed, step, m):
        if step < 700 or step % 2:  # three steps of four: the far ones are the hard ones
            return super().train_batch(B, seed, step, m)
        rng = np.random.default_rng((seed, step, m))
        return self.spread(rng, self.small_and_large(rng, B))


@torch.no_grad()
def recall_by_distance(model, data, n, device):
    """(distances, right): of every look-up of n new episodes, how far the answer is, and a hit."""
    rng = np.random.default_rng(2**41)
    sizes = rng.integers(1, data.pairs + 1, size=(n, 1))
    distances, right = [], []
    for x, y in zip(*(t.split(256) for t in data.spread(rng, sizes))):
        guess = model(x.to(device))[0].argmax(dim=-1).cpu()
        rows, places = (y >= 0).nonzero(as_tuple=True)
        keys = x[rows, places]
        # the key's first place is in its pair, and the value stands behind it
        first = (x[rows] == keys[:, None]).int().argmax(dim=1) + 1
        distances.append(places - first)
        right.append(guess[rows, places] == y[rows, places])
    return torch.cat(distances), torch.cat(right)


def evaluate_recall(args, device, dtype):
    flags, edges = ["--dataset=recall", "--max_iters=1400", *args.rest], None
    for variant in variants_of(args, RECALL_VARIANTS, flags, ("block_size", "n_layer", "window")):
        run, _ = trained(variant, flags, args.seeds[0], SpreadRecall)
        c, data = run.model.config, run.data
        distances, right = recall_by_distance(run.model.eval(), data, EPISODES, device)
        if edges is None:
            reach = c.n_layer * (c.window - 1)
            edges = sorted({1, c.window, reach + 1, (reach + data.T) // 2, data.T})
            print(f"{data.pairs} pairs at most in {data.T} tokens, W {c.window}, reach of all "
                  f"windows {reach}; guessing gets {1 / data.VALUES:.3f}")  # fmt: skip
            spans = [f"{a} to {b - 1}" for a, b in zip(edges, edges[1:])]
            print(f"{'variant':32}" + "".join(f"{span:>12}" for span in spans))
        shares = [right[(distances >= a) & (distances < b)].float().mean().item()
                  for a, b in zip(edges, edges[1:])]  # fmt: skip
        print(f"{variant:32}" + "".join(f"{share:>12.3f}" for share in shares), flush=True)
        yield {"variant": variant, "edges": edges, "right": shares}


def draw_recall(rows, axes):
    edges = rows[0]["edges"]
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        places = [group - 0.4 + (number + 0.5) * width for group in range(len(edges) - 1)]
        heights = [share or 0 for share in row["right"]]
        axes.bar(places, heights, width, color=f"C{number}", label=row["variant"])
    where = ["in the window", "in reach of all windows", "beyond", "far beyond"]
    where = where if len(edges) == 5 else [""] * len(edges)  # a window of 1, or a single layer
    spans = [f"{a} to {b - 1}\n{name}" for a, b, name in zip(edges, edges[1:], where)]
    axes.set_xticks(range(len(spans)), spans)
    axes.set(xlabel="tokens from the question back to its answer", ylabel="share right",
             yticks=(0, 0.25, 0.5, 0.75, 1), ylim=(0, 1.4))  # fmt: skip # room for the legend
    axes.legend(ncols=2, loc="upper center")


# ------------------------------------------------------------------------------------------------
# compare

VARIANTS = "full;swa;swa,swa,swa,full;orthros;orthros --scale_offset=False;orthros --sink=1"
PEERS = {
    "gla": "GatedLinearAttention",
    "gated_deltanet": "GatedDeltaNet",
    "retnet": "MultiScaleRetention",
}


class Peer(torch.nn.Module):
    """A layer of flash-linear-attention in the place of ours, as its authors set it up. It has no
    window, no output tokens, and here no cache."""

    def __init__(self, name, config, layer):
        super().__init__()
        kind = getattr(needed("fla.layers", "peers"), PEERS[name])
        narrow = {"head_dim": 3 * config.head_dim // 4} if name == "gated_deltanet" else {}
        self.layer = kind(
            hidden_size=config.n_embd, num_heads=config.n_head, layer_idx=layer, **narrow
        )
        self.layer.apply(GPT._init_weights)
        self.layer.o_proj.weight.data /= math.sqrt(2 * config.n_layer)
        self.is_last = layer == config.n_layer - 1

    def forward(self, h, T, T_out, rope, cache=None):
        with torch.autocast(h.device.type, h.dtype, enabled=h.dtype != torch.float32):
            y = self.layer(h)[0]
        return y[:, -T_out:] if self.is_last else y


class PeerRun(train.Run):
    """A training run of a plain Transformer's shape with Peers for attention."""

    def __init__(self, peer, *args):
        self.peer = peer
        super().__init__(*args)

    def wrap(self):  # called before the optimizer asks for the parameters
        for layer, block in enumerate(self.model.blocks):
            block.attn = Peer(self.peer, self.model.config, layer).to(self.device)
        return super().wrap()


TAKEN = {
    "--seed": "is --seeds here", "--attention": "is the first word of a variant",
    "--out_dir": "is chosen here, in out/evaluate",
    "--init_from=resume": "cannot be compared with runs that start anew",
}  # fmt: skip


def variant_args(variant, flags, seed):
    """(class of its run, flags of train.py) of '[attention or peer] [flags of train.py]'."""
    try:
        attention, *own = shlex.split(variant)
    except ValueError as error:  # no word at all, or a quotation without an end
        raise ValueError(f"'{variant}' is no variant, which is an attention and flags of train.py "
                         f"({error})") from error  # fmt: skip
    for word in [*flags, *own]:
        for flag in {word, word.split("=")[0]} & TAKEN.keys():
            raise ValueError(f"{flag} {TAKEN[flag]}")
    kind = train.Run
    if attention in PEERS:
        kind, attention = functools.partial(PeerRun, attention), "full"
    GPTConfig(attention=attention)  # a ValueError, if there is none such
    name = "".join(c if c.isalnum() else "-" for c in variant)[:80]
    name += f"-{seed}-{zlib.crc32(shlex.join([variant, *flags]).encode()):08x}"
    out_dir = os.path.join("out", "evaluate", name)
    return kind, train.parse_args([*flags, *own, f"--attention={attention}", f"--seed={seed}",
                                   f"--out_dir={out_dir}"])  # fmt: skip


def variants_of(args, default, flags, same):
    """The variants asked for, each looked at before the first is trained.

    same: the flags in which they must not differ, so that a table compares like with like.
    """
    variants = (default if args.variants is None else args.variants).split(";")
    no_doubles("--variants", [" ".join(variant.split()) for variant in variants])
    first = None
    for variant in variants:
        kind, own = [variant_args(variant, flags, seed) for seed in args.seeds][0]
        if args.command == "recall" and (own.dataset, own.mode) != ("recall", "pt"):
            raise ValueError("recall has a dataset of its own; --dataset and --mode are compare's")
        device, _ = pick_device(own.device, own.dtype)
        train.config_of(own)
        if kind is not train.Run:
            if device.type != "cuda":
                raise ValueError(f"the kernels of {variant} need an NVIDIA GPU, not {device}")
            needed("fla.layers", "peers")
        if first is None:
            first = own
            train.open_data(own)
        for name in same:
            mine, others = (getattr(x, name) for x in (own, first))
            if mine != others:
                raise ValueError(f"one table cannot hold {name} {mine} of '{variant}' and {others} "
                                 f"of '{variants[0]}'")  # fmt: skip
    return variants


def trained(variant, flags, seed, data=None):
    """Train a variant by train.py's own loop. data: the class of its dataset, if it is not what
    --dataset says. Returns (the Run, its log's records)."""
    kind, args = variant_args(variant, flags, seed)
    os.makedirs(args.out_dir, exist_ok=True)
    device, dtype = train.start_processes(args)
    choose_backend(args.backend)
    torch.compiler.reset()  # it gives up on code that it has compiled for too many models
    data = data(train.config_of(args)) if data else train.open_data(args)
    run = kind(args, data, device, dtype)
    print(f"training {variant}, seed {seed}: {args.max_iters} steps", file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):
        log = train.Log(run)
        log.peak = None if isinstance(run, PeerRun) else log.peak  # their FLOPs are not counted
        train.train(run, log)
    return run, train.read_log(args.out_dir)


@torch.no_grad()
def loss_by_quarter(run):
    """Mean validation loss of each quarter of the block."""
    totals, counts = torch.zeros(4), torch.zeros(4)
    for x, y in run.data.val_batches(run.args.batch_size, run.args.eval_windows):
        x, y = x.to(run.device), y.to(run.device)
        logits = run.model.eval()(x, T_out=y.size(1))[0].float()
        losses = torch.nn.functional.cross_entropy(
            logits.mT, y, reduction="none", ignore_index=-1
        ).cpu()
        quarters = (t.tensor_split(4, dim=1) for t in (losses, y.cpu()))
        for i, (part, targets) in enumerate(zip(*quarters)):
            totals[i] += part.sum()
            counts[i] += (targets >= 0).sum()
    return (totals / counts).tolist()  # nan where nothing is to be predicted


def evaluate_compare(args, device, dtype):
    variants = variants_of(args, VARIANTS, args.rest, ("dataset", "mode", "block_size"))
    first, left_out = None, []
    print(f"{'variant':32}{'val loss':>10}{'+-':>8}{'1/4':>8}{'2/4':>8}{'3/4':>8}{'4/4':>8}"
          f"{'tokens/s':>11}{'FLOPs':>7}")  # fmt: skip
    for variant in variants:
        try:
            row = over_seeds(variant, args)
        except (RuntimeError, ValueError, OSError) as error:
            why = error if isinstance(error, ValueError) else brief(error)
            print(f"{variant} failed ({why}); the others go on", file=sys.stderr)
            left_out.append(variant)
            continue
        first = first or row
        cost = [row["flops"] / first["flops"]] if row["flops"] and first["flops"] else []
        print(f"{variant:32}{row['mean']:>10.4f}"
              + (f"{row['spread']:>8.4f}" if row["spread"] is not None else f"{'':8}")
              + "".join(f"{'' if math.isnan(q) else f'{q:.4f}':>8}" for q in row["quarters"])
              + (f"{row['tokens_per_s']:>11,.0f}" if row["tokens_per_s"] else f"{'':11}")
              + "".join(f"{x:>7.2f}" for x in cost)
              + "".join(f"  accuracy {x:.3f}" for x in row["accuracy"]), flush=True)  # fmt: skip
        yield row
    if left_out:
        raise ValueError(f"the table lacks what failed: {'; '.join(left_out)}")


def over_seeds(variant, args):
    """What a variant reaches, trained once for each seed."""
    losses, quarters, accuracy, speeds = [], [], [], []
    began = time.perf_counter()
    for seed in args.seeds:
        run = None  # free the one before
        run, records = trained(variant, args.rest, seed)
        losses.append([r["val_loss"] for r in records if "val_loss" in r][-1])
        quarters.append(loss_by_quarter(run))
        speeds += [r["tokens_per_s"] for r in records if "tokens_per_s" in r][1:]
        if run.args.dataset == "recall":
            batches = run.args.batch_size, run.args.eval_windows
            accuracy.append(train.evaluate(run.model, run.data, *batches, run.device, True))
    return {"variant": variant, "seeds": args.seeds, "losses": losses,
            "flops": None if isinstance(run, PeerRun) else run.flops,  # of kernels not counted here
            "parameters": run.model.num_params(), "mean": statistics.mean(losses),
            "quarters": np.mean(quarters, axis=0).tolist(), "accuracy": accuracy,
            "spread": statistics.stdev(losses) if len(losses) > 1 else None,
            "seconds": (time.perf_counter() - began) / len(losses),
            "tokens_per_s": statistics.median(speeds) if speeds else None}  # fmt: skip


def draw_compare(rows, axes):
    names = [row["variant"] for row in rows][::-1]
    means, spreads = ([row[key] or 0 for row in rows][::-1] for key in ("mean", "spread"))
    axes.errorbar(means, range(len(rows)), xerr=spreads, fmt="o", capsize=4)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlabel="validation loss, nats a token\n(bars: standard deviation over seeds)")


# ------------------------------------------------------------------------------------------------
# needle

NEEDLE = "\nThe secret number of {name} is {number}.\n"
QUESTION = "\nThe secret number of {name} is"
NAMES = ("Amsterdam", "Bogota", "Cairo", "Delhi", "Edinburgh", "Florence", "Geneva", "Havana")


@torch.no_grad()
def needle_found(model, tokenizer, hay, T, depth, trial, device):
    """Whether the model, asked at the end of T tokens, finds every token of the needle's number
    likeliest. The text is read in linear time: only the answer is predicted."""
    name, number = NAMES[trial % len(NAMES)], 1000 + (7919 * (trial + 1)) % 9000
    needle, question = (
        tokenizer.encode(text.format(name=name, number=number)).tolist()
        for text in (NEEDLE, QUESTION)
    )
    answer = tokenizer.encode(f" {number}.").tolist()[:-1]
    room = T - len(needle) - len(question) - len(answer)
    start = (trial * room) % max(1, len(hay) - room)
    text = hay[start : start + room]
    place = round(depth * len(text))
    ids = text[:place] + needle + text[place:] + question + answer
    idx = torch.tensor([ids], device=device)
    cache, last = KVCache.of(model, 1, T), idx[:, -len(answer) - 1 : -1]
    prefill(model, idx[:, : -len(answer) - 1], cache, 8192, T_out=0)
    return (model(last, cache=cache)[0].argmax(dim=-1) == idx[:, -len(answer) :]).all().item()


def evaluate_needle(args, device, dtype):
    model, tokenizer = load(args, args.attention, device, dtype)
    longest = max(args.lengths)
    hay = text_tokens(tokenizer, args, longest * args.trials)
    if len(hay) < longest:
        raise ValueError(f"the files have {len(hay)} tokens; a haystack of {longest} needs more")
    if min(args.lengths) < 128:
        raise ValueError("--lengths must be at least 128: the needle and its question need room")
    depths = [0.0, 0.25, 0.5, 0.75, 1.0]
    print(f"{model.config.attention}, W {model.config.window}, sink {model.config.sink}, "
          f"{args.trials} needles a cell")  # fmt: skip
    print(f"{'T':>8}" + "".join(f"{depth:>8.2f}" for depth in depths))
    for T in args.lengths:
        found = [sum(needle_found(model, tokenizer, hay, T, depth, i, device)
                     for i in range(args.trials)) / args.trials for depth in depths]  # fmt: skip
        print(f"{T:>8}" + "".join(f"{share:>8.2f}" for share in found), flush=True)
        yield {"T": T, "depths": depths, "found": found}


def draw_needle(rows, axes):
    shares = [row["found"] for row in rows]
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_yticks(range(len(rows)), [f"{row['T']:,}" for row in rows])
    axes.set_xticks(range(len(rows[0]["depths"])), rows[0]["depths"])
    axes.set(xlabel="depth of the needle", ylabel="tokens")
    axes.figure.colorbar(image, label="share found")


# ------------------------------------------------------------------------------------------------
# harness


def evaluate_harness(args, device, dtype):
    needed("lm_eval", "eval")
    from harness import evaluate

    for kind in kinds_of(args, ""):
        model, tokenizer = load(args, kind, device, dtype)
        print(f"{model.config.attention}, W {model.config.window}, sink {model.config.sink}")
        results, seconds = evaluate(model, tokenizer, args)
        print(f"{seconds:.1f} s in the model", flush=True)
        yield {"attention": model.config.attention, "seconds": seconds, "results": results}
        model = None


# ------------------------------------------------------------------------------------------------


def check_json(path):
    """A ValueError or OSError, unless the file is new and can be written, or is an older table.
    What is wrong is better said now than after an hour."""
    if path.endswith(".png"):
        raise ValueError("--json is the table's file; the picture goes beside it as .png")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    is_new = not os.path.exists(path)
    with open(path, "a+", encoding="utf-8") as file:
        file.seek(0)
        try:
            os.path.getsize(path) and json.load(file)["rows"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is no table of evaluate.py and would be lost: name another "
                             f"--json") from None  # fmt: skip
    if is_new:
        os.remove(path)


def keep(args, device, rows, draw, plt):
    """Write the rows and their circumstances to --json, and a picture beside it."""
    record = {"command": shlex.join(sys.argv[1:]), "torch": torch.__version__, "rows": rows,
              "device": train.device_name(device)}  # fmt: skip
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    if plt:
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        draw(rows, axes)
        figure.savefig(os.path.splitext(args.json)[0] + ".png", dpi=120)
        plt.close(figure)


def no_doubles(flag, items):
    """A ValueError if one is there twice."""
    for item in items:
        if items.count(item) > 1:
            raise ValueError(f"{flag} has {item or 'nothing'} twice")


def numbers(text):
    try:
        values = [int(x) for x in text.split(",")]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values):
        raise argparse.ArgumentTypeError("must be different whole numbers, as in 1,2,3")
    return values


OF_MODEL = "out_dir tokenizer attention window sink"
COMMANDS = {  # what it runs, what draws it, the flags that mean something to it
    "loss": (evaluate_loss, draw_loss, f"{OF_MODEL} T max_windows batch_size glob"),
    "recall": (evaluate_recall, draw_recall, "variants seeds window sink batch_size"),
    "needle": (evaluate_needle, draw_needle, f"{OF_MODEL} lengths trials glob"),
    "compare": (evaluate_compare, draw_compare, "variants seeds window sink batch_size"),
    "harness": (evaluate_harness, None,
                f"{OF_MODEL} tasks limit num_fewshot include_path batch_size"),
}  # fmt: skip
TO_ALL = ("command", "files", "json", "device", "dtype", "backend")
TO_TRAIN = ("window", "sink", "batch_size", "device", "dtype", "backend")


def build_parser():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("command", choices=COMMANDS)
    add("files", nargs="*", help="loss, needle: files and folders of text")
    add("--out_dir", default="out", help="folder of the checkpoint (default out)")
    add("--tokenizer", help="bytes, gpt2 or a tokenizer.json (default the checkpoint's)")
    add("--attention", help="kinds, with ; between (default the checkpoint's own; loss "
        "full;swa;orthros); needle takes one")  # fmt: skip
    add("--window", type=int, help="keys a base token sees (default the checkpoint's)")
    add("--sink", type=int, help="first keys that stay visible (default the checkpoint's)")
    add("--T", type=int, default=1024, help="loss: tokens of a window (default 1024)")
    add("--max_windows", type=int, default=64, help="loss: windows at most (default 64)")
    add("--batch_size", type=int, help="loss: windows at a time (default 1); harness: requests "
        "(default 8)")  # fmt: skip
    add("--tasks", default="paper", help="harness: names with commas between, or paper (default)")
    add("--limit", type=float, help="harness: documents of each task, or their share if below 1")
    add("--num_fewshot", type=int, help="harness: examples before each question")
    add("--include_path", help="harness: a folder of more tasks")
    add("--lengths", type=numbers, default=[1024, 4096], help="needle: tokens (default 1024,4096)")
    add("--trials", type=int, default=8, help="needle: needles a cell (default 8)")
    add("--variants", help="recall, compare: an attention and flags of train.py each, with ; "
        f"between (default '{RECALL_VARIANTS}'; compare '{VARIANTS}')")  # fmt: skip
    add("--seeds", type=numbers, default=[1337], help="compare: separated by commas; recall: one")
    add("--glob", default="*.txt", help="which files of a folder (default *.txt)")
    add("--json", help="file to keep the table in")
    add("--device", help="cpu, cuda, mps (default: the best there is)")
    add("--dtype", help="float32, bfloat16, float16 (default: what suits the device)")
    add("--backend", help="attention backend: torch, flash or masked")
    return parser


def parse_args():
    """Flags, with those of train.py in .rest; a ValueError for what cannot be meant."""
    parser = build_parser()
    args, rest = parser.parse_known_intermixed_args()
    trains = args.command in ("recall", "compare")
    if rest and not trains:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    for name in given:
        if name not in TO_ALL and name not in COMMANDS[args.command][2].split():
            raise ValueError(f"--{name} means nothing to {args.command}")
    reads = args.command in ("loss", "needle")
    if reads != bool(args.files):
        raise ValueError(f"{args.command} takes {'files of text' if reads else 'no files'}")
    if args.command == "recall" and len(args.seeds) > 1:
        raise ValueError("recall trains with one seed; several are for compare")
    if args.batch_size is None and not trains:
        args.batch_size = 8 if args.command == "harness" else 1
    for name in ("T", "max_windows", "batch_size", "trials"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise ValueError(f"--num_fewshot must be 0 or more, not {args.num_fewshot}")
    limit = args.limit
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit % 1 == 0)):
        raise ValueError(f"--limit must be a whole number, or a share below 1, not {limit}")
    args.rest = [f"--{n}={getattr(args, n)}" for n in TO_TRAIN if trains and n in given] + rest
    return args


def main():
    args = parse_args()
    run, draw, _ = COMMANDS[args.command]
    plt = None
    if args.json:
        check_json(args.json)
        from bench import pyplot  # here, for its imports are of no other use

        plt = pyplot() if draw else None
    device, dtype = pick_device(args.device, args.dtype)
    choose_backend(args.backend)
    rows = []
    for row in run(args, device, dtype):
        # None for nan, which JSON lacks
        rows.append(json.loads(json.dumps(row), parse_constant=lambda _: None))
        if args.json:  # after each row: the next may fail
            keep(args, device, rows, draw, plt)


if __name__ == "__main__":
    run_cli(main)

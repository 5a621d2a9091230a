"""How fast, beside what the hardware allows.

    python bench.py prefill [--preset=qwen3-8b --n_layer=8] [--T=32768,131072]
    python bench.py prefill --kernels      the attention alone, every backend that is installed
    python bench.py train   [--preset=gpt2 --batch_size=32] [--T_out=128]    with it, T_out = T too
    python bench.py decode  [--T=1024,131072 --batch_size=1 --max_new_tokens=128]
    python bench.py plot OUT_DIR...        what the log.jsonl of training runs hold, over steps
    python bench.py mask [--window=4 --sink=0]    what sees what: the phases, and layer upon layer

The first three compare orthros, full and swa in one run: the same random weights, warm,
synchronised, medians. The table is printed, written with its circumstances to
OUT_DIR/NAME.json, and drawn to NAME.png.

Columns
  decoder   graph: the kernels of fast.py, a step in one CUDA graph; eager: the model itself
  T         tokens in the sequence; decode: in the cache, whose capacity is the largest T
  ms        median time of one call: a whole prefill, a training step, one attention
  limit ms  what the hardware allows: the larger of FLOPs over the rate of a large matrix product
            and bytes over the rate of a large copy, both measured in this run. FLOPs are those of
            the work done (two streams, the window, the last layer's few queries); bytes are
            weights, caches and optimizer state, each moved as rarely as can be
  x full    how many times faster than full attention
  tokens/s  T (times the batch) over the time
  MFU       FLOPs over time over the matrix product's rate
  first s   end to end: seconds from a prompt of the largest T to the first token of the answer
  written/s tokens of all answers over the seconds after that; all/s, over the seconds in all
  MiB       the largest memory used beside weights, and beside the cache in prefill (GPU only)
  error     relative difference from the masked reference on the same inputs: prefill, the logits
            when the last tokens are read again over the same cache; train, the gradient of the
            first layer's keys for the end of one sequence; decode, the logits; kernels, the last
            rows in float32
"""

import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from importlib.metadata import distributions

import torch

import model as M
from fast import fuse
from model import GPT, PRESETS, GPTConfig, KVCache, choose_backend, pick_device
from prepare import Parser, needed, parse_bool, run_cli
from sample import decode, fast_step, pick_token, prefill
from train import device_name, forward_flops, keys_seen, read_log

# ------------------------------------------------------------------------------------------------
# Clocks, limits, memory


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_time(call, device, repeats, warmup):
    """Median seconds of call(), after warm-up, the device idle at both clock reads."""
    times = []
    for i in range(warmup + repeats):
        sync(device)
        start = time.perf_counter()
        call()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:])


class Limits:
    """What this device does at best: FLOP/s of a matrix product, bytes/s of a copy."""

    def __init__(self, device, dtype):
        gpu = device.type == "cuda"
        n = 8192 if gpu else 1024
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        self.flops = 2 * n**3 / median_time(lambda: a @ b, device, 10, 3)
        a, b = (torch.empty(2**30 if gpu else 2**26, device=device, dtype=torch.int8) for _ in "ab")
        self.bytes = 2 * a.nbytes / median_time(lambda: a.copy_(b), device, 10, 3)

    def ms(self, flops, nbytes):
        return 1e3 * max(flops / self.flops, nbytes / self.bytes)


def check_memory(args, config, device, dtype):
    """ValueError unless what the command needs, roughly, is free on the device."""
    with torch.device("meta"):
        count = GPT(config).num_params()
    c, size = config, dtype.itemsize
    row = (8 * c.n_embd + 3 * c.n_hidden) * size  # activations of one token in one layer
    if args.kernels:  # queries, keys, values; in float32 for the reference, with a key a head
        heads = c.n_head + c.n_kv_head
        need = max(args.T) * c.head_dim * ((heads + c.n_kv_head) * size + 8 * heads)
        lower = "--T"
    elif args.command != "train":
        B = args.batch_size if args.command == "decode" else 1
        keys = 2 * c.n_layer * B * max(args.T) * c.n_kv_head * c.head_dim * size
        need = count * size + keys + B * min(args.chunk, max(args.T)) * row
        lower = "--n_layer or --T"
    else:  # weights, gradients and two moments in float32; both streams' activations; logits
        rows = args.batch_size * (args.T[0] + (args.T_out or args.T[0]))
        logits = min(rows * c.vocab_size, M.MAX_LOGITS) * 3 * 4
        need = 16 * count + rows * c.n_layer * row + logits
        lower = "--batch_size or --n_layer"
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu" and os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            free = next(int(x.split()[1]) * 1024 for x in file if x.startswith("MemAvailable"))
    else:
        return
    if need > free:
        raise ValueError(
            f"{args.command} with --preset={args.preset} needs about {need / 2**30:.0f} GiB, "
            f"{free / 2**30:.0f} GiB are free on {device}; lower {lower}"
        )


def build(args, kind, device, dtype):
    """A model with the same random weights for every kind, made on the device."""
    torch.compiler.reset()  # the kinds share code that the compiler specialises for each
    gc.collect()
    torch.set_default_dtype(dtype)
    torch.manual_seed(args.seed)
    try:
        with torch.device(device):
            return GPT(config_of(args, kind))
    finally:
        torch.set_default_dtype(torch.float32)


def config_of(args, kind):
    changes = {n: getattr(args, n) for n in ("n_layer", "window", "sink")}
    changes = {n: value for n, value in changes.items() if value is not None}
    return GPTConfig(**{**PRESETS[args.preset], **changes, "attention": kind})


def reset_peak(device):
    if device.type != "cuda":
        return 0
    gc.collect()  # a compiled model is in a cycle: else the one before would count
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device, before):
    """MiB that the call used beside what was there before it, or None without a GPU."""
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def relative_error(call, reference=None):
    """call() through the chosen backend against reference(), or itself, through the masked one."""
    chosen, answers = choose_backend(M._backend), []
    for name, compute in ((chosen, call), ("masked", reference or call)):
        choose_backend(name)
        answers.append(compute().float())
    choose_backend(chosen)
    got, want = answers
    return ((got - want).norm() / want.norm()).item()


# ------------------------------------------------------------------------------------------------
# The benchmarks. Each returns rows: {column: value}


@torch.no_grad()
def bench_prefill(args, device, dtype, limits):
    rows = []
    for kind in args.attention:
        model = build(args, kind, device, dtype).eval()
        if args.compile:
            fuse(model)
        weights = sum(p.nbytes for p in model.parameters())
        for T in args.T:
            idx = torch.randint(model.config.vocab_size, (1, T), device=device)
            cache = KVCache(model.config, 1, T, device, dtype)

            def call(idx=idx, chunk=args.chunk, start=0):
                cache.length = start
                return prefill(model, idx, cache, chunk)

            memory = reset_peak(device)
            slow = kind == "full" and T >= 2**19  # minutes: the first chunks warm the later ones up
            seconds = median_time(call, device, 1 if slow else args.repeats, 0 if slow else 1)
            MiB = peak(device, memory)
            tail = min(T, 16)
            error = relative_error(lambda: call(idx[:, -tail:], start=T - tail))
            flops = forward_flops(model.config, T, 1)
            nbytes = -(-T // args.chunk) * weights + cache.nbytes
            rows.append({"kind": kind, "T": T, "ms": 1e3 * seconds, "tokens/s": T / seconds,
                         "limit ms": limits.ms(flops, nbytes), "MiB": MiB,
                         "error": error})  # fmt: skip
            cache = call = None  # free it before the next one
        model = None
    return rows


@torch.no_grad()
def bench_kernels(args, device, dtype, limits):
    """One layer's attention over the last chunk of T positions, as prefill calls it."""
    c = config_of(args, "orthros")
    H, Hk, D, W = c.n_head, c.n_kv_head, c.head_dim, c.window
    backends = {"torch": M.attend_torch}
    if device.type == "cuda" and dtype != torch.float32:
        for generation in M.load_flash():
            backends[f"flash-attn {generation}"] = lambda *a, generation=generation: M.call_flash(
                generation, *a
            )
    rows = []
    for T in args.T:
        q, k, v = (torch.randn(1, T, h, D, device=device, dtype=dtype) for h in (H, Hk, Hk))
        chunk = min(args.chunk, T)
        cases = {"window": (chunk, W, 0), "window, 1 sink": (chunk, W, 1), "full": (chunk, None, 0),
                 "one query": (1, None, 0)}  # fmt: skip
        for case, (Tq, window, sink) in cases.items():
            last = min(Tq, 16)
            want = M.attend_masked(q[:, -last:].float(), k.float(), v.float(), window, sink)
            keys = keys_seen(Tq, T, window, sink)
            nbytes = 2 * q[:, :Tq].nbytes + 2 * k[:, : min(T, Tq + (window or T))].nbytes
            for name, attend in backends.items():
                call = lambda: attend(q[:, T - Tq :], k, v, window, sink)
                try:
                    got = call()[:, -last:].float()
                except (RuntimeError, TypeError, AssertionError) as error:
                    print(f"{name} cannot do {case}: {error}", file=sys.stderr)
                    continue
                seconds = median_time(call, device, args.repeats, 3)
                rows.append({"call": case, "backend": name, "T": T, "ms": 1e3 * seconds,
                             "limit ms": limits.ms(4 * H * D * keys, nbytes),
                             "error": ((got - want).norm() / want.norm()).item()})  # fmt: skip
    return rows


@torch.no_grad()
def bench_decode(args, device, dtype, limits):
    """A step at several lengths of one cache: one token of full or swa, the pair of Orthros."""
    rows, B = [], args.batch_size
    for kind in args.attention:
        model = build(args, kind, device, dtype).eval()
        c = model.config
        cache = KVCache(c, B, max(args.T), device, dtype)
        cache.k.normal_()
        cache.v.normal_()
        step = fast_step(args, model, cache) or model
        ids = torch.randint(c.vocab_size, (B, 1), device=device)
        used = [p.nbytes for p in model.parameters() if p is not model.wte.weight]
        weights = sum(used) + c.tie_embeddings * model.wte.weight.nbytes
        for T in args.T:

            def call(step=step, T=T):
                cache.length = T - 1
                return step(ids, T_out=1, cache=cache)[0]

            seconds = median_time(call, device, 4 * args.repeats, 3)
            error = relative_error(call, lambda: call(model))
            reach = [(c.window, c.sink) if c.kind(i) == "swa" else () for i in range(c.n_layer)]
            keys = sum(keys_seen(1, T, *r) for r in reach) * B * cache.k[0, 0, 0].nbytes
            rows.append({"kind": kind, "decoder": "eager" if step is model else "graph", "T": T,
                         "ms": 1e3 * seconds, "tokens/s": B / seconds,
                         "limit ms": limits.ms(0, weights + 2 * keys), "error": error})  # fmt: skip
        model = cache = step = call = None  # free them before the next ones
    return rows


@torch.no_grad()
def bench_answers(args, device, dtype):
    """Prompts of the largest T read, and max_new_tokens written to each, greedily."""
    rows, B, T, n = [], args.batch_size, max(args.T), args.max_new_tokens
    for kind in args.attention:
        model = build(args, kind, device, dtype).eval()
        cache = KVCache(model.config, B, T + n, device, dtype)
        step = fast_step(args, model, cache) or model
        if args.compile:
            fuse(model)
        idx = torch.randint(model.config.vocab_size, (B, T), device=device)
        for warm in (True, False):
            cache.length, times = 0, []
            text = idx[:, : 2 * args.chunk] if warm else idx  # two chunks compile what all need
            sync(device)
            began = time.perf_counter()
            logits = prefill(model, text, cache, args.chunk)
            for ids, _ in decode(step, cache, logits, n, lambda x: pick_token(x, temperature=0)):
                ids.tolist()  # as a reader would have it
                times.append(time.perf_counter() - began)
        rows.append({"kind": kind, "decoder": "eager" if step is model else "graph", "batch": B,
                     "T": T, "written": B * n, "first s": times[0],
                     "written/s": B * (n - 1) / (times[-1] - times[0]) if n > 1 else None,
                     "all/s": B * n / times[-1]})  # fmt: skip
        model = cache = step = None
    return rows


def bench_train(args, device, dtype, limits):
    rows, T = [], args.T[0]
    cases = [(kind, kind, args.T_out or T) for kind in args.attention]
    if args.T_out and "orthros" in args.attention:
        cases.append(("orthros, T_out = T", "orthros", T))
    for name, kind, T_out in cases:
        model = build(args, kind, device, torch.float32)
        model.compute_dtype = dtype
        optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=1e-4, fused=True)
        forward = torch.compile(model) if args.compile else model
        shape = (args.batch_size, T + 1)
        both = torch.randint(model.config.vocab_size, shape, device=device)
        idx, targets = both[:, :-1], both[:, 1 + T - T_out :].contiguous()
        weight = model.blocks[0].attn.k_proj.weight

        def gradient(n=min(T, 1024), m=min(T_out, 1024)):  # the reference takes n x n a head
            return torch.autograd.grad(model(idx[:1, -n:], targets[:1, -m:], m)[1], weight)[0]

        error = relative_error(gradient)
        memory = reset_peak(device)

        def call():
            forward(idx, targets, T_out)[1].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = median_time(call, device, args.repeats, 3)
        flops = 3 * args.batch_size * forward_flops(model.config, T, T_out)
        nbytes = 8 * 4 * model.num_params()  # AdamW: weight, gradient, 2 moments in; all out again
        rows.append({"kind": name, "T": T, "ms": 1e3 * seconds,
                     "limit ms": limits.ms(flops, nbytes),
                     "tokens/s": args.batch_size * T / seconds,
                     "MFU": flops / seconds / limits.flops,
                     "MiB": peak(device, memory), "error": error})  # fmt: skip
        model = optimizer = forward = weight = None
    return rows


# ------------------------------------------------------------------------------------------------
# What comes out


FORMATS = {"T": ",d", "ms": ",.2f", "limit ms": ",.2f", "x full": ".2f", "tokens/s": ",.0f",
           "MFU": ".0%", "MiB": ",.0f", "error": ".1e", "first s": ",.2f", "written/s": ",.1f",
           "all/s": ",.2f"}  # fmt: skip


def show(rows):
    cell = lambda name, value: "" if value is None else format(value, FORMATS.get(name, ""))
    table = [list(rows[0])] + [[cell(name, row[name]) for name in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def draw(rows, title, path):
    """Time over T, a line for each kind or backend and a dotted one for its limit; bars for one T.
    Kernels have a panel for each call."""
    plt = pyplot()
    if plt is None:
        return
    calls = list(dict.fromkeys(row.get("call") for row in rows))
    several, lengths = len(calls) > 1, sorted({row["T"] for row in rows})
    figure, panels = plt.subplots(
        1, len(calls), figsize=(14 if several else 7, 4.5), layout="constrained", squeeze=False
    )
    for axes, call in zip(panels[0], calls):
        lines = {}
        for row in rows:
            if row.get("call") == call:
                lines.setdefault(row["kind"] if "kind" in row else row["backend"], []).append(row)
        if len(lengths) > 1:
            draw_lines(axes, lines, lengths)
        else:  # bars grow from below
            ms, limits = ([line[0][n] for line in lines.values()][::-1] for n in ("ms", "limit ms"))
            axes.barh(list(lines)[::-1], ms, color="C0")
            axes.plot(limits, range(len(ms)), "k|", markersize=24, label="the hardware's limit")
            axes.set(xlabel="ms")
            axes.legend(markerscale=0.4)
        axes.set_title(call, fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    print(f"drawn to {path}")


def draw_lines(axes, lines, lengths):
    for number, (name, rows) in enumerate(lines.items()):
        T, width = [row["T"] for row in rows], 1.5 * (len(lines) - number)  # none hides another
        color = f"C{number}"
        axes.plot(T, [row["ms"] for row in rows], "o-", color=color, label=name, linewidth=width)
        axes.plot(T, [row["limit ms"] for row in rows], ":", color=color)
    axes.set(xlabel="tokens", ylabel="ms (dotted: the hardware's limit)", xscale="log")
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths], rotation=30)
    axes.minorticks_off()
    times = [row["ms"] for rows in lines.values() for row in rows]
    axes.set(ylim=(0, None)) if max(times) < 20 * min(times) else axes.set(yscale="log")
    axes.legend()


def pyplot():
    try:
        import matplotlib
    except ImportError:
        print("no picture without matplotlib: pip install -e '.[plot]'", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(runs, out_dir):
    """What the logs of training runs (or rl.py's) hold over steps, to OUT_DIR/plot.png."""
    logs = {run: read_log(run) for run in runs}
    if not logs:
        raise ValueError("plot needs the --out_dir of at least one training run")
    plt = pyplot()
    panels = {"loss in nats a token": ("loss", "val_loss"), "reward": ("reward",), "KL": ("kl",),
              "learning rate": ("lr",), "gradient norm": ("grad_norm",),
              "tokens/s": ("tokens_per_s",), "MFU": ("mfu",),
              "memory, MiB": ("memory_mib",)}  # fmt: skip
    known = {key for records in logs.values() for r in records for key in r if r[key] is not None}
    panels = {title: keys for title, keys in panels.items() if known.intersection(keys)}
    if not panels:
        raise ValueError(f"nothing is logged yet in {', '.join(runs)}")
    columns = math.ceil(math.sqrt(len(panels)))
    rows = -(-len(panels) // columns)
    size = (5 * columns + 2, 3.5 * rows + 1)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, keys) in zip(grid.flat, panels.items()):
        for number, (run, records) in enumerate(logs.items()):
            for key in keys:
                # by step, since a resumed run repeats some
                points = {r["step"]: r[key] for r in records if r.get(key) is not None}
                style = "o--" if key == "val_loss" else "-"
                label = f"{run}, validation" if key == "val_loss" else run
                if points:
                    axes.plot(*zip(*sorted(points.items())), style, color=f"C{number}", label=label,
                              alpha=1.0 if key == "val_loss" else 0.6)  # fmt: skip
        axes.set(xlabel="step", title=title)
        axes.legend(fontsize=8)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    os.makedirs(out_dir, exist_ok=True)
    path = os.path.join(out_dir, "plot.png")
    figure.savefig(path, dpi=120)
    print(f"drawn to {path}")


def mask(window, sink, out_dir):
    """Two pictures of the contract of attend: masks.png and reach.png."""
    plt = pyplot()
    from matplotlib.colors import ListedColormap

    style = dict(cmap=ListedColormap(["white", "tab:blue", "tab:orange"]), vmin=0, vmax=2)
    os.makedirs(out_dir, exist_ok=True)
    for name, picture in (("masks", draw_masks), ("reach", draw_reach)):
        picture(plt, style, window, sink).savefig(os.path.join(out_dir, f"{name}.png"), dpi=120)
    print(f"drawn to {out_dir}/masks.png and {out_dir}/reach.png")


def draw_masks(plt, style, window, sink):
    """Every phase's queries (rows) and the keys that they see."""
    T = 12
    phases = {
        "pre-training": (T, T),
        "fine-tuning, RL": (T, 4),
        "prefill": (T, 1),
        "decoding": (1, 1),
    }
    most = max(n_base + n_out for n_base, n_out in phases.values())
    figure, panels = plt.subplots(1, 4, figsize=(11, 5), layout="constrained")
    for axes, (name, (n_base, n_out)) in zip(panels, phases.items()):
        base = M.visible(n_base, T, window, sink).int()
        rows = torch.cat((base, 2 * M.visible(n_out, T).int()))
        image = torch.zeros(most, T, dtype=torch.int)
        image[: len(rows)] = rows  # one scale for all four
        axes.imshow(image, **style)
        axes.set_ylim(most - 0.5, -0.5)
        axes.set_xticks(range(T), [f"k{j + 1}" for j in range(T)], fontsize=6)
        queries = [f"x{T - n_base + i + 1}" for i in range(n_base)]
        queries += [f"x'{T - n_out + i + 1}" for i in range(n_out)]
        axes.set_yticks(range(len(rows)), queries, fontsize=6)
        axes.set_title(f"{name}\nT_out = {n_out}", fontsize=9)
    figure.suptitle(f"base tokens (blue): window {window}, sink {sink}; output tokens (orange): "
                    f"all of the cache", fontsize=9)  # fmt: skip
    return figure


def draw_reach(plt, style, window, sink):
    """What the last position knows of after each layer."""
    T, layers = 32, 6
    sees, knows = M.visible(T, T, window, sink).float(), torch.eye(T)
    rows = []
    for _ in range(layers):
        knows = ((sees @ knows) > 0).float()  # of its own keys' positions, all they knew
        rows.append(knows[-1])
    rows.append(torch.full((T,), 2.0))
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    frame = (0.5, T + 0.5, layers + 0.5, -0.5)
    axes.imshow(torch.stack(rows), **style, aspect="auto", extent=frame)
    labels = [f"base, layer {i + 1}" for i in range(layers)] + ["output token, any layer"]
    axes.set_yticks(range(layers + 1), labels, fontsize=8)
    axes.set(
        xlabel="position", title=f"what position {T} can know of (window {window}, sink {sink})"
    )
    return figure


def build_parser():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("command", choices=("prefill", "train", "decode", "plot", "mask"))
    add("runs", nargs="*", help="plot: the out_dirs of runs")
    add("--kernels", action="store_true", help="time the attention alone, per backend")
    add("--preset", help="model shape (default: laptop on a CPU; on a GPU qwen3-8b or gpt2)")
    add("--T", help="lengths, separated by commas")
    add("--attention", default="full;swa;orthros", help="kinds, with ; between (default "
        "full;swa;orthros)")  # fmt: skip
    add("--n_layer", type=int)
    add("--window", type=int)
    add("--sink", type=int)
    add("--chunk", type=int, help="tokens a prefill chunk (default 2048; 32768 on a GPU)")
    add("--batch_size", type=int, help="sequences a training step (default 4; 32 on a GPU), or "
        "decoded at once (default 1)")  # fmt: skip
    add("--max_new_tokens", type=int, help="decode: tokens of each answer end to end (default "
        "128); 0 leaves that out")  # fmt: skip
    add("--T_out", type=int, help="output tokens a sequence in training (default all)")
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=1337)
    add("--device", help="cpu, cuda, mps (default: the best there is)")
    add("--dtype", help="float32, bfloat16, float16 (default: what suits the device)")
    add("--compile", type=parse_bool, help="compile the training step, what lies between the "
        "matrix products in prefill, and decode by fast.py (default: on a GPU)")  # fmt: skip
    add("--backend", help="attention backend: torch, flash or masked")
    add("--out_dir", default="out/bench")
    return parser


def complete(args, device, dtype):
    """Fill in what suits the device; ValueError for what cannot be measured, before it starts."""
    gpu, train = device.type == "cuda", args.command == "train"
    if args.runs:
        raise ValueError(f"{args.command} takes no folders: {' '.join(args.runs)}")
    if args.kernels and args.command != "prefill":
        raise ValueError("--kernels belongs to prefill")
    for name, command in dict(T_out="train", max_new_tokens="decode").items():
        if getattr(args, name) is not None and args.command != command:
            raise ValueError(f"--{name} belongs to {command}")
    if args.batch_size is not None and args.command == "prefill":
        raise ValueError("--batch_size belongs to train and decode: prefill reads one sequence")
    args.max_new_tokens = 128 if args.max_new_tokens is None else args.max_new_tokens
    args.preset = args.preset or ("laptop" if not gpu else "gpt2" if train else "qwen3-8b")
    if args.preset not in PRESETS:
        raise ValueError(f"unknown preset '{args.preset}'; known are {', '.join(PRESETS)}")
    args.compile = gpu if args.compile is None else args.compile
    args.chunk = (32768 if gpu else 2048) if args.chunk is None else args.chunk
    if args.batch_size is None:
        args.batch_size = 1 if args.command == "decode" else 32 if gpu else 4
    default = PRESETS[args.preset]["block_size"] if train else (
        "1024,4096,32768,131072" if gpu else "1024,4096,8192,16384")  # fmt: skip
    try:
        args.T = [int(x) for x in str(args.T or default).split(",")]
    except ValueError:
        raise ValueError(f"--T must be whole numbers separated by commas, not '{args.T}'") from None
    for name, least in dict(T=1, repeats=1, chunk=1, batch_size=1, max_new_tokens=0).items():
        value = min(args.T) if name == "T" else getattr(args, name)
        if value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    if train and len(args.T) > 1:
        raise ValueError(f"train takes one --T, not {len(args.T)}")
    if args.T_out is not None and not 1 <= args.T_out <= args.T[0]:
        raise ValueError(f"--T_out must be from 1 to T = {args.T[0]}, not {args.T_out}")
    args.attention = args.attention.split(";")
    for kind in args.attention:
        check_memory(args, config_of(args, kind), device, dtype)


BENCHES = {"prefill": bench_prefill, "kernels": bench_kernels, "train": bench_train,
           "decode": bench_decode}  # fmt: skip


def measure(args, device, dtype):
    """Run one benchmark; print its table, write it to a JSON file, and draw it."""
    where = device_name(device)
    if device.type == "cuda" and not M.load_flash():
        print("flash-attn is not installed: pip install -e '.[flash]'", file=sys.stderr)
    name = "kernels" if args.kernels else args.command
    backend, limits = choose_backend(args.backend), Limits(device, dtype)
    rows = BENCHES[name](args, device, dtype, limits)
    if name != "kernels":
        full = {row["T"]: row["ms"] for row in rows if row["kind"] == "full"}
        rows = [row | {"x full": full[row["T"]] / row["ms"] if full else None} for row in rows]
    title = (f"{name}, {args.preset}, {where}, {str(dtype)[6:]}, torch {torch.__version__}, "
             f"backend {backend}\nmatrix product {limits.flops / 1e12:.2f} TFLOP/s, copy "
             f"{limits.bytes / 1e9:.0f} GB/s")  # fmt: skip
    print(title)
    show(rows)
    answers = []
    if name == "decode" and args.max_new_tokens:
        answers = bench_answers(args, device, dtype)
        print("end to end")
        show(answers)
    packages = [p.metadata["Name"].replace("_", "-") + " " + p.version for p in distributions()]
    flash = [p for p in packages if p.startswith("flash-attn")]
    record = dict(device=where, torch=torch.__version__, python=platform.python_version(),
                  dtype=str(dtype), backend=backend, flash=flash, flops=limits.flops,
                  bytes=limits.bytes, args=vars(args), rows=rows, answers=answers)  # fmt: skip
    path = os.path.join(args.out_dir, name)
    with open(f"{path}.json", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    print(f"written to {path}.json")
    draw(rows, title, f"{path}.png")


def main():
    args = build_parser().parse_intermixed_args()
    if args.command in ("plot", "mask"):
        needed("matplotlib", "plot")
    if args.command == "plot":
        return plot(args.runs, args.out_dir)
    if args.command == "mask":
        shape = GPTConfig(window=4 if args.window is None else args.window, sink=args.sink or 0)
        return mask(shape.window, shape.sink, args.out_dir)
    device, dtype = pick_device(args.device, args.dtype)
    complete(args, device, dtype)
    os.makedirs(args.out_dir, exist_ok=True)
    measure(args, device, dtype)


if __name__ == "__main__":
    run_cli(main)

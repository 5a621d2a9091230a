"""How fast, beside what the hardware allows.

    python bench.py prefill [--preset=qwen3-8b --n_layer=8] [--T=32768,131072]
    python bench.py train   [--preset=gpt2 --batch_size=32] [--T_out=128]

Each compares orthros, full and swa in one run: the same random weights, warm, synchronised, medians.
The table is printed and written with its circumstances to OUT_DIR/NAME.json.

Columns: T tokens; ms the median time of one call; tokens/s; limit ms the call's FLOPs over the rate of
a large matrix product measured in this run; x full how many times faster than full; MiB the largest
memory beside weights (and beside the cache, in prefill), on a GPU; error the difference from the masked
reference, relative, on the last output of a short run.
"""

import json
import os
import platform
import statistics
import time

import torch

import model as M
from model import GPT, PRESETS, GPTConfig, KVCache, choose_backend, pick_device
from prepare import Parser, parse_bool, run_cli
from sample import prefill

KINDS = ("full", "swa", "orthros")


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_time(call, device, repeats, warmup=1):
    """Median seconds of call(), after warm-up, the device idle at both clock reads."""
    times = []
    for i in range(warmup + repeats):
        sync(device)
        start = time.perf_counter()
        call()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:])


def matmul_rate(device, dtype):
    """FLOP/s of one large matrix product: the ceiling for everything here."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_time(lambda: a @ b, device, 10, 3)


def forward_flops(config, T, T_out):
    """FLOPs of one forward over T new tokens: 2 a weight and token, 4 D a head, query and key.

    Counts what runs: output tokens, the window, and the last layer's queries at T_out alone.
    """
    c, total = config, 0
    H, D = c.n_head, c.head_dim
    windowed = sum(min(p + 1, c.window + c.sink) for p in range(min(T, c.window + c.sink)))
    windowed += max(0, T - c.window - c.sink) * (c.window + c.sink)
    last_rows = T_out * (2 * T - T_out + 1) // 2  # keys seen by the last T_out queries
    for layer in range(c.n_layer):
        kind, is_last = c.kind(layer), layer == c.n_layer - 1
        n_base = 0 if is_last else T
        n_out = T_out if is_last or kind == "orthros" else 0
        total += 2 * T * c.n_embd * 2 * c.n_kv_head * D
        total += 2 * (n_base + n_out) * c.n_embd * (2 * H * D + 3 * c.n_hidden)
        keys = T * (T + 1) // 2 if kind == "full" else windowed
        if is_last:
            keys = min(T_out * c.window, last_rows) if kind == "swa" else last_rows
        elif kind == "orthros":
            keys += last_rows
        total += 4 * H * D * keys
    return total + 2 * T_out * c.n_embd * c.vocab_size


def relative_error(model, device):
    """The chosen backend against the masked reference on a short prefill, whole logits."""
    T = min(4 * model.config.window, 2048)
    idx = torch.randint(model.config.vocab_size, (1, T), device=device)
    chosen, answers = M.choose_backend(M._backend), []
    for name in (chosen, "masked"):
        choose_backend(name)
        answers.append(model(idx, T_out=1)[0].float())
    choose_backend(chosen)
    got, want = answers
    return ((got - want).norm() / want.norm()).item()


def build(args, kind, device, dtype):
    """A model with the same random weights for every kind, made on the device."""
    changes = {n: getattr(args, n) for n in ("n_layer", "window", "sink") if getattr(args, n)}
    config = GPTConfig(**{**PRESETS[args.preset], **changes, "attention": kind})
    with torch.device("meta"):
        count = GPT(config).num_params()
    size = count * dtype.itemsize * (1 if args.command == "prefill" else 8)
    if device.type == "cuda" and size > torch.cuda.get_device_properties(device).total_memory:
        raise ValueError(
            f"{args.preset} needs {size / 2**30:.0f} GiB for {args.command}, more than this GPU has; "
            f"lower --n_layer"
        )
    torch.manual_seed(args.seed)
    with torch.device(device):
        model = GPT(config)
    return model


@torch.no_grad()
def bench_prefill(args, device, dtype):
    rows, rate = [], matmul_rate(device, dtype)
    for kind in KINDS:
        torch.set_default_dtype(dtype)
        model = build(args, kind, device, dtype).eval()
        torch.set_default_dtype(torch.float32)
        error = relative_error(model, device)
        for T in args.T:
            idx = torch.randint(model.config.vocab_size, (1, T), device=device)
            cache = KVCache(model.config, 1, T, device, dtype)

            def call():
                cache.length = 0
                prefill(model, idx, cache, args.chunk)

            memory = reset_peak(device)
            slow = kind == "full" and T >= 2**19
            seconds = median_time(call, device, 1 if slow else args.repeats, 0 if slow else 1)
            row = dict(kind=kind, T=T, ms=1e3 * seconds, tokens_per_s=T / seconds)
            row["limit_ms"] = 1e3 * forward_flops(model.config, T, 1) / rate
            row |= dict(MiB=peak(device, memory), error=error)
            rows.append(row)
            cache = None  # free it before the next one
        model = None
    return rows, rate


def bench_train(args, device, dtype):
    rows, rate = [], matmul_rate(device, dtype)
    T = args.T[0]
    T_out = args.T_out or T
    for kind in KINDS:
        model = build(args, kind, device, dtype)
        model.compute_dtype = dtype
        with torch.no_grad():
            error = relative_error(model, device)
        optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=1e-4, fused=True)
        compiled = device.type == "cuda" if args.compile is None else args.compile
        forward = torch.compile(model) if compiled else model
        shape = (args.batch_size, T + 1)
        both = torch.randint(model.config.vocab_size, shape, device=device)
        idx, targets = both[:, :-1], both[:, 1 + T - T_out :].contiguous()
        memory = reset_peak(device)

        def call():
            forward(idx, targets, T_out)[1].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = median_time(call, device, args.repeats, 3)
        flops = 3 * args.batch_size * forward_flops(model.config, T, T_out)
        row = dict(kind=kind, T=T, ms=1e3 * seconds, tokens_per_s=args.batch_size * T / seconds)
        rows.append(row | dict(limit_ms=1e3 * flops / rate, MiB=peak(device, memory), error=error))
        model = optimizer = forward = None
    return rows, rate


def reset_peak(device):
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device, before):
    """MiB that the call used beside what was there before it, or None without a GPU."""
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def show(rows):
    base = {row["T"]: row["ms"] for row in rows if row["kind"] == "full"}
    print(f"{'kind':8}{'T':>9}{'ms':>11}{'tokens/s':>12}{'limit ms':>11}{'x full':>8}"
          f"{'MiB':>9}{'error':>9}")  # fmt: skip
    for row in rows:
        row["x_full"] = base[row["T"]] / row["ms"]
        memory = "" if row["MiB"] is None else f"{row['MiB']:,.0f}"
        print(f"{row['kind']:8}{row['T']:>9,}{row['ms']:>11,.1f}{row['tokens_per_s']:>12,.0f}"
              f"{row['limit_ms']:>11,.1f}{row['x_full']:>8.2f}{memory:>9}{row['error']:>9.1e}")  # fmt: skip


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("command", choices=("prefill", "train"))
    add("--preset", help="model shape (default: laptop on a CPU; on a GPU qwen3-8b or gpt2)")
    add("--T", help="lengths, separated by commas")
    add("--n_layer", type=int)
    add("--window", type=int)
    add("--sink", type=int)
    add("--chunk", type=int, help="tokens a prefill chunk (default 2048; 32768 on a GPU)")
    add("--batch_size", type=int, help="sequences a training step (default 4; 32 on a GPU)")
    add("--T_out", type=int, help="output tokens a sequence in training (default all)")
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=1337)
    add("--device")
    add("--dtype")
    add("--compile", type=parse_bool, help="torch.compile for training (default: on a GPU)")
    add("--backend", help="attention backend: torch, flash or masked")
    add("--out_dir", default="out/bench")
    args = parser.parse_args()
    device, dtype = pick_device(args.device, args.dtype)
    gpu = device.type == "cuda"
    args.preset = args.preset or (
        "laptop" if not gpu else "qwen3-8b" if args.command == "prefill" else "gpt2"
    )
    if args.preset not in PRESETS:
        raise ValueError(f"unknown preset '{args.preset}'; known are {', '.join(PRESETS)}")
    args.chunk = args.chunk or (32768 if gpu else 2048)
    args.batch_size = args.batch_size or (32 if gpu else 4)
    default = {"prefill": "32768,131072" if gpu else "4096,8192,16384"}.get(args.command)
    text = args.T or default or str(PRESETS[args.preset]["block_size"])
    try:
        args.T = [int(x) for x in text.split(",")]
    except ValueError:
        raise ValueError(f"--T must be whole numbers separated by commas, not '{text}'") from None
    if min(args.T) < 1 or args.repeats < 1:
        raise ValueError("--T and --repeats must be at least 1")
    os.makedirs(args.out_dir, exist_ok=True)
    where = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    backend = choose_backend(args.backend)
    bench = {"prefill": bench_prefill, "train": bench_train}[args.command]
    rows, rate = bench(args, device, dtype)
    print(f"{args.command}, {args.preset}, {where}, {str(dtype)[6:]}, torch {torch.__version__}, "
          f"backend {backend}, matrix product {rate / 1e12:.2f} TFLOP/s")  # fmt: skip
    show(rows)
    record = dict(device=where, torch=torch.__version__, python=platform.python_version(),
                  dtype=str(dtype), backend=backend, flops=rate, args=vars(args), rows=rows)  # fmt: skip
    path = os.path.join(args.out_dir, f"{args.command}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    print(f"written to {path}")


if __name__ == "__main__":
    run_cli(main)

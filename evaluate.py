"""How good, rather than how fast.

    python evaluate.py loss --out_dir=DIR FILE...    one set of weights as full, swa and orthros

Columns of loss
  nats      mean loss of a token        perplexity   e to that power
  bits/byte the loss per byte of text, the same for every tokenizer
  from ...  mean loss of the tokens from that position of a window on, to the next column's
"""

import math

import torch

from model import KVCache, choose_backend, load_checkpoint, pick_device
from prepare import (
    Parser,
    decoded,
    local_files,
    run_cli,
    tokenizer_of,
)


@torch.no_grad()
def token_losses(model, idx, chunk=512):
    """Nats of each next token: idx (B, T + 1) -> (B, T). Read in chunks through a cache, so that the
    logits of a chunk alone exist; the same as one pass of pre-training."""
    B, T = idx.shape[0], idx.shape[1] - 1
    weight = model.wte.weight
    cache, losses = KVCache(model.config, B, T, weight.device, weight.dtype), []
    for x, y in zip(idx[:, :-1].split(chunk, dim=1), idx[:, 1:].split(chunk, dim=1)):
        logits = model(x, cache=cache)[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits.mT, y, reduction="none"))
    return torch.cat(losses, dim=1)


def windows(tokenizer, files, T, limit):
    """(number of windows, T + 1) token ids of all the files, one after the other, and their bytes."""
    ids = []
    for _, _, fetch in files:
        with open(fetch(), "rb") as file:
            ids += tokenizer.encode("".join(decoded(file))).tolist() + [tokenizer.eot]
        if len(ids) > limit * T:
            break
    n = min(limit, (len(ids) - 1) // T)
    if n < 1:
        raise ValueError(f"{len(ids)} tokens are less than a window of {T} and one more: lower --T")
    rows = torch.tensor([ids[i * T : (i + 1) * T + 1] for i in range(n)])
    return rows, len(tokenizer.decode_bytes(ids[1 : n * T + 1]))


def evaluate_loss(args, device, dtype):
    rows, text, model = [], None, None
    for kind in args.attention.split(";"):
        changes = {n: getattr(args, n) for n in ("window", "sink") if getattr(args, n) is not None}
        model = None  # free the one before
        model, checkpoint = load_checkpoint(args.out_dir, device, attention=kind, **changes)
        model.to(dtype).eval()
        if text is None:
            tokenizer = tokenizer_of(checkpoint, args.out_dir)
            files = local_files(args.files, args.glob)
            text, n_bytes = windows(tokenizer, files, args.T, args.max_windows)
            print(f"{len(text)} windows of {args.T} tokens, {n_bytes / 1e6:.2f} MB of text; {device}, "
                  f"{str(dtype)[6:]}, backend {choose_backend(args.backend)}, W "
                  f"{model.config.window}, sink {model.config.sink}")  # fmt: skip
            starts = [0] + [2**i for i in range(8, 20) if 2**i < args.T]
            print(f"{'attention':12}{'nats':>9}{'perplexity':>12}{'bits/byte':>11}"
                  + "".join(f"{f'from {start}':>12}" for start in starts))  # fmt: skip
        losses = torch.cat([token_losses(model, x.to(device)) for x in text.split(args.batch_size)])
        mean = losses.double().mean().item()
        parts = [losses[:, a:b].mean().item() for a, b in zip(starts, [*starts[1:], args.T])]
        rows.append({"attention": kind, "nats": mean, "by position": parts})
        print(f"{kind:12}{mean:>9.4f}{math.exp(mean):>12.3f}"
              f"{mean * losses.numel() / math.log(2) / n_bytes:>11.4f}"
              + "".join(f"{part:>12.4f}" for part in parts), flush=True)  # fmt: skip
    return rows


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("command", choices=("loss",))
    add("files", nargs="+", help="files and folders of text")
    add("--out_dir", default="out", help="folder of the checkpoint (default out)")
    add("--attention", default="full;swa;orthros", help="kinds, with ; between (default "
        "full;swa;orthros)")  # fmt: skip
    add("--window", type=int, help="keys a base token sees (default the checkpoint's)")
    add("--sink", type=int, help="first keys that stay visible (default the checkpoint's)")
    add("--T", type=int, default=1024, help="tokens of a window (default 1024)")
    add("--max_windows", type=int, default=64, help="windows at most (default 64)")
    add("--batch_size", type=int, default=1, help="windows at a time")
    add("--glob", default="*.txt", help="which files of a folder (default *.txt)")
    add("--device", help="cpu, cuda, mps (default: the best there is)")
    add("--dtype", help="float32, bfloat16, float16 (default: what suits the device)")
    add("--backend", help="attention backend: torch, flash or masked")
    args = parser.parse_intermixed_args()
    if min(args.T, args.max_windows, args.batch_size) < 1:
        raise ValueError("--T, --max_windows and --batch_size must be at least 1")
    device, dtype = pick_device(args.device, args.dtype)
    choose_backend(args.backend)
    evaluate_loss(args, device, dtype)


if __name__ == "__main__":
    run_cli(main)

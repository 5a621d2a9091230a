"""Sample from a trained model: linear prefill, then decoding in pairs.

python sample.py --out_dir=out --prompt='def main(' --max_new_tokens=200 --stats
"""

import codecs
import sys
import time
import warnings

import torch

from model import KVCache, choose_backend, load_checkpoint, pick_device
from prepare import Parser, load_tokenizer, run_cli, tokenizer_path


def decode(model, cache, logits, n, pick):
    """The paired loop. Each step sends one new token through the model twice, side by side: as a
    base token, which adds its keys and values to the cache, and as an output token, which reads
    the whole cache and predicts the next. Yields n times what `pick` makes of the logits (B, V).
    """
    for step in range(n):
        ids, logprobs = pick(logits[:, -1])
        yield ids, logprobs
        if step + 1 < n:
            logits, _ = model(ids[:, None], T_out=1, cache=cache)


def prefill(model, idx, cache, chunk):
    """Read idx (B, T) into the cache, linear in T; return the logits (B, 1, V) at its end.

    Only the last chunk has an output token, so only its one query looks at the whole cache, and
    memory beside the cache stays that of a chunk.
    """
    *chunks, last = idx.split(chunk, dim=1)
    for piece in chunks:
        model(piece, T_out=0, cache=cache)
    return model(last, T_out=1, cache=cache)[0]


def pick_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one id a row from logits (B, V). Returns (ids (B,), log-probabilities (B,)).

    The log-probabilities are those of the whole distribution at this temperature, before top_k and
    top_p cut it. Temperature 0 takes the largest logit and reports its log-probability at 1.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logits.argmax(dim=-1)
    else:
        probs, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            probs[:, top_k:] = 0
        if top_p is not None:  # keep the fewest that reach top_p together, and always the first
            probs[:, 1:] *= probs.cumsum(dim=-1)[:, :-1] < top_p
        drawn = torch.multinomial(probs, 1, generator=generator)
        ids = order.gather(1, drawn).squeeze(1)
    return ids, logprobs.gather(1, ids[:, None]).squeeze(1)


def generate(
    model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=(), generator=None,
    prefill_chunk=2048, cache=None, vocab_size=None,
):  # fmt: skip
    """Continue idx (B, T). Returns an iterator of (ids (B,), log-probabilities (B,)), one a step.

    cache: a KVCache whose text idx continues, or None for a new one that is just large enough.
    stop: ids that end a row; an ended row yields its stop id as padding (log-probability 0), and
    the iterator ends with the last row. Ids >= vocab_size (a padded vocabulary's) never appear.
    The last ids yielded are not in the cache yet. Bad values raise ValueError before anything runs.
    """
    B, T = idx.shape
    if T == 0:
        raise ValueError("the prompt is empty; start from the tokenizer's end-of-text id")
    if max_new_tokens < 1 or prefill_chunk < 1:
        raise ValueError("max_new_tokens and prefill_chunk must be at least 1")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
    needed = T + max_new_tokens - 1
    if cache is None:
        weight = model.blocks[0].attn.k_proj.weight
        dtype = model.compute_dtype or weight.dtype
        cache = KVCache(model.config, B, needed, weight.device, dtype)
    cache.check(needed)
    if cache.length + needed > model.config.block_size:
        warnings.warn(
            f"{cache.length + needed} positions are more than the {model.config.block_size} "
            f"(block_size) that the model was trained on",
            stacklevel=2,
        )
    stop = torch.tensor(list(stop), device=idx.device, dtype=torch.long)
    ended = torch.zeros(B, dtype=torch.bool, device=idx.device)
    last = idx[:, -1]

    def pick(logits):
        nonlocal last, ended
        ids, logprobs = pick_token(logits[:, :vocab_size], temperature, top_k, top_p, generator)
        last, logprobs = torch.where(ended, last, ids), logprobs.masked_fill(ended, 0.0)
        ended = ended | torch.isin(last, stop)
        return last, logprobs

    @torch.no_grad()
    def run():
        logits = prefill(model, idx, cache, prefill_chunk)
        for ids, logprobs in decode(model, cache, logits, max_new_tokens, pick):
            yield ids, logprobs
            if len(stop) and ended.all():
                return

    return run()


def write_stream(tokenizer, steps, out=None):
    """Write row 0 of generate()'s steps as they come, whole UTF-8 characters only. Returns the ids."""
    out = out or sys.stdout
    text, ids = codecs.getincrementaldecoder("utf-8")("replace"), []
    for new, _ in steps:
        ids.append(int(new[0]))
        out.write(text.decode(tokenizer.decode_bytes(ids[-1:])))
        out.flush()
    out.write(text.decode(b"", final=True) + "\n")
    return ids


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--out_dir", default="out", help="folder of the checkpoint (default out)")
    add("--prompt", default="", help="text to continue; empty starts from end-of-text")
    add("--num_samples", type=int, default=1)
    add("--max_new_tokens", type=int, default=200)
    add("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    add("--top_k", type=int, help="draw from the k likeliest tokens only")
    add("--top_p", type=float, help="draw from the fewest tokens that together reach p")
    add(
        "--stop",
        action="append",
        default=[],
        help="text of one token that ends a sample; repeatable",
    )
    add("--seed", type=int, default=1337)
    add("--attention", help="run the same weights as orthros, full, swa or a pattern")
    add("--window", type=int, help="keys a base token sees")
    add("--sink", type=int, help="first keys that stay visible to base tokens")
    add("--device", help="cpu, cuda, mps (default: the best there is)")
    add("--dtype", help="float32, bfloat16, float16 (default: what suits the device)")
    add("--backend", help="attention backend: torch, flash or masked")
    add("--stats", action="store_true", help="print times, rates and the size of the cache")
    args = parser.parse_args()
    device, dtype = pick_device(args.device, args.dtype)
    names = ("attention", "window", "sink")
    overrides = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    model, checkpoint = load_checkpoint(args.out_dir, device, **overrides)
    if checkpoint["tokenizer"] is None:
        raise ValueError(f"{args.out_dir} was trained on token ids, not on text: nothing to sample")
    tokenizer = load_tokenizer(tokenizer_path(checkpoint["tokenizer"], args.out_dir))
    model.to(dtype).eval()
    print(f"attention backend: {choose_backend(args.backend)} on {device}", file=sys.stderr)
    if args.num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {args.num_samples}")
    stop = [tokenizer.eot]
    for text in args.stop:
        ids = tokenizer.encode(text.encode().decode("unicode_escape"))
        if len(ids) != 1:
            raise ValueError(
                f"--stop must be one token of {tokenizer.name}, but {text!r} is {len(ids)}"
            )
        stop.append(int(ids[0]))
    prompt = [int(i) for i in tokenizer.encode(args.prompt)] or [tokenizer.eot]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    generator = torch.Generator(device).manual_seed(args.seed)
    idx = torch.tensor([prompt], device=device)
    for number in range(args.num_samples):
        cache = KVCache(model.config, 1, len(prompt) + args.max_new_tokens, device, dtype)
        steps = generate(
            model, idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p, stop,
            generator, cache=cache, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        times = [time.perf_counter()]

        def timed(steps):
            for ids, logprobs in steps:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter())
                yield ids, logprobs

        print(f"--- sample {number + 1} of {args.num_samples}\n{args.prompt}", end="")
        n = len(write_stream(tokenizer, timed(steps)))
        if args.stats:
            rate = (n - 1) / (times[-1] - times[1]) if n > 1 else float("nan")
            print(
                f"{len(prompt)} prompt tokens, first token after {1e3 * (times[1] - times[0]):.1f} ms; "
                f"{n} tokens at {rate:.1f} tokens/s; cache {cache.nbytes:,} bytes",
                file=sys.stderr,
            )


if __name__ == "__main__":
    run_cli(main)

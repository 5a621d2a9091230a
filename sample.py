"""Sample from a trained model: linear prefill, then decoding in pairs.

python sample.py --out_dir=out --prompt='def main(' --max_new_tokens=200 --stats
python sample.py --out_dir=out --chat [--system='Be brief.']
"""

import codecs
import os
import re
import sys
import time
import warnings

import torch

from model import KVCache, choose_backend, load_checkpoint, pick_device
from prepare import Parser, needed, parse_bool, run_cli, tokenizer_of


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


def prefill(model, idx, cache, chunk, T_out=1):
    """Read idx (B, T) into the cache, linear in T; return the logits (B, 1, V) at its end, or None
    with T_out=0.

    Only the last chunk has an output token, so only its one query looks at the whole cache, and
    memory beside the cache stays that of a chunk.
    """
    *chunks, last = idx.split(chunk, dim=1)
    for piece in chunks:
        model(piece, T_out=0, cache=cache)
    return model(last, T_out=T_out, cache=cache)[0]


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
    prefill_chunk=2048, cache=None, vocab_size=None, step=None,
):  # fmt: skip
    """Continue idx (B, T). Returns an iterator of (ids (B,), log-probabilities (B,)), one a step.

    cache: a KVCache whose text idx continues, or None for a new one that is just large enough.
    step: what decodes a pair instead of the model (fast.FastStep, with its cache), or None.
    stop: ids that end a row; an ended row yields its stop id as padding (log-probability 0), and
    the iterator ends with the last row. Ids >= vocab_size (a padded vocabulary's) never appear.
    The last ids yielded are not in the cache yet. Bad values raise ValueError before anything runs.
    """
    B, T = idx.shape
    if T == 0:
        raise ValueError("the prompt is empty; start from the tokenizer's end-of-text id")
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    check_sampling(temperature, top_k, top_p)
    needed = T + max_new_tokens - 1
    if cache is None:
        cache = KVCache.of(model, B, needed)
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
        for ids, logprobs in decode(step or model, cache, logits, max_new_tokens, pick):
            yield ids, logprobs
            if len(stop) and ended.all():
                return

    return run()


def check_sampling(temperature, top_k, top_p):
    """A ValueError that names the setting whose value cannot be meant."""
    if not temperature >= 0:  # nan is refused too
        raise ValueError(f"temperature must be 0 (greedy) or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")


class ChatTemplate:
    """How messages become tokens, for training and for talking.

    A tokenizer of its own template (chat_template.jinja beside it) is asked; other models get

        ### user
        (text)
        ### assistant
        (text)(end of text)

    What the messages say is encoded as plain text, so that nobody can write a control token.
    """

    ROLES = ("system", "user", "assistant")

    def __init__(self, tokenizer):
        self.tokenizer, self.template = tokenizer, None
        path = os.path.join(os.path.dirname(tokenizer.name), "chat_template.jinja")
        if tokenizer.name.endswith(".json") and os.path.exists(path):
            sandbox = needed("jinja2.sandbox", "hf").ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True
            )
            with open(path, encoding="utf-8") as file:
                self.template = sandbox.from_string(file.read())
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids, said = self.encode(probe)
        self.stop = tokenizer.stop | {[i for i, s in zip(ids, said) if s][-1]}  # ends a turn

    def encode(self, messages, reply=False):
        """(token ids, whether the assistant says each). reply: open the assistant's next turn.

        A message may bring the "ids" that it was written in: text need not encode to them again.

        The assistant says its text and the control token that ends its turn.
        """
        ids, said = [], []
        words = lambda m, end="": m.get("ids") or self.tokenizer.encode(m["content"] + end)

        def add(tokens, says):
            ids.extend(int(i) for i in tokens)
            said.extend([says] * len(tokens))

        if self.template is None:
            for message in messages + [{"role": "assistant"}] * reply:
                is_last = "content" not in message
                says = message["role"] == "assistant"
                add(self.tokenizer.encode(f"### {message['role']}\n"), False)
                if not is_last:
                    add(words(message, "" if says else "\n"), says)
                    add([self.tokenizer.eot] if says else [], says)
            return ids, said
        # private characters mark where each message goes, so that control tokens are read from the
        # template's own text alone
        marked = [{**m, "content": f"\ue000{i}\ue001"} for i, m in enumerate(messages)]
        text = self.template.render(messages=marked, add_generation_prompt=reply, tools=None)
        says = False
        for i, piece in enumerate(re.split("\ue000(\\d+)\ue001", text)):
            if i % 2:
                message = messages[int(piece)]
                says = message["role"] == "assistant"
                add(words(message), says)
            else:
                tokens = self.tokenizer.encode(piece, control=True)
                control = [n for n, t in enumerate(tokens) if int(t) in self.tokenizer.special]
                end = control[0] + 1 if says and control else 0  # its turn ends there
                add(tokens[:end], True)
                add(tokens[end:], False)
        return ids, said


def chat(args, model, tokenizer, device, dtype):
    """Talk. The cache keeps the whole conversation; a turn reads its own new tokens, no more."""
    template, held = ChatTemplate(tokenizer), []  # held: the tokens in the cache
    cache = KVCache(model.config, 1, args.max_context or model.config.block_size, device, dtype)
    step = fast_step(args, model, cache)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    generator = torch.Generator(device).manual_seed(args.seed)
    for line in iter(lambda: ask("> "), None):
        messages.append({"role": "user", "content": line})
        ids, _ = template.encode(messages, reply=True)
        same = next(
            (i for i, (a, b) in enumerate(zip(held, ids)) if a != b), min(len(held), len(ids) - 1)
        )
        cache.length = same  # usually all of it; some templates write the past anew
        room = cache.max_len - len(ids)
        if room < 1:
            print(f"the context of {cache.max_len} tokens is full (--max_context)", file=sys.stderr)
            return
        new, began = torch.tensor([ids[same:]], device=device), time.perf_counter()
        steps = generate(
            model, new, min(room, args.max_new_tokens), args.temperature, args.top_k, args.top_p,
            template.stop, generator, cache=cache, vocab_size=tokenizer.vocab_size, step=step,
        )  # fmt: skip
        reply = write_stream(tokenizer, steps, stop=template.stop)
        held = (ids + reply)[: cache.length]
        text = [i for i in reply if i not in template.stop]
        content = tokenizer.decode_bytes(text).decode("utf-8", "replace")
        messages.append({"role": "assistant", "content": content, "ids": text})
        if args.stats:
            print(f"{new.size(1)} new tokens read, {len(reply)} written in "
                  f"{time.perf_counter() - began:.1f} s, {cache.length} in the cache",
                  file=sys.stderr)  # fmt: skip


def fast_step(args, model, cache):
    """fast.FastStep on a GPU, or None, with a line that says why."""
    if not (cache.k.is_cuda if args.compile is None else args.compile):
        return None
    from fast import FastStep

    try:
        return FastStep(model, cache)
    except Exception as error:  # a model that it is not for, or a GPU that its kernels do not fit
        print(f"decoding eagerly: {error}", file=sys.stderr)


def ask(prompt):
    """A line from the user, or None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        return None


def write_stream(tokenizer, steps, out=None, stop=()):
    """Write row 0 of generate()'s steps as they come, whole UTF-8 characters only. Returns the ids.
    Those in `stop` are not shown."""
    out = out or sys.stdout
    text, ids = codecs.getincrementaldecoder("utf-8")("replace"), []
    for new, _ in steps:
        ids.append(int(new[0]))
        if ids[-1] not in stop:
            out.write(text.decode(tokenizer.decode_bytes(ids[-1:])))
        out.flush()
    out.write(text.decode(b"", final=True) + "\n")
    return ids


def write_samples(args, model, tokenizer, device, dtype):
    """Prompt and continuation, num_samples times over one cache, with times if asked for."""
    stop = [*tokenizer.stop, *(stop_id(text, tokenizer) for text in args.stop)]
    prompt = [int(i) for i in tokenizer.encode(args.prompt)] or [tokenizer.eot]
    generator = torch.Generator(device).manual_seed(args.seed)
    idx = torch.tensor([prompt], device=device)
    cache = KVCache(model.config, 1, len(prompt) + args.max_new_tokens, device, dtype)
    step = fast_step(args, model, cache)
    for number in range(args.num_samples):
        cache.length = 0
        steps = generate(
            model, idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p, stop,
            generator, cache=cache, vocab_size=tokenizer.vocab_size, step=step,
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
                f"{len(prompt)} prompt tokens, first token after "
                f"{1e3 * (times[1] - times[0]):.1f} ms; {n} tokens at {rate:.1f} tokens/s; "
                f"cache {cache.nbytes:,} bytes",
                file=sys.stderr,
            )


def stop_id(text, tokenizer):
    # \n and the like mean what they say in Python; other letters are themselves
    ids = tokenizer.encode(text.encode("latin-1", "backslashreplace").decode("unicode_escape"))
    if len(ids) != 1:
        raise ValueError(
            f"--stop must be one token of {tokenizer.name}, but {text!r} is {len(ids)}"
        )
    return int(ids[0])


def build_parser():
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
    add("--compile", type=parse_bool, help="decode with fast.py's kernels (default: on a GPU)")
    add("--chat", action="store_true", help="talk; the input's end or Ctrl-C ends it")
    add("--system", help="what the model is told before a chat")
    add("--max_context", type=int, help="tokens of a chat (default the model's block_size)")
    add("--stats", action="store_true", help="print times, rates and the size of the cache")
    return parser


def main():
    args = build_parser().parse_args()
    for name in ("num_samples", "max_context"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    device, dtype = pick_device(args.device, args.dtype)
    names = ("attention", "window", "sink")
    overrides = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    model, checkpoint = load_checkpoint(args.out_dir, device, **overrides)
    tokenizer = tokenizer_of(checkpoint, args.out_dir)
    model.to(dtype).eval()
    print(f"attention backend: {choose_backend(args.backend)} on {device}", file=sys.stderr)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    (chat if args.chat else write_samples)(args, model, tokenizer, device, dtype)


if __name__ == "__main__":
    run_cli(main)

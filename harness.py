"""Our models for EleutherAI's lm-eval (extra eval), behind `evaluate.py harness`.

A context is only read, in time linear in its length; full attention is paid where a token is scored
or written: T_out is the continuation.
"""

import difflib
import itertools
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
    make_table,
)
from tqdm import tqdm

from model import KVCache
from prepare import brief
from sample import generate, prefill

COMMON_SENSE = "arc_challenge,arc_easy,hellaswag,openbookqa,piqa,social_iqa,winogrande"
RECALL = "drop,longbench_narrativeqa,swde,triviaqa,fda,squad_completion"
PAPER = f"{COMMON_SENSE},mmlu,{RECALL}"
SHARE = 256  # a context of so many tokens is read once for all the answers to it


class Harness(TemplateLM):
    """model: a GPT in evaluation mode. Contexts beyond its block_size lose their beginning."""

    max_gen_toks = 256

    def __init__(self, model, tokenizer, batch_size=8):
        super().__init__()
        self.model, self.tokens, self.batch_size = model, tokenizer, batch_size
        self.max_length, self.seconds = model.config.block_size, 0.0  # spent in the model
        own = getattr(tokenizer, "tokenizer", None)  # of a tokenizer.json: what it puts first
        self.bos = own.encode("").ids[:1] if own else []
        self._device = model.wte.weight.device

    @property
    def eot_token_id(self):
        return self.tokens.eos

    @property
    def prefix_token_id(self):
        """What an empty context is: the token that begins a text, else one that ends it."""
        begin = self.bos[0] if self.bos else self.tokens.bos
        return self.tokens.eos if begin is None else begin

    @property
    def tokenizer_name(self):
        return self.tokens.name

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        ids = self.tokens.encode(string).tolist()
        return ids if add_special_tokens is False else self.bos + ids

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """requests: (whatever, context ids, continuation ids) -> (sum of log P, is it greedy)."""
        results, alone, cut = [None] * len(requests), [], []
        began = time.perf_counter()
        for _, context, continuation in requests:
            if not continuation or len(continuation) > self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens cannot be scored; "
                                 f"the model's block_size is {self.max_length}")  # fmt: skip
            context = context[-(self.max_length + 1 - len(continuation)) :]
            cut.append((context, continuation))
        order = sorted(range(len(cut)), key=lambda i: (-len(cut[i][0]), cut[i][0]))
        batches = []
        for context, group in itertools.groupby(order, key=lambda i: cut[i][0]):
            group = list(group)
            if len(group) > 1 and len(context) > SHARE:
                batches += [(part, len(context) - 1) for part in batched(group, self.batch_size)]
            else:
                alone += group
        alone.sort(key=lambda i: sum(map(len, cut[i])))
        batches += [(part, 0) for part in self.alike(alone, cut)]
        with tqdm(total=len(order), disable=disable_tqdm, desc="scoring") as bar:
            for part, shared in batches:
                for i, score in zip(part, self.score([cut[i] for i in part], shared)):
                    results[i] = score
                bar.update(len(part))
        self.seconds += time.perf_counter() - began
        return results

    def alike(self, order, pairs):
        """Batches of neighbours in length, closed before T_out would far exceed an answer."""
        part = []
        for i in order:
            rows = [pairs[j] for j in [*part, i]]
            shortest = min(len(context) for context, _ in rows)
            T_out = max(sum(map(len, row)) for row in rows) - shortest
            longest = max(len(continuation) for _, continuation in rows)
            if part and (len(part) == self.batch_size or T_out > 2 * longest + 32):
                yield part
                part = []
            part.append(i)
        if part:
            yield part

    @torch.no_grad()
    def score(self, pairs, shared=0):
        """[(context, continuation)] -> [(sum of log P, is it greedy)]. shared: tokens that all
        begin with, which are read once. Rows are padded on the right, where nothing looks."""
        rows = [(context + continuation)[:-1] for context, continuation in pairs]
        T = max(map(len, rows))
        T_out = T - min(len(context) - 1 for context, _ in pairs)
        idx = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=self.device)
        cache = None
        if shared:
            one, cache = (KVCache.of(self.model, n, T) for n in (1, len(rows)))
            prefill(self.model, idx[:1, :shared], one, 8192, T_out=0)
            cache.k[:, :, :shared] = one.k[:, :, :shared]
            cache.v[:, :, :shared] = one.v[:, :, :shared]
            cache.length = shared
        logits = self.model(idx[:, shared:], T_out=T_out, cache=cache)[0]  # (B, T_out, V)
        scores = []
        for row, (context, continuation) in zip(logits, pairs):
            first = len(context) - 1 - (T - T_out)
            row = F.log_softmax(row[first : first + len(continuation)].float(), dim=-1)
            targets = torch.tensor(continuation, device=self.device)
            logprob = row.gather(1, targets[:, None]).double().sum().item()
            scores.append((logprob, bool((row.argmax(dim=-1) == targets).all())))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="documents"):
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            results.append(sum(score for score, _ in scores))
        return results

    def generate_until(self, requests, disable_tqdm=False):
        """Paired decoding. Contexts of one length and one set of options share a batch."""
        results, jobs, began = [None] * len(requests), {}, time.perf_counter()
        for i, request in enumerate(requests):
            text, options = request.args
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            n = options.get("max_gen_toks") or options.get("max_new_tokens") or self.max_gen_toks
            n = min(
                int(n), max(1, self.max_length // 2)
            )  # a small model needs room for the question
            heat = float(options.get("temperature") or 0) if options.get("do_sample") else 0.0
            room = self.max_length - n
            ids = (self.tok_encode(text) or [self.eot_token_id])[-room:]
            jobs.setdefault((len(ids), n, heat, tuple(until)), []).append((i, ids))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="writing") as bar:
            for (_, n, heat, until), group in jobs.items():
                for part in batched(group, self.batch_size):
                    texts = self.write([ids for _, ids in part], n, heat, until)
                    for (i, _), text in zip(part, texts):
                        results[i] = text
                    bar.update(len(part))
        self.seconds += time.perf_counter() - began
        return results

    def write(self, rows, n, temperature, until):
        """Texts that continue rows of one length, each up to the first of `until`."""
        idx = torch.tensor(rows, device=self.device)
        cache = KVCache.of(self.model, len(rows), idx.size(1) + n)
        written, texts = [[] for _ in rows], [""] * len(rows)
        end = self.tokens.stop
        steps = generate(self.model, idx, n, temperature, stop=tuple(end), cache=cache,
                         vocab_size=self.tokens.vocab_size)  # fmt: skip
        for ids, _ in steps:
            for row, new in zip(written, ids.tolist()):
                row += [] if row and row[-1] in end else [new]
            texts = [self.tokens.decode_bytes([i for i in row if i not in end])
                     .decode("utf-8", "replace") for row in written]  # fmt: skip
            ended = [row[-1] in end or any(stop in text for stop in until if stop)
                     for row, text in zip(written, texts)]  # fmt: skip
            if all(ended):
                break
        for stop in filter(None, until):
            texts = [text.split(stop)[0] for text in texts]
        return texts


def batched(items, n):
    return [items[i : i + n] for i in range(0, len(items), n)]


def evaluate(model, tokenizer, args):
    """The harness's results for the tasks that args name; ValueError where its data is missing."""
    names = [name.strip() for name in (PAPER if args.tasks == "paper" else args.tasks).split(",")]
    if args.include_path and not os.path.isdir(args.include_path):
        raise ValueError(
            f"--include_path must be a folder of tasks, and {args.include_path} is none"
        )
    manager = TaskManager(include_path=args.include_path)
    for name in names:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, 5)) or "none"
            raise ValueError(f"the harness has no task '{name}'; near names: {near}")
    ours = Harness(model, tokenizer, args.batch_size)
    if ours.max_length < 1024:
        print(f"contexts are cut to the model's block_size, {ours.max_length}", file=sys.stderr)
    try:
        results = simple_evaluate(
            ours, tasks=names, limit=args.limit, num_fewshot=args.num_fewshot, task_manager=manager,
            log_samples=False,
        )  # fmt: skip
    except ImportError as error:
        raise ValueError(f"{args.tasks} needs more packages: {brief(error)}") from error
    except TemplateError as error:
        raise ValueError(f"a template of {args.tasks} fails: {brief(error)}") from error
    except (KeyError, StopIteration) as error:  # its own, of a task that misses what it names
        raise ValueError(f"{args.tasks}: a task lacks data, or names what is not there "
                         f"({brief(error)})") from error  # fmt: skip
    except Exception as error:
        if not from_hub(error):
            raise
        wanted = ", ".join(sorted(set().union(*(data_of(manager, name) for name in names))))
        home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
        raise ValueError(
            f"the data of {args.tasks} is not here and cannot be fetched ({brief(error)}). Wanted "
            f"are {wanted}. The harness looks in {home}/hub and {home}/datasets: fill them on a "
            f"machine with a network (lm_eval downloads what a task names), or set HF_HOME"
        ) from error
    print(make_table(results))
    return json.loads(json.dumps(results, default=handle_non_serializable)), ours.seconds


def data_of(manager, name):
    """Names of the data sets, or local files, behind a task, or a group or tag of tasks."""
    entry = manager.task_index.get(name)
    config = entry and entry.cfg or {}
    if "dataset_path" in config:
        files = (config.get("dataset_kwargs") or {}).get("data_files")
        return {str(files or config["dataset_path"])}
    inner = config.get("task")
    if not isinstance(inner, list):
        inner = [task for task, other in manager.task_index.items() if name in other.tags]
    inner = [task if isinstance(task, str) else task.get("task") for task in inner]
    inner = [task for part in inner for task in (part if isinstance(part, list) else [part])]
    inner = [task for task in inner if isinstance(task, str) and task != name]
    # a task written in Python keeps the name to itself
    return set().union(*(data_of(manager, task) for task in inner)) if inner else {f"{name}'s"}


def from_hub(error):
    """Whether an exception, or one behind it, is about data that cannot be fetched."""
    while error:
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in (
            "requests", "httpx", "huggingface_hub", "datasets",
        ):  # fmt: skip
            return True
        error = error.__cause__ or error.__context__
    return False

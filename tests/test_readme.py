"""README.md: its numbers stand in the JSON files of assets/, and its commands run."""

import gzip
import json
import pathlib
import re
import shlex
import statistics
import subprocess
import sys

import pytest
from test_cli import ROOT, call, workdir  # noqa: F401 (a fixture)
from test_data import gpt2, gpt2_folder, tokenizer_json  # noqa: F401 (fixtures)

import bench
import evaluate
import model
import prepare
import rl
import sample
import train

README = (ROOT / "README.md").read_text(encoding="utf-8")


def asset(name):
    return json.loads((ROOT / "assets" / f"{name}.json").read_text())


def by_length(name):
    """{T: {kind: row}} of a benchmark."""
    table = {}
    for row in asset(name)["rows"]:
        table.setdefault(row["T"], {})[row["kind"]] = row
    return table


def ms(rows, *kinds):
    return [rows[kind]["ms"] for kind in kinds]


def prefill_lines():
    for T, rows in by_length("prefill-cpu").items():
        full, swa, orthros = ms(rows, "full", "swa", "orthros")
        yield f"| {T:,} | {full:,.1f} | {swa:,.1f} | {orthros:,.1f} | {full / orthros:.2f} |"
    for name, n_layer in (("", 36), ("-512k", 36), ("-1m", 8)):
        for T, rows in by_length("prefill-h200" + name).items():
            full, orthros = ms(rows, "full", "orthros")
            limits = [rows[kind]["limit ms"] for kind in ("full", "orthros")]
            yield f"{rows['full']['MiB']:,.0f} MiB at every length"
            if T == 32768:
                yield f"at 32,768 it cannot pass {limits[0] / limits[1]:.2f}"
            yield (f"| {T:,} | {n_layer} | {full:,.0f} | {orthros:,.0f} | {full / orthros:.2f} | "
                   f"{limits[0] / limits[1]:.2f} | {orthros / limits[1]:.2f} |")  # fmt: skip


def kernel_lines():
    calls = {}
    for row in asset("kernels-h200")["rows"]:
        if row["T"] == 131072:
            calls.setdefault(row["call"], {})[row["backend"]] = row
    for call_, rows in calls.items():
        times = [rows[b]["ms"] for b in ("torch", "flash-attn 2", "flash-attn 4")]
        cells = [f"{x:.2f}" for x in (*times, rows["torch"]["limit ms"])]
        yield f"| {call_} | {' | '.join(cells)} |"
    sink, none = (calls[c]["flash-attn 4"]["ms"] for c in ("window, 1 sink", "window"))
    yield f"A sink key costs {sink - none:.1f} ms"


def training_lines():
    for name in ("train-h200", "train-sink-h200"):
        for row in asset(name)["rows"]:
            yield f"| {row['ms']:.1f} | {row['tokens/s']:,.0f} | {row['limit ms']:.1f} |"
    full, orthros = asset("train-h200")["rows"]
    yield f"{orthros['ms'] / full['ms']:.2f} times a step of full"
    yield f"its FLOPs {orthros['limit ms'] / full['limit ms']:.2f} times"
    for name, digits in (("sft-h200-32k", 1), ("sft-h200-8k", 1), ("sft-cpu", 0)):
        short, whole = (row["ms"] for row in asset(name)["rows"])
        yield from (f"{short:.{digits}f} ms", f"{whole:,.{digits}f}", f"{whole / short:.1f} times")
    one, alone, two, _ = [x for x in asset("train-runs-h200").values() if isinstance(x, dict)]
    speed = lambda run: statistics.median(run["tokens/s"])
    slowest = [max(one[what]) for what in ("evaluation s", "saving s")]
    yield "took up to {:.1f} s and a checkpoint up to {:.1f} s".format(*slowest)
    yield from (f"{round(speed(run), -3):,.0f} tokens/s" for run in (one, two))
    yield f"{round(speed(alone), -3):,.0f} on one of them, {speed(two) / speed(alone):.2f} times"


def decode_lines():
    for T, rows in by_length("decode-h200").items():
        single, pair = ms(rows, "full", "orthros")
        limit = rows["full"]["limit ms"]
        yield (f"| {T:,} | {single:.2f} | {pair:.2f} | {pair / single:.2f} | {limit:.2f} | "
               f"{limit / single:.0%} |")  # fmt: skip
    first, written = ([row[key] for row in asset("decode-h200")["answers"]]
                      for key in ("first s", "written/s"))  # fmt: skip
    yield f"both wrote {round(min(written), -1):.0f} tokens/s"
    yield from (f"{first[0]:.2f} s", f"{first[1]:.2f} s", f"{first[0] / first[1]:.1f} times")


def recall_lines():
    yield f"guessing gets {1 / train.RecallData.VALUES:.3f}"
    for row in asset("recall-cpu")["rows"]:
        name = row["variant"].replace(" --scale_offset=False", ", no scale and offset")
        yield f"| {name} | {' | '.join(f'{share:.3f}' for share in row['right'])} |"
    full, orthros, swa = (row["right"] for row in asset("recall-cpu-seed1")["rows"])
    full = full + asset("recall-cpu-seed1-full")["rows"][0]["right"]
    yield f"orthros again had {min(orthros):.3f} everywhere"
    yield "swa {:.3f}, {:.3f}, {:.3f} and {:.3f}".format(*swa)
    yield f"full stayed between {min(full):.2f} and {max(full):.2f}"


RECIPES = [asset(f"recipe-{name}h200") for name in ("", "text2-", "33m-", "124m-")]
RECIPE_TABLES = [{row["variant"]: row for row in record["rows"]} for record in RECIPES]


def less(table, one, other):
    """By how much one variant's loss is above another's, for each seed that both have."""
    return [a - b for a, b in zip(table[one]["losses"], table[other]["losses"])]


def recipe_table_lines():
    cells = lambda values, form: [format(x, form) for x in values] + [""] * (3 - len(values))
    lines = []
    for record, table in zip(RECIPES, RECIPE_TABLES):
        yield f"{record['tokens'] / 1e6:.1f} million tokens"
        yield record["text"].split("M GPT-2")[0] + " million tokens"
        for variant, row in table.items():
            cost = row["FLOPs over full"]
            cost = f"{cost:.2f}" if cost else ""
            lines.append([variant, *cells(row["losses"], ".3f"), cost])
        for variant in ("orthros", "orthros --sink=1"):
            lines.append(cells(less(table, variant, "full"), "+.3f"))
    yield from (re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines)


def recipe_lines():
    first, second, longer, larger = RECIPE_TABLES
    for table, steps, size in ((longer, 1330, "25M"), (larger, 1500, "124M")):
        row, orthros = (table[v] for v in (f"full --max_iters={steps}", "orthros"))
        yield f"{row['FLOPs over full']:.2f} times the steps"
        yield (f"{row['losses'][0]:.3f} at {size}, where Orthros had "
               f"{orthros['losses'][0]:.3f}")  # fmt: skip
    for form, variant in (("mean there is {:.3f} with a standard error of {:.3f}", "orthros"),
                          ("a sink key {:.3f} with {:.3f}", "orthros --sink=1")):  # fmt: skip
        pairs = less(larger, variant, "full")
        yield form.format(statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5)
    sink, so = "orthros --sink=1", "orthros --scale_offset=False"
    mean = lambda *pairs: statistics.mean(less(*pairs))
    yield f"by {mean(second, sink + ' --T_out=1024', sink):.3f} in the mean"
    yield f"by {mean(second, sink + ' --T_out=256', sink):.3f} (seed 1)"
    late = " --full_until=0.8"
    yield f"by {mean(first, 'orthros' + late, 'orthros'):.3f}, and with a sink"
    yield f"by {mean(first, sink + late, sink):.3f} and, after"
    yield f"by {mean(longer, sink + late, sink):.3f} (seed 1)"
    pairs = [x for table in RECIPE_TABLES for x in less(table, sink, "orthros")]
    lower = sum(x < 0 for x in pairs)
    yield f"in {lower} pairs of {len(pairs)}, by {-statistics.mean(pairs):.3f} in the mean"
    yield f"higher by {mean(first, 'orthros', so):.3f} in the mean"
    yield f"by {mean(longer, 'orthros', so):.3f} after"
    fast = mean(second, sink + ", alpha and beta at 10 times the rate", sink)
    yield f"changed it by {fast:+.3f} (seed 1"
    more = second["retnet"]["parameters"] - second["full"]["parameters"]
    yield f"{more / 1e6:.1f} million parameters more"


def recipe_cost_lines():
    full, orthros = (row["ms"] for row in asset("train-2048-h200")["rows"])
    yield f"that is {RECIPE_TABLES[-1]['orthros']['FLOPs over full']:.2f} times the FLOPs"
    yield f"took {orthros:.1f} ms against {full:.1f}, or {orthros / full:.2f} times"
    for T in (16384, 131072):
        shape = model.PRESETS["gpt2"] | {"block_size": T, "window": 128}
        full, orthros = (
            train.forward_flops(model.GPTConfig(**shape, attention=kind), T, T)
            for kind in ("full", "orthros")
        )
        yield f"{orthros / full:.2f} at {T:,}"


def convert_lines():
    convert = asset("convert-h200")
    rows = {row["name"]: row for row in convert["untrained"] + convert["trained"]}
    cost = [rows["orthros W=512 sink=1"][text]["nats"] - convert["untrained"][0][text]["nats"]
            for text in ("prose", "code")]  # fmt: skip
    yield "512 costs {:.2f} to {:.2f} nats".format(*cost)
    at = rows["orthros-1"]["needle"]["8192"]
    yield "({:.2f}, {:.2f} and {:.2f} at depths 0, 0.25 and 0.5)".format(*at)
    found = map(statistics.mean, rows["orthros W=128 sink=1"]["needle"].values())
    yield "{:.2f}, {:.2f} and {:.2f}".format(*found)
    for row in convert["untrained"]:
        yield f"{row['code']['nats']:.3f}, {row['prose']['nats']:.3f}"
    for row in convert["trained"]:
        losses = [convert["validation loss at T = 4096"][row["name"]]]
        losses += [*row["code"]["prefix"].values(), row["prose"]["nats"]]
        found = [f"{statistics.mean(shares):.2f}" for shares in row["needle"].values()]
        yield f"| {' | '.join(f'{x:.3f}' for x in losses)} | {' / '.join(found)} |"


def harness_lines():
    for name, rows, digits in (("cpu", slice(0, 2), 1), ("h200", slice(2, 4), 2)):
        full, orthros = (row["seconds"] for row in asset(f"harness-{name}")["rows"][rows])
        yield from (f"{full:.{digits}f} s", f"{orthros:.{digits}f} s")
        if name == "cpu":
            yield f"{full / orthros:.1f} times"


def laptop_lines():
    minutes = lambda seconds: "{}m{:02}s".format(*divmod(round(seconds), 60))
    for row in asset("laptop-cpu")["rows"]:
        yield f"| {row['variant']} | {row['mean']:.4f} | {minutes(row['seconds'])} |"
    for row in asset("lookups-cpu")["rows"]:
        yield f"| {row['variant']} | {row['accuracy'][0]:.3f} | {minutes(row['seconds'])} |"
    log = (ROOT / "assets" / "rl-addition.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in log]
    first, last = (statistics.mean(part) for part in (rewards[:10], rewards[-10:]))
    yield f"from {first:.2f} in the first ten steps to {last:.2f}"


def lines_by_hand():
    """What no bench writes: times of other commands, computed tables, the paper's own figures."""
    for record in asset("by-hand"):
        yield from record["numbers"]


ALL_LINES = [laptop_lines, convert_lines, prefill_lines, kernel_lines, training_lines, decode_lines,
             recall_lines, recipe_table_lines, recipe_lines, recipe_cost_lines, harness_lines,
             lines_by_hand]  # fmt: skip


@pytest.mark.parametrize("lines", ALL_LINES)
def test_what_the_readme_says_was_measured_is_in_the_assets(lines):
    text = " ".join(README.split())
    for line in lines():
        assert " ".join(line.split()) in text, f"{line} is not in README.md"


def test_every_measured_number_in_the_readme_is_in_the_assets():
    """What is left without those lines, code and versions holds no measured number: one with a
    decimal point, a unit or a percent sign."""
    text = " ".join(re.sub(r"^```.*?^```", "", README, flags=re.M | re.S).split())
    known = {" ".join(line.split()) for lines in ALL_LINES for line in lines()}
    for line in sorted(known, key=len, reverse=True):
        text = re.sub(rf"(?<![\d.,]){re.escape(line)}(?!\d)", "#", text)
    text = re.sub(r"`[^`]*`|\d+\.\d+\.\S+|arXiv \S+", "", text)
    units = r"%|m\d+s| (?:s|ms|h|hours|GB|MB|MiB|MB/s|tokens/s|times)\b"
    assert not re.findall(rf"(?<![\w.])(\d[\d,]*\.\d+\b|\d[\d,]*(?={units}))", text)


# ------------------------------------------------------------------------------------------------
# Commands

MODULES = {"train": train, "sample": sample, "prepare": prepare, "bench": bench, "rl": rl,
           "evaluate": evaluate}  # fmt: skip


def commands(text):
    """(module's name, arguments) of every command of ours in a text."""
    for words in re.findall(r"^(?:pip .* && )?((?:python|torchrun) .*?)(?: #.*)?$", text, re.M):
        program, *argv = shlex.split(words)
        while not argv[0].endswith(".py"):
            program += " " + argv.pop(0)
        yield program, argv[0][:-3], argv[1:]


BLOCKS = "\n".join(re.findall(r"^```\n(.*?)^```", README, re.M | re.S))
INLINE = "\n".join(
    " ".join(x.split()) for x in re.findall(r"`(python \w+\.py (?!.*--help)[^`]*)`", README)
)
COMMANDS = list(commands(BLOCKS + INLINE))


def test_every_flag_in_the_readme_exists():
    assert len(COMMANDS) > 30
    for _, name, argv in COMMANDS:
        argv = [x for x in argv if x != "[--attention=...]"]
        parser = MODULES[name].build_parser()
        args, rest = parser.parse_known_intermixed_args(argv)
        if name == "evaluate" and args.command in ("recall", "compare"):
            rest = train.build_parser().parse_known_args(rest)[1]
        assert not rest, f"{name}.py has no {rest}"


NEEDS_HUB = ("openwebtext --num_shards", "fineweb10B", "hf REPO", "harness")  # run in other tests
TINY = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --window=8"
SHORT = "--max_iters=2 --eval_windows=2 --gradient_accumulation_steps=2 --batch_size=1 --device=cpu"
SMALLER = {
    "train": f"{TINY} {SHORT}", "sample": "--max_new_tokens=3 --device=cpu", "bench": "",
    "prepare": "", "rl": "--max_iters=1 --device=cpu",
    "loss": "--T=64 --max_windows=1", "needle": "--lengths=128 --trials=1",
    "recall": "--max_iters=2 --eval_windows=2", "compare": f"{TINY} {SHORT} --seeds=1",
}  # fmt: skip
NAMES = {"FOLDER_OR_HUB_NAME": "hf", "FOLDER": "notes", "NEW_FOLDER": "back",
         "TEXT.txt": "notes.txt", "FILES": "notes.txt", "DIR": "out",
         "CHATS.jsonl": "chats.jsonl", "PROMPTS.jsonl": "prompts.jsonl",
         "FILE.py:function": "reward.py:reward"}  # fmt: skip


def files_of_a_user():
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=70400, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained("hf")
    pathlib.Path("tokenizer.json").rename("hf/tokenizer.json")
    text = "".join(f"Line {i} of a text that says little.\n" for i in range(400))
    chats = "".join(json.dumps({"prompt": f"{i}?", "response": f"{i}!"}) + "\n" for i in range(30))
    files = {"notes.txt": text, "notes/a.md": text, "notes/b.md": text * 2, "chats.jsonl": chats,
             "prompts.jsonl": chats,
             "reward.py": "reward = lambda prompt, response: 1.0"}  # fmt: skip
    for name, content in files.items():
        pathlib.Path(name).parent.mkdir(exist_ok=True)
        pathlib.Path(name).write_text(content)
    with gzip.open("notes.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": text}) + "\n")
    for name, tokenizer in (("stdlib", "bytes"), ("openwebtext", "gpt2"), ("fineweb-edu", "gpt2")):
        call(prepare.main, "notes.txt", f"--name={name}", f"--tokenizer={tokenizer}")


@pytest.mark.slow
def test_the_commands_of_the_readme_run_one_after_the_other(monkeypatch, tokenizer_json, gpt2):  # noqa: F811
    files_of_a_user()
    monkeypatch.setattr(evaluate, "EPISODES", 8)
    ran = 0
    for program, name, argv in commands(BLOCKS):
        line = " ".join(argv)
        if any(words in line for words in NEEDS_HUB):
            continue
        for word, own in NAMES.items():
            argv = [re.sub(rf"\b{word}\b", own, x) for x in argv]
        smaller = SMALLER[argv[0] if name == "evaluate" else name].split()
        smaller += ["--warmup_iters=1"] if "--warmup_iters" in line else []
        if "--init_from=" in line:  # the model's shape is given
            smaller = [x for x in smaller if x not in TINY.split()]
            smaller += ["--block_size=64"] if name == "train" and "resume" not in line else []
        answers = iter(["hello"])
        monkeypatch.setattr(
            "builtins.input", lambda _: next(answers, None) or exec("raise EOFError")
        )
        print(program, name, argv, smaller)
        if program.startswith("torchrun"):
            flags = ["-m", "torch.distributed.run", "--nproc_per_node=2", str(ROOT / "train.py")]
            subprocess.run([sys.executable, *flags, *argv, *smaller], check=True, timeout=120)
        else:
            call(MODULES[name].main, *argv, *smaller)
        ran += 1
    assert ran > 20

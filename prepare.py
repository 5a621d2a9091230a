"""From text to token shards.

    python prepare.py stdlib                                 Python's own standard library, no download
    python prepare.py FILE|FOLDER... --name=NAME             your own text
        [--glob='*.py'] [--tokenizer=bytes|gpt2] [--val_fraction=0.05]

A dataset is a folder data/NAME of shards train_000000.bin..., val_000000.bin... and a meta.json.
A shard is the format of llm.c and modded-nanogpt: 256 int32 (magic, version, token count), then the
tokens as uint16 or uint32, so shards that others published load as they are.
"""

import argparse
import difflib
import functools
import hashlib
import json
import os
import pathlib
import shutil
import sys
import sysconfig

import numpy as np
from tqdm import tqdm

HEADER_INTS = 256
FORMATS = {  # dtype: (magic, version)
    "uint16": (20240520, 1),
    "uint32": (20240801, 7),
}
DATA_DIR = "data"


# ------------------------------------------------------------------------------------------------
# Command lines: a mistake of the user's is one line and exit code 2


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest flag."""

    def __init__(self, description):
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=as_written, allow_abbrev=False)

    def error(self, message):
        for word in message.split():
            flag = word.split("=")[0].rstrip(":,")
            known = [o for action in self._actions for o in action.option_strings]
            near = difflib.get_close_matches(flag, known, n=1)
            if flag.startswith("--") and flag not in known and near:
                message += f"; did you mean {near[0]}?"
        raise ValueError(message)


def parse_bool(text):
    """'True' or 'False', as in --compile=False."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def run_cli(main):
    """Run main(); what a user can mend becomes one line on stderr and exit code 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        # an OSError from the system carries the file's name, but says it in an odd order
        message = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"{error.filename}: {error.strerror}"
        name = os.path.basename(sys.argv[0])
        print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


# ------------------------------------------------------------------------------------------------
# Tokenizers: encode(text) -> ids, decode_bytes(ids) -> bytes, vocab_size, eot


class ByteTokenizer:
    """The 256 byte values, and one more id that ends a text."""

    name, vocab_size, eot = "bytes", 257, 256

    def encode(self, text):
        """Token ids as a numpy array. What is not valid Unicode becomes U+FFFD."""
        return np.frombuffer(clean(text).encode("utf-8"), dtype=np.uint8)

    def decode_bytes(self, ids):
        return bytes(i for i in ids if i < 256)


class GPT2Tokenizer:
    """GPT-2's vocabulary through tiktoken. Text that looks like a control token stays text."""

    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self):
        import tiktoken

        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever the HTTP library of the day raises
            cache = os.environ.get("TIKTOKEN_CACHE_DIR")
            raise OSError(
                f"the gpt2 vocabulary is not on this machine and cannot be downloaded "
                f"({type(error).__name__}); go online once, or point TIKTOKEN_CACHE_DIR (now "
                f"{cache or 'not set'}) to a folder that tiktoken has filled on another machine"
            ) from error

    def encode(self, text):
        return np.array(self.encoding.encode_ordinary(clean(text)), dtype=np.uint16)

    def decode_bytes(self, ids):
        ids = [i for i in ids if i < self.eot]  # end of text, and the padding of a vocabulary
        return b"".join(self.encoding.decode_tokens_bytes(ids))


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}


@functools.cache
def load_tokenizer(name):
    if name not in TOKENIZERS:
        raise ValueError(f"tokenizer must be one of {', '.join(TOKENIZERS)}, not '{name}'")
    return TOKENIZERS[name]()


def clean(text):
    """Lone surrogates (broken JSON and file names make them) become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ------------------------------------------------------------------------------------------------
# Shards


def write_atomic(path, write):
    """write(file) to a temporary name, then rename: no half file ever has a final name."""
    tmp = f"{path}.tmp"
    try:
        with open(tmp, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def write_shard(path, tokens, dtype):
    """Write token ids to one shard. dtype: 'uint16' or 'uint32'; ids that do not fit raise."""
    tokens = np.asarray(tokens)
    if dtype not in FORMATS:
        raise ValueError(f"a shard's dtype must be uint16 or uint32, not '{dtype}'")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() <= np.iinfo(dtype).max:
        raise ValueError(f"{path}: token ids up to {tokens.max()} do not fit in {dtype}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *FORMATS[dtype], tokens.size

    def write(file):
        file.write(header.tobytes())
        tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(file)

    write_atomic(path, write)


def read_shard(path):
    """The tokens of one shard as a read-only memmap. Anything malformed raises a ValueError."""
    size = os.path.getsize(path)
    if os.path.basename(path) in ("train.bin", "val.bin"):  # nanoGPT's: uint16, no header
        if size == 0 or size % 2:
            raise ValueError(f"{path}: {size} bytes cannot be headerless uint16 tokens")
        start = np.fromfile(path, dtype="<i4", count=1) if size >= 4 else [0]
        if start[0] not in [magic for magic, _ in FORMATS.values()]:
            return np.memmap(path, dtype="<u2", mode="r")
    if size < HEADER_INTS * 4:
        raise ValueError(f"{path}: {size} bytes are too few for a shard's header")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3)
    dtype = {form: name for name, form in FORMATS.items()}.get((magic, version))
    if dtype is None:
        raise ValueError(
            f"{path}: not a token shard (magic {magic}, version {version}); known are {FORMATS}"
        )
    dtype = np.dtype(dtype).newbyteorder("<")
    if count < 1 or size != HEADER_INTS * 4 + count * dtype.itemsize:
        raise ValueError(f"{path}: its header says {count} tokens, which {size} bytes do not hold")
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_INTS * 4, shape=(int(count),))


def load_meta(name):
    """meta.json of data/NAME, or a ValueError that says how to make it."""
    path = os.path.join(DATA_DIR, name, "meta.json")
    if not os.path.exists(path):
        known = sorted(p.parent.name for p in pathlib.Path(DATA_DIR).glob("*/meta.json"))
        raise ValueError(
            f"unknown dataset '{name}': there is no {path}. Known here: "
            f"{', '.join([*known, 'stdlib', 'recall'])}. Make one: prepare.py FILE --name={name}"
        )
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
        return {"dtype": None, **meta, "vocab_size": int(meta["vocab_size"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); run prepare.py again") from error


def load_split(name, split, meta):
    """All shards of one split, in order of their names, as a list of memmaps."""
    folder = pathlib.Path(DATA_DIR, name)
    paths = sorted(folder.glob(f"*{split}*.bin"))
    if not paths:
        raise ValueError(f"{folder} has no *{split}*.bin shard; run prepare.py again")
    shards = [read_shard(str(path)) for path in paths]
    for path, shard in zip(paths, shards):
        if meta["dtype"] and shard.dtype != np.dtype(meta["dtype"]):
            raise ValueError(f"{path} holds {shard.dtype}, but meta.json says {meta['dtype']}")
        biggest = max(int(shard[i : i + 2**24].max()) for i in range(0, len(shard), 2**24))
        if biggest >= meta["vocab_size"]:
            raise ValueError(f"{path}: token id {biggest} >= vocab_size {meta['vocab_size']}")
    return shards


# ------------------------------------------------------------------------------------------------
# Local text


def stdlib_files():
    """The standard library's own .py files, sorted; no tests, nothing that was installed."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    return root, files


def find_files(paths, pattern):
    """Every file named, and every file in a folder named that matches the pattern."""
    files = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")
        files += [f for f in path.rglob(pattern) if f.is_file()] if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no file matches '{pattern}' in {', '.join(map(str, paths))}")
    return files


def prepare(name, documents, tokenizer, source, val_fraction, shard_tokens=10**8):
    """Tokenize documents (key, path) into data/NAME. Same bytes in, same shards out.

    A document goes to the validation split by the hash of its text, so adding or reordering others
    never moves it. An older dataset of that name is replaced when the new one is whole.
    """
    final, folder = pathlib.Path(DATA_DIR, name), pathlib.Path(DATA_DIR, f"{name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    waiting, n_waiting = {"train": [], "val": []}, {"train": 0, "val": 0}
    counts, n_documents = {"train": 0, "val": 0}, 0

    def flush(split):
        if waiting[split]:
            number = len(list(folder.glob(f"{split}_*.bin")))
            tokens = np.concatenate(waiting[split])
            write_shard(str(folder / f"{split}_{number:06d}.bin"), tokens, dtype)
            counts[split] += len(tokens)
            waiting[split].clear()
            n_waiting[split] = 0

    try:
        for _, path in tqdm(sorted(documents), desc="tokenizing", unit="file", disable=None):
            # newlines are kept as they are; bytes that are not UTF-8 become U+FFFD
            text = path.read_bytes().decode("utf-8", "replace")
            if not text:
                continue
            n_documents += 1
            digest = hashlib.sha256(text.encode("utf-8")).digest()
            is_val = int.from_bytes(digest[:8], "big") < val_fraction * 2**64
            split = "val" if is_val else "train"
            ids = np.append(tokenizer.encode(text).astype(dtype), np.array(tokenizer.eot, dtype))
            waiting[split].append(ids)
            n_waiting[split] += len(ids)
            if n_waiting[split] >= shard_tokens:
                flush(split)
        for split in waiting:
            flush(split)
        if not all(counts.values()):
            empty = next(s for s, n in counts.items() if not n)
            raise ValueError(
                f"the {empty} split is empty: {n_documents} documents with text are too few for "
                f"--val_fraction={val_fraction}; give more files, or another fraction"
            )
        meta = {
            "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
            "dtype": dtype, "tokens": counts, "documents": n_documents, "source": source,
        }  # fmt: skip
        text = json.dumps(meta, indent=2, ensure_ascii=False).encode("utf-8")
        write_atomic(str(folder / "meta.json"), lambda file: file.write(text))
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{final}: {counts['train']:,} training and {counts['val']:,} validation tokens")


def prepare_stdlib():
    """The default dataset: nothing to download, a few seconds."""
    root, files = stdlib_files()
    documents = [(f.relative_to(root).as_posix(), f) for f in files]
    source = f"Python {sys.version.split()[0]} standard library"
    prepare("stdlib", documents, load_tokenizer("bytes"), source, val_fraction=0.05)


def main():
    parser = Parser(__doc__)
    parser.add_argument("source", nargs="+", help="'stdlib', or files and folders of text")
    parser.add_argument("--name", help="the dataset becomes data/NAME")
    parser.add_argument("--glob", default="*.txt", help="which files of a folder (default *.txt)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes or gpt2 (default bytes)")
    parser.add_argument(
        "--val_fraction", type=float, default=0.05,
        help="share of documents held out for validation (default 0.05)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.source == ["stdlib"]:
        return prepare_stdlib()
    if not args.name or os.path.basename(args.name) != args.name or args.name in (".", ".."):
        raise ValueError(
            f"--name must be a plain folder name, as in --name=mine, not {args.name!r}"
        )
    if not 0 < args.val_fraction < 1:
        raise ValueError(f"--val_fraction must be between 0 and 1, not {args.val_fraction}")
    tokenizer = load_tokenizer(args.tokenizer)
    documents = [(f.as_posix(), f) for f in find_files(args.source, args.glob)]
    prepare(args.name, documents, tokenizer, " ".join(args.source), args.val_fraction)


if __name__ == "__main__":
    run_cli(main)

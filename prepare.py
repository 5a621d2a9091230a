"""From text to token shards.

    python prepare.py stdlib                        Python's own standard library, no download
    python prepare.py PATH... --name=NAME           your files and folders, - for standard input:
        [--glob='*.md'] [--field=text]              text, .jsonl, .json, .parquet, and .gz of those
    python prepare.py openwebtext | fineweb-edu     from the Hugging Face hub, tokenized here
    python prepare.py hf REPO --files='*.parquet'   any other data set of the hub
    python prepare.py fineweb10B                    shards that are tokens already
    python prepare.py info NAME                     what a dataset holds, every shard checked
    python prepare.py weights MODEL --out_dir=DIR   a Llama or Qwen 3 model of the hub, or its
        [--window=512] [--sink=1]                   folder, as a checkpoint of ours
    python prepare.py export DIR FOLDER             and back

A dataset is a folder data/NAME of shards train_000000.bin..., val_000000.bin... and a meta.json.
A shard is the format of llm.c and modded-nanogpt: 256 int32 (magic, version, token count), then the
tokens as uint16 or uint32, so shards that others published load as they are, once a meta.json is
beside them. Work that was interrupted goes on with the same command.
"""

import argparse
import codecs
import collections
import difflib
import fnmatch
import functools
import gzip
import hashlib
import importlib
import json
import math
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import tempfile
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor

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
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # torch tells of full memory by RuntimeErrors; its others are faults, of ours or its own
        full = isinstance(error, MemoryError)
        full |= any(words in str(error) for words in ("out of memory", "allocate memory"))
        if isinstance(error, RuntimeError) and not full:
            raise
        # an OSError from the system carries the file's name, but says it in an odd order
        message = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"{error.filename}: {error.strerror}"
            if isinstance(error, FileExistsError):
                message = f"{error.filename} is a file, and a folder is needed there"
        if full:
            message = f"{brief(error)}; a smaller batch, length or model needs less memory"
        name = os.path.basename(sys.argv[0])
        print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


# ------------------------------------------------------------------------------------------------
# Tokenizers: encode(text) -> ids, decode_bytes(ids) -> bytes, vocab_size, eot (which ends a
# document), bos (which begins a model's text, or None), eos (which ends it), stop (eot and eos)


class ByteTokenizer:
    """The 256 byte values, and one more id that ends a text."""

    name, vocab_size, bos, eot, eos, stop = "bytes", 257, None, 256, 256, {256}

    def encode(self, text):
        """Token ids as a numpy array. What is not valid Unicode becomes U+FFFD."""
        return np.frombuffer(clean(text).encode("utf-8"), dtype=np.uint8)

    def decode_bytes(self, ids):
        return bytes(i for i in ids if i < 256)


class GPT2Tokenizer:
    """GPT-2's vocabulary through tiktoken. Text that looks like a control token stays text."""

    name, vocab_size, bos, eot, eos, stop = "gpt2", 50257, None, 50256, 50256, {50256}

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
        self.words = {END: [self.eot], GAP: []}  # of encode_documents: word -> ids

    def encode(self, text):
        return self.encoding.encode_to_numpy(clean(text), disallowed_special=())

    def decode_bytes(self, ids):
        ids = [i for i in ids if i < self.eot]  # end of text, and the padding of a vocabulary
        return b"".join(self.encoding.decode_tokens_bytes(ids))

    def encode_documents(self, parts):
        """As the function of that name, but much faster where pyarrow is installed.

        Most words of a text are among a few thousand. So the text is cut into words with numpy, as
        GPT-2's pattern cuts it; equal words are found with pyarrow; tiktoken encodes each new one.
        """
        try:
            import pyarrow
        except ImportError:
            return encode_documents(self, parts)
        if not parts:
            return np.zeros(0, dtype=np.uint16)
        text = "".join(text + (END if ends else GAP) for text, ends in parts)
        chars, data = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), text.encode("utf-8")
        classes = char_classes()[chars]
        if np.count_nonzero(classes == UNKNOWN) != len(parts):
            return encode_documents(self, parts)  # characters newer than this Python
        first = np.flatnonzero(word_starts(chars, classes))  # in characters, then in UTF-8's bytes
        wide = np.flatnonzero(chars > 0x7F)
        extra = 1 + (chars[wide] > 0x7FF) + (chars[wide] > 0xFFFF)
        first += np.append(0, np.cumsum(extra))[np.searchsorted(wide, first)]
        offsets = np.append(first, len(data)).astype(np.int32)
        words = [pyarrow.py_buffer(x) for x in (offsets, data)]
        words = pyarrow.StringArray.from_buffers(len(first), *words).dictionary_encode()
        unique = words.dictionary.to_pylist()
        ids = [self.words.get(word) for word in unique]
        for i, word in enumerate(unique):
            if ids[i] is None:
                ids[i] = self.encoding.encode_ordinary(word)
                if len(word) < 100 and len(self.words) < 2**19:
                    self.words[word] = ids[i]
        count = np.fromiter(map(len, ids), dtype=np.int64)
        flat = np.fromiter((i for word in ids for i in word), dtype=np.uint16)
        begin, word = np.cumsum(count) - count, words.indices.to_numpy()
        count = count[word]
        shift = begin[word] - (np.cumsum(count) - count)  # from place in the text to place in flat
        return flat[np.repeat(shift, count) + np.arange(count.sum())]


END, GAP = chr(0x10FFFF), chr(0x10FFFE)  # end a document, a part of one; no text has them
BLANK, LETTER, NUMBER, OTHER, UNKNOWN = range(5)


@functools.cache
def char_classes():
    """The class of every character, as GPT-2's pattern sees it: \\s, \\p{L}, \\p{N}, the rest."""
    classes = np.full(0x110000, OTHER, dtype=np.uint8)
    kinds = {"L": LETTER, "N": NUMBER}
    for i in range(0x110000):
        category = unicodedata.category(chr(i))
        if category == "Cn":  # not assigned in this Python's Unicode, perhaps in tiktoken's
            classes[i] = UNKNOWN
        elif chr(i).isspace() and not 0x1C <= i <= 0x1F:
            classes[i] = BLANK
        else:
            classes[i] = kinds.get(category[0], OTHER)
    return classes


def word_starts(chars, classes):
    """Where GPT-2's pattern starts a word. chars, classes (n,) -> (n,) bool. The pattern:
    '(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+$|\\s+(?!\\S)|\\s"""
    start = np.append(True, classes[1:] != classes[:-1])  # runs of one class
    start |= classes == UNKNOWN  # each END and GAP by itself
    blank_before = (classes[:-1] == BLANK) & ((classes[1:] != BLANK) & (classes[1:] != UNKNOWN))
    after = np.flatnonzero(blank_before) + 1
    start[after - 1] = True  # the last blank leaves its run...
    start[after] = chars[after - 1] != ord(" ")  # ...and a space joins what follows
    quote = np.flatnonzero((chars == ord("'")) & start)
    a, b = (np.append(chars, [0, 0])[quote + i] for i in (1, 2))
    short = np.isin(a, list(b"sdmt"))
    long = ((a == ord("l")) & (b == ord("l"))) | (
        ((a == ord("v")) | (a == ord("r"))) & (b == ord("e"))
    )
    start[quote[short | long] + 1] = False  # 's, 'd, 'm, 't, 'll, 've, 're are words
    end = np.append(quote[short] + 2, quote[long] + 3)
    start[end[end < len(chars)]] = True
    return start


class HFTokenizer:
    """A Hugging Face tokenizer.json. Its end of text is the first of ENDS that it knows; what
    begins and ends the model's own texts stands in tokenizer_config.json, if that is beside it."""

    ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

    def __init__(self, path):
        self.name = path
        try:
            self.tokenizer = needed("tokenizers", "hf").Tokenizer.from_file(path)
        except ValueError:
            raise
        except Exception as error:  # a plain Exception
            raise ValueError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
        self.tokenizer.no_truncation()  # the file may ask for both
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.bos, eos = (
            ids.get(tokenizer_setting(path, name)) for name in ("bos_token", "eos_token")
        )
        ends = [i for i in (*map(ids.get, self.ENDS), eos) if i is not None]
        if not ends:
            raise ValueError(f"{path} has no end-of-text token; known are {', '.join(self.ENDS)}")
        self.eot, self.vocab_size = ends[0], max(ids.values()) + 1
        self.eos = self.eot if eos is None else eos
        self.stop = {self.eot, self.eos}
        self.special = {
            i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special
        }
        # byte-level vocabularies write each byte as one printable character, the rest moved up
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        self.byte_of = {chr(byte): byte for byte in shown}
        self.byte_of |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
        self.byte_level = "ByteLevel" in str(json.loads(self.tokenizer.to_str())["decoder"])

    def encode(self, text, control=False):
        """control: text that looks like a control token is one, as chat templates mean it."""
        self.tokenizer.encode_special_tokens = not control
        ids = self.tokenizer.encode(clean(text), add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def decode_bytes(self, ids):
        out = bytearray()
        for token in (self.tokenizer.id_to_token(int(i)) for i in ids if i not in self.special):
            if token and self.byte_level and all(c in self.byte_of for c in token):
                out += bytes(self.byte_of[c] for c in token)
            elif token and re.fullmatch("<0x[0-9A-F]{2}>", token):  # SentencePiece's bytes
                out.append(int(token[3:5], 16))
            elif token:
                out += token.replace("\u2581", " ").encode("utf-8")
        return bytes(out)


def tokenizer_setting(path, name):
    """A text, such as bos_token, in the tokenizer_config.json beside a tokenizer.json, or None."""
    try:
        config = pathlib.Path(path).with_name("tokenizer_config.json").read_text(encoding="utf-8")
        token = json.loads(config).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}


@functools.cache
def load_tokenizer(name):
    """'bytes', 'gpt2', or the path of a Hugging Face tokenizer.json."""
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    if not os.path.isfile(name):
        raise ValueError(
            f"tokenizer must be {', '.join(TOKENIZERS)} or a tokenizer.json; '{name}' is no file"
        )
    return HFTokenizer(name)


def carry_tokenizer(name, folder):
    """Copy a tokenizer.json into the folder of a dataset or model; the name to note there."""
    if name is None or not os.path.isfile(name):
        return name
    target = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(target) or not os.path.samefile(name, target):
        shutil.copyfile(name, target)
        for beside in ("chat_template.jinja", "tokenizer_config.json"):
            path = os.path.join(os.path.dirname(name), beside)
            if os.path.exists(path):
                shutil.copyfile(path, os.path.join(folder, beside))
    return "tokenizer.json"


def tokenizer_path(name, folder):
    """The name for load_tokenizer, of what carry_tokenizer noted in that folder."""
    return pathlib.Path(folder, name).as_posix() if name == "tokenizer.json" else name


def tokenizer_of(checkpoint, folder):
    """The tokenizer of a checkpoint that was read from folder."""
    if checkpoint["tokenizer"] is None:
        raise ValueError(f"{folder} has no tokenizer: it was trained on token ids, not on text")
    return load_tokenizer(tokenizer_path(checkpoint["tokenizer"], folder))


def tokenizer_identity(name):
    """The name, or the hash of a tokenizer.json, so that copies of one file are the same. None,
    of data that is no text, stays None."""
    if name is None or name in TOKENIZERS or not os.path.isfile(name):
        return name
    return hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest()


def encode_documents(tokenizer, parts):
    """Token ids of parts [(text, ends), ...], with an end-of-text id where a document ends."""
    ids = [np.zeros(0, dtype=np.uint16)]
    for text, ends in parts:
        ids.append(tokenizer.encode(text))
        if ends:
            ids.append([tokenizer.eot])
    return np.concatenate(ids)


def clean(text):
    """Lone surrogates (broken JSON and file names make them) become U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def needed(module, extra):
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ValueError(
            f"{package} is needed for this ({error}): pip install -e '.[{extra}]'"
        ) from error


def brief(error):
    """An exception of somebody else's on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def write_shard(path, tokens, dtype):
    """Write token ids, or a list of arrays of them, to one shard.

    dtype: 'uint16' or 'uint32'; ids that do not fit raise a ValueError.
    """
    parts = tokens if isinstance(tokens, list) and np.ndim(tokens[0]) else [np.asarray(tokens)]
    if dtype not in FORMATS:
        raise ValueError(f"a shard's dtype must be uint16 or uint32, not '{dtype}'")
    for part in parts:
        if part.size and not 0 <= part.min() <= part.max() <= np.iinfo(dtype).max:
            raise ValueError(f"{path}: token ids up to {part.max()} do not fit in {dtype}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *FORMATS[dtype], sum(part.size for part in parts)

    def write(file):
        file.write(header.tobytes())
        for part in parts:
            file.write(part.astype(np.dtype(dtype).newbyteorder("<")).tobytes())

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
        known = {p.parent.name for p in pathlib.Path(DATA_DIR).glob("*/meta.json")}
        raise ValueError(
            f"unknown dataset '{name}': there is no {path}. Known here: "
            f"{', '.join(sorted(known | {'stdlib', 'recall'}))}. Make one: "
            f"prepare.py FILE --name={os.path.basename(name.rstrip('/'))}"
        )
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
        meta["tokenizer"] = tokenizer_path(meta["tokenizer"], os.path.dirname(path))
        if meta.get("dtype") not in (None, *FORMATS):
            raise ValueError(f"dtype {meta['dtype']}")
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
    return shards


def check_ids(path, shard, meta):
    """Every token id must be in the vocabulary."""
    biggest = max(int(shard[i : i + 2**24].max()) for i in range(0, len(shard), 2**24))
    if biggest >= meta["vocab_size"]:
        raise ValueError(f"{path}: token id {biggest} >= vocab_size {meta['vocab_size']}")


# ------------------------------------------------------------------------------------------------
# Reading documents. A document arrives in parts, so that no text is too long for memory:
# (share of the file read so far, text, whether the document ends with it). Text None: a bad record.

PART = 2**20  # characters
BATCH = 2**22  # characters a thread tokenizes at a time: more words are equal, fewer are looked up


def read_documents(path, field, skip_bad):
    """Parts of all documents of one file, by what its name ends in. Empty ones are left out."""
    path = str(path)
    packed = path.lower().endswith(".gz")
    kind = os.path.splitext(path[:-3] if packed else path)[1].lower()
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as raw:
            size = 0 if path == "-" else os.path.getsize(path)
            file = gzip.open(raw) if packed else raw
            done = lambda: raw.tell() / size if size else 0.0
            if kind not in READERS:
                for text, ends in cut(decoded(file)):
                    yield done(), text, ends
                return
            for share, where, record in READERS[kind](file, done, field):
                problem = wrong(record, field)
                if problem and not skip_bad:
                    raise ValueError(f"{path}, {where}: {problem}; --skip_bad goes on without it")
                for text, ends in [(None, True)] if problem else cut([record[field] or ""]):
                    yield share, text, ends
    except (EOFError, zlib.error, OSError) as error:
        if not skip_bad:
            raise ValueError(f"{path} cannot be read: {error}; --skip_bad goes on") from error
        yield 1.0, None, True


def wrong(record, field):
    """Why a record cannot be used, or None."""
    if isinstance(record, Exception):
        return str(record)
    if not isinstance(record, dict):
        return f"a record is {type(record).__name__}, not an object with fields"
    if field not in record:
        return f"no field '{field}' (--field); there are: {', '.join(record) or 'none'}"
    if not isinstance(record[field], str | None):
        return f"the field '{field}' is {type(record[field]).__name__}, not text"


def decoded(file):
    """Blocks of a text file. Bytes that are not UTF-8 become U+FFFD; line ends stay as they are."""
    decoder, checked = codecs.getincrementaldecoder("utf-8")("replace"), False
    while block := file.read(PART):
        if not checked and b"\0" in block:
            raise OSError(
                "it is not UTF-8 text: NUL bytes are in it, as in UTF-16 or a binary file"
            )
        checked = True
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def cut(blocks):
    """(part, ends) of one document from consecutive strings. Cuts lie between a letter or digit and
    a space, where byte-level tokenizers have no token, unless there is no space for too long."""
    held = ""
    for block in blocks:
        held += clean(block)
        while len(held) > 2 * PART:
            space = re.compile(r"[^\W_](?=[ \n])").search(held, PART, 2 * PART)
            end = space.end() if space else 2 * PART
            yield held[:end], False
            held = held[end:]
    if held:
        yield held, True


# Readers of records: (share of the file read, where in it, the record or what is wrong with it)


def json_lines(file, done, field):
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = error
            yield done(), f"line {number}", record


def json_values(file, done, field):
    """Objects one after the other, or in one array, read as they come."""
    decoder, between, held, number = json.JSONDecoder(), re.compile(r"[\s\ufeff,\[\]]*"), "", 0
    for block in decoded(file):
        held, at = held + block, 0
        while (at := between.match(held, at).end()) < len(held):
            try:
                record, at = decoder.raw_decode(held, at)
            except (ValueError, RecursionError):
                break  # not yet whole, or broken
            number += 1
            yield done(), f"value {number}", record
        held = held[at:]
        if len(held) > 2**28:
            break
    if held:
        yield 1.0, f"value {number + 1}", ValueError("not valid JSON from here on")


def parquet_rows(file, done, field):
    pyarrow, parquet = needed("pyarrow", "data"), needed("pyarrow.parquet", "data")
    try:
        with tempfile.TemporaryFile() as whole:  # a packed one, since parquet is read from its end
            if isinstance(file, gzip.GzipFile):
                shutil.copyfileobj(file, whole)
                file = whole
            table = parquet.ParquetFile(file, pre_buffer=False)
            rows, row = table.metadata.num_rows, 0
            names = table.schema_arrow.names
            if field not in names:
                yield 1.0, "its columns", dict.fromkeys(names)
                return
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield row / rows, f"row {row}", {field: value}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield 1.0, "its structure", ValueError(f"not a whole parquet file ({error})")


READERS = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_values,
    ".parquet": parquet_rows,
}


# ------------------------------------------------------------------------------------------------
# Where files come from: (name, bytes, a function that returns the path on this machine)


def stdlib_files():
    """The standard library's own .py files; no tests, nothing that was installed."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    return [(p.relative_to(root).as_posix(), p.stat().st_size, lambda p=p: p) for p in files]


def local_files(paths, pattern):
    """Every file named, and every file in a folder named that matches the pattern."""
    files, data = {}, pathlib.Path(DATA_DIR).resolve()
    for path in map(pathlib.Path, paths):
        if str(path) == "-":
            found = [path]
        elif not path.exists():
            raise ValueError(f"no such file or folder: {path}")
        elif path.is_dir():
            try:
                found = sorted(f for f in path.rglob(pattern) if f.is_file())
            except NotImplementedError as error:
                raise ValueError(f"--glob must be a pattern such as '*.md': {error}") from error
            if data not in (path.resolve(), *path.resolve().parents):  # not the shards made before
                found = [f for f in found if data not in f.resolve().parents]
        else:
            found = [path]
        files |= {f.resolve(): f for f in found}
    if not files:
        raise ValueError(f"no file matches --glob='{pattern}' in {', '.join(map(str, paths))}")
    size = lambda p: 0 if str(p) == "-" else p.stat().st_size
    return [(p.as_posix(), size(p), lambda p=p: p) for p in files.values()]


def hub_files(repo, pattern, num_shards=None, folder=None):
    """Files of a data set on the Hugging Face hub, or of its copy in the hub's cache when offline.

    A file is downloaded when its turn comes, into that cache or into `folder`.
    """
    hub = needed("huggingface_hub", "data")
    try:
        tree = hub.HfApi().list_repo_tree(repo, repo_type="dataset", recursive=True)
        found = {entry.path: getattr(entry, "size", None) for entry in tree}
        found = {path: size for path, size in found.items() if size is not None}
    except Exception as error:  # no network, no such repository, not allowed: all kinds
        try:
            cache = hub.snapshot_download(repo, repo_type="dataset", local_files_only=True)
        except Exception:
            raise OSError(
                f"cannot list {repo} on the Hugging Face hub, and it is not in the cache "
                f"({brief(error)})"
            ) from error
        print(f"offline ({brief(error)}): only what the cache has of {repo}")
        paths = [p for p in pathlib.Path(cache).rglob("*") if p.is_file()]
        found = {p.relative_to(cache).as_posix(): p.stat().st_size for p in paths}
    names = sorted(path for path in found if fnmatch.fnmatch(path, pattern))[:num_shards]
    if not names:
        some = ", ".join(sorted(found)[:5]) or "nothing"
        raise ValueError(f"{repo} has no file that matches --files='{pattern}'; it has {some}...")

    def fetch(name):
        try:
            return hub.hf_hub_download(repo, name, repo_type="dataset", local_dir=folder)
        except Exception as error:
            raise OSError(f"{repo}/{name} was not downloaded ({brief(error)})") from error

    return [(name, found[name], functools.partial(fetch, name)) for name in names]


# ------------------------------------------------------------------------------------------------
# From documents to a dataset


def prepare(name, files, tokenizer, source, val_fraction, field="text", skip_bad=False,
            max_tokens=None, shard_tokens=10**8):  # fmt: skip
    """Tokenize all documents of files [(name, bytes, fetch)] into data/NAME, in the files' order.

    A document goes to the validation split by the hash of its first part, so adding or reordering
    others never moves it. Shards grow in data/NAME.tmp, and with each one the place in the input is
    noted there: the same command goes on from it and gives the same bytes. An older dataset of that
    name is replaced when the new one is whole.
    """
    final = pathlib.Path(os.path.realpath(pathlib.Path(DATA_DIR, name)))
    folder = final.with_name(f"{final.name}.tmp")
    for place in (final, folder):
        refuse_strangers(place)
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        if old.exists():
            raise ValueError(f"{old} would be lost when {final} is replaced; move or remove it")
        print(f"{final} will be replaced when the new one is whole", file=sys.stderr)
    files = sorted(files)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    changed = lambda path: os.stat(path).st_mtime_ns if os.path.isfile(path) else None
    settings = [[[n, size, changed(n)] for n, size, _ in files], tokenizer_identity(tokenizer.name),
                val_fraction, field, max_tokens, shard_tokens]  # fmt: skip
    state = load_progress(folder, settings, "-" not in [n for n, _, _ in files])
    check_space(files, tokenizer, dtype, max_tokens, state)
    shards, work = Shards(folder, dtype, settings, state), []
    if shards.total() != max_tokens:  # else it was killed after its last shard
        work = batches(files, state, val_fraction, field, skip_bad)
    total = sum(size for _, size, _ in files)
    try:
        place = fill(shards, tokenizer, work, total, max_tokens, shard_tokens)
        if place:
            shards.serve_both_splits(val_fraction)
            shards.flush(place)
        if not all(state["tokens"].values()):
            shutil.rmtree(folder)
            raise ValueError(f"{source} has no text, or too little of it to train and validate on")
        finish(final, folder, tokenizer, dtype, source, state)
    except BaseException:
        if state["shards"] == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def fill(shards, tokenizer, work, total, max_tokens, shard_tokens):
    """Tokenize batches of documents, `total` bytes in all, into shards, up to max_tokens.
    Returns the place in the input behind the last batch, {} if there was none."""
    encode = getattr(tokenizer, "encode_documents", functools.partial(encode_documents, tokenizer))
    workers, place = min(os.cpu_count(), 8), {}
    sys.setswitchinterval(1e-4)  # threads that use numpy give each other the interpreter often
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar,
    ):
        for ids, place in in_order(pool, encode, work, workers + 1):
            room = (max_tokens or math.inf) - shards.total()
            for split in ("train", "val"):
                shards.add(split, ids[split][: min(room, len(ids[split]))])
                room -= min(room, len(ids[split]))
            bar.update(place.pop("bytes") - bar.n)
            bar.set_postfix_str(f"{place['documents']:,} documents, {shards.total():,} tokens")
            if room == 0:
                break
            if max(shards.n_waiting.values()) >= shard_tokens:
                shards.flush(place)
    return place


class Shards:
    """Tokens of both splits on their way to the disk. A flush writes a shard of each, and with them
    the place in the input that they reach, so that a killed run goes on from there."""

    def __init__(self, folder, dtype, settings, state):
        self.folder, self.dtype, self.settings, self.state = folder, dtype, settings, state
        self.clear()
        folder.mkdir(parents=True, exist_ok=True)

    def clear(self):
        self.waiting, self.n_waiting = {"train": [], "val": []}, {"train": 0, "val": 0}

    def total(self):
        return sum(self.state["tokens"].values()) + sum(self.n_waiting.values())

    def add(self, split, ids):
        self.waiting[split].append(ids.astype(self.dtype))
        self.n_waiting[split] += len(ids)

    def flush(self, place):
        state = self.state
        for split, n in self.n_waiting.items():
            if n:
                path = self.folder / f"{split}_{state['shards']:06d}.bin"
                write_shard(str(path), self.waiting[split], self.dtype)
            state["tokens"][split] += n
        self.clear()
        state.update(place, shards=state["shards"] + 1)
        write_json(self.folder / "progress.json", {"settings": self.settings, "state": state})

    def serve_both_splits(self, val_fraction):
        """Where documents are too few for both splits, the end of the text validates."""
        written = self.state["tokens"]
        served = all(written[split] + n for split, n in self.n_waiting.items())
        if served or sum(self.n_waiting.values()) < 2:
            return
        ids = np.concatenate(self.waiting["train"] + self.waiting["val"])
        n = max(1, int(len(ids) * val_fraction))
        self.clear()
        self.add("train", ids[:-n])
        self.add("val", ids[-n:])


def refuse_strangers(folder):
    """A dataset's folder is replaced whole, so it must hold nothing else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; take another --name")
    carried = ("meta.json", "progress.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja")  # fmt: skip
    own = lambda name: name.endswith((".bin", ".tmp")) or name in carried
    strangers = [path.name for path in folder.glob("*") if not own(path.name)]
    if strangers:
        raise ValueError(
            f"{folder} holds what is not a dataset's, such as {strangers[0]}; take another --name"
        )


def load_progress(folder, settings, can_go_on):
    """Where an interrupted run with the same settings stopped, or the beginning."""
    path = folder / "progress.json"
    if path.exists():
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            same = saved["settings"] == json.loads(json.dumps(settings))
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise ValueError(
                f"{folder} is of an interrupted run with other flags or files: repeat that "
                f"command, or remove the folder"
            )
        if can_go_on:  # else both are from standard input, whose text is gone: begin again
            print(f"going on after {saved['state']['documents']:,} documents of {folder}")
            return saved["state"]
    shutil.rmtree(folder, ignore_errors=True)
    return {"file": 0, "part": 0, "documents": 0, "bad": 0, "shards": 0,
            "tokens": {"train": 0, "val": 0}}  # fmt: skip


def check_space(files, tokenizer, dtype, max_tokens, state):
    """Say what will be read and written; a ValueError if there is no room for it."""
    size = sum(n * (2 if name.endswith((".parquet", ".gz")) else 1) for name, n, _ in files)
    tokens = size if tokenizer.name == "bytes" else size / 4  # English; code has more
    need = min(tokens, max_tokens or math.inf) * np.dtype(dtype).itemsize
    os.makedirs(DATA_DIR, exist_ok=True)
    free = shutil.disk_usage(DATA_DIR).free
    read = sum(n for _, n, _ in files)
    print(f"{len(files):,} files, {read / 1e6:,.1f} MB; the shards will take about "
          f"{need / 1e6:,.1f} MB; {free / 1e9:,.1f} GB are free")  # fmt: skip
    if need > free and not state["shards"]:
        raise ValueError(f"about {need / 1e9:,.1f} GB are needed in {DATA_DIR}, {free / 1e9:,.1f} "
                         f"GB are free; take a part with --max_tokens or --num_shards")  # fmt: skip


def batches(files, state, val_fraction, field, skip_bad):
    """Yield ({split: [(text, ends), ...]}, place in the input after it) from `state` on."""
    start, skip = state["file"], state["part"]
    place = {"documents": state["documents"], "bad": state["bad"]}
    batch, size = {"train": [], "val": []}, 0
    before = sum(n for _, n, _ in files[:start])
    for number, (_, n_bytes, fetch) in enumerate(files[start:], start):
        split = None
        for part, (share, text, ends) in enumerate(read_documents(fetch(), field, skip_bad), 1):
            if split is None and text is not None:
                digest = hashlib.sha256(text.encode("utf-8")).digest()
                is_val = int.from_bytes(digest[:8], "big") < val_fraction * 2**64
                split = "val" if is_val else "train"
            if number > start or part > skip:
                place["bad" if text is None else "documents"] += ends
                if text is None and split:  # damaged in the middle of a document
                    batch[split].append(("", True))
                elif text is not None:
                    batch[split].append((text, ends))
                    size += len(text)
                place |= {"file": number, "part": part, "bytes": int(before + share * n_bytes)}
                if size >= BATCH:
                    yield batch, place.copy()
                    batch, size = {"train": [], "val": []}, 0
            split = None if ends else split
        before += n_bytes
    if "file" in place:
        yield batch, place | {"bytes": before}


def in_order(pool, encode, work, ahead):
    """encode() of each split of each batch on all cores, in the order of the input."""
    both = lambda batch: {split: encode(parts) for split, parts in batch.items()}
    pending = collections.deque()
    for batch, place in work:
        pending.append((pool.submit(both, batch), place))
        if len(pending) > ahead:
            future, place = pending.popleft()
            yield future.result(), place
    for future, place in pending:
        yield future.result(), place


def finish(final, folder, tokenizer, dtype, source, state):
    """Write meta.json, and let the folder take the place of an older one."""
    name = carry_tokenizer(tokenizer.name, folder)
    write_json(folder / "meta.json", {
        "tokenizer": name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
        "dtype": dtype, "tokens": state["tokens"], "documents": state["documents"],
        "skipped": state["bad"], "source": source,
    })  # fmt: skip
    old = final.with_name(f"{final.name}.old")
    replaces = final.exists()
    if replaces:
        final.rename(old)
    folder.rename(final)
    (final / "progress.json").unlink(missing_ok=True)
    if replaces:
        shutil.rmtree(old)
    skipped = f"; {state['bad']:,} bad records skipped" if state["bad"] else ""
    print(f"{final.name}: {state['tokens']['train']:,} training and {state['tokens']['val']:,} "
          f"validation tokens of {state['documents']:,} documents{skipped}")  # fmt: skip


def write_json(path, value):
    text = json.dumps(value, indent=2).encode("utf-8")
    write_atomic(str(path), lambda file: file.write(text))


def prepare_stdlib():
    """The default dataset: nothing to download, a few seconds."""
    prepare("stdlib", stdlib_files(), load_tokenizer("bytes"), STDLIB, val_fraction=0.05)


def download_fineweb10B(name, num_shards):
    """Shards that are tokens already, as published for modded-nanogpt: the validation shard and the
    first `num_shards` of training, 100M tokens each. Those that are here and whole stay."""
    folder = pathlib.Path(DATA_DIR, name)
    if (folder / "meta.json").exists() and load_meta(name).get("source") != FINEWEB:
        raise ValueError(f"{folder} is another dataset; take another --name")
    files = hub_files(FINEWEB, "*.bin", folder=str(folder))
    files = [f for f in files if "val" in f[0]] + [f for f in files if "train" in f[0]][:num_shards]
    missing = []
    for file in files:
        try:
            read_shard(str(folder / file[0]))
        except (ValueError, OSError):
            missing.append(file)
    size, free = sum(n for _, n, _ in missing), shutil.disk_usage(".").free
    print(f"{len(missing)} of {len(files)} shards to download, {size / 1e9:,.1f} GB; "
          f"{free / 1e9:,.1f} GB are free")  # fmt: skip
    if size > free:
        raise ValueError(f"{size / 1e9:,.1f} GB do not fit; take fewer with --num_shards")
    for _, _, fetch in tqdm(missing, desc="downloading", unit="shard", disable=None):
        read_shard(fetch())
    counts = {"train": 0, "val": 0}
    for path in folder.glob("*.bin"):  # those of an earlier call count too
        counts["val" if "val" in path.name else "train"] += len(read_shard(str(path)))
    write_json(folder / "meta.json", {
        "tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "dtype": "uint16", "tokens": counts,
        "source": FINEWEB,
    })  # fmt: skip
    print(f"{folder}: {counts['train']:,} training and {counts['val']:,} validation tokens")


def info(name):
    """Print what data/NAME holds, and check every shard whole. A bad one is a ValueError."""
    name = os.path.basename(os.path.normpath(name))
    meta = load_meta(name)
    print("\n".join(f"{key:12}{value}" for key, value in meta.items()))
    broken = []
    for split in ("train", "val"):
        for path in sorted(pathlib.Path(DATA_DIR, name).glob(f"*{split}*.bin")):
            try:
                shard = read_shard(str(path))
                check_ids(path, shard, meta)
                print(f"{path.name:32}{len(shard):>16,} tokens  {shard.dtype}  "
                      f"{path.stat().st_size / 1e6:>10,.1f} MB  whole")  # fmt: skip
            except ValueError as error:
                broken.append(str(error))
                print(f"{path.name:32}{error}")
    if broken:
        raise ValueError(f"{len(broken)} shards are broken, the first: {broken[0]}")
    tokenizer = load_tokenizer(meta["tokenizer"])
    tokens = load_split(name, "val", meta)[0][:100_000]
    ends = np.flatnonzero(tokens == tokenizer.eot)[:3]  # the first three documents
    starts = np.append(0, ends + 1)
    for start in starts[starts < len(tokens)][:3]:
        end = next((end for end in ends if end >= start), len(tokens))
        text = tokenizer.decode_bytes(tokens[start : min(end, start + 200)].tolist())
        print(f"\n--- a validation document\n{text.decode('utf-8', 'replace')}")


def build_parser():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", nargs="+", help="stdlib, openwebtext, fineweb-edu, fineweb10B, hf REPO, info "
        "NAME, weights MODEL, export DIR FOLDER, or files and folders (./stdlib for a folder of "
        "that name)")  # fmt: skip
    add("--name", help="the dataset becomes data/NAME (default for the hub: the data set's)")
    add("--glob", default="*.txt", help="which files of a folder (default *.txt)")
    add("--files", default="*.parquet", help="which files of hf REPO (default *.parquet)")
    add("--field", default="text", help="field or column that holds the text (default text)")
    add("--tokenizer", help="bytes, gpt2 or a tokenizer.json (default bytes; gpt2 for the hub)")
    add("--val_fraction", type=float, help="share of documents held out for validation (default "
        "0.05; 0.0005 for the hub)")  # fmt: skip
    add("--num_shards", type=int, help="only the first N files of the hub's data set")
    add("--max_tokens", type=int, help="stop after about N tokens")
    add("--out_dir", help="weights: where the checkpoint goes")
    add("--window", type=int, help="weights: keys a base token sees (default 512)", default=512)
    add("--sink", type=int, help="weights: first keys that stay visible (default 1)", default=1)
    add("--skip_bad", action="store_true", help="leave out and count what cannot be read")
    return parser


def main():
    args = build_parser().parse_intermixed_args()
    command, *rest = args.source
    for flag in ("num_shards", "max_tokens"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1, not {getattr(args, flag)}")
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        raise ValueError(f"--val_fraction must be between 0 and 1, not {args.val_fraction}")
    if command in ("weights", "export"):
        return move_weights(args, command, rest)
    single = command in (*CORPORA, "stdlib", "fineweb10B")
    if (single and rest) or (command in ("hf", "info") and len(rest) != 1):
        takes = "one name" if command in ("hf", "info") else "nothing"
        raise ValueError(f"{command} takes {takes} after it, not {' '.join(rest) or 'nothing'}")
    if command == "info":
        return info(rest[0])
    hub = command in (*CORPORA, "hf", "fineweb10B")
    name = args.name or (command if single else rest[0].split("/")[-1] if hub else None)
    if not name or not re.fullmatch(r"\w[\w.-]*", name) or name.endswith((".tmp", ".old")):
        raise ValueError(f"--name must be a plain folder name, as in --name=mine, not {name!r}")
    if command == "fineweb10B":
        for flag in ("tokenizer", "max_tokens", "val_fraction"):
            if getattr(args, flag) is not None:
                raise ValueError(f"--{flag} means nothing to fineweb10B: its shards are tokens")
        return download_fineweb10B(name, args.num_shards)
    files, source = find_text(args, command, rest)
    tokenizer = load_tokenizer(args.tokenizer or ("gpt2" if hub else "bytes"))
    val_fraction = args.val_fraction or (HUB_VAL_FRACTION if hub else 0.05)
    prepare(
        name, files, tokenizer, source, val_fraction, args.field, args.skip_bad, args.max_tokens
    )


def move_weights(args, command, rest):
    """A Hugging Face model in, or one of ours out."""
    import weights  # needs torch

    if len(rest) != (2 if command == "export" else 1):
        raise ValueError("it is: weights MODEL --out_dir=DIR, or: export DIR FOLDER")
    if command == "export":
        return weights.export_weights(*rest)
    if not args.out_dir:
        raise ValueError("weights needs --out_dir, where the checkpoint goes")
    weights.import_weights(rest[0], args.out_dir, window=args.window, sink=args.sink)


def find_text(args, command, rest):
    """(files as prepare() takes them, what to call them) of the command line's sources."""
    if command == "stdlib":
        return stdlib_files(), STDLIB
    if command != "hf" and command not in CORPORA:
        return local_files(args.source, args.glob), " ".join(args.source)
    repo, pattern = CORPORA.get(command) or (rest[0], args.files)
    files = hub_files(repo, pattern, args.num_shards)
    size = sum(n for _, n, _ in files) / 1e9
    print(
        f"{len(files)} files of {repo} come into the hub's cache one by one, {size:,.1f} GB in all"
    )
    return files, f"{repo} {pattern}"


STDLIB = f"Python {sys.version.split()[0]} standard library"
FINEWEB = "kjj0/fineweb10B-gpt2"
HUB_VAL_FRACTION = 0.0005  # millions of documents: a few thousand of them are enough
CORPORA = {
    "openwebtext": ("Skylion007/openwebtext", "plain_text/*.parquet"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
}


if __name__ == "__main__":
    run_cli(main)

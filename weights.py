"""Open checkpoints in and out: Hugging Face folders of Llama and Qwen 3 models.

Called by prepare.py (weights, export). Both architectures are GPT with other names: half-split
RoPE, RMSNorm, SwiGLU, grouped heads; Qwen 3 adds QK-norm. Weights are moved, never computed with.
"""

import json
import math
import os
import pathlib
import re
from dataclasses import asdict

import torch
from tqdm import tqdm

from model import GPT, GPTConfig, read_checkpoint, save_checkpoint, warn_replaced
from prepare import brief, carry_tokenizer, needed, tokenizer_path, tokenizer_setting, write_json

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
OUTER = {"wte": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    **{f"attn.{x}": f"self_attn.{x}" for x in
       ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{x}": f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
}  # fmt: skip


def their_name(name):
    """Our parameter's name -> theirs, or None for alpha and beta, which they do not have."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if block and block[2] in INNER:
        return f"model.layers.{block[1]}.{INNER[block[2]]}.weight"
    outer = name.removesuffix(".weight")
    return f"{OUTER[outer]}.weight" if outer in OUTER else None


def our_config(theirs, **changes):
    """config.json -> GPTConfig. What we would compute otherwise is a ValueError, never a guess."""
    kind = (theirs.get("architectures") or ["none"])[0]
    if kind not in ARCHITECTURES:
        raise ValueError(f"architecture {kind} is not one of {', '.join(ARCHITECTURES)}")
    for field, plain in (
        ("quantization_config", None), ("attention_bias", False), ("mlp_bias", False),
        ("use_sliding_window", False), ("hidden_act", "silu"), ("partial_rotary_factor", 1.0),
    ):  # fmt: skip
        if theirs.get(field, plain) not in (plain, None):
            raise ValueError(f"{field} = {theirs[field]} is not supported, only {plain}")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in ("default", "llama3"):
        raise ValueError(f"RoPE scaling '{scaling}' is not supported, only default and llama3")
    theta = rope.get("rope_theta", theirs.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has no rope_theta")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    llama3 = {"rope_type": "llama3"} | {n: rope[n] for n in names if n in rope}
    if scaling == "llama3" and len(llama3) < 5:
        raise ValueError(f"llama3 RoPE scaling needs {', '.join(names)}")
    try:
        heads = theirs["num_attention_heads"]
        return GPTConfig(**{
            "block_size": theirs["max_position_embeddings"], "vocab_size": theirs["vocab_size"],
            "n_layer": theirs["num_hidden_layers"], "n_head": heads,
            "n_kv_head": theirs.get("num_key_value_heads") or heads,
            "n_embd": theirs["hidden_size"], "n_hidden": theirs["intermediate_size"],
            "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
            "qk_norm": kind == "Qwen3ForCausalLM", "rope_theta": float(theta),
            "rope_scaling": llama3 if scaling == "llama3" else None,
            "norm_eps": theirs["rms_norm_eps"],
            "tie_embeddings": theirs.get("tie_word_embeddings", False), **changes,
        })  # fmt: skip
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}") from error
    except TypeError as error:
        raise ValueError(f"config.json has a value of the wrong kind ({error})") from error


def find_tensors(folder):
    """{their name: safetensors file}, one or many by the index. All missing files are listed."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files ({error!r})") from error
    elif not (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} has no model.safetensors and no index of several")
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} of its files: {', '.join(missing)}")
    found = {}
    safe_open = needed("safetensors", "hf").safe_open
    for name in sorted(names):
        try:
            with safe_open(folder / name, "pt") as file:
                found |= dict.fromkeys(file.keys(), folder / name)
        except Exception as error:  # SafetensorError is a plain Exception
            raise ValueError(f"{folder / name} cannot be read: {error}") from error
    return found


def check_tensors(folder, config, files):
    """({file: {our name: theirs}}, number of parameters), if all that config asks for is there."""
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in GPT(config).state_dict().items()}
    wanted = {name: their_name(name) for name in shapes if their_name(name)}
    if config.tie_embeddings:
        del wanted["lm_head.weight"]  # a copy of it in the file adds nothing
    lacking = sorted(set(wanted.values()) - files.keys())
    known = {*wanted.values(), "lm_head.weight"}
    surplus = sorted(n for n in files.keys() - known if not n.endswith("rotary_emb.inv_freq"))
    for names, what in ((lacking, "lacks"), (surplus, "has, and we would not use,")):
        if names:
            raise ValueError(
                f"{folder} {what} {len(names)} tensors, such as {', '.join(names[:3])}"
            )
    by_file = {path: {} for path in sorted(set(files.values()))}
    for name, theirs in wanted.items():
        by_file[files[theirs]][name] = theirs
    for path, names in by_file.items():
        with needed("safetensors", "hf").safe_open(path, "pt") as file:
            for name, theirs in names.items():
                shape = file.get_slice(theirs).get_shape()
                if shape != shapes[name]:
                    raise ValueError(
                        f"{path}: {theirs} is {shape}, config.json says {shapes[name]}"
                    )
    return by_file, sum(math.prod(shapes[name]) for name in wanted)


def their_folder(source):
    """(path, its config.json) of a folder, or of a hub's model, which is downloaded."""
    folder = pathlib.Path(source)
    if not folder.is_dir():
        if source.count("/") != 1 or source[0] in "./~":  # a hub's name is OWNER/NAME
            raise ValueError(f"there is no folder {source}")
        hub = needed("huggingface_hub", "hf")
        try:
            folder = pathlib.Path(
                hub.snapshot_download(source, allow_patterns=["*.json", "*.jinja", "*.safetensors"])
            )
        except Exception as error:
            raise OSError(
                f"{source} is no folder and no model on the hub ({brief(error)})"
            ) from error
    try:
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from error
    if not isinstance(theirs, dict):
        raise ValueError(f"{folder}/config.json is not an object")
    return folder, theirs


def import_weights(source, out_dir, **changes):
    """A Hugging Face folder or hub name -> out_dir/ckpt.pt, bit for bit, one tensor at a time.

    changes: fields of GPTConfig, such as window and sink. Everything is checked before the first
    tensor is read; alphas and betas are added when the checkpoint is loaded.
    """
    folder, theirs = their_folder(source)
    config = our_config(theirs, **changes)
    files = find_tensors(folder)
    by_file, size = check_tensors(folder, config, files)
    warn_replaced(out_dir)
    safe_open, state, dtypes = needed("safetensors", "hf").safe_open, {}, set()
    total = sum(map(len, by_file.values()))
    with tqdm(total=total, desc="reading", unit="tensor", disable=None) as bar:
        for path, names in by_file.items():
            with safe_open(path, "pt") as file:
                for name, theirs_name in names.items():
                    state[name] = file.get_tensor(theirs_name)
                    dtypes.add(str(state[name].dtype).removeprefix("torch."))
                    bar.update()
    if config.tie_embeddings:
        state["lm_head.weight"] = state["wte.weight"]
    os.makedirs(out_dir, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        print(f"{folder} has no tokenizer.json: sample.py will not know this model's text")
    save_checkpoint(out_dir, {
        "model": state, "config": asdict(config), "step": 0, "best_val_loss": math.inf, "args": {},
        "tokenizer": carry_tokenizer(str(tokenizer), out_dir) if tokenizer.exists() else None,
    })  # fmt: skip
    carry_template(folder, out_dir)
    print(f"{out_dir}/ckpt.pt: {size:,} parameters, {', '.join(sorted(dtypes))}, "
          f"{config.attention}, window {config.window}, sink {config.sink}")  # fmt: skip


def carry_template(folder, out_dir):
    """The model's chat template, if it has one, as out_dir/chat_template.jinja."""
    path = folder / "chat_template.jinja"
    text = path.read_text(encoding="utf-8") if path.exists() else None
    text = text or tokenizer_setting(path, "chat_template")
    if not isinstance(text, str):
        return
    for name in ("eos_token", "bos_token"):  # templates use their names
        text = f"{{%- set {name} = {json.dumps(tokenizer_setting(path, name) or '')} -%}}" + text
    pathlib.Path(out_dir, "chat_template.jinja").write_text(text, encoding="utf-8")


def export_weights(out_dir, folder):
    """out_dir/ckpt.pt -> a Hugging Face folder, where a plain Transformer can hold it exactly."""
    checkpoint = read_checkpoint(out_dir, mmap=True)
    config, state = GPTConfig(**checkpoint["config"]), checkpoint["model"]
    if config.attention not in ("full", "orthros"):
        raise ValueError(f"a plain Transformer has no window: attention is {config.attention}")
    for name, tensor in state.items():
        plain = 1.0 if ".alpha_" in name else 0.0
        if their_name(name) is None and (tensor != plain).any():
            raise ValueError(
                f"a plain Transformer has no scale and offset of queries, and {name} is not "
                f"{plain} everywhere; only attention full or untrained scales can be exported"
            )
    folder = pathlib.Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    tied = config.tie_embeddings
    names = {
        their_name(n): n for n in state if their_name(n) and not (tied and n == "lm_head.weight")
    }
    tensors = {theirs: state[ours].contiguous() for theirs, ours in names.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file = needed("safetensors.torch", "hf").save_file
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except Exception as error:  # SafetensorError is a plain Exception
        (folder / "model.safetensors").unlink(missing_ok=True)
        raise OSError(f"cannot write {folder}/model.safetensors: {error}") from error
    kind = ARCHITECTURES[1 if config.qk_norm else 0]
    write_json(folder / "config.json", {
        "architectures": [kind], "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size, "hidden_size": config.n_embd,
        "intermediate_size": config.n_hidden, "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head, "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim, "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling, "tie_word_embeddings": tied, "hidden_act": "silu",
        "torch_dtype": str(state["wte.weight"].dtype).removeprefix("torch."),
    })  # fmt: skip
    if checkpoint["tokenizer"] == "tokenizer.json":
        carry_tokenizer(tokenizer_path("tokenizer.json", out_dir), folder)
    print(f"{folder}: {kind}, {len(tensors)} tensors")

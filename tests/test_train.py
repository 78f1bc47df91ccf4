"Chapter 90 at its edges: bad options, interruption, resume, the data order, the step's host reads, gradients that are not finite."
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dormouse_fused import train
from dormouse_fused.triton import INTERPRET

CPU = torch.device("cpu")
DEVICE = CPU if INTERPRET else torch.device("cuda", 0)
TINY = train.Config(steps=8, batch=2, length=32, dim=32, heads=2, layers=1, lr=1e-2, warmup=3, optimizer="adamw")
SMALL = replace(TINY, dim=16, heads=1, batch=1, length=16)  # Muon+ in the interpreter
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled for it")
RECURRING = replace(SMALL, layers=3, recursions=2)
MIXERS = ["gdn", "kda", "gdn2"]
OPTIMIZERS = ["muon_plus", "adamw"]
ROUTERS = ["expert", "token"]
SIZES = f"""--device {DEVICE} --batch 1 --length 16 --dim 16 --heads 1 --layers 1 --op torch --compare none --every 2
            --optimizer adamw""".split()


@pytest.fixture
def text():
    data = bytes(range(32, 127)) * 20
    return train.text_from_bytes(data[:1700], data[1700:]).to(DEVICE)


@pytest.fixture
def place(tmp_path):
    "A scratch directory with a text file, and the options that keep the command inside it."
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(32, 127)) * 20)
    return ["--text", str(file), "--figure", str(tmp_path / "loss.svg")], tmp_path


def held(run):
    "Everything that a step changes."
    return [*run.model.parameters(), *(x for state in run.optimizer.state.values() for x in state.values())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def faulty(monkeypatch, bad, value=math.nan):
    "From now on, at steps for which `bad` holds, an element of a gradient is `value`."
    update = train.update

    def spoil(p):
        p.grad[3, 5].fill_(value)

    def updated(run):
        hooks = [run.model.blocks[0].up.weight.register_post_accumulate_grad_hook(spoil)] if bad(run.done) else []
        update(run)
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(train, "update", updated)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A text and a checkpoint of four steps on it."
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 20)
    options = ["--text", f"{folder}/text.txt", "--figure", f"{folder}/loss.svg", "--checkpoint", f"{folder}/c.pt", "--steps", "4"]
    assert train.main([*options, *SIZES]) == 0
    return (folder / "c.pt").read_bytes()


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


@pytest.mark.parametrize("mixer", MIXERS)
def test_causal_in_every_position(text, mixer):
    torch.manual_seed(0)
    model = train.ByteLM(32, 2, 2, train.mixing_op("torch", DEVICE, mixer), mixer).to(DEVICE)
    tokens = train.Windows(text.train, 20, 1, 0)(0)
    with torch.no_grad():
        full = model(tokens)
        for t in range(1, 21):
            edited = tokens.clone()
            edited[:, t:] = 1
            assert torch.equal(model(edited)[:, :t], full[:, :t])


@pytest.mark.parametrize(("mixer", "optimizer", "residual"), [
    ("gdn", "muon_plus", "add"), ("gdn", "adamw", "attnres"), *((mixer, "adamw", "add") for mixer in MIXERS)])
def test_one_step_costs_no_host_read(text, mixer, optimizer, residual):
    run = train.Run("torch", replace(SMALL, mixer=mixer, optimizer=optimizer, residual=residual), text, DEVICE)
    train.update(run)
    with train.HostReads() as reads:
        train.update(run)
    assert reads.count == 0
    with train.HostReads() as reads:
        bool(run.losses[0] > 0)
    assert reads.count == 1


def test_only_warnings_of_waiting_count_as_host_syncs(text, monkeypatch):
    "Turning PyTorch's watch on warns, too: that it does not see every synchronizing operation."
    run = train.Run("torch", TINY, text, DEVICE)
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


@pytest.mark.parametrize("op", ["torch", pytest.param("dormouse", marks=INTERPRETED)])
@pytest.mark.parametrize("options", [*(dict(mixer=mixer) for mixer in MIXERS),
                                     *(dict(layers=3, recursions=3, router=router) for router in ROUTERS)])
def test_step_runs_on_fake_tensors(text, monkeypatch, op, options):
    "A read of a value, or a shape that depends on one, raises on fake tensors. Optimizers have no addresses there."
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)  # fake parameters can't be moved
    firewall = SimpleNamespace(mask_loss=lambda loss: loss, check=lambda: None)
    optimizer = SimpleNamespace(param_groups=[], step=lambda verdict: None, zero_grad=lambda set_to_none: None)
    monkeypatch.setattr(train, "make_optimizer", lambda *_: (optimizer, firewall))
    with FakeTensorMode():
        fake = replace(text, train=torch.empty(1700, dtype=torch.uint8))
        run = train.Run(op, replace(TINY, **options), fake, CPU)
        for _ in range(3):
            train.update(run)
        with pytest.raises(DataDependentOutputException):
            float(run.losses[0])
    assert run.done == 3


@pytest.mark.parametrize("mixer", MIXERS)
def test_peers_start_equal_and_train_alike(text, mixer):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(TINY, steps=3, dim=16, mixer=mixer)
    runs = [train.Run(op, config, text.to(device), device) for op in ("dormouse", "torch")]
    for ours, plain in zip(runs[0].model.parameters(), runs[1].model.parameters()):
        assert torch.equal(ours, plain)
    assert train.fit(runs, every=2) == 0
    assert (runs[0].losses - runs[1].losses).abs().max() < 1e-4
    assert all(run.losses[-1] < run.losses[0] for run in runs)
    assert all(run.syncs == 0 and len(run.step_ms) == 2 for run in runs)


@pytest.mark.parametrize(("mixer", "dtype"), [*((mixer, "fp32") for mixer in MIXERS), ("gdn2", "bf16")])
def test_runs_repeat_bitwise(text, mixer, dtype):
    runs = [train.Run("torch", replace(TINY, steps=4, dim=16, dtype=dtype, mixer=mixer), text, DEVICE) for _ in range(2)]
    train.fit(runs, every=3)
    assert torch.equal(runs[0].losses, runs[1].losses)
    assert runs[0].losses[-1] < runs[0].losses[0]


@pytest.mark.parametrize(("mixer", "optimizer"), [("gdn", "muon_plus"), *((mixer, "adamw") for mixer in MIXERS)])
def test_resume_is_bitwise_and_a_longer_run_starts_as_a_shorter(place, capsys, mixer, optimizer):
    common, folder = place
    sizes = [*SIZES, "--mixer", mixer, "--optimizer", optimizer]
    def run(*options):
        return train.main([*common, *options])
    assert run("--checkpoint", f"{folder}/a.pt", "--steps", "4", *sizes) == 0
    assert run("--checkpoint", f"{folder}/b.pt", "--steps", "2", *sizes) == 0
    capsys.readouterr()
    assert run("--checkpoint", f"{folder}/b.pt", "--steps", "4", "--resume", "--device", str(DEVICE)) == 0
    printed = capsys.readouterr().out
    assert f"{optimizer}, mixer {mixer}, residual add, ops: torch" in printed and f"\nmixer {mixer} " in printed
    assert dict(line.rsplit(maxsplit=1) for line in printed.splitlines() if "optimizer " in line or "skipped" in line) == {
        "optimizer": optimizer, "skipped steps": "0"}
    a, b = train.load(f"{folder}/a.pt"), train.load(f"{folder}/b.pt")
    for state in (a, b):
        assert state["config"]["mixer"] == mixer and state["config"]["optimizer"] == optimizer
        assert state["runs"]["torch"]["firewall"].tolist() == [4, 0, 0, 0, 0]
    assert torch.equal(a["runs"]["torch"]["losses"], b["runs"]["torch"]["losses"])
    for name, value in a["runs"]["torch"]["model"].items():
        assert torch.equal(value, b["runs"]["torch"]["model"][name])
    assert (folder / "loss.svg").read_text().startswith("<?xml")


def test_an_old_checkpoint_goes_on_as_gated_deltanet_with_adamw(place, capsys):
    "As written before there was a choice of either, and before the firewall counted."
    common, folder = place
    for name, steps in (("straight", "5"), ("old", "3")):
        assert train.main([*common, "--checkpoint", f"{folder}/{name}.pt", "--steps", steps, *SIZES]) == 0
    state = train.load(f"{folder}/old.pt")
    options = "mixer", "optimizer", "residual", "recursions", "router"
    assert [state["config"].pop(name) for name in options] == ["gdn", "adamw", "add", 0, "expert"]
    del state["runs"]["torch"]["firewall"]
    torch.save(state, f"{folder}/old.pt")
    resume = [*common, "--device", str(DEVICE), "--checkpoint", f"{folder}/old.pt", "--steps", "5", "--resume"]
    for option, made in (("mixer", "gdn"), ("optimizer", "adamw")):
        other = {"mixer": "gdn2", "optimizer": "muon_plus"}[option]
        with pytest.raises(SystemExit):
            train.main([*resume, f"--{option}", other])
        assert f"{option}: the checkpoint was made with {made}, got {other}" in capsys.readouterr().err
    assert train.main(resume) == 0
    assert torch.equal(saved_losses(f"{folder}/straight.pt"), saved_losses(f"{folder}/old.pt"))


def test_parameters_of_the_mixers(text):
    "Gated DeltaNet's are those of the checkpoints from before there was a choice, made in the same order."
    names = {mixer: {name.removeprefix("blocks.0.mixer."): tuple(p.shape) for name, p in
                     train.Run("torch", replace(TINY, mixer=mixer), text, DEVICE).model.named_parameters() if ".mixer." in name}
             for mixer in MIXERS}
    shared = {"qkv.weight": (96, 32), "conv.weight": (4, 96), "gate.weight": (32, 32), "norm.weight": (16,), "out.weight": (32, 32)}
    low_rank = {"A_log": (2,), "dt_bias": (32,), "decay.0.weight": (16, 32), "decay.1.weight": (32, 16)}
    assert names["gdn"] == shared | {"A_log": (2,), "dt_bias": (2,), "decay.weight": (2, 32), "strength.weight": (2, 32)}
    assert names["kda"] == shared | low_rank | {"strength.weight": (2, 32)}
    assert names["gdn2"] == shared | low_rank | {"erase.weight": (32, 32), "write.weight": (32, 32)}
    torch.manual_seed(7)
    drawn = [torch.nn.Linear(32, 96, bias=False).weight, torch.empty(4, 96).uniform_(-1, 1) / 2]
    drawn += [torch.nn.Linear(32, n, bias=False).weight for n in (2, 2, 32, 32)]
    drawn += [torch.empty(2).uniform_(1, 16).log()]
    torch.manual_seed(7)
    mixer = train.Mixer(32, 2, None)
    made = [mixer.qkv.weight, mixer.conv.weight, mixer.decay.weight, mixer.strength.weight, mixer.gate.weight, mixer.out.weight]
    assert all(map(torch.equal, drawn, [*made, mixer.A_log]))


@pytest.mark.parametrize("mixer", MIXERS)
def test_gates_of_the_mixers(mixer):
    "What the op is given: raw decays, and rates that are raw for a sigmoid in the kernel or between 0 and 1."
    given = {}
    def op(**inputs):
        given.update(inputs)
        return inputs["v"], None
    layer = train.MIXERS[mixer](32, 2, op)
    layer(torch.randn(3, 5, 32))
    per_channel = (3, 5, 2, 16)
    assert given["g"].shape == ((3, 5, 2) if mixer == "gdn" else per_channel)
    assert given["dt_bias"].shape == ((2,) if mixer == "gdn" else (32,)) and given["A_log"].shape == (2,)
    assert given["use_gate_in_kernel"] and given["use_qk_l2norm_in_kernel"]
    if mixer == "gdn2":
        assert given["b"].shape == given["w"].shape == per_channel and "beta" not in given
        assert all(0 < x.min() and x.max() < 1 for x in (given["b"], given["w"]))
    else:
        assert given["beta"].shape == (3, 5, 2) and given["use_beta_sigmoid_in_kernel"]


def test_ops_of_the_mixers(monkeypatch):
    rules = {"gdn": "gated_delta_rule", "kda": "kda", "gdn2": "gdn2"}
    for mixer, rule in rules.items():
        ours, plain, fla = (train.mixing_op(op, torch.device("cuda"), mixer) for op in ("dormouse", "torch", "fla"))
        assert ours.__module__.startswith("dormouse_fused.") and ours.__name__ == f"chunk_{rule}"
        assert plain.__module__ == ours.__module__ and plain.__name__ == f"naive_chunk_{rule}"
        assert fla.__module__.startswith(f"fla.ops.{rule}.") and fla.__name__ == f"chunk_{rule}"
    with pytest.raises(ValueError, match="mixer: expected one of gdn, kda, gdn2, got 'mamba'"):
        train.mixing_op("torch", CPU, "mamba")
    with pytest.raises(ValueError, match="mixer: expected one of gdn, kda, gdn2, got 'mamba'"):
        replace(TINY, mixer="mamba")
    monkeypatch.setitem(sys.modules, "fla.ops.gdn2", None)
    with pytest.raises(ValueError, match="op: .*fla.ops.gdn2.* .pip install"):
        train.mixing_op("fla", torch.device("cuda"), "gdn2")


@INTERPRETED
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
    command = [sys.executable, "-c", code, *common, "--device", str(DEVICE), "--checkpoint", f"{folder}/cut.pt"]
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
    config, path = replace(SMALL, steps=5), tmp_path / "c.pt"
    op = train.mixing_op("torch", DEVICE, "gdn")
    monkeypatch.setattr(train, "mixing_op", lambda name, device, mixer: op)
    def fresh():
        return [train.Run(name, config, text, DEVICE) for name in ("torch", "fla")]
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
    run, path = train.Run("torch", TINY, text, DEVICE), tmp_path / "c.pt"
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


@INTERPRETED
def test_the_interpreter_computes_the_same_when_it_looks_once():
    "And what it has replaced is put back after a launch, as before."
    from triton import language as tl
    from triton.runtime import interpreter

    from dormouse_fused.triton import l2norm

    x, now = torch.randn(7, 20), interpreter._patch_lang
    interpreter._patch_lang = getattr(now, "always", now)
    try:
        want = l2norm(x)
        train.patch_once()
        once = interpreter._patch_lang
        train.patch_once()
        assert interpreter._patch_lang is once and once.always is not once
        assert torch.equal(l2norm(x), want) and tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
    finally:
        interpreter._patch_lang = now


@pytest.mark.parametrize("mixer", MIXERS)
def test_matrices_are_muons_and_the_rest_is_adamws(text, mixer):
    run = train.Run("torch", replace(TINY, mixer=mixer, optimizer="muon_plus"), text, DEVICE)
    names = {id(p): name for name, p in run.model.named_parameters()}
    muon, adam = ([names.pop(id(p)).removeprefix("blocks.0.").removeprefix("mixer.") for p in group["params"]]
                  for group in run.optimizer.param_groups)
    own = {"gdn": set(), "kda": {"decay.0.weight", "decay.1.weight"},
           "gdn2": {"decay.0.weight", "decay.1.weight", "erase.weight", "write.weight"}}[mixer]
    assert set(muon) == {"qkv.weight", "gate.weight", "out.weight", "up.weight", "down.weight"} | own and not names
    assert {"embed.weight", "conv.weight", "norms.0.weight", "norm.weight", "A_log", "dt_bias"} <= set(adam)
    assert [(group["use_muon"], group["weight_decay"]) for group in run.optimizer.param_groups] == [(True, 0.1), (False, 0.0)]
    with pytest.raises(ValueError, match="optimizer: expected one of muon_plus, adamw, got 'sgd'"):
        replace(TINY, optimizer="sgd")


@pytest.mark.parametrize(("optimizer", "value"), [("muon_plus", math.nan), ("adamw", math.nan), ("adamw", -math.inf)])
def test_a_bad_gradient_costs_its_step_and_no_more(text, monkeypatch, tmp_path, optimizer, value):
    "At the first step too, and a resume knows of it."
    faulty(monkeypatch, lambda step: step in (0, 2), value)
    def fresh():
        return train.Run("torch", replace(SMALL, steps=5, optimizer=optimizer), text, DEVICE)
    run, path = fresh(), tmp_path / "c.pt"
    weights = [p.detach().clone() for p in run.model.parameters()]
    train.update(run)
    assert same(weights, list(run.model.parameters())) and not any(x.any() for x in held(run)[len(weights):])
    train.update(run)
    before = [x.clone() for x in held(run)]
    train.update(run)
    assert same(before, held(run))
    train.save(path, [run])
    resumed = fresh()
    train.restore(train.load(path), [resumed])
    assert resumed.skipped == 2
    for each in (run, resumed):
        train.fit([each])
        assert each.skipped == 2 and each.firewall.read()[:2] == (5, 2) and each.losses.isfinite().all()
    assert same(held(run), held(resumed)) and torch.equal(run.losses, resumed.losses) and not same(before, held(run))
    assert "skipped steps" in (rows := {name: values for name, *values in train.summary([run])}) and rows["skipped steps"] == ["2"]


def test_a_loss_that_is_not_finite_is_kept_as_it_came_and_not_followed(text, monkeypatch):
    run = train.Run("torch", replace(SMALL, steps=4), text, DEVICE)
    loss = run.model.loss
    monkeypatch.setattr(run.model, "loss", lambda window: loss(window) + (math.inf if run.done == 1 else 0))
    assert train.fit([run], every=2) == 0
    assert run.losses.isfinite().tolist() == [True, False, True, True] and math.isfinite(run.recent)
    assert run.firewall.read()[:3] == (4, 0, 1) and run.lost == 0
    assert "nan" not in dict(row[:2] for row in train.summary([run]))["loss, last 20 steps"]


@pytest.mark.parametrize("every", [1, 3, train.PATIENCE])
def test_a_run_that_only_skips_ends(text, monkeypatch, tmp_path, every):
    "And its checkpoint stays that of the last good step, whatever the cadence of reads."
    faulty(monkeypatch, lambda step: step >= every)
    run, path = train.Run("torch", replace(SMALL, steps=30), text, DEVICE), tmp_path / "c.pt"
    with pytest.raises(FloatingPointError, match=f"a gradient of torch is not finite at step {every + 1}, nor at any after it up to"):
        train.fit([run], every=every, checkpoint=path, save_every=1)
    assert train.PATIENCE <= run.done - every < train.PATIENCE + every
    assert train.load(path)["runs"]["torch"]["done"] == every


def test_a_run_that_recovers_goes_on(text, monkeypatch, capsys):
    faulty(monkeypatch, lambda step: 1 <= step < train.PATIENCE)
    run = train.Run("torch", replace(SMALL, steps=train.PATIENCE + 1), text, DEVICE)
    assert train.fit([run], every=1, progress=True) == 0
    assert run.skipped == train.PATIENCE - 1 and run.lost == 0 and f"({run.skipped} skipped)" in capsys.readouterr().err


@pytest.mark.skipif(INTERPRET, reason="a CPU has no stream to wait for")
@pytest.mark.parametrize("options", [
    *(dict(optimizer=name) for name in OPTIMIZERS), dict(optimizer="muon_plus", residual="attnres"),
    *(dict(layers=3, recursions=3, router=name) for name in ROUTERS)])
def test_no_step_waits_for_the_gpu(text, monkeypatch, options):
    faulty(monkeypatch, lambda step: step == 3)
    run = train.Run("dormouse", replace(TINY, **options), text, DEVICE)
    train.update(run)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            train.update(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.firewall.read()[:2] == (5, 1)


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
    ("--mixer nothing", "invalid choice"),
    ("--optimizer sgd", "invalid choice"),
    ("--router nobody --recursions 2", "invalid choice"),
    ("--router token", "router: expected only with recursions"),
    ("--recursions 1", "recursions: expected from 2 to 8, or 0 for none, got 1"),
    ("--recursions 2 --layers 2", "layers: expected at least 3 with recursions, got 2"),
    ("--recursions 2 --residual attnres", "residual: expected add with recursions, got attnres"),
    ("--mixer gdn2 --device cpu --op fla", "need a GPU"),
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
    ("--dim 64", "dim: the checkpoint was made with 16, got 64"),
    ("--seed 3", "seed: the checkpoint was made with 0"),
    ("--dtype fp32", "dtype: the checkpoint was made with bf16") if torch.cuda.is_available() else
    ("--dtype bf16", "dtype: the checkpoint was made with fp32"),
    ("--mixer kda", "mixer: the checkpoint was made with gdn, got kda"),
    ("--optimizer muon_plus", "optimizer: the checkpoint was made with adamw, got muon_plus"),
    ("--residual attnres", "residual: the checkpoint was made with add, got attnres"),
    ("--recursions 2", "recursions: the checkpoint was made with 0, got 2"),
    ("--router expert", "router: expected only with recursions"),
    ("--op dormouse", "the checkpoint holds torch"),
    ("--compare dormouse", "the checkpoint holds torch"),
    ("", "step 4 is reached"),
    ("--steps 3", "step 4 is reached"),
])
def test_resume_refuses_what_would_not_be_the_same_run(place, trained, capsys, options, message):
    common, folder = place
    (folder / "c.pt").write_bytes(trained)
    with pytest.raises(SystemExit):
        train.main([*common, "--checkpoint", f"{folder}/c.pt", "--resume", *options.split()])
    assert message in capsys.readouterr().err


def test_resume_refuses_damage_and_another_text(place, trained, capsys):
    common, folder = place
    path, whole = folder / "c.pt", trained
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


@pytest.mark.parametrize(("residual", "dtype"), [("attnres", "fp32"), ("attnres", "bf16"), ("block_attnres", "bf16")])
def test_attention_over_depth(text, residual, dtype, tmp_path):
    "Every read learns, nothing reads what comes later, and a run continues with the same bits."
    config = replace(SMALL, steps=3, residual=residual, dtype=dtype)
    run, other = (train.Run("torch", config, text, DEVICE) for _ in range(2))
    names = {name for name, _ in run.model.named_parameters() if "depth" in name}
    assert names == {"depth.query", "depth.rms_weight"} and run.model.depth.query.shape == (3, 16)
    train.fit([run], every=3, checkpoint=tmp_path / "c.pt")
    assert run.syncs == 0 and run.losses.isfinite().all()
    moved = run.model.depth.query.abs().amax(1) > 0
    assert not moved[0] and moved[1:].all()  # the first read has one source, and no choice
    with torch.no_grad(), run.autocast():
        tokens = text.val[:12].long()[None]
        edited = tokens.clone()
        edited[:, 7:] = 65
        assert torch.equal(run.model(tokens)[:, :7], run.model(edited)[:, :7])
    train.restore(train.load(tmp_path / "c.pt"), [other])
    assert all(map(torch.equal, run.model.parameters(), other.model.parameters()))


def test_what_attention_over_depth_is_not_for():
    with pytest.raises(ValueError, match="residual: expected one of add, attnres, block_attnres, got 'block'"):
        replace(TINY, residual="block")
    with pytest.raises(ValueError, match="layers: expected at most 31 for attnres, got 32"):
        replace(TINY, layers=32, residual="attnres")
    with pytest.raises(ValueError, match="layers: expected at most 126 for block_attnres, got 127"):
        replace(TINY, layers=127, residual="block_attnres")


def test_depth_weights(text):
    "Rows are distributions over what came before; a query that looks for one source finds it."
    run = train.Run("torch", replace(SMALL, layers=2, residual="attnres"), text, DEVICE)
    even = train.depth_weights(run)
    assert even.shape == (5, 5) and torch.equal(even.triu(1), torch.zeros_like(even))
    want = torch.ones(5, 5, device=DEVICE).tril()
    assert torch.allclose(even, want / want.sum(1, keepdim=True), atol=1e-6)
    with torch.no_grad():
        run.model.depth.query[4] = 1e4 * torch.randn(16, device=DEVICE)
    chosen = train.depth_weights(run)
    assert torch.allclose(chosen.sum(1), torch.ones(5, device=DEVICE), atol=1e-5)
    assert torch.equal(chosen[:4], even[:4]) and (chosen[4] - even[4]).abs().max() > 0.05
    with pytest.raises(ValueError, match="run: expected residual attnres, got add"):
        train.depth_weights(train.Run("torch", SMALL, text, DEVICE))


def test_reads_are_no_matrices_and_do_not_decay(text):
    for optimizer in OPTIMIZERS:
        run = train.Run("torch", replace(SMALL, residual="attnres", optimizer=optimizer), text, DEVICE)
        of = {id(p): group for group in run.optimizer.param_groups for p in group["params"]}
        for p in run.model.depth.parameters():
            assert of[id(p)]["weight_decay"] == 0 and not of[id(p)].get("use_muon", False)


@pytest.mark.parametrize("router", ROUTERS)
def test_recursions_resume_bitwise_and_say_what_they_are(place, capsys, router):
    common, folder = place
    def run(name, *options):
        return train.main([*common, "--checkpoint", f"{folder}/{name}.pt", *options])
    sizes = [*SIZES, "--layers", "3", "--recursions", "2", "--router", router]
    assert run("a", "--steps", "4", *sizes) == 0 and run("b", "--steps", "2", *sizes) == 0
    with pytest.raises(SystemExit):
        run("b", "--steps", "4", "--resume", "--router", ROUTERS[router == "expert"])
    assert f"router: the checkpoint was made with {router}" in capsys.readouterr().err
    assert run("b", "--steps", "4", "--resume", "--device", str(DEVICE)) == 0
    printed = capsys.readouterr().out
    assert f"residual add, 2 recursions of 1 by {router} choice, ops: torch" in printed
    table = dict(line.split("  ", 1) for line in printed.splitlines() if line.startswith(("recursions", "tokens in each", "host syncs")))
    assert table["recursions"].strip() == f"2, {router} choice" and table["host syncs per step"].strip() == "0"
    assert table["tokens in each, validation"].count("%") == 2
    a, b = (train.load(f"{folder}/{name}.pt") for name in "ab")
    assert a["config"]["recursions"] == 2 and a["config"]["router"] == router
    assert same(list(a["runs"]["torch"]["model"].values()), list(b["runs"]["torch"]["model"].values()))
    assert torch.equal(a["runs"]["torch"]["losses"], b["runs"]["torch"]["losses"]) and len(a["runs"]["torch"]["losses"]) == 4


@pytest.mark.parametrize("router", ROUTERS)
def test_middle_layers_recur_and_the_others_do_not(text, router):
    "With a router of zeros: expert choice seats all and then the first half, token choice stops after one recursion."
    model = train.Run("torch", replace(RECURRING, layers=4, router=router), text, DEVICE).model
    first, *middle, last = model.blocks
    tokens = text.val[None, :16].long()
    with torch.no_grad():
        torch.nn.init.zeros_(model.recursions.router_weight)
        x = train.through([first], model.embed(tokens))
        if router == "token":
            x = x + 0.5 * train.through(middle, x)
        else:
            x = x + 0.05 * train.through(middle, x)
            x = torch.cat([x[:, :8] + 0.05 * train.through(middle, x[:, :8]), x[:, 8:]], 1)
        want = torch.nn.functional.linear(model.norm(train.through([last], x)), model.embed.weight)
        assert torch.allclose(model(tokens), want, atol=1e-5)


@pytest.mark.parametrize(("router", "dtype"), [("expert", "fp32"), ("token", "bf16")])
def test_recursions_learn_without_host_reads_and_are_judged_causally(text, router, dtype):
    config = replace(RECURRING, steps=3, router=router, dtype=dtype)
    run, plain = train.Run("torch", config, text, DEVICE), train.Run("torch", replace(config, recursions=0), text, DEVICE)
    own = {name for name, _ in run.model.named_parameters()} - {name for name, _ in plain.model.named_parameters()}
    assert own == {"recursions.router_weight"} and run.model.recursions.router_weight.shape == (2, 16)
    start = run.model.recursions.router_weight.detach().clone()
    train.fit([run], every=3)
    assert run.syncs == 0 and run.losses.isfinite().all() and (run.model.recursions.router_weight != start).all(1).all()
    tokens = text.val[None, :16].long()
    edited = tokens.clone()
    edited[:, 7:] = 65
    with torch.no_grad(), run.autocast():
        window, run.model.recursions.loss_weight = text.val[None, :17].long(), 100.0
        assert run.model.loss(window) > 20 and run.model.eval().loss(window) < 7  # without the routers' losses
        assert torch.equal(run.model(tokens)[:, :7], run.model(edited)[:, :7])
    run.model.train()
    shares = train.recursion_shares(run)
    assert len(shares) == 2 and 1 >= shares[0] >= shares[1] >= 0 and run.model.training
    assert train.recursion_shares(plain) == []


def test_expert_choice_sees_the_future_in_training_only(text):
    model = train.Run("torch", RECURRING, text, DEVICE).model
    tokens = text.val[None, :16].long()
    edited = [torch.cat([tokens[:, :8], torch.full_like(tokens[:, 8:], byte)], 1) for byte in range(65, 75)]
    with torch.no_grad():
        for training in (True, False):
            model.train(training)
            same_past = [torch.equal(model(tokens)[:, :8], model(other)[:, :8]) for other in edited]
            assert not all(same_past) if training else all(same_past)


@INTERPRETED
@pytest.mark.parametrize("router", ROUTERS)
def test_peers_train_alike_with_recursions(text, router):
    runs = [train.Run(op, replace(RECURRING, steps=2, recursions=3, router=router), text, CPU) for op in ("dormouse", "torch")]
    assert same(*(list(run.model.parameters()) for run in runs)) and train.fit(runs, every=2) == 0
    assert (runs[0].losses - runs[1].losses).abs().max() < 1e-4 and all(run.syncs == 0 for run in runs)


def test_what_recursions_are_not_for():
    for options, message in [(dict(recursions=1), "recursions: expected from 2 to 8, or 0 for none, got 1"),
                             (dict(recursions=9), "recursions: expected from 2 to 8, or 0 for none, got 9"),
                             (dict(layers=2), "layers: expected at least 3 with recursions, got 2"),
                             (dict(residual="block_attnres"), "residual: expected add with recursions, got block_attnres"),
                             (dict(router="top"), "router: expected one of expert, token, got 'top'")]:
        with pytest.raises(ValueError, match=message):
            replace(RECURRING, **options)


def test_routers_are_no_matrices_and_do_not_decay(text):
    for optimizer in OPTIMIZERS:
        run = train.Run("torch", replace(RECURRING, optimizer=optimizer), text, DEVICE)
        group, = (g for g in run.optimizer.param_groups if any(p is run.model.recursions.router_weight for p in g["params"]))
        assert group["weight_decay"] == 0 and not group.get("use_muon", False)

"AdamW: the formula's bits, torch's states, verdicts, awkward parameters, and what a step must notice."

import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from optimizers import DEVICE, leaves, problem, result, steps

from dormouse_fused import adamw
from dormouse_fused.adamw import AdamW, naive_adamw, rounded_adamw
from dormouse_fused.multi_tensor import Verdict
from dormouse_fused.parity import fenced, rel_err, same_bits
from dormouse_fused.triton import INTERPRET

GPU = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
DTYPES = torch.float32, torch.bfloat16, torch.float16
OPTIONS = [
    {}, dict(amsgrad=True), dict(maximize=True), dict(weight_decay=0.0), dict(lr=0.1, betas=(0.8, 0.95), eps=1e-3), dict(betas=(0.0, 0.9)),
]  # fmt: skip
SMALL = (7,), (9, 30), (0,), (), (3, 5)
HEADER = Path(torch.__file__).parent / "include/ATen/native/cuda/fused_adam_utils.cuh"
SAME_FORMULA = HEADER.exists() and "std::fma(beta1" in HEADER.read_text()  # torch before 2.11 computes in float64
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setitem(adamw.TILE, "CHUNK", 256)
    monkeypatch.setitem(adamw.TILE, "WARPS", 1)


def run(params, grads, verdicts=None, optimizer=AdamW, **options):
    params = leaves(params)
    return steps(optimizer(params, **options), params, grads, verdicts)


def formula(params, grads, how=rounded_adamw, amsgrad=False, **options):
    out = []
    for i, p in enumerate(params):
        m = v = torch.zeros_like(p)
        top = m if amsgrad else None
        for t, step in enumerate(grads):
            p, m, v, top = how(p, step[i].to(p.dtype), m, v, t + 1, top=top, **options)
        out.append(dict(p=p, exp_avg=m, exp_avg_sq=v) | (dict(max_exp_avg_sq=top) if amsgrad else {}))
    return out


def without_step(states):
    return [{n: t for n, t in s.items() if n != "step"} for s in states]


def verdict(scale=1.0, go=1.0, sanitize=False):
    return Verdict(torch.tensor([scale, go], device=DEVICE), sanitize)


def close(a, b, tol):
    for x, y in zip(a, b, strict=True):
        for n in y:
            assert not x[n].numel() or rel_err(x[n], y[n]) <= tol, n


@each_dtype
@each_option
def test_the_formula(dtype, options, small_tiles):
    "Several chunks, several blocks, a last block that isn't whole, empty tensors, scalars; in the interpreter bit by bit."
    params, grads = problem(*SMALL, (600,), (512,), dtype=dtype)
    got, want = run(params, grads, **options), formula(params, grads, **options)
    if DEVICE == "cpu":
        assert same_bits(without_step(got), want)
    close(got, want, 1e-6 if dtype is torch.float32 else 1e-2)
    assert all(s["step"] == len(grads) and s["step"].dtype == torch.float32 for s in got)


@each_option
def test_the_oracle_is_torch(options):
    params, grads = problem((7,), (3, 4))
    params, grads = [p.double() for p in params], [[g.double() for g in step] for step in grads]
    close(formula(params, grads, naive_adamw, **options), without_step(run(params, grads, optimizer=torch.optim.AdamW, **options)), 1e-14)


@each_option
def test_errors(options):
    "Against float64 with the same betas: each of three steps rounds a few times, by up to 2**-24."
    params, grads = problem((1000,))
    betas = torch.tensor(options.get("betas", (0.9, 0.999)))
    betas = tuple(betas.double().tolist())
    want = formula([p.double() for p in params], grads, naive_adamw, **options | dict(betas=betas))
    close(run(params, grads, **options), want, 3 * 2**-23)


def test_like_torch():
    "Parameters as torch's own; v differs by what float32 does to 1 - 0.999, which is 1.3e-5."
    params, grads = problem(*SMALL, (200,))
    got, want = run(params, grads), run(params, grads, optimizer=torch.optim.AdamW)
    for a, b in zip(got, want, strict=True):
        if a["p"].numel():
            assert rel_err(a["p"], b["p"]) < 3 * 2**-23
            assert rel_err(a["exp_avg"], b["exp_avg"]) < 1e-6 and rel_err(a["exp_avg_sq"], b["exp_avg_sq"]) < 2e-5


def test_groups_have_settings_of_their_own():
    params, grads = problem((5,), (6,), (7,))
    mine = leaves(params)
    opt = AdamW([dict(params=mine[:1], lr=0.1, amsgrad=True), dict(params=mine[1:2], weight_decay=0.0, betas=(0.5, 0.9)), dict(params=[])])
    opt.add_param_group(dict(params=mine[2:], maximize=True, eps=0.1))
    got = steps(opt, mine, grads)
    for i, options in enumerate((dict(lr=0.1, amsgrad=True), dict(weight_decay=0.0, betas=(0.5, 0.9)), dict(maximize=True, eps=0.1))):
        assert same_bits(got[i], run(params[i : i + 1], [step[i : i + 1] for step in grads], **options)[0])


def test_dtypes_in_one_optimizer():
    params, grads = problem((50,), (60,), (70,))
    cast = [(t, dtype) for t, dtype in zip(range(3), DTYPES)]
    params, grads = [params[i].to(d) for i, d in cast], [[step[i].to(d) for i, d in cast] for step in grads]
    for i, got in enumerate(run(params, grads)):
        assert got["exp_avg"].dtype == DTYPES[i]
        assert same_bits(got, run(params[i : i + 1], [step[i : i + 1] for step in grads])[0])


def test_missing_gradients():
    params, grads = problem((5,), (6,), (7,), steps=4)
    some = [[a, None, c if n % 2 else None] for n, (a, _, c) in enumerate(grads)]
    got = run(params, some)
    assert same_bits(got[0], run(params[:1], [s[:1] for s in some])[0])
    assert same_bits(got[1], dict(p=params[1]))
    assert same_bits(got[2], run(params[2:], [[s[2]] for s in some if s[2] is not None])[0])


def test_nothing_to_do():
    params = leaves(problem((3,))[0])
    opt = AdamW(params)
    opt.step()
    assert not opt.state
    empty = leaves([torch.empty(0, 4, device=DEVICE)])
    (got,) = steps(AdamW(empty), empty, [[torch.empty(0, 4, device=DEVICE)]] * 2)
    assert got["step"] == 2 and got["exp_avg"].shape == (0, 4)
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])


def test_layouts():
    "Transposed, channels last, inside NaNs, not aligned; gradients laid out as the parameter or otherwise."
    params, grads = problem((5, 9), (2, 3, 4, 5), (37,), (40,))
    odd = [
        params[0].t().contiguous().t(),
        params[1].contiguous(memory_format=torch.channels_last),
        fenced(params[2]),
        fenced(params[3], before=1023),
    ]
    fence = torch.full((1000,), 7.0, device=DEVICE)
    fence[101:138] = params[2]
    odd[2] = fence[101:138]
    mine = [torch.nn.Parameter(p) for p in odd]
    grads[1][0], grads[2][1] = grads[1][0].t().contiguous().t(), grads[2][1].contiguous(memory_format=torch.channels_last)
    opt = AdamW(mine)
    got, want = steps(opt, mine, grads), run(params, grads)
    for a, b, p in zip(got, want, mine):
        assert same_bits({n: t.contiguous() for n, t in a.items()}, b) and opt.state[p]["exp_avg"].stride() == p.stride()
    assert (fence[:101] == 7).all() and (fence[138:] == 7).all() and odd[3].data_ptr() % 16


def test_loaded_states_in_another_layout():
    params, grads = problem((5, 9), steps=4)
    first = leaves(params)
    opt = AdamW(first)
    steps(opt, first, grads[:2])
    second = [torch.nn.Parameter(first[0].detach().t().contiguous().t())]
    other = AdamW(second)
    other.load_state_dict(opt.state_dict())
    got = steps(other, second, grads[2:])
    assert same_bits([{n: t.contiguous() for n, t in got[0].items()}], run(params, grads))


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_skipped(bad, sanitize):
    "A step that is skipped leaves no trace, at any time, and the next goes on as if it hadn't been."
    params, grads = problem((50,), (6, 4), steps=3)
    for at in range(3):
        broken = [[g.clone() for g in step] for step in grads]
        broken[at][1][2, 3] = bad
        verdicts = [verdict(float("nan") if n == at else 1.0, float(n != at), sanitize) for n in range(3)]
        for amsgrad in False, True:
            got = run(params, broken, verdicts, amsgrad=amsgrad)
            assert same_bits(got, run(params, grads[:at] + grads[at + 1 :], amsgrad=amsgrad))


def test_skipped_from_the_start():
    params, grads = problem((50,), steps=2)
    (got,) = run(params, grads, [verdict(go=0.0)] * 2)
    assert same_bits(got["p"], params[0]) and got["step"] == 0 and not got["exp_avg"].any() and not got["exp_avg_sq"].any()


@each_dtype
def test_scaled(dtype):
    "The scale multiplies the gradient as read, in float32, and the gradient stays as it is."
    params, grads = problem((50,), (6, 4), dtype=dtype)
    kept = [[g.clone() for g in step] for step in grads]
    got = run(params, grads, [verdict(0.3)] * 3)
    assert same_bits(grads, kept)
    scale = torch.tensor(0.3, device=DEVICE)
    want = formula([p.float() for p in params], [[g.float() * scale for g in step] for step in grads])
    if dtype is torch.float32:
        assert same_bits(without_step(got), want) or DEVICE == "cuda"
    close(got, want, 1e-6 if dtype is torch.float32 else 2e-2)
    assert same_bits(run(params, grads, [verdict()] * 3), run(params, grads))


@each_dtype
def test_sanitized(dtype):
    params, grads = problem((50,), (6, 4), dtype=dtype)
    grads[1][0][3], grads[1][0][7], grads[2][1][2, 1] = float("nan"), float("inf"), float("-inf")
    zeroed = [[torch.where(g.isfinite(), g, 0) for g in step] for step in grads]
    assert same_bits(run(params, grads, [verdict(0.5, sanitize=True)] * 3), run(params, zeroed, [verdict(0.5)] * 3))


@pytest.mark.parametrize("options", [{}, dict(weight_decay=0.0), dict(amsgrad=True)], ids=str)
def test_values_that_are_not_finite_go_where_they_go_in_torch(options):
    "inf - inf is NaN: in moments if a gradient is infinite, in an infinite parameter unless nothing decays."
    params, grads = problem((8,), steps=2)
    params[0][0], grads[0][0][1], grads[1][0][2] = float("inf"), float("nan"), float("inf")
    want = formula(params, grads, **options)
    if DEVICE == "cuda" and SAME_FORMULA:
        want = without_step(run(params, grads, optimizer=torch.optim.AdamW, fused=True, **options))
    (got,), (want,) = run(params, grads, **options), want
    for n, x in want.items():
        assert same_bits(got[n].isnan(), x.isnan()) and same_bits(got[n].isinf(), x.isinf()), n
    assert got["p"][0].isnan() if options.get("weight_decay") != 0 else got["p"][0] == float("inf")
    assert got["p"][1:3].isnan().all() and got["p"][3:].isfinite().all()


def test_tiny_gradients():
    "Subnormal squares are not lost: v has the formula's bits, the parameter its value."
    params, grads = problem((64,))
    grads = [[1e-21 * g for g in step] for step in grads]
    (got,), (want,) = run(params, grads, eps=1e-30), formula(params, grads, eps=1e-30)
    assert want["exp_avg_sq"].any() and same_bits(got["exp_avg_sq"], want["exp_avg_sq"])
    assert rel_err(got["p"], want["p"]) < 1e-6


@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_dict_round_trip(amsgrad):
    params, grads = problem(*SMALL, steps=4)
    mine = leaves(params)
    opt = AdamW(mine, amsgrad=amsgrad)
    steps(opt, mine, grads[:2])
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    second = leaves(mine)
    other = AdamW(second, lr=1.0)
    other.load_state_dict(torch.load(file))
    assert same_bits(result(opt, mine), result(other, second)) and other.param_groups[0]["lr"] == 1e-3
    whole = run(params, grads, amsgrad=amsgrad)
    assert same_bits(steps(other, second, grads[2:]), whole)
    assert same_bits(steps(opt, mine, grads[2:]), whole)


@pytest.mark.parametrize("theirs", [dict(), dict(fused=True), dict(foreach=True), dict(amsgrad=True)], ids=str)
def test_states_are_torchs(theirs):
    "Either optimizer goes on where the other stopped; keys, dtypes and order are the same."
    ours = {n: x for n, x in theirs.items() if n == "amsgrad"}
    params, grads = problem((7,), (4, 5), steps=4)
    alone = run(params, grads, **ours)
    for first, second in ((AdamW, ours), (torch.optim.AdamW, theirs)), ((torch.optim.AdamW, theirs), (AdamW, ours)):
        mine = leaves(params)
        opt = first[0](mine, **first[1])
        steps(opt, mine, grads[:2])
        saved = opt.state_dict()
        after = second[0](mine, **second[1])
        keys = set(after.param_groups[0])
        after.load_state_dict(saved)
        got = steps(after, mine, grads[2:])
        assert set(saved["param_groups"][0]) == keys and set(got[0]) == set(alone[0])
        assert [*saved["state"][0]] == [n for n in alone[0] if n != "p"]
        for a, b in zip(got, alone):
            assert a["step"] == 4 and rel_err(a["p"], b["p"]) < 1e-6 and rel_err(a["exp_avg"], b["exp_avg"]) < 1e-6
        if second[0] is AdamW:
            assert all(s["step"].device == mine[0].device and s["step"].dtype == torch.float32 for s in after.state.values())


def test_old_states():
    "Step counts were Python numbers once."
    params, grads = problem((7,), steps=2)
    mine = leaves(params)
    opt = AdamW(mine)
    steps(opt, mine, grads[:1])
    saved = opt.state_dict()
    saved["state"][0]["step"] = 1
    other = AdamW(mine)
    other.load_state_dict(saved)
    assert same_bits(steps(other, mine, grads[1:]), run(params, grads))


def test_copies():
    params, grads = problem((7,), (8,), steps=4)
    mine = leaves(params)
    opt = AdamW(mine)
    steps(opt, mine, grads[:2])
    for p in mine:
        p.grad = None
    again, twins = copy.deepcopy((opt, mine))
    whole = run(params, grads)
    assert same_bits(steps(again, twins, grads[2:]), whole)
    assert same_bits(steps(opt, mine, grads[2:]), whole)


def test_what_a_step_must_notice(monkeypatch):
    "The second step of the same kind makes no tables; a moved tensor, a new state, another parameter do."
    made = []

    def counted(real):
        return lambda *a: made.append(1) or real(*a)

    for name in "upload", "chunk_map":
        monkeypatch.setattr(adamw, name, counted(getattr(adamw, name)))
    params, grads = problem((5,), (6,), steps=12)
    mine = leaves(params)
    opt, ref = AdamW(mine), leaves(params)
    other = torch.optim.AdamW(ref)

    def both(n):
        steps(opt, mine, grads[n : n + 1])
        steps(other, ref, [[g.to(p.dtype) for p, g in zip(ref, grads[n])]])
        for p, q in zip(mine, ref):
            assert rel_err(p, q) < 1e-5 and opt.state[p]["step"] == other.state[q]["step"]

    both(0)
    first = len(made)
    both(1)
    assert len(made) == first > 0
    mine[0].data = mine[0].data.clone()
    both(2)
    opt.state[mine[0]]["exp_avg"] = opt.state[mine[0]]["exp_avg"].clone()
    both(3)
    opt.state[mine[1]]["step"].data = opt.state[mine[1]]["step"].clone()
    both(4)
    opt.state.clear()
    other.state.clear()
    both(5)
    opt.state[mine[0]] = {n: t.clone() for n, t in opt.state[mine[0]].items()}
    both(6)
    mine.append(torch.nn.Parameter(grads[0][0].clone()))
    ref.append(torch.nn.Parameter(grads[0][0].clone()))
    opt.add_param_group(dict(params=mine[2:]))
    other.add_param_group(dict(params=ref[2:]))
    for n in range(7, 10):
        grads[n].append(grads[n][0].flip(0))
        both(n)
    assert len(made) > first
    opt.param_groups[0]["amsgrad"] = True
    steps(opt, mine, [[*grads[10], grads[10][0]]])
    assert "max_exp_avg_sq" in opt.state[mine[0]] and "max_exp_avg_sq" not in opt.state[mine[2]]


def test_numbers_as_tensors():
    params, grads = problem((30,), steps=3)
    want = run(params, grads, lr=0.01, weight_decay=0.1)
    for dtype in torch.float32, torch.float64:
        lr, decay = (torch.tensor(x, device=DEVICE, dtype=dtype) for x in (0.01, 0.1))
        for options in dict(lr=lr, weight_decay=0.1), dict(lr=0.01, weight_decay=decay), dict(lr=lr[None], weight_decay=decay):
            assert same_bits(run(params, grads, **options), want)
    zero = torch.zeros((), device=DEVICE)
    assert same_bits(run(params, grads, weight_decay=zero), run(params, grads, weight_decay=0.0))


@pytest.mark.parametrize("tensor", [False, True])
def test_schedules(tensor):
    params, grads = problem((30,), steps=4)
    mine, ref = leaves(params), leaves(params)
    lr = torch.tensor(0.1, device=DEVICE) if tensor else 0.1
    pairs = [(AdamW(mine, lr=lr), mine), (torch.optim.AdamW(ref, lr=0.1), ref)]
    for opt, ps in pairs:
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5, cycle_momentum=True)
        for step in grads:
            ps[0].grad = step[0]
            opt.step()
            schedule.step()
    assert rel_err(mine[0], ref[0]) < 1e-6 and (not tensor or pairs[0][0].param_groups[0]["lr"] is lr)


def test_closures_hooks_and_versions():
    params, _ = problem((6,))
    mine = leaves(params)
    opt, heard = AdamW(mine), []
    opt.register_step_post_hook(lambda *a: heard.append(1))

    def closure():
        opt.zero_grad()
        loss = mine[0].square().sum()
        loss.backward()
        return loss

    loss = opt.step(closure)
    assert loss.requires_grad and heard == [1] and not same_bits(mine[0].detach(), params[0])
    loss = mine[0].square().sum()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_named_parameters():
    model = torch.nn.Linear(3, 4, device=DEVICE)
    opt = AdamW(model.named_parameters())
    model(torch.ones(1, 3, device=DEVICE)).sum().backward()
    opt.step()
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"] and len(opt.state) == 2


def test_deterministic():
    params, grads = problem((999,), (30, 30))
    assert same_bits(run(params, grads), run(params, grads))


@pytest.mark.parametrize(
    "options,error,match",
    [
        (dict(lr=-1.0), ValueError, "lr: expected at least 0"),
        (dict(lr=float("nan")), ValueError, "lr: expected at least 0"),
        (dict(lr=torch.ones(2)), ValueError, "lr: expected one number"),
        (dict(weight_decay=-1.0), ValueError, "weight_decay: expected at least 0"),
        (dict(weight_decay=torch.ones(2)), ValueError, "weight_decay: expected one number"),
        (dict(eps=-1e-8), ValueError, "eps: expected at least 0"),
        (dict(eps=torch.ones(())), TypeError, "eps: expected a number"),
        (dict(betas=(1.0, 0.9)), ValueError, "betas: expected two numbers from 0 to below 1"),
        (dict(betas=(0.9, -0.1)), ValueError, "betas: expected two numbers from 0 to below 1"),
        (dict(betas=(torch.ones(()), 0.1)), TypeError, "betas: expected a number"),
        (dict(differentiable=True), ValueError, "differentiable: expected False"),
    ],
    ids=str,
)
def test_bad_settings(options, error, match):
    with pytest.raises(error, match=match):
        AdamW(leaves(problem((3,))[0]), **options)
    if "differentiable" not in options:
        with pytest.raises(error, match=match):
            AdamW([dict(params=leaves(problem((3,))[0]), **options)])


@pytest.mark.parametrize(
    "make,error,match",
    [
        (lambda: [torch.randn(3, device=DEVICE), torch.randn(3, device="meta")], ValueError, "one device, got some on .* and some on meta"),
        (lambda: [torch.randn(3, dtype=torch.complex64, device=DEVICE)], TypeError, "params: expected torch.float32 or .*complex64"),
        (lambda: [torch.randn(3, dtype=torch.float64, device=DEVICE)], TypeError, "params: expected torch.float32 or .*float64"),
        (lambda: [torch.randn(3, 3, device=DEVICE).to_sparse()], TypeError, "params: expected a dense tensor"),
        (lambda: [torch.randn(3, 8, device=DEVICE)[:, :5]], ValueError, "params: expected strides without gaps"),
        (lambda: [torch.randn(1, 8, device=DEVICE).expand(3, 8)], ValueError, "params: expected strides without gaps"),
    ],
    ids=["devices", "complex", "float64", "sparse", "gaps", "overlaps"],
)
def test_bad_parameters(make, error, match):
    with pytest.raises(error, match=match):
        AdamW([torch.nn.Parameter(p) for p in make()])


def test_a_parameter_twice():
    p = leaves(problem((3,))[0])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="params: expected each parameter once"):
        AdamW(p * 2)


def test_bad_gradients_verdicts_and_numbers():
    "And nothing has changed after the error."
    params, grads = problem((3, 3), steps=1)
    mine = leaves(params)
    opt = AdamW(mine)
    before = steps(opt, mine, grads)
    for bad, error, match in (
        (True, TypeError, "verdict: expected a Verdict or None, got bool"),
        (torch.ones(2), TypeError, "verdict: expected a Verdict or None, got Tensor"),
        (Verdict(torch.ones(3, device=DEVICE)), ValueError, r"verdict.scale_and_go: expected shape \[2\]"),
        (Verdict(torch.ones(2, device=DEVICE).double()), TypeError, "verdict.scale_and_go: expected torch.float32"),
        (Verdict(torch.ones(2, device="meta")), ValueError, "verdict.scale_and_go: expected on"),
    ):
        with pytest.raises(error, match=match):
            opt.step(verdict=bad)
    for name in "lr", "weight_decay":
        good = opt.param_groups[0][name]
        for x, error, match in (
            (torch.ones((), device="meta"), ValueError, f"{name}: expected on"),
            (torch.ones(2, device=DEVICE), ValueError, f"{name}: expected one real number"),
            (torch.ones((), device=DEVICE, dtype=torch.int32), ValueError, f"{name}: expected one real number"),
        ):
            opt.param_groups[0][name] = x
            with pytest.raises(error, match=match):
                opt.step()
        opt.param_groups[0][name] = good
    state = opt.state[mine[0]]
    good, state["exp_avg"] = state["exp_avg"], torch.zeros(2, device=DEVICE)
    with pytest.raises(ValueError, match=r"state\['exp_avg'\]: expected shape"):
        opt.step()
    state["exp_avg"] = good
    assert same_bits(result(opt, mine), before)
    mine[0].grad = None
    opt.step()
    mine[0].grad = grads[0][0].to_sparse()
    with pytest.raises(TypeError, match="params: expected dense gradients"):
        opt.step()


def test_sparse_gradients_after_dense_ones():
    params, grads = problem((3, 3), steps=1)
    mine = leaves(params)
    opt = AdamW(mine)
    steps(opt, mine, grads)
    mine[0].grad = grads[0][0].to_sparse()
    with pytest.raises((RuntimeError, TypeError)):
        opt.step()


def test_sixteen_bytes_at_a_time():
    "A whole block of each tensor is one access of 16 bytes a thread, if all tensors start at such a multiple."
    code = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dormouse_fused import adamw
for case in adamw.aot_cases():
    if case.signature.get("lr") == "fp32" and case.constexprs["ALIGNED"]:
        fn, vector = case.kernel.partition(":")[2], ("v4.b32", "v4")
        fn = getattr(adamw, fn)
        types = {a: case.signature.get(a, "constexpr") for a in fn.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t[0] == "*"}
        ptx = triton.compile(ASTSource(fn, types, case.constexprs, aligned), GPUTarget("cuda", 90, 32), dict(num_warps=8)).asm["ptx"]
        n = 4 + case.constexprs["AMSGRAD"]
        print(len(re.findall(r"ld\\.global\\.v4\\.b32", ptx)) == n, len(re.findall(r"st\\.global\\.v4\\.b32", ptx)) == n - 1)
"""
    env = os.environ | dict(TRITON_INTERPRET="0", PYTHONPATH=os.pathsep.join(p or os.getcwd() for p in sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 3 and set(lines) == {"True True"}, done.stdout + done.stderr


@GPU
@each_dtype
@each_option
@pytest.mark.parametrize("aligned", [True, False])
def test_fused_bits(dtype, options, aligned):
    "torch's fused kernel, bit by bit where it has the same formula; else errors are no larger."
    params, grads = problem((1000,), (333, 129), (1,), (65536,), (100_001,), steps=6, dtype=dtype)
    if not aligned:
        params = [torch.cat([p.reshape(-1)[:1], p.reshape(-1)])[1:].view(p.shape) for p in params]
    got, want = ([torch.nn.Parameter(p) for p in copy.deepcopy(params)] for _ in range(2))
    got = steps(AdamW(got, **options), got, grads)
    want = steps(torch.optim.AdamW(want, fused=True, **options), want, grads)
    if SAME_FORMULA:
        assert same_bits(got, want)
    else:
        close(got, want, 2e-5 if dtype is torch.float32 else 1e-2)


@GPU
@pytest.mark.skipif(not SAME_FORMULA, reason="torch before 2.11 computes in float64")
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9999), (0.1, 0.5)])
def test_powers_have_fused_bits(betas):
    "Bias corrections at two thousand step counts."
    counts = [*range(1, 1500), *range(1500, 200_000, 397)]
    params, grads = problem(*[(4,)] * len(counts), steps=1)
    out = []
    for optimizer in AdamW, lambda *a, **k: torch.optim.AdamW(*a, fused=True, **k):
        mine = leaves(params)
        opt = optimizer(mine, betas=betas)
        for p, n in zip(mine, counts):
            zeros = torch.full_like(p, 0.5)
            opt.state[p].update(step=torch.full((), n - 1.0, device=DEVICE), exp_avg=zeros, exp_avg_sq=zeros.clone())
        out.append(steps(opt, mine, grads))
    assert same_bits(*out)


@pytest.fixture
def launched(monkeypatch):
    "Names of launches, as they happen."
    names = []

    def noted(name, real):
        return lambda *a, **k: names.append(name) or real(*a, **k)

    real = adamw._launcher
    monkeypatch.setattr(adamw, "_count", noted("count", adamw._count))
    monkeypatch.setattr(adamw, "_launcher", lambda *a: noted("adamw", real(*a)))
    monkeypatch.setattr(adamw.torch, "pow", noted("pow", torch.pow))
    return names


@pytest.mark.parametrize(
    "settings,want",
    [
        ([{}], "count pow adamw"),
        ([{}, dict(lr=1.0), {}], "count pow adamw adamw adamw"),
        ([{}, dict(betas=(0.9, 0.95)), {}], "count count count pow adamw adamw adamw"),
        ([dict(betas=[0.9, 0.95]), dict(betas=(0.9, 0.95)), {}], "count count pow adamw adamw adamw"),
    ],
    ids=["one group", "same betas", "other betas", "lists of betas"],
)
def test_launches(launched, settings, want):
    "A skipped step has the same ones."
    params, grads = problem((5,), (6,), (7,), steps=1)
    mine = leaves(params)
    opt = AdamW([dict(params=mine[i : i + 3 if len(settings) == 1 else i + 1], **options) for i, options in enumerate(settings)])
    for v in verdict(), verdict(go=0.0), None:
        launched.clear()
        steps(opt, mine, grads, [v])
        assert " ".join(launched) == want


def test_each_tensor_has_its_own_powers():
    "More tensors than one program counts for, most of them empty; groups with betas of their own, betas that change, a skipped step."
    n = 300
    params, grads = problem(*[(int(i > 250),) for i in range(n)])
    mine = leaves(params)
    opt = AdamW([dict(params=mine[:270]), dict(params=mine[270:280], betas=(0.5, 0.75)), dict(params=mine[280:])])
    for i, p in enumerate(mine):
        opt.state[p].update(step=torch.full((), float(i), device=DEVICE), exp_avg=torch.ones_like(p), exp_avg_sq=torch.ones_like(p))
    before = steps(opt, mine, grads[:1], [verdict(go=0.0)])
    assert all(same_bits(s["p"], p) and s["step"] == i for i, (s, p) in enumerate(zip(before, params, strict=True)))
    want = [(p, torch.ones_like(p), torch.ones_like(p)) for p in params]
    for t, first in (1, (0.9, 0.999)), (2, (0.25, 0.5)):
        opt.param_groups[0]["betas"] = first
        got = steps(opt, mine, grads[t : t + 1])
        betas = [first] * 270 + [(0.5, 0.75)] * 10 + [(0.9, 0.999)] * 20
        want = [rounded_adamw(p, g, m, v, i + t, betas=betas[i])[:3] for i, ((p, m, v), g) in enumerate(zip(want, grads[t], strict=True))]
        close(got, [dict(p=p, exp_avg=m, exp_avg_sq=v) for p, m, v in want], 1e-6)
    assert [float(s["step"]) for s in got] == [i + 2 for i in range(n)]


@GPU
def test_no_waiting_and_three_launches():
    from dormouse_fused import measure

    params, grads = problem((1000,), (333, 129), (1,), steps=1)
    mine = leaves(params)
    opt, yes = AdamW(mine, lr=torch.tensor(1e-3, device=DEVICE)), verdict(0.5, sanitize=True)
    steps(opt, mine, grads, [yes])
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p in mine:
            p.grad = torch.ones_like(p)
        opt.step(verdict=yes)
        mine[0].grad = None
        opt.step(verdict=yes)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    steps(opt, mine, grads, [yes])
    assert measure.launches(lambda: opt.step(verdict=yes)).kernels == 3


@GPU
@pytest.mark.parametrize("fresh", [False, True], ids=["same gradients", "gradients of the graph"])
def test_captured(fresh):
    "A graph follows the schedule and the verdict, and gives an eager run's bits, also after other steps have moved on."
    params, grads = problem((1000,), (333, 129), steps=6)
    lr, verdict_, mine = torch.tensor(0.1, device=DEVICE), verdict(), leaves(params)
    opt, static = AdamW(mine, lr=lr), [torch.zeros_like(p) for p in params]
    ref, lr_ref = leaves(params), torch.tensor(0.1, device=DEVICE)
    eager = AdamW(ref, lr=lr_ref)

    def step():
        for p, s in zip(mine, static):
            p.grad = s + 0.0 if fresh else s
        opt.step(verdict=verdict_)

    for s, g in zip(static, grads[0]):
        s.copy_(g)
    step()
    steps(eager, ref, grads[:1], [verdict()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    opt._plan = None  # what the graph reads must outlive it
    junk = [torch.randn(2**16, device=DEVICE) for _ in range(64)]
    for n in range(1, 6):
        scale, go = 0.5 + 0.25 * n, float(n != 3)
        verdict_.scale_and_go.copy_(torch.tensor([scale, go]))
        lr.fill_(0.1 / n)
        lr_ref.fill_(0.1 / n)
        for s, g in zip(static, grads[n]):
            s.copy_(g)
        graph.replay()
        steps(eager, ref, grads[n : n + 1], [verdict(scale, go)])
    assert same_bits(result(opt, mine), result(eager, ref)) and len(junk) == 64


@GPU
def test_capture_without_a_step_before():
    mine = leaves(problem((10,))[0])
    mine[0].grad = torch.ones_like(mine[0])
    opt = AdamW(mine)
    with pytest.raises(RuntimeError, match="capture a graph only after a step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()
    torch.cuda.synchronize()


@GPU
def test_fast_enough():
    "Within two times of torch's fused on 16 million parameters, whatever else the machine does."
    from dormouse_fused import measure

    grads = [torch.randn(s, device=DEVICE) for s in (768,) * 40 + (2**20,) * 16]
    times = {}
    for name, optimizer in dict(ours=AdamW, theirs=lambda ps: torch.optim.AdamW(ps, fused=True, capturable=True)).items():
        mine = leaves(grads)
        for p, g in zip(mine, grads):
            p.grad = g
        opt = optimizer(mine)
        opt.step()
        times[name] = measure.percentiles(measure.device_ms(opt.step))["p50"]
    assert times["ours"] < 2 * times["theirs"], times


def test_the_header_is_read_right():
    "Which formula torch has is asked of its header; the version must not contradict it."
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    if HEADER.exists():
        assert SAME_FORMULA == ((major, minor) >= (2, 11))

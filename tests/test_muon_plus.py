"Muon+: the authors' steps, their order of rounding, torch's Muon, awkward parameters, verdicts, states, and what a step must notice."

import copy
import io
import math
import pickle
from functools import partial

import optimizers
import pytest
import torch
from optimizers import leaves, result, steps

from dormouse_fused import firewall
from dormouse_fused import multi_tensor as mt
from dormouse_fused import muon_plus as mp
from dormouse_fused.adamw import AdamW
from dormouse_fused.firewall import Firewall
from dormouse_fused.multi_tensor import Verdict
from dormouse_fused.muon_plus import NORM_MODES, MuonPlus, muon_groups, naive_post_norm, post_norm
from dormouse_fused.newton_schulz import naive_newton_schulz, newton_schulz
from dormouse_fused.parity import fenced, load_golden, poison, rel_err, same_bits
from dormouse_fused.triton import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET else "cuda:0")
GPU = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
DTYPES = torch.float32, torch.bfloat16, torch.float16
FAULTS = math.nan, math.inf, -math.inf
SCALES = dict(  # as their authors have them
    none=lambda r, c: 1.0,
    rms=lambda r, c: (r / c) ** 0.5,
    original=lambda r, c: max(1, r / c) ** 0.5,
    match_rms_adamw=lambda r, c: 0.2 * max(r, c) ** 0.5,
)
QUICK = dict(ns_steps=1)
problem = partial(optimizers.problem, steps=2)
pytestmark = pytest.mark.filterwarnings(
    *[f"ignore:{what}" for what in ("overflow encountered", "invalid value", "divide by zero")]
)  # in the interpreter
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
vectors_too = pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)  # AdamW refuses float16


def run(params, grads, verdicts=None, **options):
    params = leaves(params)
    return steps(MuonPlus(params, **options), params, grads, verdicts)


def both_kinds(params, **options):
    "Matrices and vectors, in an optimizer; a step of Newton–Schulz is enough for most questions."
    mine = leaves(params)
    groups = [
        dict(params=[p for p in mine if p.dim() > 1]),
        dict(params=[p for p in mine if p.dim() < 2], use_muon=False),
    ]
    return MuonPlus(groups, **QUICK | options), mine


def verdict(scale=1.0, go=1.0, sanitize=False):
    return Verdict(torch.tensor([scale, go], device=DEVICE), sanitize)


def plus(x, y, alpha=1.0):
    "x + alpha y as operators on a GPU round it; on a CPU they round alpha too, if x is of two bytes."
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    return torch.add(x.to(wide), y.to(wide), alpha=alpha).to(x.dtype)


def operators(
    p, grads, orthogonal=newton_schulz, dtype=None, *, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ema=False,
    ns_steps=5, ns_coefficients="keller", eps=1e-7, norm_mode="none", adjust_lr_fn="rms",
):  # fmt: skip
    "The authors' step, or torch's momentum, operator by operator; in float64 the oracle, but for what Newton–Schulz starts from."
    p = p.to(dtype or p.dtype)
    buf, scale = torch.zeros_like(p), SCALES[adjust_lr_fn](*p.shape[-2:])
    for g in grads:
        g = g.to(p.dtype)
        if ema:
            buf = buf.lerp(g, 1 - momentum)
            u = g.lerp(buf, momentum) if nesterov else buf
        else:
            buf = buf * momentum + g
            u = plus(g, buf, momentum) if nesterov else buf
        more = dict(dtype=dtype) if dtype else {}
        u = orthogonal(u.bfloat16().to(dtype) if dtype else u, ns_steps, ns_coefficients, eps, **more)
        p = plus(p * (1 - lr * weight_decay), naive_post_norm(u, norm_mode), -lr * scale)
    return dict(p=p, momentum_buffer=buf)


def exact(p, grads, **options):
    return operators(p, grads, naive_newton_schulz, torch.float64, **options)["p"]


def operators_adamw(p, grads, lr=1e-3, weight_decay=0.1, betas=(0.95, 0.95), eps=1e-8):
    "The same of the authors' AdamW; square roots in float64, since on a CPU those of float32 aren't always the nearest."
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = m.lerp(g, 1 - betas[0]), v.lerp(g.square(), 1 - betas[1])
        scale = (1 - betas[0] ** t) / (1 - betas[1] ** t) ** 0.5
        root = plus(v.double().sqrt().to(p.dtype), torch.ones_like(p), eps)
        p = plus(p * (1 - lr * weight_decay), m / root, -lr / scale)
    return dict(p=p, step=torch.tensor(float(len(grads)), device=DEVICE), moment1=m, moment2=v)


def alike(a, b, tol=1e-3):
    "The same bits in the interpreter; on a GPU a product may be cut otherwise when there are more or fewer matrices."
    if INTERPRET or not isinstance(a, dict | list | tuple | torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[n], b[n], tol) for n in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and (a.numel() == 0 or rel_err(a, b) < tol)
    return len(a) == len(b) and all(alike(x, y, tol) for x, y in zip(a, b))


def columns(steps_, i):
    return [step[i] for step in steps_]


GOLDEN = dict(lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="rms")


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "heavyball"])
@pytest.mark.parametrize("mode", NORM_MODES)
def test_golden_steps(mode, nesterov):
    "Momentum as the authors' bit by bit, parameters no further from float64 than theirs after any step, on either machine."
    files = [load_golden(f"muon_plus-{where}") for where in ("cpu", "h200")]
    kind = f"step/{mode}/{'nesterov' if nesterov else 'heavyball'}/"
    shapes = sorted({name.split("/")[3] for name in files[0] if name.startswith(kind)})
    assert len(shapes) == 3
    names = "p0", "g0", "g1", "g2", "p1", "p2", "p3", "momentum"
    theirs = [{name: [file[f"{kind}{s}/{name}"].to(DEVICE) for s in shapes] for name in names} for file in files]
    mine, grads = leaves(theirs[0]["p0"]), [theirs[0][f"g{n}"] for n in range(3)]
    opt = MuonPlus(mine, nesterov=nesterov, norm_mode=mode, **GOLDEN)
    for n in range(3):
        got = steps(opt, mine, grads[n : n + 1])
        for i, p in enumerate(theirs[0]["p0"]):
            want = exact(p, columns(grads[: n + 1], i), nesterov=nesterov, norm_mode=mode, **GOLDEN)
            for golden in theirs:
                assert rel_err(got[i]["p"], want) <= rel_err(golden[f"p{n + 1}"][i], want), (shapes[i], n)
    for golden in theirs:
        assert same_bits([s["momentum_buffer"] for s in got], golden["momentum"])
    assert same_bits(theirs[0]["p0"], theirs[1]["p0"]) and same_bits(grads, [theirs[1][f"g{n}"] for n in range(3)])


@pytest.mark.parametrize("file", ["muon_plus-cpu", "muon_plus-h200"])
@pytest.mark.parametrize("mode", ["col", "row", "col_row", "row_col"])
def test_golden_norms(file, mode):
    golden = load_golden(file)
    cases = sorted({name.split("/")[1] for name in golden if name.startswith("norm/")})
    for case in cases:
        assert same_bits(post_norm(golden[f"ns/{case}/u"].to(DEVICE), mode).cpu(), golden[f"norm/{case}/{mode}"]), case
    assert len(cases) == 5


@pytest.mark.parametrize("file", ["muon_plus-cpu", "muon_plus-h200"])
def test_golden_adamw(file):
    golden = {name[6:]: x.to(DEVICE) for name, x in load_golden(file).items() if name.startswith("adamw/")}
    mine = leaves([golden["p0"]])
    opt = MuonPlus([dict(params=mine, use_muon=False)], lr=0.01, weight_decay=0.1)
    for n in range(3):
        (got,) = steps(opt, mine, [[golden[f"g{n}"]]])
        assert same_bits(got["p"], golden[f"p{n + 1}"]) and got["step"] == n + 1


OPTIONS = [
    {}, dict(nesterov=False), dict(ema=True), dict(ema=True, nesterov=False, momentum=0.3), dict(momentum=0.0), dict(weight_decay=0.0),
    dict(lr=0.0), dict(adjust_lr_fn="none"), dict(adjust_lr_fn="original"), dict(adjust_lr_fn="match_rms_adamw"), dict(ns_steps=2),
    dict(ns_coefficients="polar_express", ns_steps=3), dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=1), dict(eps=10.0),
    dict(norm_mode="col"), dict(norm_mode="row"), dict(norm_mode="col_row"), dict(norm_mode="row_col"),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(f"{n}={x}" for n, x in o.items()) or "plain")
def test_operator_by_operator(options):
    "Wide and tall, with (2) to (4) of their own: what is around them rounds as the authors' operators do."
    params, grads = problem((9, 20), (20, 9))
    options = dict(lr=0.05) | (QUICK if options else {}) | options
    for i, got in enumerate(run(params, grads, **options)):
        want = operators(params[i], columns(grads, i), **options)
        assert alike(got, want) and same_bits(got["momentum_buffer"], want["momentum_buffer"])


@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("shape", [(70, 300), (300, 70)], ids=str)
def test_norms_of_several_tiles(mode, shape):
    "Bit by bit in every mode, whatever the shape; rows of zeros stay zeros, and beyond the matrix nothing is written."
    u = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16) * 0.05
    u[3], u[:, 5] = 0, 0
    u = u if mode == "row_col" else u.t().contiguous().t()
    assert same_bits(post_norm(u, mode), naive_post_norm(u, mode).contiguous())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [dict(norm_mode="row_col"), dict(ema=True, norm_mode="col"), dict(nesterov=False)], ids=str
)
def test_half_precision(dtype, options):
    "Parameters, gradients and momentum of two bytes, in the order of rounding of operators on them."
    params, grads = problem((9, 20), (20, 9), dtype=dtype)
    options = dict(lr=0.05, **QUICK) | options
    got = run(params, grads, **options)
    for i in range(2):
        want = operators(params[i], columns(grads, i), **options)
        assert alike(got[i], want, 5e-3) and same_bits(got[i]["momentum_buffer"], want["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_in_half_precision(dtype):
    "Of updates, which are all that is in parameters that were zero."
    params, grads = problem((24, 40), (40, 24), steps=1, dtype=dtype)
    zero, options = [torch.zeros_like(p) for p in params], dict(norm_mode="row_col", lr=0.05)
    for i, got in enumerate(run(zero, grads, **options)):
        want = exact(zero[i], columns(grads, i), **options)
        assert rel_err(got["p"], want) <= rel_err(
            operators(zero[i], columns(grads, i), naive_newton_schulz, **options)["p"], want
        )


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_like_torch(adjust, nesterov):
    "torch's Muon in its own variant: momentum bit by bit, parameters no further from float64."
    params, grads = problem((24, 40), (40, 24), steps=3)
    options = dict(lr=0.05, weight_decay=0.2, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust)
    got, theirs = run(params, grads, ema=True, norm_mode="none", **options), leaves(params)
    theirs = steps(torch.optim.Muon(theirs, **options), theirs, grads)
    for i, (a, b) in enumerate(zip(got, theirs)):
        want = exact(params[i], columns(grads, i), ema=True, **options)
        assert same_bits(a["momentum_buffer"], b["momentum_buffer"])
        assert rel_err(a["p"], want) <= rel_err(b["p"], want) < 0.01


@vectors_too
def test_adamw_group(dtype):
    "Several chunks, a scalar, an empty tensor; matrices too."
    params, grads = problem((7,), (), (1500,), (3, 5), steps=3, dtype=dtype)
    grads = [[g + g.sign() for g in step] for step in grads]
    for options in dict(), dict(adamw_betas=(0.0, 0.9), adamw_eps=1e-3, lr=0.1):
        theirs = {n.removeprefix("adamw_"): x for n, x in options.items()}
        mine = leaves(params)
        got = steps(MuonPlus([dict(params=mine, use_muon=False)], **options), mine, grads)
        for i, (a, p) in enumerate(zip(got, params)):
            want = operators_adamw(p, columns(grads, i), **theirs)
            if INTERPRET:
                assert same_bits(a, want)
            assert all(rel_err(a[n], want[n]) < (1e-6 if dtype is torch.float32 else 1e-2) for n in want)


def test_batches_of_matrices():
    "A parameter [n, rows, cols] is n matrices."
    params, grads = problem((3, 9, 20), (2, 9, 20), (9, 20))
    got = run(params, grads, norm_mode="row_col", **QUICK)
    for i in 0, 1:
        alone = run(list(params[i]), [list(step[i]) for step in grads], norm_mode="row_col", **QUICK)
        assert alike(got[i], {n: torch.stack([s[n] for s in alone]) for n in alone[0]})
    assert alike(got[2], run(params[2:], [step[2:] for step in grads], norm_mode="row_col", **QUICK)[0])


@pytest.mark.parametrize("first", ["a matrix first", "a batch first"])
def test_a_batch_as_deep_as_its_matrices_are_large(first):
    params, grads = problem((5, 5), (5, 5, 5))
    if first == "a batch first":
        params, grads = params[::-1], [step[::-1] for step in grads]
    mine = [torch.nn.Parameter(fenced(p)) for p in params]
    opt = MuonPlus(mine, **QUICK)
    for p in mine:
        opt.state[p]["momentum_buffer"] = fenced(torch.zeros_like(p))
    got = steps(opt, mine, [[fenced(g) for g in step] for step in grads])
    for i in range(2):
        assert alike(got[i], run(params[i : i + 1], [step[i : i + 1] for step in grads], **QUICK)[0])


@pytest.mark.parametrize("split,norm_mode", [((3, 1), "none"), ((1, 2), "row_col"), ((3, 2), "col")], ids=str)
def test_split(split, norm_mode):
    "A matrix split into parts is as many parameters, of their own shape's learning rate; a batch of such matrices too."
    down, across = split
    params, grads = problem((12, 8), (2, 12, 8), steps=1)

    def cut(x):
        rows, cols = x.shape[-2] // down, x.shape[-1] // across
        return [
            x[..., r * rows : (r + 1) * rows, c * cols : (c + 1) * cols].contiguous()
            for r in range(down)
            for c in range(across)
        ]

    def joined(parts):
        return torch.cat([torch.cat(parts[r * across : (r + 1) * across], -1) for r in range(down)], -2)

    options = dict(norm_mode=norm_mode, lr=0.05, adjust_lr_fn="none", **QUICK)
    got = run(params, grads, split=split, **options)
    for i in 0, 1:
        alone = run(cut(params[i]), [cut(step[i]) for step in grads], **options)
        assert alike(got[i], {n: joined([s[n] for s in alone]) for n in alone[0]})


def test_groups_have_settings_of_their_own():
    params, grads = problem((9, 20), (20, 9), (9, 20), (6,))
    mine, settings = (
        leaves(params),
        (dict(lr=0.1, norm_mode="col"), dict(nesterov=False, weight_decay=0.0), dict(ema=True), dict(use_muon=False)),
    )
    opt = MuonPlus([dict(params=mine[:1], **settings[0]), dict(params=mine[1:2], **settings[1])], **QUICK)
    for n in 2, 3:
        opt.add_param_group(dict(params=mine[n : n + 1], **settings[n]))
    got = steps(opt, mine, grads)
    for i in range(3):
        assert alike(got[i], run(params[i : i + 1], [step[i : i + 1] for step in grads], **QUICK, **settings[i])[0])
    assert set(got[3]) == {"p", "step", "moment1", "moment2"}


def test_dtypes_in_one_optimizer():
    params, grads = problem((9, 20), (9, 20), (9, 20))
    params, grads = (
        [p.to(d) for p, d in zip(params, DTYPES)],
        [[g.to(d) for g, d in zip(step, DTYPES)] for step in grads],
    )
    got = run(params, grads, **QUICK)
    for i in range(3):
        assert got[i]["momentum_buffer"].dtype == DTYPES[i]
        assert alike(got[i], run(params[i : i + 1], [step[i : i + 1] for step in grads], **QUICK)[0], 5e-3)


def test_missing_gradients():
    "Some never come, some come now and then, some only later; nothing of those that are missing moves."
    params, grads = problem((9, 20), (9, 20), (9, 20), (6,), (6,), steps=4)
    some = [[a, None, c if n % 2 else None, d if n > 1 else None, None] for n, (a, _, c, d, _) in enumerate(grads)]
    mine = leaves(params)
    opt = MuonPlus([dict(params=mine[:3]), dict(params=mine[3:], use_muon=False)], **QUICK)
    got = steps(opt, mine, some)
    for i in 0, 2:
        assert alike(got[i], run(params[i : i + 1], [[s[i]] for s in some if s[i] is not None], **QUICK)[0])
    assert same_bits(got[1], dict(p=params[1])) and same_bits(got[4], dict(p=params[4]))
    late = leaves(params[3:4])
    assert same_bits(got[3], steps(MuonPlus([dict(params=late, use_muon=False)]), late, [[s[3]] for s in some[2:]])[0])


def test_nothing_to_do():
    params = leaves(problem((4, 6))[0])
    opt = MuonPlus(params)
    opt.step()
    assert not opt.state
    empty = leaves(
        [torch.empty(0, 4, device=DEVICE), torch.empty(2, 0, 5, device=DEVICE), torch.empty(0, device=DEVICE)]
    )
    opt = MuonPlus(
        [dict(params=[]), dict(params=empty[:2]), dict(params=empty[2:], use_muon=False), dict(params=params)]
    )
    for p in empty:
        p.grad = torch.empty_like(p)
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(before)
    opt.step(verdict=verdict())
    assert not same_bits(params[0].detach(), before)
    MuonPlus([dict(params=[])]).step()
    with pytest.raises(ValueError, match="empty parameter list"):
        MuonPlus([])


@pytest.mark.parametrize("norm_mode", ["none", "row_col", "col_row"])
def test_one_row_or_column(norm_mode):
    shapes, options = [(1, 40), (40, 1), (1, 1), (3, 1, 7)], dict(norm_mode=norm_mode, lr=0.05, **QUICK)
    params, grads = problem(*shapes)
    for i, got in enumerate(run(params, grads, **options)):
        assert alike(got, operators(params[i], columns(grads, i), **options))
        assert rel_err(got["p"], exact(params[i], columns(grads, i), **options)) < 2e-3


@pytest.mark.parametrize("norm_mode", NORM_MODES)
def test_zero_gradients(norm_mode):
    "A parameter only decays; in a batch the others are what they are alone."
    params, grads = problem((9, 20), (9, 20), steps=1)
    grads[0][0].zero_()
    options = dict(lr=0.5, norm_mode=norm_mode, **QUICK)
    got = run(params, grads, **options)
    assert same_bits(got[0]["p"], params[0] * (1 - 0.5 * 0.1)) and not got[0]["momentum_buffer"].any()
    assert alike(got[1], run(params[1:], [step[1:] for step in grads], **options)[0])


@vectors_too
def test_zero_gradients_of_vectors(dtype):
    "They only decay."
    params, grads = problem((6,), dtype=dtype)
    for step in grads:
        step[0][2:] = 0
    opt, mine = both_kinds(params)
    (got,) = steps(opt, mine, grads)
    assert all(t.isfinite().all() for t in got.values())
    assert same_bits(got["p"][2:], (params[0] * (1 - 1e-4) * (1 - 1e-4))[2:]) and not same_bits(
        got["p"][:2], params[0][:2]
    )


@pytest.mark.parametrize("norm_mode", ["none", "row_col"])
@pytest.mark.parametrize("norm", [1e-9, 1e15])
def test_any_norm(norm, norm_mode):
    params, grads = problem((9, 20), (20, 9))
    grads = [[g * (norm / g.norm()) for g in step] for step in grads]
    zero = [torch.zeros_like(p) for p in params]
    for i, got in enumerate(run(zero, grads, norm_mode=norm_mode)):
        want = exact(zero[i], columns(grads, i), norm_mode=norm_mode)
        assert got["p"].isfinite().all() and rel_err(got["p"], want) < 0.03


def test_layouts():
    "Gradients laid out otherwise, with gaps, not aligned, among NaNs, broadcast; parameters that aren't aligned, or lie among others."
    params, grads = problem((9, 20), (9, 20), (20, 9), (37,))
    want_params = leaves(params)
    opt = MuonPlus([dict(params=want_params[:3]), dict(params=want_params[3:], use_muon=False)], **QUICK)
    want = steps(opt, want_params, grads)
    fence = torch.full((1000,), 7.0, device=DEVICE)
    fence[101:281] = params[0].flatten()
    mine = [
        torch.nn.Parameter(p)
        for p in (
            fence[101:281].view(9, 20),
            fenced(params[1], before=1023),
            params[2].clone(),
            fenced(params[3], before=1023),
        )
    ]
    assert mine[0].data_ptr() % 16 and mine[1].data_ptr() % 16
    odd = [[a.t().contiguous().t(), fenced(b, between=3), torch.stack([c, c], -1)[..., 0], torch.stack([d, d], -1)[..., 1]]
           for a, b, c, d in grads]  # fmt: skip
    opt = MuonPlus([dict(params=mine[:3]), dict(params=mine[3:], use_muon=False)], **QUICK)
    with poison():
        got = steps(opt, mine, odd)
    assert same_bits(got, want) and (fence[:101] == 7).all() and (fence[281:] == 7).all()
    (row,), _ = problem((1, 20))
    assert same_bits(*[run(params[:1], [[g]], **QUICK) for g in (row.expand(9, 20), row.expand(9, 20).contiguous())])


def test_gradients_are_left_alone():
    params, grads = problem((9, 20), (6,))
    kept, mine = copy.deepcopy(grads), leaves(params)
    steps(
        MuonPlus([dict(params=mine[:1]), dict(params=mine[1:], use_muon=False)]),
        mine,
        grads,
        [verdict(0.5, sanitize=True)] * 2,
    )
    assert same_bits(grads, kept)


def test_memory_is_bounded_by_going_through_a_batch_in_parts(monkeypatch):
    "Few matrices at a time give the same bits as all at once, and so do parts that don't come out even."
    params, grads = problem(*[(9, 20)] * 3, (2, 9, 20))
    got = {None: run(params, grads, norm_mode="col_row", **QUICK)}
    for n in 2, 5:
        monkeypatch.setattr(mp, "_at_a_time", lambda plans, part, n=n: n)
        got[n] = run(params, grads, norm_mode="col_row", **QUICK)
    assert all(alike(got[n], got[5]) for n in got)


def test_workspaces_stay_below_the_largest_batch(monkeypatch):
    "1.2 times that, or one matrix; and the first step is cut like any other, or a run that goes on might have other bits."
    seen = []
    monkeypatch.setattr(mp, "Workspace", lambda *a, real=mp.Workspace: seen.append(real(*a)) or seen[-1])
    params, grads = problem(*[(16, 16)] * 8, (64, 64), steps=2)
    mine, counts = leaves(params), []
    for groups in [mine[:8]], [mine[:8], mine[8:]]:
        opt = MuonPlus([dict(params=group) for group in groups], **QUICK)
        for step in grads:
            seen.clear()
            steps(opt, mine, [step])
            counts.append([len(w.x) for w in seen])
            bytes_ = [sum(t.numel() * t.element_size() for t in (w.x, w.y, w.b)) for w in seen if len(w.x) > 1]
            assert max(bytes_) <= 1.2 * 4 * (8 * 16 * 16 if len(groups) == 1 else 64 * 64)
    assert counts == [[4, 4], [4, 4], [8, 1], [8, 1]]


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_numbers_as_tensors(name):
    "A float64 tensor is the number, to the last bit; a float32 one is what float32 makes of it."
    params, grads = problem((9, 20), (6,), steps=1)
    numbers, value = dict(lr=0.02, weight_decay=0.3), dict(lr=0.02, weight_decay=0.3)[name]

    def both(**options):
        mine = leaves(params)
        return steps(
            MuonPlus([dict(params=mine[:1]), dict(params=mine[1:], use_muon=False)], **QUICK | numbers | options),
            mine,
            grads,
        )

    want = both()
    for shape in (), (1, 1):
        assert same_bits(both(**{name: torch.full(shape, value, dtype=torch.float64, device=DEVICE)}), want)
    single = torch.tensor(value, device=DEVICE)
    assert same_bits(both(**{name: single}), both(**{name: float(single)}))
    assert all(rel_err(a["p"], b["p"]) < 1e-6 for a, b in zip(both(**{name: single}), want))
    assert same_bits(both(**{name: torch.zeros((), device=DEVICE)}), both(**{name: 0}))


def test_schedules():
    "Numbers and tensors that change every step, and PyTorch's own schedule on a tensor."
    params, grads = problem((9, 20), (6,), steps=3)
    lr, decay, results = (
        torch.zeros((), dtype=torch.float64, device=DEVICE),
        torch.zeros((), dtype=torch.float64, device=DEVICE),
        [],
    )
    for tensor in False, True:
        mine = leaves(params)
        opt = MuonPlus([dict(params=mine[:1]), dict(params=mine[1:], use_muon=False)], **QUICK)
        for n, step in enumerate(grads):
            lr.fill_(0.1 / (n + 1))
            decay.fill_(0.2 * n)
            for group in opt.param_groups:
                group.update(lr=lr if tensor else float(lr), weight_decay=decay if tensor else float(decay))
            got = steps(opt, mine, [step])
        results.append(got)
    assert same_bits(*results)
    p, q = leaves(params[:1]), leaves(params[:1])
    lr = torch.tensor(0.1, device=DEVICE, dtype=torch.float64)
    for mine, opt in (p, MuonPlus(p, lr=lr, **QUICK)), (q, MuonPlus(q, lr=0.1, **QUICK)):
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (n + 1))
        for step in grads:
            steps(opt, mine, [step[:1]])
            schedule.step()
    assert same_bits(p[0].detach(), q[0].detach()) and rel_err(lr, torch.tensor(0.025)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_state_dict_round_trip(dtype):
    "Bit by bit through a file, and a run that goes on from there is the run that wasn't interrupted."
    params, grads = problem((9, 20), (6,), steps=3, dtype=dtype)
    opt, mine = both_kinds(params, norm_mode="row_col", nesterov=False)
    steps(opt, mine, grads[:2])
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other, second = both_kinds(mine, lr=1.0)
    other.load_state_dict(torch.load(file, map_location="cpu"))
    assert same_bits(result(opt, mine), result(other, second)) and other.param_groups[0]["norm_mode"] == "row_col"
    assert {t.device for s in other.state.values() for t in s.values()} == {DEVICE}
    whole, params = both_kinds(params, norm_mode="row_col", nesterov=False)
    whole = steps(whole, params, grads)
    assert same_bits(steps(other, second, grads[2:]), whole)


def test_loading_into_an_optimizer_that_has_stepped():
    params, grads = problem((9, 20), (6,), steps=3)
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    saved, values = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in mine]
    whole = steps(opt, mine, grads[1:])
    opt.load_state_dict(saved)
    for p, value in zip(mine, values):
        p.data.copy_(value)
    assert same_bits(steps(opt, mine, grads[1:]), whole)


def test_momentum_of_another_dtype_becomes_the_parameter_s():
    params, grads = problem((9, 20), dtype=torch.bfloat16)
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    saved, want = opt.state_dict(), None
    for dtype in torch.bfloat16, torch.float32:
        other, second = both_kinds(mine)
        loaded = copy.deepcopy(saved)
        loaded["state"][0]["momentum_buffer"] = loaded["state"][0]["momentum_buffer"].to(dtype)
        other.load_state_dict(loaded)
        got = steps(other, second, grads[1:])
        assert got[0]["momentum_buffer"].dtype == torch.bfloat16 and (want is None or same_bits(got, want))
        want = got


def test_loaded_momentum_in_another_layout():
    params, grads = problem((9, 20), steps=2)
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].t().contiguous().t()
    other, second = both_kinds(mine)
    other.load_state_dict(saved)
    got, want = steps(other, second, grads[1:])[0], steps(opt, mine, grads[1:])[0]
    assert same_bits({n: t.contiguous() for n, t in got.items()}, want)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies(how):
    params, grads = problem((9, 20), (6,), steps=3)
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    for p in mine:
        p.grad = None
    again, twins = how((opt, mine))
    assert again.param_groups[0]["params"][0] is twins[0]
    assert same_bits(steps(again, twins, grads[1:]), steps(opt, mine, grads[1:]))


@pytest.mark.parametrize(
    "at,value,sanitize", [(0, math.nan, False), (1, math.inf, True), (2, -math.inf, False)], ids=str
)
def test_a_skipped_step_leaves_no_trace(at, value, sanitize):
    "At any time, and the next step goes on as if it hadn't been."
    params, grads = problem((9, 20), (6,), steps=3)
    broken = copy.deepcopy(grads)
    broken[at][0][8, 19] = broken[at][1][5] = value
    opt, mine = both_kinds(params, norm_mode="row_col")
    for n in range(3):
        before = result(opt, mine)
        after = steps(opt, mine, broken[n : n + 1], [verdict(math.nan if n == at else 1.0, float(n != at), sanitize)])
        if n == at:
            assert same_bits([s["p"] for s in after], [s["p"] for s in before]) and (
                at == 0 or same_bits(after, before)
            )
    opt, mine = both_kinds(params, norm_mode="row_col")
    assert same_bits(after, steps(opt, mine, grads[:at] + grads[at + 1 :]))


def test_skipped_from_the_start():
    params, grads = problem((9, 20), (6,), steps=2)
    opt, mine = both_kinds(params)
    matrix, vector = steps(opt, mine, grads, [verdict(go=0.0)] * 2)
    assert same_bits(matrix["p"], params[0]) and same_bits(vector["p"], params[1])
    assert vector["step"] == 0 and not any(t.any() for s in (matrix, vector) for n, t in s.items() if n != "p")


@pytest.mark.parametrize("dtype,ema", [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)], ids=str)
def test_scaled(dtype, ema):
    "Gradients are multiplied as they are read."
    params, grads = problem((9, 20), *[(6,)][: dtype is not torch.float16], dtype=dtype)
    opt, mine = both_kinds(params, ema=ema)
    got = steps(opt, mine, grads, [verdict(0.3)] * 2)
    scale = torch.tensor(0.3, device=DEVICE)
    opt, mine = both_kinds(params, ema=ema)
    want = steps(opt, mine, [[(g.float() * scale).to(dtype) for g in step] for step in grads])
    opt, mine = both_kinds(params, ema=ema)
    assert same_bits(got, want) and not same_bits(got, steps(opt, mine, grads, [verdict()] * 2))


@vectors_too
def test_sanitized(dtype):
    params, grads = problem((9, 20), (6,), dtype=dtype)
    grads[0][0][3, 4], grads[1][0][8, 19], grads[1][0][0, 0] = math.nan, -math.inf, math.inf
    grads[1][1][2], grads[1][1][3], grads[1][1][5] = FAULTS
    zeroed = [[torch.where(g.isfinite(), g, 0) for g in step] for step in grads]
    (opt, mine), (other, second) = both_kinds(params), both_kinds(params)
    got = steps(opt, mine, grads, [verdict(0.5, sanitize=True)] * 2)
    assert same_bits(got, steps(other, second, zeroed, [verdict(0.5)] * 2)) and all(
        t.isfinite().all() for s in got for t in s.values()
    )


def test_without_a_verdict_faults_go_through():
    "To their own matrix, and no further."
    params, grads = problem((9, 20), (9, 20), steps=1)
    want = run(params, grads, **QUICK)
    grads[0][0][4, 4] = math.nan
    got = run(params, grads, **QUICK)
    assert got[0]["p"].isnan().all() and same_bits(got[1], want[1]) and got[0]["momentum_buffer"].isnan().sum() == 1


@pytest.fixture
def small_chunks(monkeypatch):
    "Of the firewall, whose chunks are large for the interpreter."
    for name, value in dict(CHUNK=256, BYTES=256, UNROLL=2, num_warps=1).items():
        monkeypatch.setitem(firewall._TILE, name, value)


@pytest.mark.parametrize("at,value,where", [(0, math.nan, 0), (1, math.inf, 3), (2, -math.inf, 2)], ids=str)
def test_with_the_firewall_and_adamw(small_chunks, at, value, where):
    "One verdict for two optimizers: a step with a fault in one gradient leaves both as they were, and counts."
    params, grads = problem((9, 20), (2, 5, 4), (6,), (33,), steps=3)

    def train(grads):
        (opt, mine), vector = both_kinds(params[:3], norm_mode="col_row"), leaves(params[3:])
        other, everything = AdamW(vector), [*mine, *vector]
        wall = Firewall(everything, 1.0)
        for n, step in enumerate(grads):
            for p, g in zip(everything, step):
                p.grad = g
            before = result(opt, mine) + result(other, vector)
            judged = wall()
            opt.step(verdict=judged)
            other.step(verdict=judged)
            after = result(opt, mine) + result(other, vector)
            if n:
                assert same_bits(before, after) == (not all(g.isfinite().all() for g in step))
        return after, wall.read()

    whole, _ = train(grads[:at] + grads[at + 1 :])
    grads[at][where].view(-1)[-1] = value
    got, report = train(grads)
    assert same_bits(got, whole) and report[:2] == (3, 1)


def test_a_sanitizing_firewall(small_chunks):
    params, grads = problem((9, 20), (6,), steps=1)
    grads[0][0][0, 0] = math.nan
    opt, mine = both_kinds(params)
    for p, g in zip(mine, grads[0]):
        p.grad = g
    opt.step(verdict=Firewall(mine, 1.0, on_nonfinite="sanitize")())
    assert all(t.isfinite().all() and t.any() for s in result(opt, mine) for t in s.values())


def test_closures():
    mine = leaves(problem((4, 6))[0])
    opt, heard = MuonPlus(mine), []
    opt.register_step_post_hook(lambda *a: heard.append(1))

    def closure():
        opt.zero_grad()
        loss = mine[0].square().sum()
        loss.backward()
        return loss

    before = mine[0].detach().clone()
    loss = opt.step(closure)
    assert (
        loss.requires_grad
        and loss == before.square().sum()
        and heard == [1]
        and not same_bits(mine[0].detach(), before)
    )
    assert opt.step() is None


def test_deterministic():
    params, grads = problem((9, 20), (70, 65), steps=1)
    assert same_bits(*[run(params, grads, norm_mode="row_col", ns_steps=2) for _ in range(2)])


def test_groups_of_a_model():
    "Matrices are Muon's, and all that is none, or embeds, or is a head, AdamW's."
    model = torch.nn.ModuleDict(
        dict(
            wte=torch.nn.Embedding(5, 4),
            body=torch.nn.Linear(4, 4),
            lm_head=torch.nn.Linear(4, 5),
            other=torch.nn.Linear(4, 4),
        )
    ).to(DEVICE)
    muon, rest = muon_groups(model.named_parameters(), lr=0.5)
    assert muon["use_muon"] and not rest["use_muon"] and muon["lr"] == rest["lr"] == 0.5
    assert [id(p) for p in muon["params"]] == [id(model.body.weight), id(model.other.weight)] and len(
        rest["params"]
    ) == 5
    (muon, rest), everything = muon_groups(model.named_parameters(), ("other",)), [*model.parameters()]
    assert len(muon["params"]) == 3 and len(muon["params"]) + len(rest["params"]) == len(everything)
    MuonPlus(muon_groups([("bias", model.body.bias)])).step()
    for groups in muon_groups(model.named_parameters()), muon_groups([("bias", model.body.bias)]):
        opt = MuonPlus(groups, **QUICK)
        sum(p.square().sum() for p in everything).backward()
        opt.step()
        assert len(opt.state) == len([p for group in groups for p in group["params"]])


def test_what_a_step_must_notice(monkeypatch):
    "A step like the last one sends no tables; gradients, parameters or momentum elsewhere, and other members, do."
    sent = []
    for module in mp, mt:
        monkeypatch.setattr(
            module, "upload", lambda values, *a, real=mt.upload: sent.append(len(values)) or real(values, *a)
        )
    params, grads = problem((9, 20), (9, 20), (6,), steps=9)
    (opt, mine), (other, second) = both_kinds(params), both_kinds(params)

    def both(n):
        sent.clear()
        for p, g in zip(mine, grads[n]):
            if p.grad is None:
                p.grad = g.clone()
            else:
                p.grad.copy_(g)
        opt.step()
        count = len(sent)
        other._plans.clear()
        got, want = result(opt, mine), steps(other, second, [grads[n][: len(second)]])
        assert same_bits([{m: t.contiguous() for m, t in s.items()} for s in got], want)
        return count

    assert both(0) and not both(1)
    mine[0].data = mine[0].data.clone()
    assert both(2) == 1
    opt.state[mine[0]]["momentum_buffer"] = opt.state[mine[0]]["momentum_buffer"].clone()
    assert both(3) == 1
    opt.state[mine[2]]["moment1"] = opt.state[mine[2]]["moment1"].clone()
    assert both(4) == 1
    mine[1].grad, kept = None, mine[1].grad  # so that the next one lies elsewhere
    assert both(5) == 1 and kept is not mine[1].grad
    opt.state.clear()
    other.state.clear()
    assert both(6) and not both(7)
    for o in opt, other:
        o.param_groups[0].update(split=(3, 1), adjust_lr_fn="none", norm_mode="col", ns_steps=2, nesterov=False)
    both(8)


def test_parameters_that_no_longer_fit_are_refused():
    "After a change of dtype or layout under the optimizer's hands; nothing is misread."
    params, grads = problem((9, 20), dtype=torch.bfloat16)
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    mine[0].grad = None
    mine[0].data = mine[0].data.float()
    with pytest.raises((TypeError, ValueError), match="momentum_buffer"):
        steps(opt, mine, [[grads[1][0].float()]])
    params, grads = problem((9, 20))
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    mine[0].data = mine[0].data.t().contiguous().t()
    with pytest.raises(ValueError, match="params: expected contiguous"):
        steps(opt, mine, grads[1:])


def test_states_that_do_not_fit_are_refused():
    params, grads = problem((9, 20))
    opt, mine = both_kinds(params)
    steps(opt, mine, grads[:1])
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["momentum_buffer"] = torch.zeros(10, 20, device=DEVICE)
    opt.load_state_dict(saved)
    with pytest.raises(ValueError, match="momentum_buffer.*expected shape"):
        steps(opt, mine, grads[1:])


def test_gradients_that_do_not_fit_are_refused():
    "Before anything has changed, also in a step after others."
    params, grads = problem((9, 20), (9, 20), (6,))
    for before in 0, 1:
        for kind in "sparse", "dtype":
            opt, mine = both_kinds(params)
            kept = steps(opt, mine, grads[:before])
            for p, g in zip(mine, grads[1]):
                p.grad = g
            if kind == "sparse":
                mine[2].grad = None
                mine[2].grad = grads[1][2].to_sparse()
            else:
                if not hasattr(mine[2], "grad_dtype"):
                    continue
                mine[2].grad = None
                mine[2].grad_dtype = torch.float64
                mine[2].grad = grads[1][2].double()
            with pytest.raises((TypeError, ValueError), match="dense gradient|grad.*expected torch.float32"):
                opt.step()
            assert same_bits(result(opt, mine), kept)


BAD_SETTINGS = [
    (dict(lr=-1.0), "lr: expected at least 0, got -1.0"),
    (dict(lr=math.nan), "lr: expected at least 0"),
    (dict(lr=torch.ones(2, device=DEVICE)), "lr: expected a float32 or float64 tensor of one number"),
    (
        dict(lr=torch.ones((), device=DEVICE, dtype=torch.int32)),
        "lr: expected a float32 or float64 tensor of one number",
    ),
    (dict(lr=torch.ones((), device="meta")), "lr: expected .*on .*meta"),
    (dict(weight_decay=-0.1), "weight_decay: expected at least 0, got -0.1"),
    (dict(weight_decay=torch.ones(2, device=DEVICE)), "weight_decay: expected a float32 or float64 tensor"),
    (dict(weight_decay=torch.ones((), device="meta")), "weight_decay: expected .*on .*meta"),
    (dict(momentum=1.0), "momentum: expected at least 0 and below 1"),
    (dict(momentum=-0.1), "momentum: expected at least 0 and below 1"),
    (dict(eps=0.0), "eps: expected a positive number"),
    (dict(norm_mode="cols"), "norm_mode: expected none or col or row or col_row or row_col, got 'cols'"),
    (dict(adjust_lr_fn=None), "adjust_lr_fn: expected none or rms or original or match_rms_adamw, got None"),
    (dict(adamw_betas=(0.9, 1.0)), "adamw_betas: expected two numbers of at least 0 and below 1"),
    (dict(adamw_betas=(0.9,)), "adamw_betas: expected two numbers"),
    (dict(adamw_eps=-1e-8), "adamw_eps: expected"),
    (dict(split=(0, 1)), "split: expected two whole numbers of at least 1"),
    (dict(split=(1.0, 1)), "split: expected two whole numbers of at least 1"),
    (dict(split=(1, 1, 1)), "split: expected two whole numbers of at least 1"),
    (dict(split=(5, 1)), r"split: expected to divide 4 by 6, got \(5, 1\)"),
    (dict(split=(1, 4)), r"split: expected to divide 4 by 6, got \(1, 4\)"),
    (dict(ns_steps=0), "ns_steps: expected a whole number of at least 1"),
    (dict(ns_coefficients="jordan"), "ns_coefficients: expected keller"),
    (dict(ns_coefficients=None), "ns_coefficients: expected"),
]


@pytest.mark.parametrize("options,message", BAD_SETTINGS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_settings(options, message):
    "For all groups or for one; a group that is refused leaves the optimizer as it was."
    (p, q), _ = problem((4, 6), (4, 6))
    p, q = leaves([p, q])
    with pytest.raises(ValueError, match=message):
        MuonPlus([p], **options)
    opt = MuonPlus([q])
    before = [dict(group) for group in opt.param_groups]
    with pytest.raises(ValueError, match=message):
        opt.add_param_group(dict(params=[p], **options))
    assert [dict(group) for group in opt.param_groups] == before
    opt.add_param_group(dict(params=[p]))
    assert len(opt.param_groups) == 2


BAD_PARAMETERS = dict(
    devices=(
        lambda: [torch.zeros(4, 6, device=DEVICE), torch.zeros(4, 6, device="meta")],
        ValueError,
        "params: expected all on .*on meta",
    ),
    complex=(
        lambda: [torch.zeros(4, 6, device=DEVICE, dtype=torch.complex64)],
        TypeError,
        "params: expected float32, .*complex64",
    ),
    float64=(
        lambda: [torch.zeros(4, 6, device=DEVICE, dtype=torch.float64)],
        TypeError,
        "params: expected float32, .*float64",
    ),
    vector=(
        lambda: [torch.zeros(5, device=DEVICE)],
        ValueError,
        r"Muon\+ expects matrices .*shape \[5\]; put .* use_muon=False",
    ),
    scalar=(lambda: [torch.zeros((), device=DEVICE)], ValueError, r"Muon\+ expects matrices .*shape \[\]"),
    filters=(
        lambda: [torch.zeros(5, 4, 3, 3, device=DEVICE)],
        ValueError,
        r"Muon\+ expects matrices .*shape \[5, 4, 3, 3\]",
    ),
    transposed=(
        lambda: [torch.zeros(6, 4, device=DEVICE).t()],
        ValueError,
        r"params: expected contiguous parameters, got strides \(1, 4\)",
    ),
    gaps=(lambda: [torch.zeros(4, 9, device=DEVICE)[:, :6]], ValueError, "params: expected contiguous parameters"),
    sparse=(lambda: [torch.eye(4, device=DEVICE).to_sparse()], (TypeError, ValueError), "params: expected"),
)


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
def test_bad_parameters(kind):
    make, error, message = BAD_PARAMETERS[kind]
    bad = [torch.nn.Parameter(p) for p in make()]
    with pytest.raises(error, match=message):
        MuonPlus(bad)
    good = leaves(problem((4, 6))[0])
    for opt in MuonPlus(good), MuonPlus([dict(params=[]), dict(params=good)]):
        groups = len(opt.param_groups)
        with pytest.raises(error, match=message):
            opt.add_param_group(dict(params=bad[-1:]))
        assert len(opt.param_groups) == groups and opt.param_groups[-1]["params"] == good


def test_vectors_in_float16():
    params, _ = problem((6,), dtype=torch.float16)
    with pytest.raises(TypeError, match="params: expected float32 or bfloat16 where use_muon=False, got torch.float16"):
        MuonPlus([dict(params=leaves(params), use_muon=False)])


def test_a_parameter_that_grew():
    "Another shape under the same name is another plan."
    params, grads = problem((4, 6), steps=1)
    opt, mine = both_kinds(params)
    steps(opt, mine, grads)
    (larger,), ((g,),) = problem((8, 6), steps=1)
    opt.state.clear()
    mine[0].grad = None
    mine[0].data = larger.clone()
    fresh, second = both_kinds([larger])
    assert same_bits(steps(opt, mine, [[g]]), steps(fresh, second, [[g]]))


def test_negative_views():
    params, grads = problem((9, 20), (6,), steps=1)
    opt, mine = both_kinds(params)
    want = steps(opt, mine, grads)
    opt, mine = both_kinds(params)
    assert same_bits(steps(opt, mine, [[torch._neg_view(-g) for g in grads[0]]]), want)


def test_a_parameter_twice():
    (p,) = leaves(problem((4, 6))[0])
    with (
        pytest.warns(UserWarning, match="duplicate"),
        pytest.raises(ValueError, match="params: expected each parameter once"),
    ):
        MuonPlus([p, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonPlus([dict(params=[p]), dict(params=[p])])


def test_bad_verdicts():
    "And nothing has changed after the error."
    params, grads = problem((9, 20), (6,))
    opt, mine = both_kinds(params)
    before = steps(opt, mine, grads[:1])
    for bad, error, match in (
        (True, TypeError, "verdict: expected a Verdict or None, got bool"),
        (torch.ones(2, device=DEVICE), TypeError, "verdict: expected a Verdict or None, got Tensor"),
        (Verdict(1.0), TypeError, "verdict.*: expected a tensor"),
        (Verdict(torch.ones(3, device=DEVICE)), ValueError, r"verdict.*: expected .*shape \[2\], got .*\[3\]"),
        (
            Verdict(torch.ones(2, device=DEVICE).double()),
            (TypeError, ValueError),
            "verdict.*: expected .*float32.*, got .*float64",
        ),
        (Verdict(torch.ones(2, device="meta")), ValueError, "verdict.*: expected on .*, got meta"),
        (Verdict(torch.ones(2, 2, device=DEVICE)[:, 0]), ValueError, "verdict.*: expected .*contiguous"),
    ):
        with pytest.raises(error, match=match):
            opt.step(verdict=bad)
        with pytest.raises(error, match=match):
            MuonPlus([dict(params=[]), dict(params=mine[:1])]).step(verdict=bad)
    assert same_bits(result(opt, mine), before)


def test_every_kernel_is_compiled_ahead_of_time():
    kernels = {c.kernel.partition(":")[2] for c in mp.aot_cases()}
    assert kernels == {f"_{name}_kernel" for name in ("momentum", "sums", "fold", "apply", "adamw")}


@GPU
@each_dtype
@pytest.mark.parametrize("norm_mode", NORM_MODES)
def test_errors_of_large_matrices(dtype, norm_mode):
    "No further from float64 than operators; all that is in the parameters is the updates."
    shapes = (768, 768), (768, 2048), (2048, 768), (300, 1000)
    params, grads = problem(*shapes, dtype=dtype)
    params, options = [torch.zeros_like(p) for p in params], dict(norm_mode=norm_mode, lr=0.02)
    for i, got in enumerate(run(params, grads, **options)):
        want, theirs = (
            exact(params[i], columns(grads, i), **options),
            operators(params[i], columns(grads, i), naive_newton_schulz, **options),
        )
        assert rel_err(got["p"], want) <= rel_err(theirs["p"], want), shapes[i]
        assert same_bits(got["momentum_buffer"], theirs["momentum_buffer"])


@GPU
def test_the_host_never_waits():
    params, grads = problem((24, 40), (768, 768), (300, 40), (6,), steps=3)
    opt, mine = both_kinds(params, lr=torch.tensor(0.1, device=DEVICE), norm_mode="row_col")
    yes = verdict(0.5, sanitize=True)
    steps(opt, mine, grads[:1], [yes])
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(opt, mine, [[g.clone() for g in grads[1]]], [yes])
        mine[0].grad = None
        opt.step(verdict=yes)
        steps(opt, mine, [[g.t().contiguous().t() for g in grads[2]]], [yes])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
def test_launches():
    "As many as for one matrix of each shape."
    from dormouse_fused.measure import launches

    counts = []
    for many in ((48, 24, 12), (2, 1, 1)):
        shapes = [s for s, n in zip([(768, 768), (768, 2048), (2048, 768)], many) for _ in range(n)]
        params, grads = problem(*shapes, steps=1)
        mine = leaves(params)
        opt = MuonPlus(mine, norm_mode="row_col")
        monitored = verdict()
        steps(opt, mine, grads, [monitored])
        counts.append(launches(lambda opt=opt, monitored=monitored: opt.step(verdict=monitored)))
    assert counts[0].kernels <= 60 and counts[0].kernels == counts[1].kernels and counts[0].syncs == 0


@GPU
@pytest.mark.parametrize("fresh", [False, True], ids=["same gradients", "gradients of the graph"])
def test_captured(fresh):
    "A graph follows the schedule and the verdict, and gives an eager run's bits, also after other steps have moved on."
    params, grads = problem((24, 40), (300, 130), (2, 130, 300), (6,), steps=6)
    options = dict(norm_mode="row_col")
    rates = [torch.tensor(0.1, device=DEVICE) for _ in range(2)]
    decays = [torch.tensor(0.1, device=DEVICE) for _ in range(2)]
    (opt, mine), (eager, ref) = (both_kinds(params, lr=lr, weight_decay=d, **options) for lr, d in zip(rates, decays))
    verdict_, static = verdict(), [torch.zeros_like(p) for p in params]

    def step():
        for p, s in zip(mine, static):
            p.grad = s + 0.0 if fresh else s
        opt.step(verdict=verdict_)

    def follow(n, go=1.0, scale=1.0):
        for rate, decay in zip(rates, decays):
            rate.fill_(0.1 / (n + 1))
            decay.fill_(0.05 * n)
        verdict_.scale_and_go.copy_(torch.tensor([scale, go]))
        for s, g in zip(static, grads[n]):
            s.copy_(g)

    follow(0)
    step()
    steps(eager, ref, grads[:1], [verdict()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for n, (go, scale) in enumerate([(1.0, 1.0), (0.0, math.nan), (1.0, 0.5)], 1):
        follow(n, go, scale)
        graph.replay()
        assert same_bits(result(opt, mine), steps(eager, ref, grads[n : n + 1], [verdict(scale, go)]))
    follow(4)
    step()
    assert same_bits(result(opt, mine), steps(eager, ref, grads[4:5], [verdict()]))
    follow(5)
    graph.replay()
    assert same_bits(result(opt, mine), steps(eager, ref, grads[5:6], [verdict()]))


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    params, grads = problem((24, 40), (300, 130))
    want = run(params, grads)
    got = run([p.to("cuda:1") for p in params], [[g.to("cuda:1") for g in step] for step in grads])
    assert same_bits([{n: t.to(DEVICE) for n, t in s.items()} for s in got], want)

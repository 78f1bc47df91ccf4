"Sums on tensor cores: the kernels in the interpreter, and beside Triton's form on a GPU."
import pytest
import torch

from dormouse_fused import attnres
from dormouse_fused.attnres import AttnResStack, Sources, fused_attnres, naive_attnres
from dormouse_fused.attnres_mma import (
    _mma_attnres_bwd_kernel,
    _mma_attnres_fwd_kernel,
    _multiplied,
    _wide_attnres_coefs_kernel,
    _wide_cases,
    aot_cases,
    emulated,
    mma_plan,
    runs_here,
    wide_plan,
)  # fmt: skip
from dormouse_fused.gluon import interpret
from dormouse_fused.parity import rel_err
from dormouse_fused.triton import INTERPRET, aot_all

DEVICE = "cpu" if INTERPRET else "cuda"
gpu = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
BF16 = torch.bfloat16


def randn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def problem(L, N, D, seed=0, device="cpu", sharp=1.0):
    "Sources, query, norm's weight, output norm's weight, output's gradient."
    v = [(randn(N, D, seed=seed + l) * (1 + l / 4)).to(device, BF16) for l in range(L)]
    q, w, last = randn(D, seed=90) * sharp / D**0.5, 1 + randn(D, seed=91) / 4, 1 + randn(D, seed=92) / 4
    return v, q.to(device), w.to(device), last.to(device), randn(N, D, seed=93).to(device, BF16)


def oracle(v, q, w, last, do, scale=0.7, eps=1e-6):
    "Output, p, gradients of the sources and of the query, in float64."
    v, q = [t.detach().double().requires_grad_() for t in v], q.double().requires_grad_()
    o, p = naive_attnres(q, v, w.double(), None if last is None else last.double(), eps, scale, True)
    return o.detach(), p.detach(), *torch.autograd.grad(o, [*v, q], do.double())


def fixed(L, D, warps, ahead):
    return dict(D=D, STEP=D, SOURCES=L, LANES=1 << (L - 1).bit_length(), AHEAD=ahead, WARPS=warps, instead=emulated)


CASES = [  # L, N, D, warps, tokens ahead, programs
    (1, 3, 8, 1, 1, 2), (2, 4, 64, 1, 2, 1), (3, 5, 512, 1, 1, 3), (5, 7, 264, 1, 2, 2), (8, 3, 776, 2, 1, 2), (9, 5, 296, 2, 2, 3),
    (12, 2, 40, 4, 2, 1), (16, 2, 64, 1, 1, 2), (2, 3, 1032, 4, 1, 2), (7, 1, 24, 8, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("L,N,D,warps,ahead,programs", CASES, ids=str)
def test_forward_and_backward(L, N, D, warps, ahead, programs):
    v, q, w, _, do = problem(L, N, D)
    out, stats = torch.full((N, D), float("nan"), dtype=BF16), torch.full((3, L, N), float("nan"))
    constants = fixed(L, D, warps, ahead)
    interpret(_mma_attnres_fwd_kernel, programs, tuple(v), q, w, None, out, stats, 1e-6, 0.7, N, L, **constants)
    o, p, *dv, dq = oracle(v, q, w, None, do)
    assert rel_err(out, o) < 3e-3 and rel_err(stats[0], p) < 1e-6
    r = torch.stack([torch.rsqrt(t.double().square().mean(-1) + 1e-6) for t in v])
    assert rel_err(stats[2], r) < 1e-6
    assert rel_err(stats[1], r * torch.stack([0.7 * t.double() @ (q * w).double() for t in v])) < 1e-6
    new, partial = tuple(torch.full((N, D), float("nan"), dtype=BF16) for _ in v), torch.full((1, programs, D), float("nan"))
    interpret(_mma_attnres_bwd_kernel, programs, tuple(v), new, do, q, w, stats, None, partial, 0.7, N, L, **constants)
    for a, b in zip(new, dv):
        assert rel_err(a, b) < 4e-3
    if L == 1:
        assert not partial.any()
    else:
        assert rel_err(0.7 * partial.sum((0, 1)) * w, dq) < 2e-6


@pytest.mark.parametrize("L,sources,D,warps", [(3, 4, 264, 1), (5, 8, 40, 2), (9, 9, 296, 2)], ids=str)
def test_coefficients_instead_of_gradients(L, sources, D, warps):
    "What pulling needs, of fewer sources than there is room for."
    N = 4
    v, q, w, _, do = problem(L, N, D)
    out, stats = torch.empty(N, D, dtype=BF16), torch.full((3, sources, N), float("nan"))
    coefs, partial = torch.full((2, sources, N), float("nan")), torch.full((1, 3, D), float("nan"))
    filled = tuple(v) + (torch.full_like(v[0], float("nan")),) * (sources - L)
    interpret(_mma_attnres_fwd_kernel, 2, filled, q, w, None, out, stats, 1e-6, 0.7, N, L, **fixed(sources, D, warps, 1))
    constants = fixed(sources, D, warps, 2)
    interpret(_mma_attnres_bwd_kernel, 3, filled, None, do, q, w, stats, coefs, partial, 0.7, N, L, **constants)
    p, s, r = stats[:, :L].double()
    d = torch.stack([(t.double() * do.double()).sum(-1) for t in v])
    a = p * (d - (p * d).sum(0)) * r
    assert rel_err(coefs[0, :L], a) < 2e-6 and rel_err(coefs[1, :L], a * s * r / D) < 2e-6
    assert coefs[:, L:].isnan().all()
    assert rel_err(0.7 * partial.sum((0, 1)) * w, oracle(v, q, w, None, do)[-1]) < 2e-6


@pytest.mark.parametrize("L,sources,D,warps", [(3, 4, 264, 1), (5, 8, 264, 2), (9, 12, 40, 1), (1, 2, 16, 2)], ids=str)
def test_output_norm_and_fewer_sources_than_room(L, sources, D, warps):
    "What stands where a source would be is not read."
    N = 3
    v, q, w, last, do = problem(L, N, D)
    out, stats = torch.empty(N, D, dtype=BF16), torch.full((3, sources, N), float("nan"))
    filled = tuple(v) + (torch.full_like(v[0], float("nan")),) * (sources - L)
    interpret(_mma_attnres_fwd_kernel, 2, filled, q, w, last, out, stats, 1e-6, 0.7, N, L, **fixed(sources, D, warps, 1))
    o, p, *_ = oracle(v, q, w, last, do)
    assert rel_err(out, o) < 3e-3 and rel_err(stats[0, :L], p) < 1e-6
    assert not stats[0, L:].any() and not stats[2, L:].any()


def test_saturated_weights():
    "One weight is nearly 1: the query's gradient is made of what is left."
    v, q, w, _, do = problem(4, 6, 64, sharp=30.0)
    out, stats, partial = torch.empty(6, 64, dtype=BF16), torch.empty(3, 4, 6), torch.empty(1, 1, 64)
    interpret(_mma_attnres_fwd_kernel, 1, tuple(v), q, w, None, out, stats, 1e-6, 1.0, 6, 4, **fixed(4, 64, 1, 1))
    new = tuple(map(torch.empty_like, v))
    constants = fixed(4, 64, 1, 1)
    interpret(_mma_attnres_bwd_kernel, 1, tuple(v), new, do, q, w, stats, None, partial, 1.0, 6, 4, **constants)
    want = oracle(v, q, w, None, do, 1.0)
    assert stats[0].max(0).values.min() > 0.9
    assert rel_err(partial.sum((0, 1)) * w, want[-1]) < 1e-5


def test_rows_that_are_far_apart():
    v, q, w, _, do = problem(3, 4, 64)
    wide = [torch.full((4, 72), float("nan"), dtype=BF16) for _ in v]
    for a, b in zip(wide, v):
        a[:, :64] = b
    out, stats = torch.empty(4, 64, dtype=BF16), torch.empty(3, 3, 4)
    interpret(_mma_attnres_fwd_kernel, 2, tuple(wide), q, w, None, out, stats, 1e-6, 0.7, 4, 3, **fixed(3, 64, 1, 1) | dict(STEP=72))
    assert rel_err(out, oracle(v, q, w, None, do)[0]) < 3e-3


def test_the_product_is_equation_1():
    a, b = [randn(32, 2, seed=i).bfloat16() for i in range(4)], [randn(32, 2, seed=9 + i).bfloat16() for i in range(2)]
    left, right = torch.zeros(16, 16), torch.zeros(16, 8)
    for t in range(32):
        g, k = t // 4, t % 4 * 2
        for n, x in enumerate(a):
            left[g + n % 2 * 8, k + n // 2 * 8:][:2] = x[t].float()
        for n, x in enumerate(b):
            right[k + n * 8:, g][:2] = x[t].float()
    want, got = left @ right, _multiplied(a, b, None)
    for t in range(32):
        g, k = t // 4, t % 4 * 2
        assert torch.allclose(got[t], torch.cat([want[g, k:k + 2], want[g + 8, k:k + 2]]), atol=1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_plans(backward):
    for L in range(1, 20):
        for D in (8, 100, 300, 768, 1000, 1024, 2048, 4096, 8192, 16384, 65536):
            plan = mma_plan(L, D, backward)
            if L > 12 or D % 8:
                assert plan is None
            if plan:
                warps, programs, ahead = plan
                assert programs >= 1 and ahead in (1, 2) and 2 * (L + backward) * D * ahead * programs <= 223 << 10
    assert mma_plan(9, 4096, backward)[0] == 8 and mma_plan(8, 768, backward)[0] == 2
    assert mma_plan(9, 4096, backward, 90 << 10)[2] == 1


def coefficients(L, sources, N, D, warps, ahead, programs, step=None, sharp=1.0):
    "a, b, the query's gradient of the kernel for many sources, and the same in float64."
    step = step or D
    v, q, w, _, do = problem(L, N, D, sharp=sharp)
    x, nan = torch.stack(v).double(), float("nan")
    r = torch.rsqrt(x.square().mean(-1) + 1e-6)
    s = 0.7 * r * (x @ (q * w).double())
    p, d = s.softmax(0), (x * do.double()).sum(-1)
    stats, far = torch.full((3, sources, N), nan), torch.full((sources, N, step), nan, dtype=BF16)
    stats[:, :L], far[:L, :, :D] = torch.stack([p, s, r]), torch.stack(v)
    coefs, partial = torch.full((2, sources, N), nan), torch.full((1, programs, D), nan)
    constants = dict(D=D, STEP=step, SOURCES=sources, AHEAD=ahead, WARPS=warps, instead=emulated)
    interpret(_wide_attnres_coefs_kernel, programs, far.unbind(), do, stats, coefs, partial, N, L, **constants)
    assert coefs[:, L:].isnan().all()
    a = p * (d - (p * d).sum(0)) * r
    got = coefs[0, :L], coefs[1, :L], 0.7 * partial.sum((0, 1)) * w
    return got, (a, a * s * r / D, oracle(v, q, w, None, do)[-1]), p


@pytest.mark.parametrize("L,sources,N,D,warps,ahead,programs,step", [
    (12, 12, 5, 264, 1, 2, 2, None), (13, 16, 4, 520, 1, 2, 2, 528), (16, 24, 3, 768, 2, 1, 1, None), (32, 32, 3, 264, 2, 2, 4, None),
    (1, 16, 2, 8, 1, 1, 1, None), (17, 20, 3, 776, 2, 1, 2, 800),
], ids=str)  # fmt: skip
def test_coefficients_of_many_sources(L, sources, N, D, warps, ahead, programs, step):
    got, want, _ = coefficients(L, sources, N, D, warps, ahead, programs, step)
    for a, b in zip(got, want):
        assert rel_err(a, b) < 2e-6 if L > 1 else not a.any()


def test_many_sources_of_saturated_weights():
    (*_, dq), want, p = coefficients(16, 16, 4, 128, 1, 1, 1, sharp=60.0)
    assert p.max(0).values.min() > 0.9
    assert rel_err(dq, want[-1]) < 1e-5


def test_plans_for_many_sources():
    for L in range(1, 40):
        for D in (8, 100, 264, 520, 768, 776, 1000, 1024, 1032, 4096):
            for shared in (99 << 10, 163 << 10, 227 << 10):
                plan = wide_plan(L, D, shared)
                assert (plan is None) == (not 12 <= L <= 32 or D % 8 != 0 or D > 1024)
                if plan:
                    warps, programs, ahead = plan
                    assert L <= 16 * warps and programs >= 1 and ahead in (1, 2)
                    assert programs * (ahead * -(-D // 64) * 128 * (16 * warps + 8) + (1 << 10)) <= shared
    assert wide_plan(12, 768) == wide_plan(16, 768) == (1, 3, 2) and wide_plan(17, 768) == wide_plan(32, 768) == (2, 3, 1)


def test_what_it_is_not_for():
    assert not runs_here([torch.empty(2, 64)], 64)
    assert not INTERPRET or not runs_here([torch.empty(2, 64, dtype=BF16)], 64)


def test_nothing_spills_on_hopper():
    cases = [c for c in aot_cases(((8, 768), (9, 4096))) if "sm_90" in c.targets]
    assert len(cases) == 8 + len(_wide_cases()) // 3
    assert all(u.spill == 0 for u in aot_all([c._replace(arch="sm_90") for c in cases]))


@gpu
@pytest.mark.parametrize("L,N,D", [(8, 300, 768), (9, 70, 4096), (5, 37, 296), (12, 9, 1536), (1, 5, 64), (3, 1000, 2048)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["no norm", "norm"])
def test_beside_triton_s_form(monkeypatch, L, N, D, last):
    v, q, w, norm, do = problem(L, N, D, device=DEVICE)
    norm = norm if last else None
    leaves = [t.requires_grad_() for t in (*v, q, w)]

    def run():
        o, p = fused_attnres(q, v, w, norm, scale=0.7, return_weights=True)
        return o.detach(), p, *torch.autograd.grad(o, leaves, do)

    assert runs_here(v, D)
    fast, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(fast, again))
    monkeypatch.setattr(attnres, "runs_here", lambda tensors, step: False)
    plain, want = run(), oracle(v, q, w, norm, do)
    for a, b, c in zip(fast, plain, want):
        assert rel_err(a, c) < max(1.2 * rel_err(b, c), 2e-6)


@gpu
def test_unaligned_sources_take_the_other_form():
    v, q, w, _, _ = problem(3, 9, 64, device=DEVICE)
    shifted = [torch.empty(9 * 64 + 1, dtype=BF16, device=DEVICE)[1:].view(9, 64).copy_(t) for t in v]
    assert not runs_here(shifted, 64) and runs_here(v, 64)
    assert rel_err(fused_attnres(q, shifted, w), fused_attnres(q, v, w)) < 3e-3


@gpu
@pytest.mark.parametrize("L,N,D", [(13, 300, 768), (12, 37, 264), (16, 70, 1024), (20, 41, 768), (28, 9, 520), (24, 5000, 768)], ids=str)
def test_many_sources_beside_triton_s_form(monkeypatch, L, N, D):
    v, q, w, _, do = problem(L, N, D, device=DEVICE)
    q, w = q.requires_grad_(), w.requires_grad_()

    def run(unaligned=False):
        shifted = torch.empty(N * D + 1, dtype=BF16, device=DEVICE)[1:].view(N, D).copy_(v[0])
        x = (shifted if unaligned else v[0]).detach().requires_grad_()
        sources = Sources(x, scale=0.7)
        for t in v[1:]:
            sources.append(t)
        return torch.autograd.grad(sources.read(q, w), [x, q, w], do)

    assert runs_here([*v, do], D) and wide_plan(-(-L // 4) * 4, D)
    fast, again, unaligned = run(), run(), run(True)
    assert all(torch.equal(a, b) for a, b in zip(fast, again))
    monkeypatch.setattr(attnres, "wide_launcher", lambda *args: None)
    monkeypatch.setattr(attnres, "mma_launcher", lambda *args: None)
    plain, (_, _, dx, *_, dq) = run(), oracle(v, q.detach(), w.detach(), None, do)
    dw = dq * (q / w).detach()
    for a, b, c, want in zip(fast, plain, unaligned, (dx, dq, dw)):
        assert max(rel_err(a, want), rel_err(c, want)) < max(1.2 * rel_err(b, want), 2e-6)


@gpu
@pytest.mark.parametrize("layers", [12, 27])
def test_a_deep_stack(monkeypatch, layers):
    "Reads of more than 12 sources, padded to room for a multiple of four."
    x, queries = randn(130, 768, device=DEVICE).bfloat16().requires_grad_(), (randn(layers + 1, 768, device=DEVICE) / 30).requires_grad_()
    weight = 1 + randn(768, seed=1, device=DEVICE) / 4

    def run():
        sources = Sources(x)
        for q in queries[:-1]:
            sources.append(torch.tanh(2 * sources.read(q, weight)))
        return torch.autograd.grad(sources.read(queries[-1], weight).float().square().sum(), [x, queries])

    fast, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(fast, again))
    monkeypatch.setattr(attnres, "wide_launcher", lambda *args: None)
    for a, b in zip(fast, run()):
        assert rel_err(a, b) < 5e-3


@gpu
def test_a_stack():
    stack = AttnResStack(768, 11, device=DEVICE)
    torch.nn.init.normal_(stack.query, std=0.03)
    x = randn(70, 768, device=DEVICE).bfloat16().requires_grad_()
    scales = [1 + randn(768, seed=i, device=DEVICE).bfloat16() / 4 for i in range(11)]
    got = torch.autograd.grad(stack(x, [lambda h, s=s: h * s for s in scales]).float().square().sum(), [x, stack.query])

    def plain(x, query):
        sources = [x]
        for q, w, s in zip(query, stack.rms_weight.double(), scales):
            sources.append(naive_attnres(q, sources, w) * s.double())
        return naive_attnres(query[-1], sources, stack.rms_weight[-1].double())

    x, query = x.detach().double().requires_grad_(), stack.query.detach().double().requires_grad_()
    want = torch.autograd.grad(plain(x, query).square().sum(), [x, query])
    assert rel_err(got[0], want[0]) < 2e-2 and rel_err(got[1], want[1]) < 2e-2

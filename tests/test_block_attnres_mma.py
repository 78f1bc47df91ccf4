"A block's reads on tensor cores: the kernels in the interpreter, and beside Triton's form on a GPU."
import pytest
import torch

from dormouse_fused import block_attnres
from dormouse_fused.block_attnres import BlockAttnResStack, batched_attnres, naive_block_attnres
from dormouse_fused.block_attnres_mma import (
    _block_mma_bwd_kernel,
    _block_mma_fwd_kernel,
    aot_cases,
    block_mma_plan,
    emulated,
    mma_room,
)  # fmt: skip
from dormouse_fused.gluon import interpret
from dormouse_fused.parity import rel_err
from dormouse_fused.triton import INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"
gpu = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
BF16, NAN = torch.bfloat16, float("nan")


def randn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def problem(M, S, N, D, sharp=1.0, device="cpu"):
    "Sources, queries, norms' weights, gradients, partial sums."
    v = [(randn(N, D, seed=m) * (1 + m / 4)).to(device, BF16) for m in range(M)]
    q, w = randn(S, D, seed=90) * sharp / D**0.5, 1 + randn(S, D, seed=91) / 4
    g, b = ([randn(N, D, seed=first + i).to(device, BF16) for i in range(S)] for first in (100, 200))
    return v, q.to(device), w.to(device), g, b


def oracle(v, q, w, c=0.7, eps=1e-6):
    "o, lse, p, s, r in float64."
    x = torch.stack(v).double()
    r = torch.rsqrt(x.square().mean(-1) + eps)
    s = c * r * torch.einsum("mnd,sd->smn", x, q.double() * w.double())
    lse = s.logsumexp(1)
    p = (s - lse[:, None]).exp()
    return torch.einsum("smn,mnd->snd", p, x), lse, p, s, r


def back(v, q, w, g, alpha, beta, d_b, dlse, c=0.7):
    "Gradients of the sources, and u / c."
    x, G, qw = torch.stack(v).double(), torch.stack(g).double(), c * q.double() * w.double()
    _, _, p, s, r = oracle(v, q, w, c)
    d = torch.einsum("mnd,snd->smn", x, G)
    ref = d.gather(1, p.argmax(1, keepdim=True))
    shift = (p * (d - ref)).sum(1) - dlse
    shift = shift - beta * (ref[:, 0] - d_b + shift)
    a = alpha[:, None] * p * (d - ref - shift[:, None]) * r
    dv = torch.einsum("smn,snd->mnd", alpha[:, None] * p, G) + torch.einsum("smn,sd->mnd", a, qw)
    return dv - ((a * s).sum(0) * r / v[0].shape[-1])[..., None] * x, torch.einsum("smn,mnd->sd", a, x)


def constants(D, room, S, warps, ahead, step=None, exact=True):
    lanes = 1 << (room - 1).bit_length()
    folded = min(1 << (S - 1).bit_length(), 32 // lanes)
    return dict(D=D, STEP=step or D, QUERIES=S, SOURCES=room, LANES=lanes, FOLDED=folded, AHEAD=ahead, WARPS=warps, EXACT=exact)


def forward(M, room, S, N, D, warps, ahead, programs, shared, sharp=1.0, step=None):
    v, q, w, g, b = problem(M, S, N, D, sharp)
    fixed = constants(D, room, S, warps, ahead, step, M == room)
    outs, lse = tuple(torch.full((N, D), NAN, dtype=BF16) for _ in range(S)), torch.full((S, N), NAN)
    stats, rstds = torch.full((S, N, 2, fixed["LANES"]), NAN), torch.full((N, fixed["LANES"]), NAN)
    wide = [torch.full((N, fixed["STEP"]), NAN, dtype=BF16) for _ in v]
    for x, y in zip(wide, v):
        x[:, :D] = y
    filled = tuple(wide) + (torch.full_like(wide[0], NAN),) * (room - M)
    fixed |= dict(SHARED=shared, instead=emulated)
    interpret(_block_mma_fwd_kernel, programs, filled, q, w, outs, lse, stats, rstds, 1e-6, 0.7, N, M, **fixed)
    return v, q, w, g, b, outs, lse, stats, rstds


FWD = [  # M, room, S, N, D, warps, ahead, programs, shared
    (1, 1, 1, 3, 64, 1, 1, 2, 0), (1, 1, 8, 3, 264, 1, 2, 2, 1), (2, 2, 8, 4, 520, 2, 1, 3, 0), (3, 3, 8, 5, 1032, 4, 2, 2, 1),
    (4, 4, 8, 5, 296, 1, 2, 2, 0), (3, 3, 8, 2, 1032, 2, 1, 1, 1), (4, 4, 5, 3, 72, 4, 1, 1, 1), (5, 6, 1, 4, 264, 2, 2, 2, 0),
    (5, 6, 8, 3, 136, 1, 1, 2, 1), (8, 8, 8, 3, 264, 2, 2, 1, 0), (7, 7, 3, 3, 64, 1, 1, 1, 1), (12, 12, 1, 3, 264, 1, 1, 2, 0),
    (11, 12, 3, 2, 64, 1, 1, 1, 1), (3, 3, 2, 3, 200, 1, 2, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", FWD, ids=str)
@pytest.mark.parametrize("sharp", [1.0, 20.0])
def test_forward(case, sharp):
    M = case[0]
    v, q, w, _, _, outs, lse, stats, rstds = forward(*case, sharp, case[4] + 8)
    o, want, p, s, r = oracle(v, q, w)
    assert rel_err(torch.stack(outs), o) < 3e-3 and rel_err(lse, want) < 2e-6
    assert rel_err(stats[:, :, 0, :M].transpose(1, 2), p) < 5e-6 and rel_err(stats[:, :, 1, :M].transpose(1, 2), s) < 1e-6
    assert rel_err(rstds[:, :M].T, r) < 1e-6
    assert not stats[..., M:].any() and not rstds[:, M:].any()
    if M == 1:
        assert all(torch.equal(out, v[0]) for out in outs)


BWD = [  # M, room, S, N, D, warps, ahead, programs, shared, bare, with `last`, fresh
    (1, 1, 1, 3, 64, 1, 1, 2, 0, 1, 1, 3), (1, 1, 8, 3, 264, 1, 2, 2, 1, 1, 1, 0), (2, 2, 8, 4, 520, 2, 1, 3, 0, 1, 1, 0),
    (3, 3, 8, 5, 1032, 4, 2, 2, 1, 1, 1, 1), (4, 4, 8, 5, 296, 1, 2, 2, 1, 1, 1, 2), (4, 4, 5, 3, 72, 4, 1, 1, 1, 0, 1, 4),
    (5, 6, 1, 4, 264, 2, 2, 2, 0, 1, 1, 2), (5, 6, 8, 3, 136, 1, 1, 2, 1, 1, 1, 3), (2, 2, 8, 3, 1032, 2, 1, 2, 1, 1, 1, 0),
    (8, 8, 8, 3, 264, 2, 2, 1, 0, 1, 1, 0), (4, 4, 8, 3, 264, 1, 1, 1, 1, 8, 0, 3), (12, 12, 1, 3, 264, 1, 1, 2, 0, 1, 1, 3),
    (3, 4, 2, 3, 200, 1, 2, 2, 1, 2, 0, 3), (9, 10, 3, 3, 72, 1, 1, 2, 1, 1, 1, 1),
]  # fmt: skip


def backward(M, room, S, N, D, warps, ahead, programs, shared, bare, with_last, fresh, hold, late, halves, sharp=1.0):
    v, q, w, g, b, _, _, stats, rstds = forward(M, room, S, N, D, 1, 1, 1, 0, sharp)
    alpha, beta, d_b, dlse = torch.ones(S, N).double(), torch.zeros(S, N).double(), torch.zeros(S, N).double(), torch.zeros(S, N)
    links = torch.full((S, N, 4), NAN)
    for i in range(bare, S):
        t, dot = randn(N, seed=300 + i) * 3, (b[i].float() * g[i].float()).sum(-1)
        links[i] = torch.stack([torch.sigmoid(t), torch.sigmoid(-t), dot, t * NAN], 1)
        alpha[i], beta[i], d_b[i] = links[i, :, :3].double().unbind(1)
    if not with_last:
        dlse = randn(S, N, seed=77)
    dv, u = back(v, q, w, g, alpha, beta, d_b, dlse.double())
    works = [randn(N, D, seed=400 + m).to(torch.float32 if with_last else BF16) for m in range(M)]
    before, last = [t.clone() for t in works], torch.full((N, D), NAN, dtype=BF16) if with_last else None
    empty = [bool(fresh % 2 if m < M - 1 else fresh // 2 % 2) for m in range(M)]
    for t, nothing in zip(works, empty):
        if nothing:
            t.fill_(NAN)
    filled, rows = tuple(v) + (torch.full_like(v[0], NAN),) * (room - M), programs + 2
    shares = torch.full((S, rows, D), NAN)
    interpret(_block_mma_bwd_kernel, programs, filled, tuple(works) + (works[0],) * (room - M), last, tuple(g), None if with_last else dlse,
              links if bare < S else None, q, w, stats, rstds, shares, 0.7, N, M, fresh, rows, BARE=bare, SHARED=shared, HOLD=hold,
              LATE=late, HALVES=halves, SOON=True, instead=emulated, **constants(D, room, S, warps, ahead, exact=M == room))  # fmt: skip
    for m in range(M):
        want = dv[m] + (before[m].double() if with_last and not empty[m] else 0)
        final = with_last and m == M - 1 and fresh < 4
        got = last if final else works[m]
        assert rel_err(got, want) < (4e-3 if got.dtype is BF16 else 4e-6), m
        if final:
            assert works[m].isnan().all() or torch.equal(works[m], before[m])
    if S == M == 1:
        assert not shares[:, :programs].any()
    else:
        assert rel_err(shares[:, :programs].sum(1), u) < 5e-6
    assert shares[:, programs:].isnan().all()


@pytest.mark.parametrize("hold,late,halves", [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0)])
@pytest.mark.parametrize("case", BWD, ids=str)
def test_backward(case, hold, late, halves):
    backward(*case, hold, late, halves)


@pytest.mark.parametrize("hold", [0, 1])
def test_backward_where_one_weight_is_nearly_1(hold):
    backward(4, 4, 8, 5, 64, 1, 1, 2, 1, 8, 1, 3, hold, 0, 0, sharp=30.0)
    backward(3, 3, 8, 5, 64, 1, 1, 2, 0, 1, 1, 3, hold, 1, 0, sharp=30.0)


@pytest.mark.parametrize("shared,major", [(99 << 10, 8), (163 << 10, 8), (227 << 10, 9), (227 << 10, 10)])
def test_plans(shared, major):
    "Whatever is launched fits; what can't be is left to Triton."
    for M in range(1, 20):
        for D in (8, 100, 256, 768, 1000, 1024, 2048, 3000, 4096, 8192):
            for S in (1, 2, 5, 8, 9, 33):
                for backward in False, True:
                    plan = block_mma_plan(M, D, S, backward, shared, major)
                    if M > 12 or D % 8 or D > 4096:
                        assert plan is None
                    if plan:
                        fixed, queries = dict(plan.constants), min(S, plan.most)
                        assert 256 * fixed["WARPS"] * (2 if S == 1 or backward else 1) >= D
                        rows = fixed["AHEAD"] * (mma_room(M) + backward * (-(-S // -(-S // queries))))
                        assert plan.programs * 2 * D * rows <= shared and plan.programs * fixed["WARPS"] <= 64
                        assert plan.programs * fixed["WARPS"] * 32 * fixed.get("maxnreg", 128) <= 65536
                        assert ("maxnreg" not in fixed) or major == 9
    assert block_mma_plan(4, 2048, 8, True, 227 << 10).most == 8 and mma_room(9) == 10 and mma_room(7) == 7


def test_what_the_gate_compiles():
    cases = aot_cases()
    assert {c.targets for c in cases} == {("sm_80",), ("sm_90",), ("sm_100",)}
    assert {c.kernel.split(":")[1] for c in cases} == {"_block_mma_fwd_kernel", "_block_mma_bwd_kernel"}


def read(v, q, w, g, dlse):
    leaves = [t.detach().requires_grad_() for t in (*v, q, w)]
    out, lse = batched_attnres(leaves[-2], leaves[:-2], leaves[-1], scale=0.7)
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [torch.stack(g), dlse])


READS = [  # M, S, N, D
    (4, 8, 300, 2048), (1, 8, 70, 768), (3, 5, 37, 296), (9, 3, 33, 1536), (12, 8, 9, 2048), (5, 1, 50, 2048), (6, 8, 40, 1024),
    (4, 8, 70, 4096), (8, 1, 20, 4096), (2, 9, 64, 512), (10, 11, 21, 72),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("M,S,N,D", READS, ids=str)
def test_beside_triton_s_form(monkeypatch, M, S, N, D):
    v, q, w, g, _ = problem(M, S, N, D, device=DEVICE)
    dlse = randn(S, N, seed=77, device=DEVICE)
    assert block_attnres._fast(v, D, M, S) and block_attnres._fast(v, D, M, S, True)
    fast, again = read(v, q, w, g, dlse), read(v, q, w, g, dlse)
    assert all(torch.equal(a, b) for a, b in zip(fast, again))
    monkeypatch.setattr(block_attnres, "runs_here", lambda tensors, step: False)
    plain = read(v, q, w, g, dlse)
    one = torch.ones(S, N, device=DEVICE).double()
    dv, u = back(v, q, w, g, one, 0 * one, 0 * one, dlse.double())
    want = *oracle(v, q, w)[:2], *dv, 0.7 * u * w.double(), 0.7 * u * q.double()
    for a, b, c in zip(fast, plain, want):
        assert rel_err(a, c) < max(1.2 * rel_err(b, c), 3e-6)


@gpu
@pytest.mark.parametrize("n,S,D", [(32, 8, 2048), (9, 4, 768), (13, 3, 4096), (40, 5, 264)], ids=str)
def test_a_stack_beside_triton_s_form(monkeypatch, n, S, D):
    stack = BlockAttnResStack(D, n, S, device=DEVICE)
    torch.nn.init.normal_(stack.query, std=2 / D**0.5)
    scales, x = [1 + randn(D, seed=i, device=DEVICE).bfloat16() / 4 for i in range(n)], randn(2, 35, D, seed=99, device=DEVICE).bfloat16()
    leaves = [x.requires_grad_(), stack.query, stack.rms_weight]

    def run():
        out = stack(x, [lambda h, s=s: torch.sin(h * s) for s in scales])
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)

    fast, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(fast, again))
    monkeypatch.setattr(block_attnres, "runs_here", lambda tensors, step: False)
    plain, exact = run(), [t.detach().double().requires_grad_() for t in leaves]
    out = naive_block_attnres(exact[0], [lambda h, s=s: torch.sin(h * s.double()) for s in scales], exact[1], exact[2], S)
    want = out.detach(), *torch.autograd.grad(out.square().sum(), exact)
    for a, b, c in zip(fast, plain, want):
        assert rel_err(a, c) < 1.2 * rel_err(b, c)


@gpu
def test_unaligned_tensors_take_the_other_form():
    v, q, w, g, _ = problem(3, 2, 9, 64, device=DEVICE)
    shifted = [torch.empty(9 * 64 + 1, dtype=BF16, device=DEVICE)[1:].view(9, 64).copy_(t) for t in v]
    dlse = randn(2, 9, seed=77, device=DEVICE)
    assert not block_attnres._fast(shifted, 64, 3, 2) and block_attnres._fast(v, 64, 3, 2)
    for a, b in zip(read(shifted, q, w, g, dlse), read(v, q, w, g, dlse)):
        assert rel_err(a, b) < 4e-3
    leaves = [t.requires_grad_() for t in (*v, q, w)]
    out, _ = batched_attnres(q, v, w)
    bent = torch.empty(2 * 9 * 64 + 1, dtype=BF16, device=DEVICE)[1:].view(2, 9, 64).copy_(torch.stack(g))
    for a, b in zip(torch.autograd.grad(out, leaves, bent, retain_graph=True), torch.autograd.grad(out, leaves, torch.stack(g))):
        assert rel_err(a, b) < 4e-3

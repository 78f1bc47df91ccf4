"The Hopper kernels of KDA and GDN-2 without a GPU: odd lengths, gates and options, in Gluon's interpreter."

import pytest
import torch
import torch.nn.functional as F

from dormouse_fused import kda_hopper as hopper
from dormouse_fused.gluon import interpret
from dormouse_fused.parity import rel_err
from dormouse_fused.triton import aot_all

NAN = float("nan")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [(BF16, 1), (FP16, 1), (FP32, 2)]
TOLERANCE = {BF16: 1e-2, FP16: 1e-3, FP32: 2e-4}
LOOSE = dict(dg=4, db=2, ddt_bias=10, dA_log=50)  # sums of rounded numbers of both signs, over tokens or channels


def plan(parts, which, per=False):
    plan = hopper._scan_plan(parts, which, per) if which in (1, 2) else hopper.PLANS[parts][which]
    return {n: v for n, v in plan.items() if n.isupper()}


def closed_gates(name, T):
    "Log decays [T, 1 or 64] in nats."
    t = torch.arange(T)[:, None]
    some = torch.rand(T, 64, generator=torch.Generator().manual_seed(3)) < 0.2
    return {
        "0": torch.zeros(T, 1),
        "-5": torch.full((T, 1), -5.0),
        "-20": torch.full((T, 1), -20.0),
        "mixed": torch.where(some, -20.0, -0.01),
        "closed then open": torch.where(t % 64 < 8, -20.0, -0.01),
        "one channel": torch.where(torch.arange(64) == 5, -20.0, -0.01).expand(T, 64),
    }[name]


def make(T, dtype, per=False, B=1, H=1, gate=None, raw=False, beta=None, state=True, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    x = {n: randn(B, T, H, 64).to(dtype) for n in "qkv"}
    x["g"] = -torch.rand(B, T, H, 64, generator=gen)
    if gate is not None:
        x["g"] = closed_gates(gate, T)[None, :, None].expand(B, T, H, 64).contiguous()
    if per:
        x |= {n: torch.rand(B, T, H, 64, generator=gen).to(dtype) for n in "bw"}
    else:
        x["b"] = torch.rand(B, T, H, generator=gen).to(dtype)
    if beta is not None:
        x["b"][:, 3::7] = beta
    if raw:
        x |= dict(g=randn(B, T, H, 64) - 1, A_log=0.1 * randn(H), dt_bias=0.3 * randn(H, 64))
    x["do"] = randn(B, T, H, 64).to(dtype)
    return x | (dict(S=randn(B, H, 64, 64), dS=randn(B, H, 64, 64)) if state else {})


def recurrence(q, k, e, z, g, S):
    o = [z[:, :0]]
    for t in range(q.shape[1]):
        S = S * g[:, t, :, :, None].exp()
        r = z[:, t] - (e[:, t, :, None] @ S)[..., 0, :]
        S = S + k[:, t, :, :, None] * r[..., None, :]
        o.append((q[:, t, :, None] @ S)[:, None, ..., 0, :] / 8)
    return torch.cat(o, 1), S


def wanted(x, l2norm=True, sigmoid=False, neg=False, lower=None):
    "Outputs and gradients of the recurrence in float64."
    leaves = {n: t.double().requires_grad_() for n, t in x.items() if n not in ("do", "dS")}
    q, k, v, g, b = (leaves[n] for n in "qkvgb")
    if l2norm:
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    if "A_log" in x:
        a, y = leaves["A_log"].exp()[:, None], g + leaves["dt_bias"]
        g = lower * (a * y).sigmoid() if lower else -a * F.softplus(y)
    w = leaves.get("w")
    if w is None:
        b = w = (1 + neg) * b[..., None].sigmoid() if sigmoid else b[..., None]
    S = leaves["S"] if "S" in x else v.new_zeros(v.shape[0], v.shape[2], 64, 64)
    o, S = recurrence(q, k, b * k, w * v, g, S)
    out, upstream = (
        (dict(o=o, ht=S), [x["do"].double(), x["dS"].double()]) if "S" in x else (dict(o=o), [x["do"].double()])
    )
    grads = torch.autograd.grad(list(out.values()), list(leaves.values()), upstream)
    return {n: t.detach() for n, t in out.items()} | {"d" + n: t for n, t in zip(leaves, grads)}


class Kernels:
    "The five kernels on one problem, outputs poisoned with NaN."

    def __init__(self, x, parts, l2norm=True, sigmoid=False, neg=False, lower=None, v_first=False):
        self.x, self.parts, self.per, self.v_first, self.state = x, parts, "w" in x, v_first, "S" in x
        (self.B, self.T, self.H, _), dtype = x["q"].shape, x["q"].dtype
        self.NT, self.low = -(-self.T // 64), BF16 if parts > 1 else dtype
        raw = "A_log" in x
        self.gate = x.get("A_log"), x.get("dt_bias")
        self.last, self.short = (0.125, lower or 0.0, self.T, self.H, self.NT), (0.125, self.T, self.H, self.NT)
        self.scan = dict(PER_CHANNEL=self.per, USE_L2=l2norm, PARTS=parts)
        self.on = hopper._gates(self.per, l2norm, raw, bool(lower), raw, raw) | dict(PARTS=parts)
        self.beta = dict(USE_SIGMOID=sigmoid, NEG=neg)
        BH = self.B, self.H
        self.vec = torch.full((*BH, self.NT, 4, 64), NAN)
        self.h = torch.full((*BH, self.NT - 1, parts, 64, 64), NAN, dtype=self.low)
        self.o, self.ht, self.dh0 = (
            torch.full_like(x["v"], NAN),
            torch.full((*BH, 64, 64), NAN),
            torch.full((*BH, 64, 64), NAN),
        )
        self.new = {n: torch.full_like(x[n], NAN) for n in "qkvgbw" if n in x}
        self.G, self.M = self.new["g"], self.new["k"].view(self.low)  # dg and dk take their places
        self.A = self.new["b"].view(self.low) if self.per else torch.full((*BH, self.NT, parts, 3072), NAN, dtype=self.low)
        self.dgate = torch.full((self.B, self.NT, 65 * self.H), NAN)

    def states(self, name):
        if not self.state:
            return None
        return self.x[name].mT.contiguous() if self.v_first else self.x[name]

    def forward(self):
        q, k, v, g, b = (self.x[n] for n in "qkvgb")
        made, first = (self.A, self.M), dict(V_FIRST=self.v_first)
        n = self.B * self.H
        interpret(hopper._hopper_kda_chunk_fwd_kernel, n * self.NT, q, k, g, b, *self.gate, *made, self.G, self.vec, *self.last,
                  EPS=1e-6, **self.beta, **self.on, **plan(self.parts, 0))  # fmt: skip
        interpret(hopper._hopper_kda_fwd_kernel, n, q, k, v, self.G, b, self.x.get("w"), *made, self.vec, self.states("S"), self.o, self.h,
                  self.ht, *self.short, HAS_H0=self.state, SAVE_H=True, SAVE_HT=True, **first, **self.scan,
                  **plan(self.parts, 1, self.per))  # fmt: skip
        return self

    def backward_scan(self):
        q, k, b = (self.x[n] for n in "qkb")
        interpret(hopper._hopper_kda_bwd_kernel, self.B * self.H, q, k, self.x["do"], self.G, b, self.A, self.M, self.vec,
                  self.states("dS"), self.new["q"].view(self.low), self.new["v"], self.dh0, *self.short, HAS_DHT=self.state,
                  SAVE_DH0=True, V_FIRST=self.v_first, **self.scan, **plan(self.parts, 2, self.per))  # fmt: skip
        return self

    def gradients(self, levels):
        q, k, v, g, b = (self.x[n] for n in "qkvgb")
        kernel = hopper._hopper_kda_levels_bwd_kernel if levels else hopper._hopper_kda_chunk_bwd_kernel
        interpret(kernel, self.B * self.H * self.NT, q, k, v, g, b, self.x.get("w"), *self.gate, self.A, self.G, self.vec,
                  self.states("S"), self.h, self.x["do"], self.states("dS"), self.new["q"].view(self.low),
                  *(self.new.get(n) for n in "qkvgbw"), self.dgate, *self.last, HAS_H0=self.state, HAS_DHT=self.state,
                  V_FIRST=self.v_first, **self.beta, **self.on, **plan(self.parts, 3 + levels))  # fmt: skip
        return self

    def results(self):
        out = dict(o=self.o) | {"d" + n: t for n, t in self.new.items()}
        if self.state:
            out |= dict(ht=self.ht.mT, dS=self.dh0.mT) if self.v_first else dict(ht=self.ht, dS=self.dh0)
        if self.gate[0] is not None:
            ddt_bias, dA = self.dgate.sum((0, 1)).split([64 * self.H, self.H])
            out |= dict(dA_log=dA, ddt_bias=ddt_bias.view(self.H, 64))
        return out

    def run(self):
        self.forward().backward_scan()
        for levels in hopper.levels_of(self.x["q"].dtype):
            self.gradients(levels)
        return self.results()


def check(x, parts, **options):
    want = wanted(x, **{n: v for n, v in options.items() if n != "v_first"})
    got = Kernels(x, parts, **options).run()
    dtype = x["q"].dtype
    # an operand in float16 below its smallest number is zero, and so is what closed gates make of it
    lost = {n for n, t in want.items() if t.abs().max() <= (2.0**-20 if dtype == FP16 else 0)}
    wrong = {n: rel_err(got[n], t) for n, t in want.items() if n not in lost}
    wrong = {n: e for n, e in wrong.items() if not e <= TOLERANCE[dtype] * LOOSE.get(n, 1)}
    assert not wrong
    assert all(got[n].abs().max() <= 2.0**-20 for n in lost)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("per", [False, True])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
def test_lengths(T, per, dtype, parts):
    check(make(T, dtype, per), parts)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("per", [False, True])
def test_batches_heads_and_no_states(per, dtype, parts):
    check(make(70, dtype, per, B=2, H=3, state=False), parts)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("per", [False, True])
def test_states_stored_value_first(per, dtype, parts):
    check(make(130, dtype, per, B=2), parts, v_first=True)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("gate", ["0", "-5", "-20", "mixed", "closed then open", "one channel"])
def test_gates(gate, dtype, parts):
    check(make(130, dtype, gate=gate), parts)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("gate", ["0", "mixed", "closed then open"])
def test_gates_with_rates_by_channel(gate, dtype, parts):
    check(make(130, dtype, True, gate=gate), parts)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("lower", [None, -5.0, -20.0])
@pytest.mark.parametrize("neg", [False, True])
def test_activations(neg, lower, dtype, parts):
    check(make(100, dtype, H=2, raw=True), parts, sigmoid=True, neg=neg, lower=lower)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("per", [False, True])
def test_rows_as_they_are(per, dtype, parts):
    x = make(100, dtype, per)
    x |= {n: F.normalize(x[n].float(), dim=-1).to(dtype) for n in "qk"}
    check(x, parts, l2norm=False)


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("per", [False, True])
def test_rows_that_erase_nothing(per, dtype, parts):
    check(make(100, dtype, per, beta=0.0), parts)


@pytest.mark.parametrize(("dtype", "parts"), [(BF16, 1), (FP32, 2)])
def test_each_launch_leaves_the_other_kind_of_chunks_alone(dtype, parts):
    x = make(200, dtype, True, B=2, H=2)
    x["g"][0, 64:128, 1, 7] = -20.0  # one channel of one chunk, and the whole of another
    x["g"][1, 128:192, 0] = -20.0
    kernels = Kernels(x, parts).forward().backward_scan()
    closed = torch.zeros(2, 2, 4, dtype=torch.bool)
    closed[0, 1, 1] = closed[1, 0, 2] = True
    assert torch.equal(kernels.vec[..., 3, :].amin(-1) < -160, closed)
    rows = closed.repeat_interleave(64, -1)[..., :200].transpose(1, 2)
    before = {n: t.clone() for n, t in kernels.new.items()}
    kernels.gradients(False)
    anchored = {n: t.clone() for n, t in kernels.new.items()}
    for n, t in anchored.items():
        assert torch.equal(t[rows].view(torch.uint8), before[n][rows].view(torch.uint8)), n
        assert t[~rows].isfinite().all(), n
    kernels.gradients(True)
    for n, t in kernels.new.items():
        assert torch.equal(t[~rows], anchored[n][~rows]), n
        assert t[rows].isfinite().all(), n
    want = wanted(x)
    assert all(rel_err(t, want["d" + n]) <= TOLERANCE[dtype] for n, t in kernels.new.items())


@pytest.mark.parametrize("at", [70, 128])
def test_no_later_token_and_no_later_chunk_reaches_an_output(at):
    def forward(edit):
        x = make(150, BF16, True, state=False)
        if edit:
            x["k"][:, at:], x["v"][:, at:], x["b"][:, at:] = -x["k"][:, at:], 2 * x["v"][:, at:], 0.5
            x["g"][:, at:] = -9.0
        return Kernels(x, 1).forward().o

    before, after = forward(False), forward(True)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("gate", [-1.0, -9.0])
def test_later_gates_of_a_chunk_move_no_bit(gate, dtype, parts):
    "At -9 the chunk goes by levels: anchors are whole numbers, and both ways give the same bits."
    x = make(64, dtype, state=False)
    before = Kernels(x, parts).forward()
    x["g"][:, 40:] = gate
    after = Kernels(x, parts).forward()
    assert torch.equal(before.o[:, :40], after.o[:, :40])
    lost = [-kernels.vec[..., 3, :].min() for kernels in (before, after)]
    assert lost[0] < 160 and (lost[1] > 160) == (gate < -5)


def test_where_they_run():
    cpu = torch.device("cpu")
    assert not hopper.runs_here(64, 64, BF16, "tf32", cpu)
    assert hopper.levels_of(FP16) == (True,)
    assert hopper.levels_of(BF16) == hopper.levels_of(FP32) == (False, True)


@pytest.mark.parametrize(("K", "V", "dtype", "prec", "here"), [
    (64, 64, BF16, "tf32", True), (64, 64, FP32, "tf32", True), (64, 64, FP32, "tf32x3", False), (64, 64, FP32, "ieee", False),
    (64, 128, BF16, "tf32", False), (32, 64, FP16, "tf32", False),
])  # fmt: skip
def test_what_runs_on_a_hopper_gpu(monkeypatch, K, V, dtype, prec, here):
    monkeypatch.setattr(hopper.gated_delta_hopper, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(hopper.gated_delta_hopper, "INTERPRET", False)
    assert hopper.runs_here(K, V, dtype, prec, torch.device("cuda:0")) is here
    monkeypatch.setattr(hopper.gated_delta_hopper, "_capability", lambda index: (10, 0))
    assert not hopper.runs_here(K, V, dtype, prec, torch.device("cuda:0"))


def test_every_kernel_compiles_for_hopper():
    cases = hopper.aot_cases()
    assert {c.targets for c in cases} == {("sm_90",)}
    some = [c for c in cases if c.signature["q"] == "*bf16" and c.constexprs["USE_L2"]]
    assert len(some) == 5
    assert all(use.spill <= case.spill for case, use in zip(some, aot_all(some)))

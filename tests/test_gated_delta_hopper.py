"The Hopper kernels without a GPU: odd lengths and options, in Gluon's interpreter. test_gated_delta.py has them on a GPU."
import math

import pytest
import torch
import torch.nn.functional as F

from dormouse_fused import gated_delta_hopper as hopper
from dormouse_fused.gated_delta import naive_recurrent_gated_delta_rule
from dormouse_fused.gluon import interpret
from dormouse_fused.parity import rel_err


def plan(parts, which):
    return {n: v for n, v in hopper.PLANS[parts][which].items() if n.isupper()}


def inverse(k, G, beta, parts=1):
    NT = -(-k.shape[1] // 64)

    def chunks(x):
        B, T, H, D = x.shape
        return F.pad(x.float().transpose(1, 2), (0, 0, 0, NT * 64 - T)).view(B, H, NT, 64, D)

    k, b = chunks(k), chunks(beta[..., None])
    G = chunks(G[..., None]).double().cumsum(-2) / math.log(2)
    A = torch.linalg.inv(torch.eye(64) + b * ((G - G.mT).exp2().float() * (k @ k.mT)).tril(-1)) - torch.eye(64)
    vec = G, b, (G[..., -1:, :] - G).exp2(), G - G.float() if parts == 3 else G.exp2()
    vec = torch.stack(vec, -3)[..., 0].float().contiguous()
    return torch.cat([A[..., :32, :32].flatten(-2), A[..., 32:, :].flatten(-2)], -1), vec


def split(x, parts, dtype):
    out = []
    for _ in range(parts):
        out.append(x.to(dtype))
        x = x - out[-1].float()
    return torch.stack(out, -2).contiguous()


def run(T, dtype, parts, B=1, H=2, state=False, v_first=False, beta=None, gate=None, seed=0):
    "Outputs and gradients of the three kernels, and of the recurrence in float64."
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    q, k = (F.normalize(randn(B, T, H, 64), dim=-1).to(dtype) for _ in range(2))
    v, do = (randn(B, T, H, 64).to(dtype) for _ in range(2))
    g = F.logsigmoid(randn(B, T, H) + 1) if gate is None else torch.as_tensor(gate).expand(B, T, H).contiguous()
    b = (randn(B, T, H).sigmoid() if beta is None else beta.expand(B, T, H)).to(dtype).contiguous()
    h0, dht = (randn(B, H, 64, 64) if state else None for _ in range(2))
    names = ("q", "k", "v", "g", "beta") + (("initial_state",) if state else ())
    x = dict(zip(names, (t.double().requires_grad_() for t in (q, k, v, g, b, *([h0] if state else ())))))
    o, S = naive_recurrent_gated_delta_rule(**x, output_final_state=True)
    want = dict(o=o, S=S) if state else dict(o=o)
    upstream = [do.double(), dht.double()] if state else [do.double()]
    want |= {"d" + n: t for n, t in zip(x, torch.autograd.grad(list(want.values()), list(x.values()), upstream))}
    NT, low, scale = -(-T // 64), torch.bfloat16 if parts > 1 else dtype, 64**-0.5
    A, vec = inverse(k, g, b, parts)
    A = split(A, parts, low)
    nan = float("nan")
    new = [torch.full_like(t, nan) for t in (q, k, v, g, b)]
    o, h = torch.full_like(v, nan), torch.full((B, H, NT - 1, parts, 64, 64), nan, dtype=low)
    ht, dh0 = (torch.full((B, H, 64, 64), nan) if state else None for _ in range(2))
    ds, ds2 = new[0].view(low), new[1].view(low)
    if v_first:
        h0, dht = h0.mT.contiguous(), dht.mT.contiguous()
    on = dict(EPS=1e-6, USE_L2=False, V_FIRST=v_first, PARTS=parts)
    switches = dict(USE_GATE=False, HAS_BIAS=False, USE_SIGMOID=False, NEG=False, HAS_H0=state, HAS_DHT=state)
    interpret(hopper._hopper_scan_fwd_kernel, B * H, q, k, v, A, vec, h0, o, h, ht, scale, T, H, NT,
              HAS_H0=state, SAVE_H=True, SAVE_HT=state, **on, **plan(parts, 0))  # fmt: skip
    interpret(hopper._hopper_scan_bwd_kernel, B * H, q, k, do, A, vec, dht, ds, ds2, new[2], dh0, scale, T, H, NT,
              HAS_DHT=state, SAVE_DH0=state, **on, **plan(parts, 1))  # fmt: skip
    interpret(hopper._hopper_chunk_bwd_kernel, B * H * NT, q, k, v, g, None, None, A, vec, h0, h, do, dht, ds, ds2, *new, None,
              scale, T, H, NT, **on, **switches, **plan(parts, 2))  # fmt: skip
    got = dict(o=o) | {"d" + n: t for n, t in zip(names, [*new, dh0])} | (dict(S=ht) if state else {})
    if v_first:
        got |= dict(S=ht.mT, dinitial_state=dh0.mT)
    return {n: rel_err(got[n], want[n].detach()) for n in want}


TOLERANCE = {1: 1e-2, 2: 2e-4, 3: 5e-6}
CASES = [(torch.bfloat16, 1), (torch.float32, 2), (torch.float32, 3)]


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
def test_lengths(T, dtype, parts):
    errors = run(T, dtype, parts, H=1)
    if T == 1:  # one token's decay reaches nothing, and its dbeta is one sum of 64 rounded numbers of both signs
        assert errors.pop("dbeta") <= 5 * TOLERANCE[parts]
        errors.pop("dg")
    assert max(errors.values()) <= TOLERANCE[parts], errors


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("v_first", [False, True])
def test_states(v_first, dtype, parts):
    errors = run(130, dtype, parts, B=2, state=True, v_first=v_first)
    assert max(errors.values()) <= TOLERANCE[parts], errors


@pytest.mark.parametrize("value", [0.0, 1e-3, 1.0, -0.005])
def test_rows_whose_beta_is_too_small_to_divide_by(value):
    beta = torch.full((1, 70, 2), 0.5)
    beta[:, 3::7, 0] = value
    errors = run(70, torch.float32, 3, beta=beta)
    assert max(errors.values()) <= TOLERANCE[3], errors


@pytest.mark.parametrize(("dtype", "parts"), CASES)
@pytest.mark.parametrize("gate", [-1e-3, -1.0, -20.0])
def test_gates(gate, dtype, parts):
    errors = run(100, dtype, parts, gate=gate)
    # with every gate closed, what is left of dg is a difference of larger numbers
    closed = 5e-5 if parts == 3 and gate < -5 else TOLERANCE[parts]
    assert all(e <= (closed if n == "dg" else TOLERANCE[parts]) for n, e in errors.items()), errors


@pytest.mark.parametrize(("dtype", "parts"), CASES)
def test_small_decays_behind_closed_gates(dtype, parts):
    closed = torch.arange(130) % 64 < 8
    errors = run(130, dtype, parts, gate=torch.where(closed, -20.0, -0.01)[None, :, None])
    assert max(errors.values()) <= TOLERANCE[parts], errors


def test_no_future_token_or_gate_reaches_an_output():
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 130, 1, 64, generator=gen).bfloat16() for _ in range(3))
    g, b = -torch.rand(1, 130, 1, generator=gen), torch.rand(1, 130, 1, generator=gen)

    def forward(k, v, g):
        A, vec = inverse(F.normalize(k.float(), dim=-1), g, b)
        o = torch.full_like(v, float("nan"))
        interpret(hopper._hopper_scan_fwd_kernel, 1, q, k, v, split(A, 1, torch.bfloat16), vec, None, o, None, None, 0.125, 130, 1, 3,
                  EPS=1e-6, USE_L2=True, V_FIRST=False, HAS_H0=False, SAVE_H=False, SAVE_HT=False, PARTS=1, **plan(1, 0))  # fmt: skip
        return o

    before, at = forward(k, v, g), 70
    k[:, at:], v[:, at:], g[:, at:] = -k[:, at:], 2 * v[:, at:], -9.0
    after = forward(k, v, g)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


@pytest.mark.parametrize(("K", "V", "here"), [(64, 64, False), (64, 128, False), (32, 64, False)])
def test_the_cpu_runs_triton(K, V, here):
    assert hopper.runs_here(K, V, torch.device("cpu")) is here


@pytest.mark.parametrize(("dtype", "prec", "parts"), [
    (torch.bfloat16, "tf32", 1), (torch.float16, "tf32x3", 1), (torch.float32, "tf32", 2), (torch.float32, "tf32x3", 3),
])  # fmt: skip
def test_parts_of(dtype, prec, parts):
    assert hopper.parts_of(dtype, prec) == parts

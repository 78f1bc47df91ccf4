"Gated DeltaNet: options, awkward input, and the kinds of trouble reported of kernels like it."
import subprocess
import sys

import delta_rules
import pytest
import torch
import torch.nn.functional as F
from delta_rules import DEVICE, compare, exact, gpu, refused, upstream, values

from dormouse_fused import gated_delta
from dormouse_fused.gated_delta import (
    chunk_gated_delta_rule,
    naive_chunk_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from dormouse_fused.parity import rel_err

ALL = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
# The interpreter truncates where a GPU rounds to bfloat16.
TOLERANCE = delta_rules.TOLERANCE | ({} if DEVICE == "cuda" else {torch.bfloat16: 3e-2})


def make(B=1, T=20, H=2, K=16, V=16, dtype=torch.float32, seed=0, state=True, gate=False, raw_beta=False):
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    x = dict(q=F.normalize(randn(B, T, H, K), dim=-1), k=F.normalize(randn(B, T, H, K), dim=-1), v=randn(B, T, H, V))
    x["g"] = randn(B, T, H) if gate else F.logsigmoid(randn(B, T, H) + 1)
    x["beta"] = randn(B, T, H) if raw_beta else randn(B, T, H).sigmoid()
    if state:
        x["initial_state"] = randn(B, H, K, V)
    if gate:
        x |= dict(A_log=0.3 * randn(H), dt_bias=randn(H))
    low = ("q", "k", "v", "beta")
    return {n: t.to(DEVICE, dtype if n in low else torch.float32) for n, t in x.items()}


def oracle(x, do, dS, **options):
    return exact(naive_recurrent_gated_delta_rule, x, do, dS, **options)


def check(x, tolerance=None, **options):
    compare(chunk_gated_delta_rule, naive_recurrent_gated_delta_rule, x, tolerance or TOLERANCE[x["q"].dtype], **options)


# One token, fewer than a chunk, exactly two chunks, one more, K != V, no power of two, up to 256.
@pytest.mark.parametrize("T,K,V", [
    (1, 16, 16), (2, 8, 24), (63, 16, 24), (64, 16, 16), (65, 48, 20), (128, 32, 16), (129, 16, 80),
    (40, 60, 100), (40, 100, 48), (20, 96, 160), (20, 192, 12), (35, 256, 256), (3, 1, 1),
])
def test_shapes(T, K, V):
    check(make(T=T, K=K, V=V, H=1))


@pytest.mark.parametrize("B,H", [(1, 1), (3, 1), (1, 5), (2, 3)])
def test_batches_and_heads(B, H):
    check(make(B=B, H=H, T=9))


@pytest.mark.parametrize("options", [
    dict(), dict(scale=1.0), dict(scale=0.0), dict(use_qk_l2norm_in_kernel=True), dict(use_beta_sigmoid_in_kernel=True),
    dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True), dict(use_gate_in_kernel=True), ALL,
], ids=lambda o: "+".join(o) or "none")
def test_options(options):
    gate, raw = options.get("use_gate_in_kernel", False), options.get("use_beta_sigmoid_in_kernel", False)
    check(make(T=70, gate=gate, raw_beta=raw), **options)


def test_gate_without_bias():
    x = make(gate=True)
    del x["dt_bias"]
    check(x, use_gate_in_kernel=True)


@pytest.mark.parametrize("logit", [-60.0, -15.0, 15.0, 60.0])
def test_saturated_gate(logit):
    x = make(gate=True)
    x["g"].fill_(logit)
    got = values(chunk_gated_delta_rule, x, *upstream(x), use_gate_in_kernel=True)
    want = oracle(x, *upstream(x), use_gate_in_kernel=True)
    assert all(t.isfinite().all() for t in got.values())
    assert rel_err(got["o"], want["o"]) < 5e-6


def test_defaults_return_no_state():
    x = make(state=False)
    o, S = chunk_gated_delta_rule(**x)
    assert S is None
    assert rel_err(o, naive_recurrent_gated_delta_rule(**{n: t.double() for n, t in x.items()})[0]) < 5e-6


def test_positional_arguments_are_fla_s():
    x = make()
    by_name = chunk_gated_delta_rule(**x, scale=0.5, output_final_state=True)
    by_position = chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], 0.5, x["initial_state"], True)
    assert all(map(torch.equal, by_name, by_position))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_have_their_own_dtype(dtype):
    x = make(T=20, gate=True, raw_beta=True)
    x |= {n: x[n].to(dtype) for n in ("g", "beta", "A_log", "dt_bias")}
    low = tuple(f"d{n}" for n in ("g", "beta", "A_log", "dt_bias"))
    check(x, skip=() if dtype == torch.float32 else low, **ALL)
    check(x, tolerance=1e-2, **ALL)


def test_scale_may_be_an_int():
    "One kernel serves them all; a compiler that takes 1 for a constant must not freeze it there."
    for scale in (1, 0.5, 2):
        check(make(T=70, K=64, V=64), scale=scale)


def test_state_v_first():
    x = make(T=20, V=24)
    do, dS = upstream(x)
    want = values(chunk_gated_delta_rule, x, do, dS)
    y = x | dict(initial_state=x["initial_state"].mT.contiguous())
    got = values(chunk_gated_delta_rule, y, do, dS.mT, state_v_first=True)
    for n in "S", "dinitial_state":
        got[n] = got[n].mT
    assert all(torch.equal(got[n], want[n]) for n in want)


# Gates that are absent, tiny, closed, mixed, and closed beyond what float32 can hold (fla#389).
GATES = {
    "none": lambda g: torch.zeros_like(g),
    "tiny": lambda g: torch.full_like(g, -1e-12),
    "closed": lambda g: torch.full_like(g, -20.0),
    "every fifth closed": lambda g: torch.where(torch.arange(g.shape[1], device=g.device)[:, None] % 5 == 0, -20.0, g),
    "one closed": lambda g: torch.where(torch.arange(g.shape[1], device=g.device)[:, None] == 40, -20.0, g),
    "beyond float32": lambda g: torch.full_like(g, -200.0),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
    x = make(T=75, H=1)
    x["g"] = GATES[name](x["g"])
    # Where every gate is closed, dg's sums over rows cancel down to the little that still flows.
    check(x, skip=("dg", "dinitial_state") if name == "beyond float32" else (), loose=dict(dg=5e-5) if name == "closed" else ())


# G runs down to -640, that is -923 in powers of two, where float32's steps are 2^-14: a difference of two such sums is off
# by up to 6e-5, and so is the decay that it is the logarithm of.
def test_deep_then_mild_gates():
    x = make(T=64, H=1)
    x["g"][:, :32] = -20 + x["g"][:, :32]
    x["g"][:, 32:] *= 0.1
    check(x, tolerance=1e-4)


def test_growing_gates():
    x = make(T=70, H=1)
    x["g"] = x["g"].abs() * 0.02
    check(x)


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_correlated_keys_at_full_rate(spread):
    x = make(T=70, H=1, K=32)
    x["k"] = F.normalize(1 + spread * torch.randn(x["k"].shape, generator=torch.Generator().manual_seed(3)), dim=-1).to(DEVICE)
    x["beta"], x["g"] = torch.ones_like(x["beta"]), torch.zeros_like(x["g"])
    check(x, tolerance=5e-5)


def test_equal_keys():
    x = make(T=64, H=1)
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x["beta"] = torch.ones_like(x["beta"])
    check(x, loose=dict(dg=2e-5))  # every token overwrites the last, so nearly all of dg cancels


def test_zero_rows():
    x = make(T=20)
    x["k"][:, 3] = 0
    x["q"][:, 5] = 0
    check(x)
    check(x, use_qk_l2norm_in_kernel=True, skip=("dq", "dk"))


# Raw float16 keys: their squares overflow float16, so the norm has to be taken in float32.
def test_large_float16_keys():
    x = make(T=30, dtype=torch.float16)
    x["q"], x["k"] = x["q"] * 600, x["k"] * 900
    check(x, use_qk_l2norm_in_kernel=True)


def test_unnormalised_float16_keys():
    x = make(T=30, K=16, dtype=torch.float16)
    x["k"] = x["k"] * 1.3
    check(x, tolerance=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    check(make(T=70, H=1, K=24, dtype=dtype))


@pytest.mark.parametrize("edit", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("T,at", [(22, 21), (70, 66)])
def test_the_future_is_invisible(edit, T, at):
    x = make(T=T, H=1)
    y = x | {edit: x[edit].clone()}
    y[edit][:, at:] = -7.0 if edit == "g" else 0.5
    with torch.no_grad():
        a, b = chunk_gated_delta_rule(**x)[0], chunk_gated_delta_rule(**y)[0]
    assert torch.equal(a[:, :at], b[:, :at]) and not torch.equal(a, b)


def test_a_row_has_the_same_bits_in_any_batch():
    x = make(B=3, T=70)
    do, dS = upstream(x)
    whole = values(chunk_gated_delta_rule, x, do, dS)
    alone = values(chunk_gated_delta_rule, {n: t[1:2] for n, t in x.items()}, do[1:2], dS[1:2])
    assert all(torch.equal(whole[n][1:2], alone[n]) for n in whole)


def test_a_prefix_has_the_same_bits_at_any_length():
    x = make(T=70, H=1)
    with torch.no_grad():
        whole = chunk_gated_delta_rule(**x)[0]
        part = chunk_gated_delta_rule(**{n: t if n == "initial_state" else t[:, :37].contiguous() for n, t in x.items()})[0]
    assert torch.equal(whole[:, :37], part)


def test_two_runs_are_equal():
    x = make(T=70, gate=True, raw_beta=True)
    a, b = (values(chunk_gated_delta_rule, x, *upstream(x), **ALL) for _ in range(2))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_the_state_carries_over():
    x = make(T=70, H=1)
    do, dS = upstream(x)

    def halves(cut=27, output_final_state=True, initial_state=None, **t):
        o1, S = chunk_gated_delta_rule(**{n: y[:, :cut] for n, y in t.items()}, initial_state=initial_state, output_final_state=True)
        o2, S = chunk_gated_delta_rule(**{n: y[:, cut:] for n, y in t.items()}, initial_state=S, output_final_state=True)
        return torch.cat([o1, o2], 1), S

    whole, split = values(chunk_gated_delta_rule, x, do, dS), values(halves, x, do, dS)
    assert all(rel_err(split[n], whole[n]) < 5e-6 for n in whole)


def test_only_the_state_is_used():
    x = {n: t.requires_grad_() for n, t in make().items()}
    y = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    for rule, z in ((chunk_gated_delta_rule, x), (naive_recurrent_gated_delta_rule, y)):
        rule(**z, output_final_state=True)[1].square().sum().backward()
    assert all(rel_err(x[n].grad, y[n].grad) < 5e-6 for n in x if n != "q")
    assert not x["q"].grad.any()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_one_input_needs_a_gradient(name):
    x = make(gate=True, raw_beta=True)
    do, dS = upstream(x)
    want = values(chunk_gated_delta_rule, x, do, dS, **ALL)
    x[name].requires_grad_()
    o, S = chunk_gated_delta_rule(**x, output_final_state=True, **ALL)
    torch.autograd.backward([o, S], [do, dS])
    assert torch.equal(x[name].grad, want[f"d{name}"])
    assert all(t.grad is None for n, t in x.items() if n != name)


def test_no_input_needs_a_gradient():
    x = make()
    with torch.no_grad():
        a = chunk_gated_delta_rule(**{n: t.clone().requires_grad_() for n, t in x.items()}, output_final_state=True)
    with torch.inference_mode():
        b = chunk_gated_delta_rule(**x, output_final_state=True)
    c = chunk_gated_delta_rule(**x, output_final_state=True)
    assert not any(t.requires_grad for t in (*a, *c))
    assert all(torch.equal(s, t) and torch.equal(s, u) for s, t, u in zip(a, b, c))


def padded(t):
    "The same values in rows that are longer than they need to be."
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


LAYOUTS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "padded rows": padded,
    "reversed batch": lambda t: t.flip(0).contiguous().flip(0),
    "every second token": lambda t: torch.stack([t, t * float("nan")], 2).flatten(1, 2)[:, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_inputs(name):
    x = make(T=20)
    do, dS = upstream(x)
    want = values(chunk_gated_delta_rule, x, do, dS)
    y = {n: LAYOUTS[name](t) for n, t in x.items()}
    got = values(chunk_gated_delta_rule, y, LAYOUTS[name](do), LAYOUTS[name](dS))
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_slices_of_one_projection():
    x = make(T=20, K=16, V=16)
    packed = torch.cat([x["q"], x["k"], x["v"]], -1).requires_grad_()
    q, k, v = packed.split(16, -1)
    o, _ = chunk_gated_delta_rule(q, k, v, x["g"], x["beta"])
    do, _ = upstream(x)
    o.backward(do)
    x = {n: t for n, t in x.items() if n != "initial_state"}
    want = oracle(x, do, 0 * upstream(x)[1])
    assert rel_err(packed.grad, torch.cat([want["dq"], want["dk"], want["dv"]], -1)) < 5e-6


def test_expanded_inputs():
    x = make(T=20)
    x["g"] = x["g"][:, :, :1].expand(-1, -1, 2)
    x["beta"] = torch.tensor(0.5, device=DEVICE).expand_as(x["beta"])
    x["initial_state"] = x["initial_state"][:, :1].expand(-1, 2, -1, -1)
    check(x)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda o: o[:, -1].sum(), lambda o: o[..., 0].sum()])
def test_upstream_gradients_of_reductions(reduce):
    x = make(T=20)
    ours = {n: t.clone().requires_grad_() for n, t in x.items()}
    theirs = {n: t.double().requires_grad_() for n, t in x.items()}
    for rule, z in ((chunk_gated_delta_rule, ours), (naive_recurrent_gated_delta_rule, theirs)):
        reduce(rule(**z)[0]).backward()
    assert all(rel_err(ours[n].grad, theirs[n].grad) < 5e-6 for n in x)


def test_inputs_are_left_alone():
    x = make(T=20, gate=True, raw_beta=True)
    before, do, dS = {n: t.clone() for n, t in x.items()}, *upstream(x)
    do0, dS0 = do.clone(), dS.clone()
    values(chunk_gated_delta_rule, x, do, dS, **ALL)
    assert all(torch.equal(before[n], t) for n, t in x.items()) and torch.equal(do, do0) and torch.equal(dS, dS0)


def test_outputs_outlive_the_next_call():
    x = make(T=20)
    first = chunk_gated_delta_rule(**x, output_final_state=True)
    kept = [t.clone() for t in first]
    chunk_gated_delta_rule(**make(T=20, seed=5), output_final_state=True)
    assert all(map(torch.equal, first, kept))


def test_backward_twice_from_one_forward():
    x = {n: t.requires_grad_() for n, t in make(T=20).items()}
    o, _ = chunk_gated_delta_rule(**x)
    a = torch.autograd.grad(o.sum(), list(x.values()), retain_graph=True)
    b = torch.autograd.grad(o.sum(), list(x.values()))
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("power", [1, 2], ids=["constant upstream", "upstream with a graph"])
def test_double_backward_is_refused(power):
    x = {n: t.requires_grad_() for n, t in make(T=5).items()}
    o, _ = chunk_gated_delta_rule(**x)
    with pytest.raises((RuntimeError, NotImplementedError), match="second derivatives"):
        (dq,) = torch.autograd.grad(o.pow(power).sum(), [x["q"]], create_graph=True)
        (o.sum() + dq.square().sum()).backward()


def test_autocast_changes_nothing():
    x = make(T=20)
    do, dS = upstream(x)
    want = values(chunk_gated_delta_rule, x, do, dS)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = values(chunk_gated_delta_rule, x, do, dS)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("state", [True, False])
def test_empty_sequence(state):
    x = make(T=0, state=state)
    y = {n: t.requires_grad_() for n, t in x.items()}
    o, S = chunk_gated_delta_rule(**y, output_final_state=True)
    assert o.shape == (1, 0, 2, 16) and torch.equal(S, x["initial_state"] if state else torch.zeros_like(S))
    (o.sum() + S.sum()).backward()
    assert y["q"].grad is None or y["q"].grad.shape == x["q"].shape
    if state:
        assert torch.equal(y["initial_state"].grad, torch.ones_like(S))


def test_empty_batch():
    o, S = chunk_gated_delta_rule(**make(B=0), output_final_state=True)
    assert o.shape == (0, 20, 2, 16) and S.shape == (0, 2, 16, 16)


@pytest.mark.parametrize("name,shape", [
    ("q", (20, 2, 16)), ("q", (1, 20, 2, 8)), ("k", (1, 19, 2, 16)), ("k", (1, 20, 3, 16)), ("k", (2, 20, 2, 16)),
    ("v", (1, 21, 2, 16)), ("v", (1, 20, 3, 16)), ("v", (1, 20, 32)), ("g", (1, 20, 2, 1)), ("g", (1, 2, 20)), ("g", (1, 20)),
    ("beta", (1, 20, 1)), ("beta", (1, 20, 2, 16)), ("initial_state", (1, 2, 16, 8)), ("initial_state", (2, 2, 16, 16)),
    ("A_log", (3,)), ("A_log", (1, 2)), ("dt_bias", (1,)), ("dt_bias", (20, 2)),
])
def test_wrong_shapes(name, shape):
    x = make(gate=True)
    x[name] = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError) as caught:
        chunk_gated_delta_rule(**x, use_gate_in_kernel=True)
    assert ("k" if (name, shape) == ("q", (1, 20, 2, 8)) else name) in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float64])
def test_wrong_dtypes(name, dtype):
    x = make(gate=True)
    x[name] = x[name].to(dtype)
    with refused(TypeError, name):
        chunk_gated_delta_rule(**x, use_gate_in_kernel=True)


def test_mixed_dtypes():
    x = make()
    for name in "k", "v":
        with refused(TypeError, name):
            chunk_gated_delta_rule(**x | {name: x[name].bfloat16()})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_not_a_tensor(name):
    x = make(gate=True) | {name: [1.0]}
    with refused(TypeError, name):
        chunk_gated_delta_rule(**x, use_gate_in_kernel=True)


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_mixed_devices(name):
    x = make(gate=True)
    x[name] = x[name].to("meta")
    with refused(ValueError, name):
        chunk_gated_delta_rule(**x, use_gate_in_kernel=True)


def test_large_heads_are_refused():
    with refused(ValueError, "K", "256"):
        chunk_gated_delta_rule(**make(T=2, K=257))
    with refused(ValueError, "V", "256"):
        chunk_gated_delta_rule(**make(T=2, V=257))
    x = {n: t.expand(*t.shape[:2], 2**22, *t.shape[3:]) for n, t in make(T=1, H=1, state=False).items()}
    with refused(ValueError, "H * K"):
        chunk_gated_delta_rule(**x)


def test_options_that_contradict():
    with refused(ValueError, "allow_neg_eigval", "use_beta_sigmoid_in_kernel"):
        chunk_gated_delta_rule(**make(), allow_neg_eigval=True)
    with refused(ValueError, "A_log"):
        chunk_gated_delta_rule(**make(), use_gate_in_kernel=True)
    with pytest.raises(TypeError):
        chunk_gated_delta_rule(**make(), no_such_option=True)


def test_later_chapters_bring_these():
    x = make(state=False)
    with refused(NotImplementedError, "cu_seqlens"):
        chunk_gated_delta_rule(**x, cu_seqlens=torch.tensor([0, 7, 20], device=DEVICE))
    with refused(NotImplementedError, "cp_context"):
        chunk_gated_delta_rule(**x, cp_context=object())
    grouped = x | {n: x[n].repeat_interleave(2, 2) for n in ("v", "g", "beta")}
    with refused(NotImplementedError, "v"):
        chunk_gated_delta_rule(**grouped)


def test_nothing_is_read_back():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = {n: mode.from_tensor(t).requires_grad_() for n, t in make(gate=True, raw_beta=True).items()}
        o, S = chunk_gated_delta_rule(**x, output_final_state=True, **ALL)
        (o.sum() + S.sum()).backward()
    assert o.shape == x["v"].shape and S.shape == x["initial_state"].shape
    assert all(t.grad.shape == t.shape and t.grad.dtype == t.dtype for t in x.values())


@pytest.mark.parametrize("everything", [False, True])
def test_operators_keep_their_contract(everything):
    x = make(T=33, gate=everything, raw_beta=everything, state=everything)
    tensors = [x.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")]
    flags, dS = (*[everything] * 4, False), torch.ones(1, 2, 16, 16, device=DEVICE) if everything else None
    forward = (*tensors, 0.25, True, *flags, True)
    o, _, *saved = gated_delta._fwd_op(*forward)
    backward = (torch.ones_like(o), dS, *tensors, *saved, 0.25, *flags, everything)
    leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
    calls = {"_fwd_op": forward, "_bwd_op": backward, "_op": (*leaves, 0.25, True, *flags)}
    for op, args in calls.items():
        assert set(torch.library.opcheck(getattr(gated_delta, op), args).values()) == {"SUCCESS"}, op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_without_a_break(dtype):
    x = make(T=33, gate=True, raw_beta=True, dtype=dtype)
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    a, b = (values(rule, x, *upstream(x), **ALL) for rule in (chunk_gated_delta_rule, traced))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_traced_with_sizes_that_change():
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for B, T in (2, 20), (3, 33), (2, 70):
        x = make(B=B, T=T)
        a, b = (values(rule, x, *upstream(x)) for rule in (chunk_gated_delta_rule, traced))
        assert all(torch.equal(a[n], b[n]) for n in a)


def test_scale_on_the_device_is_refused():
    with refused(TypeError, "scale"):
        chunk_gated_delta_rule(**make(T=2), scale=torch.ones(()))


@pytest.mark.parametrize("shape", [(64, 64), (40, 100)])
def test_small_decays_behind_closed_gates(shape):
    "A float32 sum of log decays forgets the small ones after the large: the errors were 5e-5."
    K, V = shape
    gen = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 130, 2, d, generator=gen).to(DEVICE) for d in (K, K, V, V))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    closed, beta = torch.arange(130, device=DEVICE) % 64 < 8, torch.rand(1, 130, 2, generator=gen).to(DEVICE)
    g = torch.where(closed, -20.0, -0.01)[None, :, None].expand(1, 130, 2).contiguous()
    torch.set_float32_matmul_precision("highest")
    found = [[t.clone().requires_grad_() for t in (q, k, v, g, beta)], [t.double().requires_grad_() for t in (q, k, v, g, beta)]]
    o, want = chunk_gated_delta_rule(*found[0])[0], naive_recurrent_gated_delta_rule(*found[1])[0]
    grads, wanted = torch.autograd.grad(o, found[0], do), torch.autograd.grad(want, found[1], do.double())
    errors = [float(rel_err(a.detach(), b.detach())) for a, b in zip((o, *grads), (want, *wanted))]
    assert max(errors) <= 5e-6, errors


def test_what_fits_is_remembered_and_what_does_not_is_refused():
    q, k, v = (torch.randn(1, 3, 2, 16, device=DEVICE) for _ in range(3))
    g, beta = -torch.rand(1, 3, 2, device=DEVICE), torch.rand(1, 3, 2, device=DEVICE)
    for _ in range(2):
        chunk_gated_delta_rule(q, k, v, g, beta)
        with pytest.raises(ValueError, match="k: expected shape"):
            chunk_gated_delta_rule(q, k[:, :2], v, g, beta)
        with pytest.raises(TypeError, match="beta: expected a tensor, got list"):
            chunk_gated_delta_rule(q, k, v, g, beta.tolist())
        with pytest.raises(ValueError, match="initial_state: expected shape"):
            chunk_gated_delta_rule(q, k, v, g, beta, initial_state=torch.zeros(1, 2, 16, 17, device=DEVICE))
        with pytest.raises(TypeError, match="beta: expected"):
            chunk_gated_delta_rule(q, k, v, g, beta.double())


def test_a_triton_without_gluon():
    code = "import sys; sys.modules['triton.experimental.gluon'] = None; import dormouse_fused.gated_delta as g; assert g.hopper is None"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensors_that_start_anywhere():
    x = make(T=70, H=1, K=64, V=64, dtype=torch.bfloat16)
    do, dS = upstream(x)

    def moved(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    a = values(chunk_gated_delta_rule, x, do, dS)
    b = values(chunk_gated_delta_rule, {n: moved(t) for n, t in x.items()}, moved(do), moved(dS))
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("C", [1, 7, 64])
def test_references_agree(C):
    x = {n: t.double().cpu() for n, t in make(T=30, gate=True, raw_beta=True).items()}
    do, dS = (t.double().cpu() for t in upstream(make(T=30)))
    a = values(naive_recurrent_gated_delta_rule, x, do, dS, **ALL)
    b = values(lambda **z: naive_chunk_gated_delta_rule(**z, chunk_size=C), x, do, dS, **ALL)
    assert all(a[n].dtype == torch.float64 and rel_err(b[n], a[n]) < 1e-12 for n in a)


@gpu
@pytest.mark.parametrize("dtype,precision,tolerance", [
    (torch.bfloat16, "high", 1e-2), (torch.float16, "high", 2e-3), (torch.float32, "high", 3e-3), (torch.float32, "highest", 5e-6),
])
@pytest.mark.parametrize("K,V", [(16, 16), (48, 100), (60, 64), (64, 64), (96, 160), (128, 128), (192, 64), (256, 256)])
def test_compiled_kernels(dtype, precision, tolerance, K, V):
    torch.set_float32_matmul_precision(precision)
    x = make(B=2, T=333, K=K, V=V, dtype=dtype, gate=True, raw_beta=True)
    check(x, tolerance=tolerance, **ALL)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_determinism_at_the_shape_that_matters(dtype):
    torch.set_float32_matmul_precision("high")
    x = make(B=10, T=512, H=12, K=64, V=64, dtype=dtype)
    a, b = (values(chunk_gated_delta_rule, x, *upstream(x)) for _ in range(2))
    assert all(torch.equal(a[n], b[n]) for n in a)


@gpu
def test_cuda_graph():
    x = {n: t.requires_grad_() for n, t in make(B=2, T=200, K=64, V=64, gate=True, raw_beta=True, dtype=torch.bfloat16).items()}
    do, dS = upstream(x)

    def step():
        o, S = chunk_gated_delta_rule(**x, output_final_state=True, **ALL)
        return o, S, *torch.autograd.grad([o, S], list(x.values()), [do, dS])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for n, t in make(B=2, T=200, K=64, V=64, gate=True, raw_beta=True, dtype=torch.bfloat16, seed=4).items():
            x[n].copy_(t)
    graph.replay()
    assert all(map(torch.equal, captured, step()))


@gpu
def test_torch_compile():
    x = make(B=2, T=200, K=64, V=64, gate=True, raw_beta=True, dtype=torch.bfloat16)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True)
    a, b = (values(rule, x, *upstream(x), **ALL) for rule in (chunk_gated_delta_rule, compiled))
    assert all(torch.equal(a[n], b[n]) for n in a)


@gpu
def test_the_host_never_waits():
    x = {n: t.requires_grad_() for n, t in make(B=2, T=200, K=64, V=64, gate=True, raw_beta=True).items()}
    do, dS = upstream(x)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for T in 200, 131:
            y = {n: t if t.dim() == 1 or n == "initial_state" else t[:, :T] for n, t in x.items()}
            o, S = chunk_gated_delta_rule(**y, output_final_state=True, **ALL)
            torch.autograd.grad([o, S], list(x.values()), [do[:, :T], dS])
    finally:
        torch.cuda.set_sync_debug_mode(before)


@gpu
def test_a_new_length_compiles_nothing():
    import triton

    def run(T):
        x = make(T=T, K=64, V=64, dtype=torch.bfloat16)
        values(chunk_gated_delta_rule, x, *upstream(x))

    for T in 512, 1000, 333:
        run(T)
    compiled, hook = [], triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs)
    try:
        for T in 501, 777, 1024:
            run(T)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert not compiled


@gpu
def test_more_heads_than_a_grid_dimension():
    x = make(B=1, T=3, H=70000, K=16, V=16)
    check(x)


@gpu
def test_offsets_beyond_int32():
    B, T, H, D = 1, 128, 2**18 + 8, 64
    if torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs 64 GiB")
    row = make(B=B, T=T, H=1, K=D, V=D, dtype=torch.bfloat16, state=False)
    wide = {n: t.expand(-1, -1, H, *t.shape[3:]) for n, t in row.items()}
    with torch.no_grad():
        few, _ = chunk_gated_delta_rule(**row)
        many, _ = chunk_gated_delta_rule(**wide)
    assert many.numel() > 2**31 and all(torch.equal(many[:, :, h], few[:, :, 0]) for h in (0, H // 2, H - 1))

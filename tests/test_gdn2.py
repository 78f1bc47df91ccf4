"Gated DeltaNet-2: its own gates, its arguments, and the operators with both gates; the rest is chapter 11's."
import inspect

import pytest
import torch
import torch.nn.functional as F
from delta_rules import DEVICE, TOLERANCE, compare, gpu, refused, upstream, values

from dormouse_fused import kda
from dormouse_fused.gdn2 import chunk_gdn2, gdn2_cost, naive_chunk_gdn2, naive_recurrent_gdn2
from dormouse_fused.kda import chunk_kda, kda_cost
from dormouse_fused.parity import rel_err

ALL = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)
NAMES = "q", "k", "v", "g", "b", "w", "initial_state", "A_log", "dt_bias"


def make(B=1, T=20, H=2, K=16, V=16, dtype=torch.float32, seed=0, state=True, gate=False):
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    x = dict(q=F.normalize(randn(B, T, H, K), dim=-1), k=F.normalize(randn(B, T, H, K), dim=-1), v=randn(B, T, H, V))
    x["g"] = randn(B, T, H, K) if gate else F.logsigmoid(randn(B, T, H, K) + 1)
    x |= dict(b=2 * randn(B, T, H, K).sigmoid(), w=randn(B, T, H, V).sigmoid())
    if state:
        x["initial_state"] = randn(B, H, K, V)
    if gate:
        x |= dict(A_log=0.3 * randn(H), dt_bias=randn(H * K))
    low = ("q", "k", "v", "b", "w")
    return {n: t.to(DEVICE, dtype if n in low else torch.float32) for n, t in x.items()}


def check(x, tolerance=None, **options):
    compare(chunk_gdn2, naive_recurrent_gdn2, x, tolerance or TOLERANCE[x["q"].dtype], **options)


@pytest.mark.parametrize("T,K,V", [
    (1, 16, 16), (63, 16, 24), (65, 20, 16), (40, 60, 100), (33, 100, 48), (18, 130, 20), (17, 24, 200), (3, 1, 1),
])
def test_shapes(T, K, V):
    check(make(T=T, K=K, V=V, H=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T,K,V", [(70, 24, 40), (35, 100, 20)])
def test_16_bits(T, K, V, dtype):
    check(make(T=T, K=K, V=V, H=1, dtype=dtype))


@pytest.mark.parametrize("options", [
    dict(scale=1.0), dict(use_qk_l2norm_in_kernel=True), dict(use_gate_in_kernel=True), ALL, ALL | dict(lower_bound=-5.0),
], ids=lambda o: "+".join(o))
def test_options(options):
    check(make(T=36, gate=options.get("use_gate_in_kernel", False)), **options)


@pytest.mark.parametrize("absent", ["dt_bias", "A_log"])
def test_a_bounded_gate_without(absent):
    x = make(T=20, gate=True)
    del x[absent]
    check(x, use_gate_in_kernel=True, lower_bound=-5.0)


@pytest.mark.parametrize("precision,tolerance", [("highest", 5e-6), ("high", 2e-3)])
@pytest.mark.parametrize("gate", [0.0, -5.0, -20.0, "a fifth"])
def test_gates(gate, precision, tolerance):
    torch.set_float32_matmul_precision(precision)
    x = make(T=40, H=1)
    some = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.2
    x["g"] = torch.where(some, -20.0, -0.01) if gate == "a fifth" else torch.full_like(x["g"], gate)
    check(x, tolerance=tolerance)


@pytest.mark.parametrize("b,w", [(0.0, None), (None, 0.0), (0.0, 0.0), (2.0, 1.0)])
def test_gates_of_the_ends(b, w):
    x = make(T=40, H=1)
    for name, value in (("b", b), ("w", w)):
        if value is not None:
            x[name].fill_(value)
    check(x)


def test_one_rate_is_kda():
    x = make(T=40)
    beta = torch.rand(1, 40, 2, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    one = x | dict(b=beta[..., None].expand(-1, -1, -1, 16), w=beta[..., None].expand(-1, -1, -1, 16))
    plain = {n: t for n, t in x.items() if n not in ("b", "w")} | dict(beta=beta)
    a, b = values(chunk_gdn2, one, *upstream(x)), values(chunk_kda, plain, *upstream(x))
    for n in b:
        if n == "dbeta":
            assert rel_err(a["db"].sum(-1) + a["dw"].sum(-1), b[n]) < 1e-6
        elif DEVICE == "cpu":
            assert torch.equal(a[n], b[n]), n
        else:
            assert rel_err(a[n], b[n]) < 1e-6, n


def test_references():
    from fla.ops.gdn2.naive import naive_chunk_gdn2 as fla_chunk
    from fla.ops.gdn2.naive import naive_recurrent_gdn2 as fla_recurrent

    x = {n: t.cpu() for n, t in make(T=37, V=12).items()}
    want = naive_recurrent_gdn2(**{n: t.double() for n, t in x.items()}, output_final_state=True)
    for rule in fla_recurrent, fla_chunk, naive_chunk_gdn2:
        assert max(map(rel_err, rule(**x, output_final_state=True), want)) < 1e-6


def test_arguments_are_fla_s():
    from fla.ops.gdn2 import chunk_gdn2 as fla_gdn2

    def signature(f):
        return {n: p.default for n, p in inspect.signature(f).parameters.items() if p.kind != p.VAR_KEYWORD}

    theirs, ours = signature(inspect.unwrap(fla_gdn2)), signature(chunk_gdn2)
    assert list(ours)[: len(theirs)] == list(theirs) and {n: ours[n] for n in theirs} == theirs
    assert list(ours)[len(theirs):] == ["A_log", "dt_bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_have_their_own_dtype(dtype):
    x = make(T=20, gate=True)
    low = "g", "b", "w", "A_log", "dt_bias"
    x |= {n: x[n].to(dtype) for n in low}
    check(x, loose={f"d{n}": 1e-2 for n in low}, **ALL)


def test_state_v_first():
    x = make(T=20, V=24)
    do, dS = upstream(x)
    want = values(chunk_gdn2, x, do, dS)
    got = values(chunk_gdn2, x | dict(initial_state=x["initial_state"].mT.contiguous()), do, dS.mT, state_v_first=True)
    for n in "S", "dinitial_state":
        got[n] = got[n].mT
    assert [n for n in want if n != "dg" and not torch.equal(got[n], want[n])] == []
    assert rel_err(got["dg"], want["dg"]) < 1e-6  # a sum over the state, whose layout may decide the order


@pytest.mark.parametrize("edit,value", [("g", -20.0), ("g", -0.3), ("b", 0.1), ("w", 0.1), ("k", 0.5)])
@pytest.mark.parametrize("dtype,precision", [(torch.float32, "highest"), (torch.float32, "high"), (torch.bfloat16, "high")])
@pytest.mark.parametrize("size", [16, 64] if DEVICE == "cuda" else [16])  # a Hopper GPU has kernels of its own for 64
def test_the_future_is_invisible(edit, value, dtype, precision, size, at=25):
    torch.set_float32_matmul_precision(precision)
    x = make(T=40, H=1, K=size, V=size, dtype=dtype)
    y = x | {edit: x[edit].clone()}
    y[edit][:, at:] = value
    with torch.no_grad():
        a, b = chunk_gdn2(**x)[0], chunk_gdn2(**y)[0]
    assert torch.equal(a[:, :at], b[:, :at]) and not torch.equal(a, b)


def test_two_runs_are_equal_and_inputs_left_alone():
    x = make(T=40, gate=True)
    before = {n: t.clone() for n, t in x.items()}
    a, b = (values(chunk_gdn2, x, *upstream(x), **ALL) for _ in range(2))
    assert all(torch.equal(a[n], b[n]) for n in a) and all(torch.equal(before[n], t) for n, t in x.items())


@pytest.mark.parametrize("name", NAMES)
def test_one_input_needs_a_gradient(name):
    x = make(T=5, gate=True)
    do, dS = upstream(x)
    want = values(chunk_gdn2, x, do, dS, **ALL)
    x[name].requires_grad_()
    o, S = chunk_gdn2(**x, output_final_state=True, **ALL)
    torch.autograd.backward([o, S], [do, dS])
    assert torch.equal(x[name].grad, want[f"d{name}"]) and all(t.grad is None for n, t in x.items() if n != name)


def test_strided_and_expanded_inputs():
    x = make(T=20)
    x["b"] = x["b"][:, :, :1, :1].expand(-1, -1, 2, 16)
    y = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()} | dict(w=x["w"].flip(-1).contiguous().flip(-1))
    a, b = (values(chunk_gdn2, z, *upstream(x)) for z in (x, y))
    assert all(torch.equal(a[n], b[n]) for n in a)
    check(x)


@pytest.mark.parametrize("state", [True, False])
def test_empty_sequence(state):
    x = {n: t.requires_grad_() for n, t in make(T=0, state=state).items()}
    o, S = chunk_gdn2(**x, output_final_state=True)
    assert o.shape == (1, 0, 2, 16) and torch.equal(S, x["initial_state"] if state else torch.zeros_like(S))
    (o.sum() + S.sum()).backward()
    if state:
        assert torch.equal(x["initial_state"].grad, torch.ones_like(S))


@pytest.mark.parametrize("name,shape", [
    ("k", (1, 19, 2, 16)), ("v", (1, 20, 3, 16)), ("g", (1, 20, 2)), ("b", (1, 20, 2)), ("b", (1, 20, 2, 8)), ("w", (1, 20, 2)),
    ("w", (1, 20, 2, 8)), ("w", (1, 20, 1, 16)), ("initial_state", (1, 2, 16, 8)), ("A_log", (3,)), ("dt_bias", (2, 16)),
])
def test_wrong_shapes(name, shape):
    with refused(ValueError, name):
        chunk_gdn2(**make(gate=True) | {name: torch.zeros(shape, device=DEVICE)}, use_gate_in_kernel=True)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_kinds(name):
    x = make(gate=True)
    with refused(TypeError, name):
        chunk_gdn2(**x | {name: x[name].double()}, use_gate_in_kernel=True)
    with refused(TypeError, name):
        chunk_gdn2(**x | {name: [1.0]}, use_gate_in_kernel=True)
    if name != "q":
        with refused(ValueError, name):
            chunk_gdn2(**x | {name: x[name].to("meta")}, use_gate_in_kernel=True)


def test_options_that_are_refused():
    x = make()
    for name in "b", "w":
        with refused(TypeError, name):
            chunk_gdn2(**x | {name: None})
    with refused(ValueError, "A_log", "lower_bound"):
        chunk_gdn2(**x, use_gate_in_kernel=True)
    with refused(TypeError, "scale"):
        chunk_gdn2(**x, scale=torch.ones(()))
    cut = torch.tensor([0, 7, 20])
    for later in dict(cu_seqlens=cut), dict(cu_seqlens_cpu=cut), dict(cp_context=object()), dict(return_intermediate_states=True):
        with refused(NotImplementedError, *later):
            chunk_gdn2(**x, **later)
    grouped = {n: x[n].repeat_interleave(2, 2) for n in ("v", "w")}
    with refused(NotImplementedError, "v"):
        chunk_gdn2(**{n: t for n, t in x.items() if n != "initial_state"} | grouped)
    for name in "use_beta_sigmoid_in_kernel", "beta":
        with pytest.raises(TypeError):
            chunk_gdn2(**x, **{name: True})


def test_what_fits_kda_is_not_what_fits_here():
    x = make(T=3, state=False)
    beta = torch.rand(1, 3, 2, device=DEVICE)
    chunk_kda(x["q"], x["k"], x["v"], x["g"], beta)
    with refused(ValueError, "b"):
        chunk_gdn2(x["q"], x["k"], x["v"], x["g"], beta, x["w"])
    chunk_gdn2(**x)
    with refused(ValueError, "beta"):
        chunk_kda(x["q"], x["k"], x["v"], x["g"], x["b"])


def test_nothing_is_read_back():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = {n: mode.from_tensor(t).requires_grad_() for n, t in make(gate=True).items()}
        o, S = chunk_gdn2(**x, output_final_state=True, **ALL)
        (o.sum() + S.sum()).backward()
    assert o.shape == x["v"].shape and S.shape == x["initial_state"].shape
    assert all(t.grad.shape == t.shape and t.grad.dtype == t.dtype for t in x.values())


def test_operators_keep_their_contract():
    x = make(T=18, H=1, gate=True)
    tensors = [x.get(n) for n in ("q", "k", "v", "g", "b", "w", "A_log", "dt_bias", "initial_state")]
    numbers, flags, dS = (0.25, None), (True, True, False, False, False), torch.ones(1, 1, 16, 16, device=DEVICE)
    forward = (*tensors, *numbers, True, *flags, True)
    o, _, *saved = kda._fwd_op(*forward)
    backward = (torch.ones_like(o), dS, *tensors, *saved, *numbers, *flags, True, False)
    leaves = [t.clone().requires_grad_() for t in tensors]
    calls = {"_fwd_op": forward, "_bwd_op": backward, "_op": (*leaves, *numbers, True, *flags)}
    for op, args in calls.items():
        assert set(torch.library.opcheck(getattr(kda, op), args).values()) == {"SUCCESS"}, op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_without_a_break(dtype):
    x = make(T=33, gate=True, dtype=dtype)
    traced = torch.compile(chunk_gdn2, fullgraph=True, backend="aot_eager")
    a, b = (values(rule, x, *upstream(x), **ALL) for rule in (chunk_gdn2, traced))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_double_backward_is_refused():
    x = {n: t.requires_grad_() for n, t in make(T=5).items()}
    o, _ = chunk_gdn2(**x)
    with pytest.raises((RuntimeError, NotImplementedError), match="second derivatives"):
        (db,) = torch.autograd.grad(o.square().sum(), [x["b"]], create_graph=True)
        (o.sum() + db.square().sum()).backward()


def test_gates_by_channel_cost_their_bytes():
    shape = dict(B=2, T=64, H=3, K=16, V=32)
    ours, theirs = gdn2_cost(**shape), kda_cost(**shape)
    assert ours.flops == theirs.flops and ours.bytes - theirs.bytes == 2 * 2 * 64 * 3 * (16 + 32 - 1)


@gpu
@pytest.mark.parametrize("dtype,precision,tolerance", [
    (torch.bfloat16, "high", 1e-2), (torch.float16, "high", 2e-3), (torch.float32, "high", 3e-3), (torch.float32, "highest", 5e-6),
])
@pytest.mark.parametrize("K,V", [(16, 16), (48, 100), (64, 64), (128, 128), (192, 64), (256, 256)])
def test_compiled_kernels(dtype, precision, tolerance, K, V):
    torch.set_float32_matmul_precision(precision)
    check(make(B=2, T=333, K=K, V=V, dtype=dtype, gate=True), tolerance=tolerance, **ALL)


@gpu
def test_cuda_graph():
    x = {n: t.requires_grad_() for n, t in make(B=2, T=200, K=64, V=64, gate=True, dtype=torch.bfloat16).items()}
    do, dS = upstream(x)

    def step():
        o, S = chunk_gdn2(**x, output_final_state=True, **ALL)
        return o, S, *torch.autograd.grad([o, S], list(x.values()), [do, dS])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(map(torch.equal, captured, step()))


@gpu
def test_the_host_never_waits():
    x = {n: t.requires_grad_() for n, t in make(B=2, T=200, K=64, V=64, gate=True).items()}
    do, dS = upstream(x)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, S = chunk_gdn2(**x, output_final_state=True, **ALL)
        torch.autograd.grad([o, S], list(x.values()), [do, dS])
    finally:
        torch.cuda.set_sync_debug_mode(before)

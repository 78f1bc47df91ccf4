"The recurrent kernels: shapes, options, awkward input, and fla's bits."
import os

import pytest
import torch
import torch.nn.functional as F
from delta_rules import refused

from dormouse_fused import fused_recurrent as fr
from dormouse_fused.gated_delta import chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from dormouse_fused.parity import fenced, poison, rel_err, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = dict(gdn=fr.fused_recurrent_gated_delta_rule, kda=fr.fused_recurrent_kda, gdn2=fr.fused_recurrent_gdn2)
CHUNK = dict(gdn="chunk_gated_delta_rule", kda="chunk_kda", gdn2="chunk_gdn2")
NAMES = dict(gdn="q k v g beta", kda="q k v g beta", gdn2="q k v g b w")
ALL = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)
RATES = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
EVERYTHING = dict(gdn=ALL | RATES, kda=ALL | RATES | dict(lower_bound=-5.0), gdn2=ALL | dict(lower_bound=-5.0))
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
each = pytest.mark.parametrize("rule", RULES)


def make(rule, B=1, T=3, H=2, HV=None, K=16, V=16, dtype=torch.float32, seed=0, state=True, raw=False):
    HV, gen = HV or H, torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    x = dict(q=F.normalize(randn(B, T, H, K), dim=-1), k=F.normalize(randn(B, T, H, K), dim=-1), v=randn(B, T, HV, V))
    x["g"] = randn(B, T, HV) if rule == "gdn" else randn(B, T, HV, K)
    if not raw:
        x["g"] = F.logsigmoid(x["g"] + 2)
    if rule == "gdn2":
        x |= dict(b=randn(B, T, HV, K).sigmoid(), w=randn(B, T, HV, V).sigmoid())
    else:
        x["beta"] = randn(B, T, HV) if raw else randn(B, T, HV).sigmoid()
    if state:
        x["initial_state"] = randn(B, HV, K, V)
    if raw:
        x |= dict(A_log=0.3 * randn(HV), dt_bias=randn(HV if rule == "gdn" else HV * K))
    low = ("q", "k", "v", "beta", "b", "w")
    return {n: t.to(DEVICE, dtype if n in low else torch.float32) for n, t in x.items()}


def run(rule, x, **options):
    with poison(), torch.no_grad():
        return RULES[rule](**x, **{"output_final_state": True} | options)


def oracle(x, **options):
    x = {n: t.double() if torch.is_tensor(t) else t for n, t in x.items()}
    return fr.naive_fused_recurrent(**x, output_final_state=True, **options)


def check(rule, x, **options):
    (o, S), (want_o, want_S) = run(rule, x, **options), oracle(x, **options)
    assert o.dtype == x["v"].dtype and S.dtype == torch.float32
    for got, want, tolerance in (o, want_o, TOLERANCE[o.dtype]), (S, want_S, 1e-6):
        assert got.shape == want.shape
        if want.numel():
            assert rel_err(got, want) <= tolerance


# One token, B * H = 1, K != V, no power of two, one number, more than one block of V, up to 256.
@each
@pytest.mark.parametrize("T,K,V", [(1, 16, 16), (3, 20, 7), (2, 48, 100), (1, 1, 1), (2, 7, 33), (2, 256, 8), (1, 33, 256)])
def test_shapes(rule, T, K, V):
    check(rule, make(rule, T=T, H=1, K=K, V=V))


@each
@pytest.mark.parametrize("B,H,HV", [(1, 1, 1), (3, 2, 2), (2, 1, 3), (1, 2, 4)])
def test_batches_and_heads(rule, B, H, HV):
    check(rule, make(rule, B=B, H=H, HV=HV))


@each
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(rule, dtype):
    check(rule, make(rule, K=24, V=12, dtype=dtype))


@each
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gates_have_their_own_dtype(rule, dtype):
    x = make(rule, raw=True)
    x |= {n: t.to(dtype) for n, t in x.items() if n not in ("q", "k", "v")}
    check(rule, x, **EVERYTHING[rule])


@each
@pytest.mark.parametrize("options", [
    dict(scale=1.0), dict(scale=0.0), dict(use_qk_l2norm_in_kernel=True), dict(use_gate_in_kernel=True), ALL,
], ids=lambda o: "+".join(o))
def test_options(rule, options):
    x, gate = make(rule), options.get("use_gate_in_kernel")
    if gate:
        raw = make(rule, raw=True)
        x |= {n: raw[n] for n in ("g", "A_log", "dt_bias")}
    check(rule, x, **options)
    if gate:
        x.pop("dt_bias")
        check(rule, x, **options)


@each
def test_everything_in_the_kernel(rule):
    check(rule, make(rule, B=2, HV=4, K=20, V=9, raw=True), **EVERYTHING[rule])


@pytest.mark.parametrize("rule", ["gdn", "kda"])
@pytest.mark.parametrize("neg", [False, True])
def test_rates(rule, neg):
    x = make(rule) | dict(beta=make(rule, raw=True)["beta"])
    check(rule, x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg)


@pytest.mark.parametrize("rule", ["kda", "gdn2"])
def test_lower_bound_without_a(rule):
    x = make(rule) | {n: make(rule, raw=True)[n] for n in ("g", "dt_bias")}
    check(rule, x, use_gate_in_kernel=True, lower_bound=-3)
    x["dt_bias"] = x["dt_bias"].view(2, 16)
    check(rule, x, use_gate_in_kernel=True, lower_bound=-3)
    plain = make(rule)
    assert same_bits(run(rule, plain), run(rule, plain, lower_bound=-3))


def test_what_gated_delta_rule_may_leave_out():
    x = make("gdn", state=False)
    q, k, v, g, beta = x.values()
    gk = make("kda")["g"]
    assert fr.fused_recurrent_gated_delta_rule(**x)[1] is None
    zero, one = torch.zeros_like(g), torch.ones_like(beta)
    assert same_bits(run("gdn", dict(q=q, k=k, v=v)), run("gdn", dict(q=q, k=k, v=v, g=zero, beta=one)))
    o, S = run("gdn", x | dict(gk=gk))
    want_o, want_S = oracle(x | dict(g=g[..., None] + gk))
    assert rel_err(o, want_o) < 1e-6 and rel_err(S, want_S) < 1e-6
    without = {n: t for n, t in x.items() if n != "g"}
    assert same_bits(run("gdn", without | dict(gk=gk)), run("kda", x | dict(g=gk))) or DEVICE == "cuda"


def test_positional_arguments_are_fla_s():
    for rule in RULES:
        x, S = make(rule, state=False), make(rule)["initial_state"]
        want = RULES[rule](**x, scale=0.5, initial_state=S, output_final_state=True)
        t = list(x.values())
        t = [*t[:4], None, None, t[4]] if rule == "gdn" else [*t, None, None]
        assert same_bits(RULES[rule](*t, 0.5, S, True), want)


@each
@pytest.mark.parametrize("gate", [0.0, -1e-12, -5.0, -20.0, -200.0, 0.02])
def test_gates(rule, gate):
    x = make(rule, T=5)
    x["g"].fill_(gate)
    check(rule, x)
    x["g"][:, ::2] = 0
    check(rule, x)


@each
@pytest.mark.parametrize("logit", [-80.0, -18.0, 18.0, 60.0])
def test_saturated_gates(rule, logit):
    x = make(rule, T=6, raw=True)
    x["g"].fill_(logit)
    x["A_log"].fill_(4.0)
    check(rule, x | ({} if rule == "gdn2" else dict(beta=x["beta"].sigmoid())), use_gate_in_kernel=True)


@each
def test_state_v_first(rule):
    x = make(rule, K=20, V=9)
    y = x | dict(initial_state=x["initial_state"].mT.contiguous())
    (o, S), (p, R) = run(rule, x), run(rule, y, state_v_first=True)
    assert R.shape == (1, 2, 9, 20) and rel_err(R.mT, S) < 1e-6 and rel_err(p, o) < 1e-6


@each
def test_correlated_keys_at_full_rate(rule):
    x = make(rule, T=12)
    x["k"] = F.normalize(1 + 0.1 * x["k"], dim=-1)
    x |= {n: torch.ones_like(x[n]) for n in ("beta", "b", "w") if n in x} | dict(g=torch.zeros_like(x["g"]))
    (o, S), (want_o, want_S) = run(rule, x), oracle(x)
    assert rel_err(o, want_o) < 1e-5 and rel_err(S, want_S) < 1e-5


@each
def test_zero_rows_and_large_keys(rule):
    x = make(rule)
    x["k"][:, 1] = 0
    check(rule, x)
    check(rule, x, use_qk_l2norm_in_kernel=True)
    x = make(rule, dtype=torch.float16)
    x["k"] = x["k"] * 900
    check(rule, x, use_qk_l2norm_in_kernel=True)


def padded(t):
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


LAYOUTS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 2 else t,
    "padded rows": padded,
    "every second": lambda t: torch.stack([t, t * float("nan")], 1).flatten(0, 1)[::2],
    "fenced": lambda t: fenced(t),
    "moved": lambda t: torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t),
}


@each
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(rule, name):
    x = make(rule, K=20, V=9, raw=True)
    y = {n: LAYOUTS[name](t) for n, t in x.items()}
    assert same_bits(run(rule, y, **EVERYTHING[rule]), run(rule, x, **EVERYTHING[rule]))


@each
def test_expanded_inputs(rule):
    x = make(rule)
    x["g"] = torch.tensor(-0.5, device=DEVICE).expand_as(x["g"])
    x["initial_state"] = x["initial_state"][:, :1].expand(-1, 2, -1, -1)
    check(rule, x)


@each
def test_inputs_are_left_alone_and_outputs_stay(rule):
    x = make(rule, raw=True)
    before = {n: t.clone() for n, t in x.items()}
    first = run(rule, x, **EVERYTHING[rule])
    kept = [t.clone() for t in first]
    run(rule, make(rule, seed=3))
    assert same_bits(x, before) and same_bits([*first], kept)


@each
@pytest.mark.parametrize("state", [True, False])
def test_empty_sequence(rule, state):
    x = make(rule, T=0, state=state)
    o, S = run(rule, x)
    assert o.shape == (1, 0, 2, 16) and torch.equal(S, x["initial_state"] if state else torch.zeros_like(S))
    assert run(rule, x, output_final_state=False)[1] is None


@each
def test_empty_batch(rule):
    o, S = run(rule, make(rule, B=0))
    assert o.shape == (0, 3, 2, 16) and S.shape == (0, 2, 16, 16)


@each
def test_two_runs_prefixes_and_rows_have_the_same_bits(rule):
    x = make(rule, B=3, T=5, raw=True)
    whole = run(rule, x, **EVERYTHING[rule])
    assert same_bits(run(rule, x, **EVERYTHING[rule]), whole)
    fixed = ("A_log", "dt_bias")
    row = {n: t if n in fixed else t[1:2] for n, t in x.items()}
    assert same_bits(run(rule, row, **EVERYTHING[rule]), tuple(t[1:2] for t in whole))
    part = {n: t if n in (*fixed, "initial_state") else t[:, :2] for n, t in x.items()}
    assert same_bits(run(rule, part, **EVERYTHING[rule])[0], whole[0][:, :2])


@each
def test_the_state_carries_over(rule):
    x = make(rule, T=6)
    S, o = x.pop("initial_state"), []
    whole = run(rule, x | dict(initial_state=S))
    for a, b in (0, 1), (1, 4), (4, 6):
        part, S = run(rule, {n: t[:, a:b] for n, t in x.items()} | dict(initial_state=S))
        o.append(part)
    assert same_bits((torch.cat(o, 1), S), whole)


@each
def test_the_future_is_invisible(rule):
    x = make(rule, T=4)
    o, _ = run(rule, x)
    for name in NAMES[rule].split():
        y = x | {name: x[name].clone()}
        y[name][:, 3:] = -7.0 if name == "g" else 0.5
        p, _ = run(rule, y)
        assert torch.equal(o[:, :3], p[:, :3]) and not torch.equal(o, p), name


@pytest.mark.parametrize("everything", [False, True])
def test_chunks_and_references_agree(everything):
    x, options = make("gdn", T=18, H=1, raw=everything), EVERYTHING["gdn"] if everything else {}
    chunks = chunk_gated_delta_rule(**x, **options, output_final_state=True)
    assert max(map(rel_err, run("gdn", x, **options), chunks)) < 5e-6
    y = {n: t.double() for n, t in x.items()}
    naive = naive_recurrent_gated_delta_rule(**y, **options, output_final_state=True)
    assert max(map(rel_err, oracle(x, **options), naive)) < 1e-12


@each
def test_rates_that_are_one(rule):
    "Gated DeltaNet-2 with both gates at beta is KDA, and KDA with one decay a head is Gated DeltaNet."
    x = make("gdn")
    wide = x["g"][..., None].expand(-1, -1, -1, 16)
    if rule == "kda":
        x["g"] = wide
    if rule == "gdn2":
        beta = x.pop("beta")[..., None].expand(-1, -1, -1, 16)
        x |= dict(g=wide, b=beta, w=beta)
    assert max(map(rel_err, run(rule, x), oracle(make("gdn")))) < 1e-6


# fla's kernels run in Triton's interpreter as well, or on a GPU, where nobody promises equal bits.
def fla(rule):
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.gdn2 import fused_recurrent_gdn2
    from fla.ops.kda import fused_recurrent_kda

    return dict(gdn=fused_recurrent_gated_delta_rule, kda=fused_recurrent_kda, gdn2=fused_recurrent_gdn2)[rule]


def beside_fla(rule, x, **options):
    ours, theirs = run(rule, x, **options), fla(rule)(**x, output_final_state=True, **options)
    if DEVICE == "cpu":
        assert same_bits(ours, theirs)
    else:
        assert max(map(rel_err, ours, theirs)) < TOLERANCE[x["q"].dtype]


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("T,HV,K,V", [(1, 2, 64, 64), (3, 4, 20, 40), (2, 2, 100, 9)])
def test_fla_s_bits(rule, dtype, T, HV, K, V):
    beside_fla(rule, make(rule, T=T, HV=HV, K=K, V=V, dtype=dtype))


@each
def test_fla_s_bits_with_options(rule):
    x = make(rule, K=20, V=12)
    beside_fla(rule, x, use_qk_l2norm_in_kernel=True, scale=0.3)
    beside_fla(rule, x | dict(initial_state=x["initial_state"].mT.contiguous()), state_v_first=True)
    beside_fla(rule, {n: t for n, t in x.items() if n != "initial_state"})
    raw = make(rule, K=20, V=12, raw=True)
    if rule != "gdn2":
        beside_fla(rule, x | dict(beta=raw["beta"]), **RATES)
    if rule != "gdn":
        beside_fla(rule, raw, use_gate_in_kernel=True, lower_bound=-5.0)
        raw.pop("A_log")
        beside_fla(rule, raw, use_gate_in_kernel=True, lower_bound=-5.0)


def test_fla_s_bits_without_gates():
    x = make("gdn", state=False)
    beside_fla("gdn", {n: x[n] for n in "qkv"})
    beside_fla("gdn", x | dict(gk=make("kda")["g"]))


@each
def test_a_softplus_that_keeps_its_tail(rule):
    "fla's log(1 + exp(x)) is 0 at x = -18, ours is not."
    x = make(rule, T=20, K=8, V=8)
    x |= dict(g=torch.full_like(x["g"], -18.0), A_log=torch.full((2,), 5.0, device=DEVICE))
    want = oracle(x, use_gate_in_kernel=True)
    theirs = fla(rule)(**x, output_final_state=True, use_gate_in_kernel=True)
    ours = run(rule, x, use_gate_in_kernel=True)
    assert all(rel_err(a, w) < 1e-6 < 1e-5 < rel_err(b, w) for a, b, w in zip(ours, theirs, want))


WRONG = {"q": (1, 3, 16), "k": (1, 2, 2, 16), "v": (1, 3, 3, 16), "g": (1, 3), "beta": (1, 3, 2, 16), "b": (1, 3, 2), "w": (1, 3, 2, 8),
         "initial_state": (2, 2, 16, 16), "A_log": (3,), "dt_bias": (5,)}


@each
@pytest.mark.parametrize("name", WRONG)
def test_bad_input(rule, name):
    x = make(rule, raw=True)
    if name not in x:
        return
    options = dict(use_gate_in_kernel=True)
    for _ in range(2):
        with refused(ValueError, name):
            RULES[rule](**x | {name: torch.zeros(WRONG[name], device=DEVICE)}, **options)
        for dtype in torch.int32, torch.float64:
            with refused(TypeError, name):
                RULES[rule](**x | {name: x[name].to(dtype)}, **options)
        with refused(TypeError, name):
            RULES[rule](**x | {name: [1.0]}, **options)
        if name != "q":
            with refused(ValueError, name):
                RULES[rule](**x | {name: x[name].to("meta")}, **options)
        RULES[rule](**x, **options)


@each
def test_what_must_be_there(rule):
    x = make(rule)
    for name in NAMES[rule].split():
        if rule != "gdn" or name in "qkv":
            with refused(TypeError, name):
                RULES[rule](**x | {name: None})
    with refused(TypeError, "k"):
        RULES[rule](**x | dict(k=x["k"].bfloat16()))
    with refused(TypeError, "scale"):
        RULES[rule](**x, scale=torch.ones((), device=DEVICE))
    with pytest.raises(TypeError):
        RULES[rule](**x, no_such_option=True)


@each
def test_options_that_contradict(rule):
    x = make(rule)
    with refused(ValueError, "A_log"):
        RULES[rule](**x, use_gate_in_kernel=True)
    if rule != "gdn2":
        with refused(ValueError, "allow_neg_eigval"):
            RULES[rule](**x, allow_neg_eigval=True)
    if rule == "gdn":
        with refused(ValueError, "g"):
            RULES[rule](**x | dict(g=None, A_log=torch.zeros(2, device=DEVICE)), use_gate_in_kernel=True)
        with refused(ValueError, "beta"):
            RULES[rule](**x | dict(beta=None), use_beta_sigmoid_in_kernel=True)
    else:
        with refused(TypeError, "lower_bound"):
            RULES[rule](**x, use_gate_in_kernel=True, lower_bound=torch.tensor(-5.0))


@each
def test_sizes_that_are_refused(rule):
    with refused(ValueError, "K", "256"):
        RULES[rule](**make(rule, K=257))
    with refused(ValueError, "V", "256"):
        RULES[rule](**make(rule, V=257))
    with refused(ValueError, "v", "multiple"):
        RULES[rule](**make(rule, H=2, HV=3))


@each
def test_not_yet(rule):
    x = make(rule, state=False)
    with refused(NotImplementedError, "cu_seqlens"):
        RULES[rule](**x, cu_seqlens=torch.tensor([0, 1, 3], device=DEVICE))
    if rule == "gdn":
        with refused(NotImplementedError, "gv"):
            RULES[rule](**x, gv=x["v"])


@each
def test_gradients_are_refused(rule):
    x = make(rule, raw=True)
    for name in x:
        y = x | {name: x[name].clone().requires_grad_()}
        with refused(NotImplementedError, f"{name}:", CHUNK[rule]):
            RULES[rule](**y, **EVERYTHING[rule])
        assert not run(rule, y, **EVERYTHING[rule])[0].requires_grad
    with torch.inference_mode():
        RULES[rule](**y, **EVERYTHING[rule])


def test_a_closed_gate_s_parameters_may_want_gradients():
    "What isn't read needn't be refused."
    x = make("kda") | dict(A_log=torch.zeros(2, device=DEVICE, requires_grad=True))
    assert same_bits(fr.fused_recurrent_kda(**x), fr.fused_recurrent_kda(**make("kda")))


@each
def test_nothing_is_read_back(rule):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = {n: mode.from_tensor(t) for n, t in make(rule, HV=4, V=9, raw=True).items()}
        o, S = RULES[rule](**x, output_final_state=True, **EVERYTHING[rule])
    assert o.shape == x["v"].shape and S.shape == x["initial_state"].shape and S.dtype == torch.float32


@each
@pytest.mark.parametrize("everything", [False, True])
def test_the_operator_keeps_its_contract(rule, everything):
    x = make(rule, raw=everything, state=everything)
    x["gk"] = x.pop("g") if rule != "gdn" else None
    names = ("q", "k", "v", "g", "gk", "beta", "b", "w", "A_log", "dt_bias", "initial_state")
    bound = -5.0 if everything and rule != "gdn" else None
    sigmoid = everything and rule != "gdn2"
    args = *(x.get(n) for n in names), 0.25, bound, everything, everything, everything, sigmoid, sigmoid, everything
    assert set(torch.library.opcheck(fr._op, args).values()) == {"SUCCESS"}


@each
def test_traced_without_a_break(rule):
    x = make(rule, raw=True)
    traced = torch.compile(RULES[rule], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = traced(**x, output_final_state=True, **EVERYTHING[rule])
    assert same_bits(got, run(rule, x, **EVERYTHING[rule]))


@each
def test_traced_with_sizes_that_change(rule):
    traced = torch.compile(RULES[rule], fullgraph=True, backend="eager", dynamic=True)
    for B, T in (2, 3), (3, 5):
        x = make(rule, B=B, T=T)
        assert same_bits(traced(**x, output_final_state=True), run(rule, x))


def test_autocast_changes_nothing():
    x = make("kda")
    with torch.autocast(DEVICE, torch.bfloat16):
        got = run("kda", x)
    assert same_bits(got, run("kda", x))


def test_ahead_of_time_cases_cover_every_mechanism():
    cases = fr.aot_cases()
    pointers = {tuple(sorted(n for n in ("g", "gk", "beta", "b", "w") if n in c.signature)) for c in cases}
    assert pointers == {("beta", "g"), ("beta", "gk"), ("b", "gk", "w")} and not any(c.spill for c in cases)

"Block Attention Residuals: two phases against float64, a stack of blocks, what it leaves behind, and what must be refused."

import gc
import math
import re
import weakref
from functools import partial

import pytest
import torch
from depth import Fault, assert_captured

from dormouse_fused import block_attnres
from dormouse_fused.attnres import AttnResStack, fused_attnres, naive_attnres, stack_passes
from dormouse_fused.block_attnres import (
    BlockAttnResStack,
    batched_attnres,
    block_attnres_cost,
    block_passes,
    block_stack_passes,
    merge_attnres,
    naive_block_attnres,
)
from dormouse_fused.parity import (
    assert_close,
    assert_deterministic,
    errors,
    evaluate,
    fenced,
    in_float64,
    poison,
    rel_err,
    same_bits,
)
from dormouse_fused.triton import INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"
GPU = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 3e-6, F16: 6e-4, BF16: 5e-3}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered", "ignore:divide by zero")


def randn(*shape, seed=0, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def problem(M=3, S=2, *shape, D=20, dtype=F32, weights=F32, seed=0):
    "Queries, norm weights, and sources v0, v1, ..."
    x = dict(q=2 * randn(S, D, seed=seed) / D**0.5, w=1 + randn(S, D, seed=seed + 1) / 4)
    return {n: t.to(weights) for n, t in x.items()} | {
        f"v{l}": (randn(*shape or (2,), D, seed=seed + 2 + l) * (1 + l / 4)).to(dtype) for l in range(M)
    }


def batched(q, w, rule=batched_attnres, **v):
    options = {n: v.pop(n) for n in ("rms_eps", "scale") if n in v}
    return rule(q, list(v.values()), w, **options)


def naive_batched(q, v, w, rms_eps=1e-6, scale=1.0):
    "Each query's read, and the logarithm of what its softmax divides by."
    x = torch.stack(v)
    s = scale * torch.rsqrt(x.square().mean(-1) + rms_eps) * torch.stack([x @ (a * b) for a, b in zip(q, w)])
    return torch.stack([naive_attnres(a, v, b, None, rms_eps, scale) for a, b in zip(q, w)]), s.logsumexp(1)


def naive_merge(query, partial, rms_weight, out, lse, rms_eps=1e-6, scale=1.0):
    d = lse - scale * torch.rsqrt(partial.square().mean(-1) + rms_eps) * (partial @ (query * rms_weight))
    alpha, beta = (
        torch.nn.functional.logsigmoid(x).exp()[..., None] for x in (d, -d)
    )  # so that small derivatives are exact
    return alpha * out + beta * partial


def upstream(x, S):
    v = x["v0"]
    return randn(S, *v.shape, seed=90, dtype=v.dtype), randn(S, *v.shape[:-1], seed=91)


def phase1(x, rule=batched_attnres, given=None, **options):
    S = x["q"].shape[0]
    given = upstream(x, S) if given is None else given
    with poison():
        return evaluate(partial(batched, rule=rule, **options), x, given, ("o", "lse"))


def exact1(x, given=None, **options):
    return phase1(in_float64(x), naive_batched, upstream(x, x["q"].shape[0]) if given is None else given, **options)


def merging(*shape, D=20, dtype=F32, weights=F32, seed=0):
    x = dict(
        query=(2 * randn(D, seed=seed) / D**0.5).to(weights), rms_weight=(1 + randn(D, seed=seed + 1) / 4).to(weights)
    )
    shape = shape or (3,)
    x |= {n: randn(*shape, D, seed=seed + i, dtype=dtype) for i, n in ((2, "partial"), (3, "out"))}
    return x | dict(lse=randn(*shape, seed=seed + 4))


def phase2(x, rule=merge_attnres, dtype=None, **options):
    with poison():
        return evaluate(
            partial(rule, **options), x, [randn(*x["partial"].shape, seed=92, dtype=dtype or x["partial"].dtype)]
        )


def exact2(x, **options):
    return phase2(in_float64(x), naive_merge, x["partial"].dtype, **options)


def close(got, want, tolerance, few=()):
    assert got.keys() == want.keys()
    for n in want:
        assert_close(got[n], want[n], tolerance if n not in few else few[n], n)


def kinds(x, dtype, weights=F32):
    "Tolerances of results that have another dtype than the sources."
    return {n: TOLERANCE[F32 if n == "lse" else weights] for n in ("dq", "dw", "lse", "dlse", "dquery", "drms_weight")}


CASES = [
    (1, 1, 20, F32),
    (1, 3, 33, F32),
    (2, 2, 1, F32),
    (3, 2, 20, BF16),
    (4, 3, 300, F32),
    (5, 2, 33, F16),
    (2, 9, 20, F32),
    (9, 2, 20, F32),
]


@pytest.mark.parametrize("M,S,D,dtype", CASES, ids=str)
def test_phase_1(M, S, D, dtype):
    x = problem(M, S, D=D, dtype=dtype)
    got, want = phase1(x), exact1(x)
    assert (
        got["o"].shape == (S, 2, D)
        and got["lse"].shape == (S, 2)
        and got["lse"].dtype == F32
        and got["o"].dtype == dtype
    )
    if M == 1:
        assert all(torch.equal(o, x["v0"]) for o in got["o"])
    close(got, want, TOLERANCE[dtype], kinds(x, dtype))


@pytest.mark.parametrize(
    "options", [dict(scale=0.3, rms_eps=0.5), dict(scale=-2), dict(scale=0.0), dict(rms_eps=0)], ids=str
)
def test_options(options):
    x, y = problem(), merging()
    got, want = phase1(x, **options), exact1(x, **options)
    for n in want:
        assert rel_err(got[n], want[n]) < 5e-6 or want[n].norm() < 1e-9 and got[n].norm() < 1e-6, n
    got, want = phase2(y, **options), exact2(y, **options)
    for n in want:
        assert rel_err(got[n], want[n]) < 5e-6 or want[n].norm() < 1e-9 and got[n].norm() < 1e-6, n


@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradients_of_one_output(which):
    "Through the log-sum-exp alone, and through the outputs alone."
    x = problem()
    do, dlse = upstream(x, 2)
    given = (do, None) if which == "out" else (None, dlse)
    close(phase1(x, given=given), exact1(x, given), 3e-6)


@pytest.mark.parametrize("D,dtype", [(20, F32), (1, F32), (300, BF16), (33, F16)], ids=str)
def test_phase_2(D, dtype):
    x = merging(D=D, dtype=dtype)
    got, want = phase2(x), exact2(x)
    assert got["o"].shape == (3, D) and got["o"].dtype == dtype and got["dlse"].dtype == F32
    close(got, want, TOLERANCE[dtype], kinds(x, dtype))


@pytest.mark.parametrize("weights", [BF16, F16], ids=str)
def test_weights_have_their_own_dtype(weights):
    x, y = problem(weights=weights), merging(weights=weights)
    got, merged = phase1(x), phase2(y)
    assert {got["dq"].dtype, got["dw"].dtype, merged["dquery"].dtype, merged["drms_weight"].dtype} == {weights}
    close(got, exact1(x), 3e-6, kinds(x, F32, weights) | dict(lse=3e-6))
    close(merged, exact2(y), 3e-6, kinds(y, F32, weights) | dict(dlse=3e-6))


def test_two_phases_are_one_read():
    "With all gradients, against the read of all sources at once."
    x = problem(4, 1, 3)

    def phases(q, w, v0, v1, v2, v3):
        out, lse = batched_attnres(q, [v0, v1, v2], w)
        return merge_attnres(q[0], v3, w[0], out[0], lse[0])

    def whole(rule, q, w, **v):
        return rule(q[0], list(v.values()), w[0])

    do = [randn(3, 20, seed=93)]
    want = evaluate(partial(whole, naive_attnres), in_float64(x), [do[0].double()])
    close(evaluate(phases, x, do), want, 3e-6)
    close(evaluate(partial(whole, fused_attnres), x, do), want, 3e-6)


def small(monkeypatch, room):
    "As if a thread had so few registers."
    for f in (
        block_attnres._fwd_cut,
        block_attnres._bwd_cut,
        block_attnres._fwd_launcher,
        block_attnres._coefs_launcher,
    ):
        f.cache_clear()
    monkeypatch.setattr(block_attnres, "_ROOM", {False: room, True: room})


@pytest.fixture
def registers(monkeypatch):
    yield partial(small, monkeypatch)
    monkeypatch.undo()
    small(monkeypatch, 0)
    monkeypatch.undo()


@pytest.mark.parametrize("room", [4, 0], ids=["two at a time", "one at a time"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_more_than_registers_hold(registers, room, dtype):
    x = problem(5, 2, dtype=dtype)
    want, before = exact1(x), phase1(x)
    registers(room)
    assert block_attnres._fwd_cut(20, 8)[0] == 1 and not block_attnres._bwd_cut(20, 8, 2, 2)[1]
    got = phase1(x)
    close(got, want, TOLERANCE[dtype], kinds(x, dtype))
    assert rel_err(got["dq"], before["dq"].double()) < 2e-6


def test_rows_that_registers_do_not_hold():
    x = problem(2, 1, 1, D=4200)
    assert not block_attnres._bwd_cut(4200, 2, 1, 4)[1]
    close(phase1(x), exact1(x), 3e-6)


@pytest.mark.parametrize("block_size", [2, 5])
def test_a_stack_of_more_than_registers_hold(registers, block_size):
    registers(4)
    as_naive(layers(5), block_size)


def test_several_launches_of_a_phase():
    "More queries than one launch takes, in a stack: sources' gradients are added up across launches."
    x = layers(9, 1, D=16)
    assert block_attnres._bwd_cut(16, 1, 9, 4)[0] < 9
    as_naive(x, 9, tolerance=2e-5)
    y = problem(2, 9, dtype=BF16)
    close(phase1(y), exact1(y), TOLERANCE[BF16], kinds(y, BF16))


def test_programs_that_take_several_tokens(monkeypatch):
    monkeypatch.setattr(block_attnres, "_multiprocessors", lambda device: 1)
    x, y = problem(2, 2, 11), merging(11)
    close(phase1(x), exact1(x), 3e-6)
    close(phase2(y), exact2(y), 3e-6)
    as_naive(layers(3, 7), 2)


@pytest.mark.parametrize("shape", [(1,), (2, 1, 2)], ids=str)
def test_leading_dimensions(shape):
    x, y = problem(2, 2, *shape), merging(*shape)
    close(phase1(x), exact1(x), 3e-6)
    close(phase2(y), exact2(y), 3e-6)
    flat, rows = {n: t.flatten() if n[0] == "v" else t for n, t in problem(2, 2, 1).items()}, phase1(problem(2, 2, 1))
    assert same_bits(batched(**flat)[0], rows["o"][:, 0])


def test_no_tokens():
    x, y = problem(5, 2, 0), merging(0)
    got, merged = phase1(x), phase2(y)
    assert got["o"].shape == (2, 0, 20) and got["lse"].shape == (2, 0) and merged["o"].shape == (0, 20)
    assert not any(got[f"d{n}"].any() for n in x) and not merged["dquery"].any() and not merged["drms_weight"].any()
    h, module = randn(0, 20).requires_grad_(), BlockAttnResStack(20, 3, 2, device=DEVICE)
    out = module(h, [torch.sin] * 3)
    out.sum().backward()
    assert out.shape == (0, 20) and h.grad.shape == (0, 20) and not module.query.grad.any()


def turned(t):
    return t.mT.contiguous().mT


LAYOUTS = {
    "slices": lambda v: list(torch.stack(v, -2).unbind(-2)),
    "padded rows": lambda v: [fenced(t, between=3) for t in v],
    "moved": lambda v: [torch.cat([t.flatten()[:1] * math.nan, t.flatten()])[1:].view(t.shape) for t in v],
    "each its own": lambda v: [fenced(v[0], between=3), turned(v[1]), v[2]],
    "expanded": lambda v: [t[:1].expand(2, 20) for t in v],
}


def alike(a, b, tolerance=TOLERANCE):
    "The same bits in the interpreter; on a GPU threads may share a row otherwise if it is elsewhere."
    return same_bits(a, b) if INTERPRET else all(rel_err(a[n], b[n]) < tolerance[a[n].dtype] for n in a)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    x, do = problem(), upstream(problem(), 2)
    v = LAYOUTS[name]([x[f"v{l}"] for l in range(3)])
    y = {"q": fenced(x["q"], between=2), "w": fenced(x["w"])} | {f"v{l}": t for l, t in enumerate(v)}
    want = phase1({n: t.contiguous() for n, t in y.items()}, given=do)
    assert alike(phase1(y, given=(turned(do[0]), fenced(do[1], between=1))), want)
    z = merging(2)
    a = z | dict(zip(("partial", "out"), v)) | dict(lse=fenced(z["lse"][:, None], between=1)[:, 0])
    assert alike(phase2(a), phase2({n: t.contiguous() for n, t in a.items()}))


def test_incoming_gradients_of_any_layout():
    x = {n: t.requires_grad_() for n, t in problem().items()}
    out, lse = batched(**x)
    (out.sum() + lse.sum()).backward()
    ones = phase1({n: t.detach() for n, t in x.items()}, given=(torch.ones_like(out), torch.ones_like(lse)))
    assert alike({n: t.grad for n, t in x.items()}, {n: ones[f"d{n}"] for n in x})


@pytest.mark.parametrize("scale", [8.0, 40.0], ids=str)
def test_a_softmax_that_has_chosen(scale):
    "Gradients of scores are differences of what hardly differs: no further from float64 than a few times autograd in float32."
    x, y = problem(5, 2, 3), merging(4)
    got, want, plain = phase1(x, scale=scale), exact1(x, scale=scale), phase1(x, naive_batched, scale=scale)
    for n in want:
        assert rel_err(got[n], want[n]) <= max(3e-6, 1.5 * rel_err(plain[n], want[n])), n
    close(phase2(y, scale=scale), exact2(y, scale=scale), 1e-4 if scale > 10 else 2e-5)


@pytest.mark.parametrize("first", [0, 2], ids=["resident", "in batches"])
def test_all_tokens_have_chosen(registers, first):
    "The same source; what is left of the query's gradient is a small difference everywhere, and is right all the same."
    if first:
        registers(4)
    x = problem(5, 1, 4, D=48)
    x["w"].fill_(1)
    for l in range(5):
        x[f"v{l}"] = x[f"v{l}"] / 8 + (x["q"] * 48**0.5 / 2 if l == first else 0)
    given = upstream(x, 1)[0], None
    for scale in 0.5, 1.0:
        got, plain, want = (
            phase1(x, given=given, scale=scale),
            phase1(x, naive_batched, given, scale=scale),
            exact1(x, given, scale=scale),
        )
        assert rel_err(got["dq"], want["dq"]) < 3e-6
        assert scale < 1 or rel_err(plain["dq"], want["dq"]) > 1e-4


def test_large_scores():
    "The softmax is a choice; nothing overflows."
    x, y = problem(), merging()
    for scale in -1e4, 1e30:
        got, merged = phase1(x, scale=scale), phase2(y, scale=scale)
        assert all(t.isfinite().all() for n, t in got.items() if n != "lse" and "q" not in n and "w" not in n)
        assert merged["o"].isfinite().all()
    for l in range(3):
        x[f"v{l}"].zero_()
    got = phase1(x)
    assert not got["o"].any() and (got["lse"] - math.log(3)).abs().max() < 1e-6


@pytest.mark.parametrize("fault", [math.nan, math.inf], ids=str)
def test_a_fault_stays_in_its_token(fault):
    x = problem()
    want, bad = phase1(x), x | dict(v1=x["v1"].clone())
    bad["v1"][1, 5] = fault
    got = phase1(bad)
    assert got["o"][:, 1].isnan().any() and same_bits(got["o"][:, 0], want["o"][:, 0])
    assert all(got[f"dv{l}"][1].isnan().any() and same_bits(got[f"dv{l}"][0], want[f"dv{l}"][0]) for l in range(3))


NAMES = ["q", "w", "v0", "v1", "v2"]


@pytest.mark.parametrize("wanted", [*([n] for n in NAMES[:3]), ["v2", "q"]], ids="+".join)
def test_gradients_of_some_inputs(wanted):
    x, do = problem(), upstream(problem(), 2)
    want, leaf = phase1(x), {n: t.clone().requires_grad_(n in wanted) for n, t in x.items()}
    torch.autograd.backward(batched(**leaf), do)
    assert all(same_bits(t.grad, want[f"d{n}"] if n in wanted else None) for n, t in leaf.items())


def test_no_gradients():
    x, y = ({n: t.requires_grad_() for n, t in made().items()} for made in (problem, merging))
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            assert not batched(**x)[0].requires_grad and not merge_attnres(**y).requires_grad
    assert batched(**x)[0].requires_grad and batched(**x)[1].requires_grad and merge_attnres(**y).requires_grad


def test_second_derivatives_are_refused():
    x, y = ({n: t.requires_grad_() for n, t in made().items()} for made in (problem, merging))
    a = leaves(layers(2))
    for out, wrt in (
        (batched(**x)[0], x["q"]),
        (merge_attnres(**y), y["query"]),
        (stack(2)(**a), a["x"]),
        (stack(2)(**a), a["a0"]),
    ):
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(out.sum(), wrt, create_graph=True)


def test_operators_keep_their_contract():
    x, y = problem(2, 2, 1, 2), merging(1, 2)
    args = x["q"], [x["v0"], x["v1"]], x["w"], 1e-5, 0.5
    out, lse, stats, rstds = block_attnres._batched_op(*args)
    merge = *y.values(), 1e-5, 0.5
    merge = merge[0], merge[2], merge[1], *merge[3:]
    h, merge_stats = block_attnres._merged_op(*merge)
    for op, arguments in (
        (block_attnres._batched_op, args),
        (block_attnres._batched_bwd_op, (out, lse, *args[:3], stats, rstds, 0.5)),
        (block_attnres._merged_op, merge),
        (block_attnres._merged_bwd_op, (h, *merge[:4], merge_stats, 0.5)),
        (
            block_attnres._batched_op,
            (x["q"].clone().requires_grad_(), [t.clone().requires_grad_() for t in args[1]], *args[2:]),
        ),
        (block_attnres._merged_op, tuple(t.clone().requires_grad_() if torch.is_tensor(t) else t for t in merge)),
    ):
        assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_nothing_is_read_back():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = {n: mode.from_tensor(t).requires_grad_() for n, t in problem(dtype=BF16).items()}
        out, lse = batched(**x)
        (out.float().sum() + lse.sum()).backward()
        y = {n: mode.from_tensor(t).requires_grad_() for n, t in layers().items()}
        o = stack(2)(**y)
        o.sum().backward()
    assert out.shape == (2, 2, 20) and out.dtype == BF16 and lse.dtype == F32 and o.shape == (2, 20)
    assert all(t.grad.shape == t.shape and t.grad.dtype == t.dtype for t in [*x.values(), *y.values()])


def test_traced_without_a_break():
    x, y = problem(), merging()
    for f, z, run in (batched_attnres, x, phase1), (merge_attnres, y, phase2):
        traced = torch.compile(f, fullgraph=True, backend="aot_eager")
        assert same_bits(run(z, traced), run(z, f))


def test_autocast_changes_nothing():
    x, y = problem(), merging()
    with torch.autocast(DEVICE, BF16):
        got = phase1(x), phase2(y)
    assert same_bits(got, (phase1(x), phase2(y)))


def named(error, name):
    return pytest.raises(error, match=rf"^{re.escape(name)}: ")


BAD = {
    "no sources": (ValueError, "residuals", dict(residuals=[])),
    "65": (ValueError, "residuals", dict(residuals=[torch.zeros(1, 20)] * 65)),
    "no sequence": (TypeError, "residuals", dict(residuals=3)),
    "a number": (TypeError, "residuals[0]", dict(residuals=[1.0])),
    "float64": (TypeError, "residuals[0]", dict(residuals=[torch.zeros(1, 20, dtype=torch.float64)])),
    "D is 0": (ValueError, "residuals", dict(residuals=[torch.zeros(1, 0)])),
    "one query": (ValueError, "queries", dict(queries=torch.zeros(20))),
    "no queries": (ValueError, "queries", dict(queries=torch.zeros(0, 20))),
    "another D": (ValueError, "queries", dict(queries=torch.zeros(2, 21))),
    "integers": (TypeError, "queries", dict(queries=torch.zeros(2, 20, dtype=torch.int32))),
    "no query": (TypeError, "queries", dict(queries=None)),
    "fewer weights": (ValueError, "rms_weights", dict(rms_weights=torch.ones(1, 20))),
    "no weights": (TypeError, "rms_weights", dict(rms_weights=None)),
    "a tensor of eps": (TypeError, "rms_eps", dict(rms_eps=torch.ones(()))),
    "negative eps": (ValueError, "rms_eps", dict(rms_eps=-1.0)),
    "a tensor of scales": (TypeError, "scale", dict(scale=torch.ones(()))),
}


def there(x):
    return [there(t) for t in x] if isinstance(x, list) else x.to(DEVICE) if torch.is_tensor(x) and x.dim() else x


@pytest.mark.parametrize("which", BAD)
def test_bad_arguments_of_phase_1(which):
    x, (error, name, bad) = problem(2, 2, 1), BAD[which]
    good = dict(queries=x["q"], residuals=[x["v0"], x["v1"]], rms_weights=x["w"])
    batched_attnres(**good)
    for _ in range(2):
        with named(error, name):
            batched_attnres(**good | {n: there(t) for n, t in bad.items()})


def test_sources_that_are_not_alike():
    x = problem(2, 2, 1)
    for error, other in (
        (ValueError, x["v1"][:, 1:]),
        (ValueError, x["v1"][0]),
        (TypeError, x["v1"].half()),
        (ValueError, x["v1"].to("meta")),
    ):
        with named(error, "residuals[1]"):
            batched_attnres(x["q"], [x["v0"], other], x["w"])


BAD_MERGES = {
    "partial": [
        (TypeError, lambda t: None),
        (TypeError, lambda t: t.double()),
        (ValueError, lambda t: t[0, 0]),
        (ValueError, lambda t: t[:, :0]),
    ],
    "query": [(TypeError, lambda t: 1.0), (ValueError, lambda t: t[1:]), (ValueError, lambda t: t[None])],
    "rms_weight": [(TypeError, lambda t: None), (ValueError, lambda t: t[1:]), (TypeError, lambda t: t.int())],
    "out": [(TypeError, lambda t: t.half()), (ValueError, lambda t: t[1:]), (ValueError, lambda t: t.to("meta"))],
    "lse": [(TypeError, lambda t: t.bfloat16()), (ValueError, lambda t: t[1:]), (TypeError, lambda t: None)],
}


@pytest.mark.parametrize("name", BAD_MERGES)
def test_bad_arguments_of_phase_2(name):
    x = merging()
    merge_attnres(**x)
    for error, change in BAD_MERGES[name]:
        with named(error, name):
            merge_attnres(**x | {name: change(x[name])})


# A stack. A layer is elementwise, so that it has the same bits in every run.
def layers(n=4, *shape, D=20, dtype=F32, seed=0):
    "The embedding, all queries and norm weights, and the parameters of n layers."
    x = dict(x=randn(*shape or (2,), D, seed=seed, dtype=dtype), q=2 * randn(n + 1, D, seed=seed + 1) / D**0.5)
    x["w"] = 1 + randn(n + 1, D, seed=seed + 2) / 4
    return x | {f"a{i}": 1 + randn(D, seed=seed + 3 + i) / 4 for i in range(n)}


def layer(a, h):
    return torch.sin(2 * a * h).to(h.dtype)


def stack(block_size, layer=layer, recompute=False, rms_eps=1e-6, scale=1.0, seen=None, **options):
    "The module as a function of `layers`' names."

    def call(x, q, w, **a):
        module = BlockAttnResStack(
            q.shape[1], len(a), block_size, rms_eps, scale, DEVICE, recompute=recompute, **options
        )
        del module.query, module.rms_weight
        module.query, module.rms_weight = q, w
        return module(x, [partial(layer, t) for t in a.values()])

    return call


def naive(block_size, layer=layer, **options):
    return lambda x, q, w, **a: naive_block_attnres(
        x, [partial(layer, t) for t in a.values()], q, w, block_size, **options
    )


def gradients(fn, x, do=None, wrt=None):
    do = randn(*x["x"].shape, seed=98).bfloat16() if do is None else do
    with poison():
        return evaluate(fn, x, [do.to(x["x"].dtype)], wrt=wrt)


def as_naive(x, block_size, layer=layer, tolerance=6e-6, wrt=None, recompute=False, **options):
    got = gradients(stack(block_size, layer, recompute, **options), x, wrt=wrt)
    want = gradients(naive(block_size, layer, **options), in_float64(x), wrt=wrt)
    for n in want:
        assert_close(got[n], want[n], tolerance, n)
    return got


@pytest.mark.parametrize("n,block_size", [(1, 1), (1, 2), (3, 1), (4, 2), (5, 2), (5, 3), (3, 3), (3, 8)], ids=str)
def test_stacks(n, block_size):
    as_naive(layers(n), block_size)


@pytest.mark.parametrize("options", [dict(scale=0.3, rms_eps=0.1), dict(rms_eps=0.0), dict(scale=-1.5)], ids=str)
def test_options_of_a_stack(options):
    as_naive(layers(), 3, **options)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_stack_in_half_precision(dtype):
    "No further from float64 than the same by PyTorch's operators in that dtype."
    x = layers(6, 4, D=64, dtype=dtype)
    want = gradients(naive(3), in_float64(x))
    got, theirs = gradients(stack(3), x), gradients(naive(3), {n: t.to(dtype) for n, t in x.items()})
    assert all(t.dtype == (dtype if n in ("o", "dx") else F32) for n, t in got.items())
    ours, plain = errors(got, want), errors(theirs, want)
    assert all(ours[n] <= 1.1 * plain[n] for n in ours), (ours, plain)


def test_blocks_of_one_layer_are_full_attention_residuals():
    x = layers(4)

    def full(x, q, w, **a):
        module = AttnResStack(20, 4, device=DEVICE)
        del module.query, module.rms_weight
        module.query, module.rms_weight = q, w
        return module(x, [partial(layer, t) for t in a.values()])

    got, want = gradients(stack(1), x), gradients(full, x)
    for n in want:
        assert_close(got[n], want[n].double(), 5e-6, n)


def test_one_block_mixes_the_embedding_and_the_running_sum():
    def by_hand(x, q, w, a0, a1, a2):
        total = layer(a0, x)
        for i, a in (1, a1), (2, a2):
            total = total + layer(a, naive_attnres(q[i], [x, total], w[i]))
        return naive_attnres(q[3], [x, total], w[3])

    x = layers(3)
    got, want = gradients(stack(3), x), gradients(by_hand, in_float64(x))
    for n in want:
        assert_close(got[n], want[n], 5e-6, n)


def test_a_stack_that_has_chosen_what_is_finished():
    "In every token: what is left of the queries' gradients are small differences, and right all the same."

    def away(a, h):
        return h / 8 - a

    x, one = layers(3, D=48), randn(48, seed=50)
    x = dict(x=x["x"] / 4 + one, q=x["q"] / 8 + one, w=torch.ones_like(x["w"])) | {
        f"a{i}": x[f"a{i}"] / 8 + one for i in range(3)
    }
    want, plain = (gradients(naive(3, away, scale=0.1), y, wrt=["x", "q"]) for y in (in_float64(x), x))
    got = gradients(stack(3, away, scale=0.1), x, wrt=["x", "q"])
    for i in range(1, 4):
        assert rel_err(got["dq"][i], want["dq"][i]) < 3e-6 < rel_err(plain["dq"][i], want["dq"][i])


def test_recomputing_changes_no_bit():
    for x, block_size in (layers(3), 2), (layers(3), 3):
        assert same_bits(gradients(stack(block_size, recompute=True), x), gradients(stack(block_size), x))


def test_recomputing_keeps_sums_only():
    "How often a layer runs, and what autograd holds in between."
    x, count, held = leaves(layers(4, 3)), [], {None}

    def counted(a, h):
        count.append(0)
        return layer(a, h)

    def pack(t):
        held.add(t.data_ptr() if t.shape == x["x"].shape else None)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = stack(2, counted, recompute=True)(**x)
    assert len(count) == 4 and len(held) == 1 + 3  # the embedding and two sums
    out.sum().backward()
    assert len(count) == 8


def test_dropout_is_recomputed():
    def dropped(a, h):
        return torch.nn.functional.dropout(layer(a, h), 0.5)

    x, found = layers(4), []
    for recompute in False, True:
        torch.manual_seed(5)
        found.append(gradients(stack(2, dropped, recompute), x))
    assert same_bits(*found)


def test_a_stack_has_the_same_bits_in_every_run():
    x = layers(5, 2 if INTERPRET else 3000)
    assert_deterministic(lambda: gradients(stack(2), x))


def leaves(x, frozen=()):
    return {n: t.clone().requires_grad_(n not in frozen) for n, t in x.items()}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_backward_twice(recompute):
    x = leaves(layers())
    out, do = stack(2, recompute=recompute)(**x), randn(2, 20, seed=98).bfloat16().float()
    first = torch.autograd.grad(out, list(x.values()), do, retain_graph=True)
    other = torch.autograd.grad(out, list(x.values()), 2 * do, retain_graph=True)
    again = torch.autograd.grad(out, list(x.values()), do)
    assert same_bits(first, again) and all(rel_err(b, 2 * a) < 1e-6 for a, b in zip(first, other))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(out, list(x.values()), do)


def test_gradients_by_some_of_what_needs_them():
    x = leaves(layers())
    out, do = stack(2)(**x), randn(2, 20, seed=98).bfloat16().float()
    want = dict(zip(x, torch.autograd.grad(out, list(x.values()), do, retain_graph=True)))
    for n in x:
        assert same_bits(torch.autograd.grad(out, x[n], do, retain_graph=True)[0], want[n]), n


@pytest.mark.parametrize("wrt", [["x"], ["q"], ["w"], ["a3"], ["a0", "a1", "a2", "a3"]], ids="+".join)
def test_what_needs_no_gradient(wrt):
    as_naive(layers(), 2, wrt=wrt)


def numbered(special, *numbers):
    "Layers of which some are special."
    count = [0]

    def call(a, h):
        count[0] += 1
        return special(a, h) if (count[0] - 1) % 5 in numbers else layer(a, h)

    return call


def deaf(a, h):
    "Ignores what it gets."
    return torch.sin(a).expand_as(h).to(h.dtype)


def constant(a, h):
    return torch.ones_like(h)


SPECIAL = dict(
    deaf=deaf,
    constant=constant,
    turned=lambda a, h: turned(layer(a, h)),
    idle=lambda a, h: h,
    twice=lambda a, h: h * h + layer(a, h),
)


KINDS = [
    (special, n)
    for special in SPECIAL
    for n in ((0,), (1,), (2, 3), range(5))
    if len(n) > 1 or special in ("deaf", "constant")
]


@pytest.mark.parametrize("special,numbers", KINDS, ids=str)
def test_layers_of_all_kinds(special, numbers):
    "Whoever ignores its input cuts a read off; whoever returns it shares its memory."
    if special == "idle" and len(numbers) == 5:
        return  # all sources have one direction, so that gradients of queries are 0 but for rounding
    used = [f"a{i}" for i in range(5) if i not in numbers or special in ("deaf", "turned", "twice")]
    x, wrt = layers(5), ["x", "q", "w", *used]
    for block_size in (2,) if len(numbers) < 3 else (2, 5):
        make = partial(numbered, SPECIAL[special], *numbers)
        got = gradients(stack(block_size, make()), x, wrt=wrt)
        want = gradients(naive(block_size, make()), in_float64(x), wrt=wrt)
        plain = gradients(naive(block_size, make()), x, wrt=wrt)  # squares let errors grow
        for n in want:
            assert_close(got[n], want[n], max(2e-5, 3 * rel_err(plain[n], want[n])), n)


def test_a_loss_on_what_layers_get():
    "And on the embedding: tensors of the stack that are used elsewhere too."
    x, do = layers(), randn(2, 20, seed=98).bfloat16().float()

    def body(kind):
        def call(**x):
            seen = []

            def noting(a, h):
                seen.append(h)
                return layer(a, h)

            out = kind(2, noting)(**x)
            return out + seen[0].sin() + seen[2] * seen[3] + x["x"].cos()

        return call

    got, want = gradients(body(stack), x, do), gradients(body(naive), in_float64(x), do.double())
    for n in want:
        assert_close(got[n], want[n], 6e-6, n)


def test_a_strided_embedding():
    x = layers()
    for change in turned, lambda t: t[:1].expand(2, 20):
        y = x | dict(x=change(x["x"]))
        close(gradients(stack(2), y), gradients(naive(2), in_float64({n: t.contiguous() for n, t in y.items()})), 6e-6)


def test_a_layer_that_raises():
    "Forward, then backward; nothing is left of either, and the stack goes on."
    x, faults = leaves(layers()), []

    def faulty(a, h):
        if faults == ["forward"]:
            raise ArithmeticError("on purpose")
        return layer(a, Fault.apply(h) if a is x["a2"] and faults == ["backward"] else h)

    fn, want = stack(2, faulty), gradients(stack(2), layers())
    kept = []
    for fault in ["forward"], ["backward"], []:
        faults[:] = fault
        if fault:
            with pytest.raises(ArithmeticError, match="on purpose"):
                out = fn(**x)
                kept.append(out.grad_fn)
                out.sum().backward(retain_graph=True)
        else:
            got = torch.autograd.grad(fn(**x), list(x.values()), randn(2, 20, seed=98).bfloat16().float())
    assert same_bits(dict(zip(x, got)), {n: want[f"d{n}"] for n in x})
    assert len(kept) == 1 and not len(kept[0].runs)


def test_a_failed_run_is_followed_by_another_of_the_same_graph():
    x, bad = leaves(layers()), [True]

    class Sometimes(Fault):
        @staticmethod
        def backward(ctx, do):
            if bad[0]:
                raise ArithmeticError("on purpose")
            return do

    out = stack(2, lambda a, h: layer(a, Sometimes.apply(h) if a is x["a1"] else h))(**x)
    do = randn(2, 20, seed=98).bfloat16().float()
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(out, list(x.values()), do, retain_graph=True)
    bad[0] = False
    got, want = torch.autograd.grad(out, list(x.values()), do), gradients(stack(2), layers())
    assert same_bits(dict(zip(x, got)), {n: want[f"d{n}"] for n in x})


def test_nothing_is_left():
    x, seen = leaves(layers()), []
    out = stack(2)(**x)
    runs = out.grad_fn.runs
    x["a0"].register_hook(lambda g: seen.append(len(runs)))
    out.sum().backward()
    assert seen[0] > 0 and not len(runs)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_stack_is_freed(recompute):
    "As soon as nobody holds it, without a search for cycles."
    x, refs = leaves(layers()), []

    def noting(a, h):
        refs.append(weakref.ref(h))
        return layer(a, h)

    def step(backward):
        out = stack(2, noting, recompute=recompute)(**x)
        if backward:
            out.sum().backward()

    gc.collect()
    gc.disable()
    try:
        for backward in False, True:
            step(backward)
            assert not any(ref() is not None for ref in refs)
    finally:
        gc.enable()


def test_an_input_that_a_layer_changes():
    "In place: autograd refuses, since the read's backward needs it."
    x = leaves(layers())

    def spoiling(a, h):
        f = layer(a, h)
        with torch.no_grad():
            h.mul_(2)
        return f

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        stack(3, spoiling)(**x).sum().backward()


def test_no_gradients_in_a_stack():
    x = leaves(layers())
    for recompute in False, True:
        with torch.no_grad():
            out = stack(2, recompute=recompute)(**x)
        assert not out.requires_grad and same_bits(out, stack(2)(**x).detach())


def test_two_stacks_in_one_backward():
    x = layers(4) | dict(y=randn(2, 20, seed=71))

    def both(kind):
        return lambda x, y, **p: kind(2)(x=x, **p) * kind(3)(x=y + kind(4)(x=x, **p), **p)

    got, want = gradients(both(stack), x), gradients(both(naive), in_float64(x))
    for n in want:
        assert_close(got[n], want[n], 1e-5, n)


def traced(x, backend, recompute=False):
    module = BlockAttnResStack(20, len(x) - 3, 2, device=DEVICE, recompute=recompute)

    def call(x, q, w, **a):
        return torch.func.functional_call(
            module, dict(query=q, rms_weight=w), (x, [partial(layer, t) for t in a.values()])
        )

    return torch.compile(call, fullgraph=True, backend=backend)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_traced_stacks(recompute):
    "Under torch.compile it is the public functions that are traced."
    x = layers(3)
    close(gradients(traced(x, "aot_eager", recompute), x), gradients(naive(2), in_float64(x)), 6e-6)


def test_autocast_of_a_stack():
    x = layers()
    with torch.autocast(DEVICE, BF16):
        got = gradients(stack(2), x)
    assert same_bits(got, gradients(stack(2), x))


def test_the_module():
    "Parameters row by row; zero queries are means."
    module, x = BlockAttnResStack(20, 3, 2, device=DEVICE, dtype=BF16), randn(2, 20)
    assert [tuple(p.shape) for p in module.parameters()] == [(4, 20)] * 2 and module.query.dtype == BF16
    sums = [x, (x.sin() + ((x + x.sin()) / 2).sin())]
    sums.append(((sums[0] + sums[1]) / 2).sin())
    assert rel_err(module(x, [torch.sin] * 3), sum(sums) / 3) < 1e-6
    module(x, iter([torch.sin] * 3)).sum().backward()
    assert module.query.grad.dtype == BF16 and module.rms_weight.grad.shape == (4, 20)


def test_bad_modules():
    for name, args in ("layers", (0, 1)), ("block_size", (3, 0)), ("layers", (64, 1)), ("layers", (127, 2)):
        with named(ValueError, name):
            BlockAttnResStack(20, *args)
    BlockAttnResStack(2, 126, 2)
    for name, bad in dict(rms_eps=-1.0, scale=None).items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            BlockAttnResStack(20, 2, 2, **{name: bad})
    module, x = BlockAttnResStack(20, 2, 2, device=DEVICE), randn(1, 20)
    for fns in [torch.sin], [torch.sin] * 3, []:
        with named(ValueError, "layers"):
            module(x, fns)
    for error, bad in (ValueError, x[:, 1:]), (TypeError, x.double()), (TypeError, None), (ValueError, x[0, 0]):
        with pytest.raises(error):
            module(bad, [torch.sin] * 2)
    for error, f in (ValueError, lambda h: h[:, 1:]), (TypeError, lambda h: h.half()), (TypeError, lambda h: None):
        with named(error, "layers[1]'s output"):
            module(x, [torch.sin, f])


def test_costs():
    "A block of three layers and two finished blocks: 2 read, 3 written; a merge of 3, a merge with addition of 5; by hand 3 + 4 + 6."
    assert block_passes(2, 3) == dict(direct=3 + 4 + 6, phases=2 + 3 + 3 + 5)
    assert block_passes(4, 1) == dict(direct=5, phases=5)
    assert all((block_passes(M, 8)["phases"] < block_passes(M, 8)["direct"]) == (M > 2) for M in range(1, 9))
    # two layers in a block, then a last read: 1 + 2 + 3, the sum 3, 2 + 1; back 2 + 1 and float32 2 + 1; then 1 + 2, 2 + 1, and 5
    assert block_stack_passes(2, 2) == dict(fwd=1 + 2 + 3 + 3 + 3, bwd=3 + 3 + 3 + 3 + 5)
    assert sum(block_stack_passes(32, 8).values()) < stack_passes(32)["pulled"]
    cost = block_attnres_cost(2, 2, 3, 4)
    assert cost["fwd"].bytes == 12 * 24 and cost["fwd+bwd"].bytes == (12 + 17) * 24 and cost["fwd"].launches == 4


def test_ahead_of_time_cases_name_every_kernel():
    names = {c.kernel.rpartition(":")[2] for c in block_attnres.aot_cases()}
    assert names == {n for n in vars(block_attnres) if "attnres" in n and n.endswith("_kernel")}
    assert not any(c.spill for c in block_attnres.aot_cases())


# On a GPU only.
def op_step(x, y, do):
    out, lse = batched(**x)
    h = merge_attnres(**y)
    return out.detach(), *torch.autograd.grad(
        [out, lse, h], [*x.values(), *y.values()], [torch.ones_like(out), lse.detach(), do]
    )


def stack_step(x, y, do, recompute=False):
    out = stack(2, recompute=recompute, preserve_rng_state=False)(**x)
    return out.detach(), *torch.autograd.grad(out, list(x.values()), do)


STEPS = dict(op=op_step, stack=stack_step, recomputed=partial(stack_step, recompute=True))


def prepared(which, seed=0):
    x = problem(seed=seed) if which == "op" else layers(seed=seed)
    return leaves(x), leaves(merging(2, seed=seed)), randn(2, 20, seed=98).bfloat16().float()


@GPU
@pytest.mark.parametrize("which", STEPS)
def test_captured(which):
    args = prepared(which)
    mine, others = ([x for part in parts[:2] for x in part.values()] for parts in (args, prepared(which, 40)))
    assert_captured(lambda *_: STEPS[which](*args), mine, others)


@GPU
@pytest.mark.parametrize("which", STEPS)
def test_the_host_never_waits(which):
    step, args = STEPS[which], prepared(which)
    step(*args)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*args)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@GPU
def test_launches():
    from dormouse_fused.measure import launches

    x = leaves(layers(4))
    module = BlockAttnResStack(20, 4, 2, device=DEVICE)
    with torch.no_grad():
        # two blocks of a phase 1, a layer, a merge, a layer and an addition; a last read
        found = launches(lambda: module(x["x"], [torch.sin] * 4))
    assert found.kernels == 2 * 5 + 1 and found.syncs == 0
    out = stack(2, lambda a, h: torch.sin(h))(**x)
    assert launches(lambda: torch.autograd.grad(out.sum(), x["x"], retain_graph=True)).syncs == 0


@GPU
def test_memory():
    "Recomputed, a stack keeps a tensor for each block."
    from dormouse_fused.measure import peak_mib

    x = leaves(layers(32, 4096, D=1024, dtype=BF16))
    fn = lambda a, h: torch.sin(h)

    def step(recompute):
        out = stack(8, fn, recompute)(**x)
        return torch.autograd.grad(out, [x["x"], x["q"]], torch.ones_like(out))

    kept, recomputed = (peak_mib(lambda r=r: step(r)) for r in (False, True))
    assert recomputed < 0.75 * kept


@GPU
@pytest.mark.parametrize("D", [768, 2048, 4096], ids=str)
def test_a_stack_at_a_real_size(D):
    x = layers(10, 64, D=D)
    as_naive(x, 4, tolerance=3e-5)
    y = x | dict(x=x["x"].bfloat16())
    want = gradients(naive(4), in_float64(y))
    ours, plain = (
        errors(gradients(stack(4), y), want),
        errors(gradients(naive(4), {n: t.bfloat16() for n, t in y.items()}), want),
    )
    assert all(ours[n] <= 1.1 * plain[n] for n in ours), (ours, plain)


@GPU
def test_torch_compile():
    x = layers()
    close(gradients(traced(x, "inductor"), x), gradients(naive(2), in_float64(x)), 1e-5)


@GPU
def test_the_cpu_is_refused():
    x = problem()
    with named(ValueError, "residuals[0]"):
        batched(**{n: t.cpu() for n, t in x.items()})
    with named(ValueError, "partial"):
        merge_attnres(**{n: t.cpu() for n, t in merging().items()})


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("which", STEPS)
def test_another_device_than_the_current_one(which):
    step, (x, y, do) = STEPS[which], prepared(which)
    x1, y1 = ({n: t.detach().to("cuda:1").requires_grad_() for n, t in z.items()} for z in (x, y))
    assert same_bits([t.to(DEVICE) for t in step(x1, y1, do.to("cuda:1"))], [*step(x, y, do)])

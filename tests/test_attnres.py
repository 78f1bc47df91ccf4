"Attention Residuals: float64 and fla, awkward sources, a stack that pulls, and what must be refused."

import gc
import math
import re
import weakref
from functools import cache, partial

import pytest
import torch
from depth import Fault
from fla.ops.attnres import naive_attnres as fla_naive
from torch.utils.checkpoint import checkpoint

from dormouse_fused import attnres
from dormouse_fused.attnres import AttnResStack, Sources, attnres_cost, fused_attnres, naive_attnres, stack_passes
from dormouse_fused.parity import (
    assert_close,
    assert_deterministic,
    assert_no_worse,
    errors,
    evaluate,
    fenced,
    in_float64,
    poison,
    rel_err,
    same_bits,
)  # fmt: skip
from dormouse_fused.triton import INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"
GPU = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 3e-6, F16: 5e-4, BF16: 4e-3}
# Both add in float32, in different orders; in two bytes, sums that differ by that may round to either neighbour.
SLACK = {F32: 3.0, F16: 1.02, BF16: 1.02}
either = pytest.mark.parametrize("last", [False, True], ids=["no norm", "norm"])
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered", "ignore:divide by zero")


def randn(*shape, seed=0, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def problem(L=3, *shape, D=20, dtype=F32, weights=F32, last=True, seed=0):
    "Arguments by name, the sources one by one as v0, v1, ...; scores are of the order of 1."
    x = dict(query=2 * randn(D, seed=seed) / D**0.5, rms_weight=1 + randn(D, seed=seed + 1) / 4)
    if last:
        x["output_rms_weight"] = 1 + randn(D, seed=seed + 2) / 4
    x = {n: t.to(weights) for n, t in x.items()}
    return x | {f"v{l}": (randn(*shape or (2,), D, seed=seed + 3 + l) * (1 + l / 4)).to(dtype) for l in range(L)}


def sources_of(x):
    return [t for n, t in x.items() if n[0] == "v"]


def split(rule, **options):
    "The rule as a function of `problem`'s names."

    def call(query, rms_weight, output_rms_weight=None, **v):
        return rule(query, list(v.values()), rms_weight, output_rms_weight, **options)

    return call


def upstream(x, seed=99):
    return randn(*x["v0"].shape, seed=seed, dtype=x["v0"].dtype)


def values(rule, x, do=None, **options):
    "Output, weights, and the gradient of every argument."
    do = upstream(x) if do is None else do
    with poison():
        return evaluate(split(rule, return_weights=True, **options), x, [do, None], ("o", "p"))


def exact(x, do=None, rule=naive_attnres, **options):
    do = upstream(x) if do is None else do
    return values(rule, in_float64(x), do.double(), **options)


def close(got, want, dtype, weights=F32, theirs=None):
    "Each result within its dtype's tolerance, or within a few times the reference's error where a sum cancels."
    assert got.keys() == want.keys()
    for n in want:
        kind = dtype if n == "o" or n[:2] == "dv" else F32 if n == "p" else weights
        assert got[n].dtype == kind, n
        few = SLACK[kind] * rel_err(theirs[n], want[n]) if theirs else 0
        assert_close(got[n], want[n], max(TOLERANCE[kind], few), n)


def no_worse(got, theirs, want, dtype):
    "What has two bytes is no further from float64 than fla's reference, what has four not much."
    close(got, want, dtype, theirs=theirs)
    narrow = [n for n in got if got[n].dtype is not F32]
    ours, fla = errors(got, want), errors(theirs, want)
    assert_no_worse({n: ours[n] for n in narrow}, {n: fla[n] for n in narrow}, SLACK[dtype])


def alike(a, b):
    "The same bits in the interpreter; on a GPU threads may share a row otherwise if it is elsewhere."
    if INTERPRET:
        return same_bits(a, b)
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and rel_err(a[n], b[n]) < TOLERANCE[a[n].dtype] for n in a)


def small_registers(monkeypatch, size):
    "As if a thread's registers held `size` bytes of sources."
    launchers = attnres._fwd_launcher, attnres._bwd_launcher, attnres._read_bwd_launcher
    for cached in launchers:
        cached.cache_clear()
    monkeypatch.setattr(attnres, "_RESIDENT", size)


@pytest.fixture
def registers(monkeypatch):
    yield partial(small_registers, monkeypatch)
    monkeypatch.undo()
    small_registers(monkeypatch, attnres._RESIDENT)


CASES = [  # L, D, sources, whether there is an output norm
    (1, 64, F32, True), (2, 1, F32, False), (2, 33, F16, True), (5, 20, F32, True), (5, 20, BF16, False), (5, 20, BF16, True),
    (9, 33, F32, True), (9, 300, BF16, False), (5, 1300, BF16, True), (2, 1300, F32, False), (9, 64, F16, False),
]  # fmt: skip


@pytest.mark.parametrize("L,D,dtype,last", CASES, ids=str)
def test_float64_and_fla(L, D, dtype, last):
    x = problem(L, 2, D=D, dtype=dtype, last=last)
    got, want = values(fused_attnres, x), exact(x)
    assert got["o"].shape == (2, D) and got["p"].shape == (L, 2)
    no_worse(got, values(fla_naive, x), want, dtype)


@either
def test_the_oracle_is_fla_s(last):
    "fla's reference computes in float32, whatever it gets."
    x = problem(last=last)
    for options in {}, dict(scale=0.3, rms_eps=0.5):
        want, theirs = exact(x, **options), values(fla_naive, x, **options)
        assert max(errors(theirs, want).values()) < 5e-6


@either
@pytest.mark.parametrize("options", [
    dict(scale=0.0), dict(scale=-2.0), dict(scale=1), dict(rms_eps=0.5), dict(rms_eps=0.0), dict(rms_eps=0.1, scale=3),
], ids=lambda o: "+".join(f"{n}={v}" for n, v in o.items()))  # fmt: skip
def test_options(last, options):
    x = problem(last=last)
    got, want = values(fused_attnres, x, **options), exact(x, **options)
    close(got, want, F32, theirs=values(fla_naive, x, **options))
    if options not in (dict(scale=1), dict(rms_eps=0.0)):
        assert rel_err(want["o"], exact(x)["o"]) > 1e-3


@pytest.mark.parametrize("weights", [BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_weights_have_their_own_dtype(dtype, weights):
    x = problem(dtype=dtype, weights=weights)
    got, want = values(fused_attnres, x), exact(x)
    close(got, want, dtype, weights)
    mixed = x | dict(query=x["query"].float())
    got = values(fused_attnres, mixed)
    assert [got[f"d{n}"].dtype for n in ("query", "rms_weight", "output_rms_weight")] == [F32, weights, weights]
    assert_close(got["dquery"], exact(mixed)["dquery"], TOLERANCE[F32])


def test_positional_arguments_are_fla_s():
    x = problem()
    args = x["query"], sources_of(x), x["rms_weight"], x["output_rms_weight"], 0.1, 0.5, True
    for got, want in zip(fused_attnres(*args), fla_naive(*args)):
        assert got.shape == want.shape and rel_err(got, want) < 1e-6
    assert isinstance(fused_attnres(*args[:-1]), torch.Tensor)


@either
def test_one_source(last):
    "Its weight is 1, and no query can change that."
    x = problem(1, D=64, last=last)
    got = values(fused_attnres, x)
    assert bool((got["p"] == 1).all()) and not got["dquery"].any() and not got["drms_weight"].any()
    if not last:
        assert torch.equal(got["o"], x["v0"]) and torch.equal(got["dv0"], upstream(x))
    sources = Sources(x["v0"].clone().requires_grad_())
    query, weight = (x[n].clone().requires_grad_() for n in ("query", "rms_weight"))
    sources.read(query, weight, x.get("output_rms_weight")).backward(upstream(x))
    assert not query.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("size", [10, 1], ids=["two at a time", "one at a time"])
@either
def test_more_sources_than_registers_hold(registers, size, last):
    x = problem(5, last=last)
    resident, want = values(fused_attnres, x), exact(x)
    close(resident, want, F32)
    registers(size)
    assert not attnres._fits(5, 20, 4, 1)
    large = values(fused_attnres, x)
    close(large, want, F32)
    assert max(errors(large, {n: t.double() for n, t in resident.items()}).values()) < 2e-6


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_more_sources_than_registers_hold_in_half_precision(registers, dtype):
    x = problem(5, dtype=dtype)
    want, theirs = exact(x), values(fla_naive, x)
    registers(1)
    assert not attnres._fits(5, 20, 2, 1)
    no_worse(values(fused_attnres, x), theirs, want, dtype)


def test_more_sources_than_registers_hold_for_real():
    x = problem(5, 2, D=1000)
    assert not attnres._fits(5, 1000, 4, attnres._warps(1000))
    got, want = values(fused_attnres, x), exact(x)
    no_worse(got, values(fla_naive, x), want, F32)


def test_most_sources():
    x = problem(64, 1, last=False)
    with torch.no_grad():
        got = split(fused_attnres)(**x)
    assert rel_err(got, split(naive_attnres)(**in_float64(x))) < 1e-6


@either
def test_programs_that_take_several_tokens(monkeypatch, last):
    "As many programs as one multiprocessor has, and a last one that has fewer tokens."
    monkeypatch.setattr(attnres, "_multiprocessors", lambda device: 1)
    x = problem(2, 11, last=last)
    assert attnres._programs(11, 20, None, 8) == 6
    close(values(fused_attnres, x), exact(x), F32)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2), (1, 1, 1)], ids=str)
def test_leading_dimensions(shape):
    x = problem(2, *shape) if shape else {n: t.flatten() for n, t in problem(2, 1).items()}
    got = values(fused_attnres, x)
    assert got["o"].shape == x["v0"].shape and got["p"].shape == (2, *x["v0"].shape[:-1])
    close(got, exact(x), F32)


def test_tokens_do_not_see_each_other():
    x = problem(3, 4)
    whole = values(fused_attnres, x)
    do = upstream(x)
    alone = {n: t[2:3].clone() if n[0] == "v" else t for n, t in x.items()}
    part = values(fused_attnres, alone, do[2:3].clone())
    assert same_bits(part["o"], whole["o"][2:3]) and same_bits(part["p"], whole["p"][:, 2:3])
    assert all(same_bits(part[f"dv{l}"], whole[f"dv{l}"][2:3]) for l in range(3))


@pytest.mark.parametrize("shape", [(2, 0), (0,), (0, 3)], ids=str)
def test_no_tokens(shape):
    x = problem(5, *shape)
    got = values(fused_attnres, x)
    assert got["o"].shape == (*shape, 20) and got["p"].shape == (5, *shape)
    assert all(got[f"d{n}"].shape == t.shape and not got[f"d{n}"].any() for n, t in x.items())
    sources, query = Sources(x["v0"].requires_grad_()), x["query"].requires_grad_()
    out = sources.read(query, x["rms_weight"])
    out.sum().backward()
    assert out.shape == (*shape, 20) and not query.grad.any()


def storage(t):
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def padded(t):
    return fenced(t, between=3)


def every_second(t):
    return torch.stack([t, t * math.nan], -2).flatten(-3, -2)[..., ::2, :]


def moved(t):
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def turned(t):
    return t.mT.contiguous().mT


def slices(v):
    return list(torch.stack(v, -2).unbind(-2))


def channels(v):
    "Numbers of a row that aren't neighbours."
    return list(torch.stack(v, -1).unbind(-1))


LAYOUTS = {  # name -> new sources, and whether they are read where they are
    "slices": (slices, True),
    "padded rows": (lambda v: [padded(t) for t in v], True),
    "every second": (lambda v: [every_second(t) for t in v], True),
    "fenced": (lambda v: [fenced(t) for t in v], True),
    "moved": (lambda v: [moved(t) for t in v], True),
    "one moved": (lambda v: [*v[:-1], moved(v[-1])], True),
    "transposed": (lambda v: [turned(t) for t in v], False),
    "channels": (channels, False),
    "each its own": (lambda v: [f(t) for f, t in zip((padded, moved, turned), v)], False),
    "twice the same": (lambda v: [v[0], v[0], v[2]], True),
}


@cache
def in_order(*same):
    x = problem()
    return values(fused_attnres, x | dict.fromkeys(same, x["v0"]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    x, (change, in_place) = problem(), LAYOUTS[name]
    if name == "twice the same":
        x |= dict(v1=x["v0"])
    v = change(sources_of(x))
    assert (attnres._in_place(v)[0] is v) == in_place
    before = [storage(t).clone() for t in v]
    y = {n: fenced(t) for n, t in x.items() if n[0] != "v"} | {f"v{l}": t for l, t in enumerate(v)}
    assert alike(values(fused_attnres, y), in_order(*["v1"] * (name == "twice the same")))
    assert same_bits([storage(t) for t in v], before)


def test_layouts_of_more_sources_than_registers_hold(registers):
    registers(10)
    x = problem(5)
    want = values(fused_attnres, x)
    for name in "slices", "padded rows", "each its own":
        y = x | {f"v{l}": t for l, t in enumerate(LAYOUTS[name][0](sources_of(x)[:3]))}
        assert alike(values(fused_attnres, y), want), name


@pytest.mark.parametrize("which", [slice(0, None), slice(0, 2)], ids=["all", "two"])
def test_expanded_sources(which):
    "Of stride 0; a gradient there has every copy's place."
    x = problem(3, 2, 2)
    for n in list(x)[3:][which]:
        x[n] = x[n][:1].expand(2, 2, 20)
    dense = {n: t.contiguous() for n, t in x.items()}
    assert alike(values(fused_attnres, x), values(fused_attnres, dense))
    rows = {n: t[0, 0].expand(2, 20) if n[0] == "v" else t for n, t in x.items()}
    close(values(fused_attnres, rows), exact({n: t.contiguous() for n, t in rows.items()}), F32)


def test_weights_that_are_not_contiguous():
    x = problem()
    y = x | {n: torch.stack([x[n], x[n] * math.nan], -1)[:, 0] for n in list(x)[:3]}
    assert not y["query"].is_contiguous() and alike(values(fused_attnres, y), in_order())


def test_incoming_gradients():
    x = problem()
    do = upstream(x)
    want = values(fused_attnres, x, do)
    for other in turned(do), padded(do), moved(do):
        assert alike(values(fused_attnres, x, other), want)
    ones = values(fused_attnres, x, torch.ones_like(do))
    leaf = {n: t.clone().requires_grad_() for n, t in x.items()}
    split(fused_attnres)(**leaf).sum().backward()
    assert alike({n: t.grad for n, t in leaf.items()}, {n: ones[f"d{n}"] for n in x})


def test_query_of_two_dimensions():
    x = problem()
    want = values(fused_attnres, x)
    got = values(fused_attnres, x | dict(query=x["query"][:, None]))
    assert got["dquery"].shape == (20, 1)
    assert alike(got | dict(dquery=got["dquery"][:, 0]), want)
    sources, query = Sources(x["v0"]), x["query"][:, None].clone().requires_grad_()
    sources.append(x["v1"])
    out = sources.read(query, x["rms_weight"])
    out.backward(upstream(x))
    two = values(fused_attnres, {n: x[n] for n in ("query", "rms_weight", "v0", "v1")})
    assert query.grad.shape == (20, 1) and rel_err(query.grad[:, 0], two["dquery"]) < 2e-6 and rel_err(out, two["o"]) < 1e-6


def test_returned_weights():
    x = problem(3, 2, 1, dtype=BF16)
    x = {n: t.requires_grad_() for n, t in x.items()}
    o, p = split(fused_attnres, return_weights=True)(**x)
    assert o.requires_grad and not p.requires_grad and p.dtype == F32 and p.shape == (3, 2, 1)
    assert (p.sum(0) - 1).abs().max() < 1e-6 and p.min() > 0
    assert torch.equal(o, split(fused_attnres)(**x))


@either
@pytest.mark.parametrize("scale", [-1e4, 1e30], ids=str)
def test_large_scores(scale, last):
    "The softmax is a choice; nothing overflows."
    x = problem(last=last)
    got, want = values(fused_attnres, x, scale=scale), exact(x, scale=scale)
    assert all(t.isfinite().all() for t in got.values()) and (got["p"].max(0).values > 0.99).all()
    assert rel_err(got["p"], want["p"]) < 1e-3 and rel_err(got["o"], want["o"]) < 1e-3


def test_large_scores_in_batches(registers):
    "The largest score comes first, last, or between."
    registers(10)
    for place in 0, 2, 4:
        x = problem(5, last=False)
        for l in range(5):
            x[f"v{l}"] = (x["query"] * x["rms_weight"]).expand(2, 20) * (1 if l == place else -1) + 0.01 * x[f"v{l}"]
        got, want = values(fused_attnres, x, scale=30.0), exact(x, scale=30.0)
        assert (got["p"][place] == 1).all() and rel_err(got["o"], want["o"]) < 1e-6
        assert all(t.isfinite().all() for t in got.values())


@pytest.mark.parametrize("same", ["sources", "scores"])
def test_all_scores_equal(same):
    x = problem()
    if same == "sources":
        x |= {f"v{l}": x["v0"] for l in range(3)}
    else:
        x["query"].zero_()
    got = values(fused_attnres, x)
    assert (got["p"] - 1 / 3).abs().max() < 1e-7
    want = exact(x)
    for n in got:
        if want[n].norm() > 1e-9:
            assert_close(got[n], want[n], 3e-6, n)
        else:
            assert got[n].norm() < 1e-5, n


@either
@pytest.mark.parametrize("which", [(0,), (1, 2), range(3)], ids=str)
def test_zeros_as_sources(which, last):
    x = problem(last=last)
    for l in which:
        x[f"v{l}"].zero_()
    got = values(fused_attnres, x)
    close(got, exact(x), F32, theirs=values(fla_naive, x))
    if len(which) == 3:
        assert not got["o"].any() and (got["p"] - 1 / 3).abs().max() < 1e-7


@either
@pytest.mark.parametrize("large", [False, True], ids=["resident", "large"])
@pytest.mark.parametrize("fault", [math.nan, math.inf], ids=str)
def test_a_fault_stays_in_its_token(registers, fault, last, large):
    x = problem(last=last)
    if large:
        registers(1)
    want, bad = values(fused_attnres, x), x | dict(v1=x["v1"].clone())
    bad["v1"][1, 5] = fault
    got, fine = values(fused_attnres, bad), slice(0, 1)
    for n in "o", *(f"dv{l}" for l in range(3)):
        assert got[n][1].isnan().any() and same_bits(got[n][fine], want[n][fine]), n
    assert same_bits(got["p"][:, fine], want["p"][:, fine])
    if math.isnan(fault):
        assert got["o"][1].isnan().all() and got["p"][:, 1].isnan().all()
        assert got["dquery"].isnan().all()


def test_a_fault_in_the_gradient_stays_in_its_token():
    x = problem()
    do = upstream(x)
    want = values(fused_attnres, x, do)
    do[1, 0] = math.nan
    got, fine = values(fused_attnres, x, do), slice(0, 1)
    for l in range(3):
        assert got[f"dv{l}"][1].isnan().any() and same_bits(got[f"dv{l}"][fine], want[f"dv{l}"][fine])


@pytest.mark.parametrize("large", [False, True], ids=["resident", "large"])
def test_two_runs(registers, large):
    if large:
        registers(1)
    x = problem(3, 4 if INTERPRET else 5000, dtype=BF16)
    assert_deterministic(lambda: values(fused_attnres, x))


def test_inputs_are_left_alone_and_outputs_stay():
    x = problem()
    before = {n: t.clone() for n, t in x.items()}
    first = values(fused_attnres, x)
    kept = {n: t.clone() for n, t in first.items()}
    values(fused_attnres, problem(seed=50))
    assert same_bits(x, before) and same_bits(first, kept)


NAMES = ["query", "rms_weight", "output_rms_weight", "v0", "v1", "v2"]


@pytest.mark.parametrize("wanted", [*([n] for n in NAMES[:4]), ["v2", "query"], ["v0", "v1", "v2"]], ids="+".join)
def test_gradients_of_some_inputs(wanted):
    x = problem()
    want, leaf = values(fused_attnres, x), {n: t.clone().requires_grad_(n in wanted) for n, t in x.items()}
    out = split(fused_attnres)(**leaf)
    assert same_bits(out.detach(), want["o"])
    out.backward(upstream(x))
    assert all(same_bits(t.grad, want[f"d{n}"] if n in wanted else None) for n, t in leaf.items())


def test_no_gradients():
    x = {n: t.requires_grad_() for n, t in problem().items()}
    want = values(fused_attnres, x)["o"]
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            out = split(fused_attnres)(**x)
            assert not out.requires_grad and same_bits(out, want)
    assert split(fused_attnres)(**x).requires_grad


def test_one_tensor_as_several_sources():
    "Its gradient is the sum of what it has in each place."
    x, v = problem(), problem()["v0"].clone().requires_grad_()
    fused_attnres(x["query"], [v, x["v1"], v], x["rms_weight"]).backward(upstream(x))
    want = v.grad.double()
    v.grad = None
    wide = [t.double() for t in (x["query"], x["v1"], x["rms_weight"])]
    naive_attnres(wide[0], [v.double(), wide[1], v.double()], wide[2]).backward(upstream(x).double())
    assert rel_err(want, v.grad) < 2e-6


def test_a_tuple_of_sources():
    x = problem()
    v, rest = sources_of(x), (x["rms_weight"], x["output_rms_weight"])
    want = fused_attnres(x["query"], v, *rest)
    for residuals in tuple(v), list(torch.stack(v)):
        assert alike(dict(o=fused_attnres(x["query"], residuals, *rest)), dict(o=want))


def test_second_derivatives_are_refused():
    x = {n: t.requires_grad_() for n, t in problem().items()}
    out = split(fused_attnres)(**x)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), x["query"], create_graph=True)
    sources = Sources(x["v0"])
    for wanted in x["query"], x["v0"]:
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(sources.read(x["query"], x["rms_weight"]).sum(), wanted, create_graph=True)


def named(error, name):
    return pytest.raises(error, match=rf"^{re.escape(name)}: ")


def arguments(x):
    return {n: t for n, t in x.items() if n[0] != "v"} | dict(residuals=sources_of(x))


def instead(l, t):
    def change(v):
        return [*v[:l], t(v[l]) if callable(t) else t, *v[l + 1 :]]

    return change


SOURCES = {
    "none": (ValueError, "residuals", lambda v: []),
    "65": (ValueError, "residuals", lambda v: (v * 22)[:65]),
    "no sequence": (TypeError, "residuals", lambda v: None),
    "numbers": (TypeError, "residuals[0]", lambda v: [1.0, 2.0]),
    "None": (TypeError, "residuals[2]", instead(2, None)),
    "array": (TypeError, "residuals[1]", instead(1, lambda t: t.tolist())),
    "fewer tokens": (ValueError, "residuals[2]", instead(2, lambda t: t[1:])),
    "one dimension more": (ValueError, "residuals[1]", instead(1, lambda t: t[None])),
    "another D": (ValueError, "residuals[1]", instead(1, lambda t: t[:, 1:])),
    "another dtype": (TypeError, "residuals[1]", instead(1, lambda t: t.bfloat16())),
    "integers": (TypeError, "residuals[0]", lambda v: [t.int() for t in v]),
    "an integer tensor": (TypeError, "residuals[2]", instead(2, lambda t: t.int())),
    "float64": (TypeError, "residuals[0]", lambda v: [t.double() for t in v]),
    "meta": (ValueError, "residuals[2]", instead(2, lambda t: t.to("meta"))),
    "scalars": (ValueError, "residuals[0]", lambda v: [t[0, 0] for t in v]),
    "D is 0": (ValueError, "residuals", lambda v: [t[:, :0] for t in v]),
    "D is too large": (ValueError, "residuals", lambda v: [v[0].new_zeros(1, 65537)]),
}


@pytest.mark.parametrize("which", SOURCES)
def test_bad_sources(which):
    x, (error, name, change) = arguments(problem(3, 1)), SOURCES[which]
    fused_attnres(**x)
    for _ in range(2):
        with named(error, name):
            fused_attnres(**x | dict(residuals=change(x["residuals"])))


VECTORS = {
    "a number": (TypeError, lambda t: 1.0),
    "a list": (TypeError, lambda t: t.tolist()),
    "shorter": (ValueError, lambda t: t[1:]),
    "scalar": (ValueError, lambda t: t[0]),
    "a row": (ValueError, lambda t: t[None]),
    "two columns": (ValueError, lambda t: t[:, None].expand(-1, 2)),
    "integers": (TypeError, lambda t: t.int()),
    "float64": (TypeError, lambda t: t.double()),
    "meta": (ValueError, lambda t: t.to("meta")),
}


@pytest.mark.parametrize("which", VECTORS)
@pytest.mark.parametrize("name", ["query", "rms_weight", "output_rms_weight"])
def test_bad_weights(name, which):
    x, (error, change) = arguments(problem(3, 1)), VECTORS[which]
    sources, vectors = Sources(x["residuals"][0]), {n: t for n, t in x.items() if n != "residuals"}
    fused_attnres(**x)
    for _ in range(2):
        with named(error, name):
            fused_attnres(**x | {name: change(x[name])})
        with named(error, name):
            sources.read(**vectors | {name: change(x[name])})


@pytest.mark.parametrize("name", ["query", "rms_weight"])
def test_what_must_be_there(name):
    x = arguments(problem())
    with named(TypeError, name):
        fused_attnres(**x | {name: None})
    with named(TypeError, name):
        Sources(x["residuals"][0]).read(**{n: None if n == name else x[n] for n in ("query", "rms_weight")})
    with pytest.raises(TypeError):
        fused_attnres(**x, no_such_option=True)


@pytest.mark.parametrize("name", ["scale", "rms_eps"])
def test_numbers_on_the_device_are_refused(name):
    "The host would have to wait for them."
    x = arguments(problem())
    with named(TypeError, name):
        fused_attnres(**x, **{name: torch.ones((), device=DEVICE)})
    with named(TypeError, name):
        Sources(x["residuals"][0], **{name: torch.ones((), device=DEVICE)})


@either
def test_operators_keep_their_contract(last):
    x = problem(2, 1, 2, last=last)
    args = x["query"], sources_of(x), x["rms_weight"], x.get("output_rms_weight"), 1e-5, 0.5
    o, stats = attnres._op(*args)
    backward = torch.ones_like(o), *args[:4], stats, *args[4:]
    leaves = [a.clone().requires_grad_() if torch.is_tensor(a) else a for a in args]
    leaves[1] = [t.clone().requires_grad_() for t in args[1]]
    for op, arguments in (attnres._op, args), (attnres._bwd_op, backward), (attnres._op, tuple(leaves)):
        assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_nothing_is_read_back():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = {n: mode.from_tensor(t).requires_grad_() for n, t in problem(3, 2, 3, dtype=BF16).items()}
        o, p = split(fused_attnres, return_weights=True)(**x)
        o.sum().backward()
    assert o.shape == (2, 3, 20) and o.dtype == BF16 and p.shape == (3, 2, 3) and p.dtype == F32
    assert all(t.grad.shape == t.shape and t.grad.dtype == t.dtype for t in x.values())


def test_on_meta():
    x = {n: t.to("meta").requires_grad_() for n, t in problem().items()}
    out = split(fused_attnres)(**x)
    out.sum().backward()
    assert out.is_meta and all(t.grad.is_meta and t.grad.shape == t.shape for t in x.values())


@either
def test_traced_without_a_break(last):
    x = problem(last=last)
    traced = torch.compile(fused_attnres, fullgraph=True, backend="aot_eager")
    assert same_bits(values(traced, x, scale=0.5), values(fused_attnres, x, scale=0.5))


def test_traced_with_sizes_that_change():
    traced = torch.compile(fused_attnres, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in (1, 2), (2, 3), (4, 1):
        x = problem(2, *shape)
        assert same_bits(values(traced, x), values(fused_attnres, x))


def test_autocast_changes_nothing():
    x = problem()
    with torch.autocast(DEVICE, BF16):
        got = values(fused_attnres, x)
    assert same_bits(got, values(fused_attnres, x))


# A stack. Every second read has an output norm; a layer is elementwise, so that it has the same bits in every run.
class Naive(list):
    "What `Sources` does, by autograd."

    def __init__(self, x, rms_eps=1e-6, scale=1.0, rule=naive_attnres):
        super().__init__([x])
        self.rule = partial(rule, rms_eps=rms_eps, scale=scale)

    def read(self, query, rms_weight, output_rms_weight=None):
        return self.rule(query, self, rms_weight, output_rms_weight)


def layers(n=3, *shape, D=20, dtype=F32, seed=0):
    "The embedding, and the parameters of n layers and a last read."
    x = dict(x=randn(*shape or (2,), D, seed=seed, dtype=dtype))
    for i in range(n + 1):
        x |= {f"q{i}": randn(D, seed=seed + 4 * i + 1) / D**0.5, f"w{i}": 1 + randn(D, seed=seed + 4 * i + 2) / 4}
        if i % 2:
            x[f"l{i}"] = 1 + randn(D, seed=seed + 4 * i + 3) / 4
        if i < n:
            x[f"a{i}"] = 1 + randn(D, seed=seed + 4 * i + 4) / 4
    return x


def layer(a, h):
    return torch.sin(2 * a * h).to(h.dtype)


def run(sources, x, layer=layer):
    "All layers, and the last read."
    i = 0
    while f"a{i}" in x:
        sources.append(layer(x[f"a{i}"], sources.read(x[f"q{i}"], x[f"w{i}"], x.get(f"l{i}"))))
        i += 1
    return sources.read(x[f"q{i}"], x[f"w{i}"], x.get(f"l{i}"))


def stack(kind=Sources, body=run, **options):
    return lambda x, **weights: body(kind(x, **options), weights)


def gradients(fn, x, do=None, wrt=None):
    do = randn(*x["x"].shape, seed=98, dtype=x["x"].dtype) if do is None else do
    with poison():
        return evaluate(fn, x, [do.to(x["x"].dtype)], wrt=wrt)


def as_naive(x, body=run, wrt=None, tolerance=5e-6, **options):
    "Assert that a stack gives what autograd gives in float64, and return it."
    got = gradients(stack(body=body, **options), x, wrt=wrt)
    want = gradients(stack(Naive, body, **options), in_float64(x), wrt=wrt)
    for n in want:
        assert_close(got[n], want[n], tolerance, n)
    return got


@pytest.mark.parametrize("n,D,options", [
    (0, 20, {}), (1, 20, {}), (5, 20, {}), (3, 20, dict(scale=0.3, rms_eps=0.1)), (4, 20, dict(rms_eps=0.0)), (3, 300, {}),
], ids=str)  # fmt: skip
def test_stacks(n, D, options):
    as_naive(layers(n, 2, D=D), **options)


def test_a_stack_of_many_tokens():
    "More than a tile of the pulling kernel, and of several dimensions."
    as_naive(layers(1, 2, 9))


def test_a_stack_reads_as_the_operator():
    x = layers(4)
    sources = Sources(x["x"])
    run(sources, x)
    assert len(sources) == 5
    for last in None, x["l1"]:
        want = fused_attnres(x["q0"], sources.tensors, x["w0"], last)
        assert rel_err(sources.read(x["q0"], x["w0"], last), want) < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_stack_in_half_precision(dtype):
    "No further from float64 than fla's reference and autograd, which rounds at every addition."
    x = layers(3, dtype=dtype)
    want = gradients(stack(Naive), in_float64(x))
    ours, theirs = gradients(stack(), x), gradients(stack(partial(Naive, rule=fla_naive)), x)
    assert all(t.dtype == (dtype if n in ("o", "dx") else F32) for n, t in ours.items())
    assert_no_worse(errors(ours, want), errors(theirs, want), 1.3)


def test_a_stack_has_the_same_bits_in_every_run():
    x = layers(4, 1 if INTERPRET else 3000)
    assert_deterministic(lambda: gradients(stack(), x))


def leaves(x, frozen=()):
    return {n: t.clone().requires_grad_(n not in frozen) for n, t in x.items()}


def test_backward_twice():
    x = leaves(layers())
    out, do = stack()(**x), randn(2, 20, seed=98)
    first = torch.autograd.grad(out, list(x.values()), do, retain_graph=True)
    other = torch.autograd.grad(out, list(x.values()), 2 * do, retain_graph=True)
    again = torch.autograd.grad(out, list(x.values()), do)
    assert same_bits(first, again) and all(rel_err(b, 2 * a) < 1e-6 for a, b in zip(first, other) if a.any())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, list(x.values()), do)


def test_gradients_add_up_over_calls():
    x = leaves(layers())
    out, do = stack()(**x), randn(2, 20, seed=98)
    out.backward(do, retain_graph=True)
    once = {n: t.grad.clone() for n, t in x.items()}
    out.backward(do)
    assert same_bits({n: t.grad for n, t in x.items()}, {n: 2 * t for n, t in once.items()})
    stack()(**x).backward(do)
    assert all(rel_err(t.grad, 3 * once[n]) < 1e-6 for n, t in x.items())


def two_reads(sources, x):
    "Of the same sources, in every layer."
    for i in range(3):
        a, b = (sources.read(x[f"q{j}"], x[f"w{j}"], x.get(f"l{j}")) for j in (i, i + 1))
        sources.append(layer(x[f"a{i}"], a * b + a))
    return sources.read(x["q3"], x["w3"]) + sources.read(x["q0"], x["w0"])


def used_elsewhere(sources, x):
    "Sources that layers and the loss use besides."
    held = []
    for i in range(3):
        h = layer(x[f"a{i}"], sources.read(x[f"q{i}"], x[f"w{i}"], x.get(f"l{i}")))
        sources.append(h)
        held.append((h * h, list(sources)[-1] if isinstance(sources, Naive) else sources.tensors[-1]))
    return sources.read(x["q3"], x["w3"], x["l3"]) + held[0][0] * held[1][1] + held[2][1].sin()


def idle_reads(sources, x):
    "Reads that aren't part of the loss."
    sources.read(x["q3"], x["w3"])
    out = run(sources, x)
    sources.read(x["q0"], x["w0"]).sum()
    return out


def idle_sources(sources, x):
    "A source that no read in the loss has seen."
    out = run(sources, x)
    sources.append(out * 2)
    sources.append(x["a0"] * out)
    sources.read(x["q0"], x["w0"])
    return out


def same_twice(sources, x):
    "One tensor as two sources, and a source that is a view of another."
    sources.append(sources.read(x["q0"], x["w0"]).sin())
    h = layer(x["a1"], sources.read(x["q1"], x["w1"], x["l1"]))
    sources.append(h)
    sources.append(h)
    sources.append(h.view(1, 2, 20)[0])
    return sources.read(x["q3"], x["w3"])


def an_early_loss(sources, x):
    "A loss on every read."
    outs = []
    for i in range(3):
        outs.append(sources.read(x[f"q{i}"], x[f"w{i}"], x.get(f"l{i}")))
        sources.append(layer(x[f"a{i}"], outs[-1]))
    return sum(o * (i + 1) for i, o in enumerate(outs)) + sources.read(x["q3"], x["w3"])


def strided(sources, x):
    "Outputs of layers in memory as layers leave them."
    run(sources, x, lambda a, h: turned(layer(a, h)))
    return sources.read(x["q3"], x["w3"], x["l3"]).mT.sin().mT


@pytest.mark.parametrize(
    "body", [two_reads, used_elsewhere, idle_reads, idle_sources, same_twice, an_early_loss, strided], ids=lambda f: f.__name__
)  # fmt: skip
def test_uses(body):
    as_naive(layers(), body)


@pytest.mark.parametrize("wrt", [
    ["x"], ["a2", "q3"], ["q3", "w3", "l3"], ["q0"], [n for n in layers() if n != "x"],
], ids="+".join)  # fmt: skip
def test_what_needs_no_gradient(wrt):
    as_naive(layers(), wrt=wrt)


def test_gradients_by_some_of_what_needs_them():
    x = leaves(layers(2))
    out, do = stack()(**x), randn(2, 20, seed=98)
    want = dict(zip(x, torch.autograd.grad(out, list(x.values()), do, retain_graph=True)))
    for n in x:
        assert same_bits(torch.autograd.grad(out, x[n], do, retain_graph=True)[0], want[n]), n


def test_a_constant_source():
    def body(sources, x):
        sources.append(x["q0"].detach().to(x["x2"].dtype).expand(2, 20))
        sources.append(x["x2"])
        return run(sources, x)

    as_naive(layers() | dict(x2=randn(2, 20, seed=70)), body)


def test_no_gradients_in_a_stack():
    x = leaves(layers())
    with torch.no_grad():
        out = stack()(**x)
    assert not out.requires_grad and same_bits(out, stack()(**x))


def test_two_stacks_in_one_backward():
    "The layers of one take what the other's have read."
    x = layers() | dict(y=randn(3, 20, seed=71))

    def both(kind):
        def call(x, y, **p):
            a, b = kind(x), kind(y, scale=0.5)
            for i in range(3):
                h, k = a.read(p[f"q{i}"], p[f"w{i}"]), b.read(p[f"q{i + 1}"], p[f"w{i + 1}"], p.get(f"l{i + 1}"))
                a.append(layer(p[f"a{i}"], h + k.mean(0)))
                b.append(layer(p[f"a{i}"], k * h.sum(0).sin()))
            return a.read(p["q3"], p["w3"]) * b.read(p["q2"], p["w2"]).sum(0)

        return call

    got, want = gradients(both(Sources), x), gradients(both(Naive), in_float64(x))
    for n in want:
        assert_close(got[n], want[n], 5e-6, n)


def test_a_stack_of_stacks():
    "A whole stack is a layer of another."
    x = layers(2, 2)

    def body(kind):
        return lambda x, **p: run(kind(x), p, lambda a, h: layer(a, run(kind(h), p)))

    got, want = gradients(body(Sources), x), gradients(body(Naive), in_float64(x))
    for n in want:
        assert_close(got[n], want[n], 1e-5, n)


def test_two_losses_one_after_the_other():
    x = leaves(layers())
    sources = Sources(x["x"])
    out = run(sources, x)
    early = sources.tensors[1].sin().sum()
    alone = torch.autograd.grad(early, x["a0"], retain_graph=True)[0]
    out.sum().backward(retain_graph=True)
    x["a0"].grad = None
    early.backward()
    assert same_bits(x["a0"].grad, alone)


def test_checkpointed_layers():
    x = layers()

    def body(sources, p):
        return run(sources, p, lambda a, h: checkpoint(layer, a, h, use_reentrant=False))

    assert same_bits(gradients(stack(body=body), x), gradients(stack(), x))


def test_nothing_is_left():
    x = leaves(layers())
    sources = Sources(x["x"])
    out = run(sources, x)
    seen, loud = [], sources.tensors[1].grad_fn
    loud.register_prehook(lambda grads: seen.append(len(sources._left)))
    out.sum().backward(retain_graph=True)
    assert seen == [3] and not sources._left
    torch.autograd.grad(out.sum(), x["q3"])
    assert not sources._left


def test_nothing_is_left_when_a_layer_raises():
    "And the next backward, of something else, doesn't pull what the failed one has left."
    x = leaves(layers())
    sources, count = Sources(x["x"]), []

    def faulty(a, h):
        count.append(0)
        return layer(a, Fault.apply(h) if len(count) == 2 else h)

    out = run(sources, x, faulty)
    other = (sources.tensors[0] * 3).sum() + sources.tensors[1].sum()
    with pytest.raises(ArithmeticError, match="on purpose"):
        out.sum().backward(retain_graph=True)
    for t in x.values():
        t.grad = None
    got = torch.autograd.grad(other, x["x"], retain_graph=True)[0]
    fresh = leaves(layers())
    again = Sources(fresh["x"])
    run(again, fresh)
    assert same_bits(got, torch.autograd.grad((again.tensors[0] * 3).sum() + again.tensors[1].sum(), fresh["x"])[0])
    assert not sources._left


def test_a_failed_backward_keeps_nothing():
    "Gradients of a whole stack are not memory that anybody can use."
    x = leaves(layers(1))
    sources = Sources(x["x"])
    out = run(sources, x, lambda a, h: layer(a, Fault.apply(h)))
    with pytest.raises(ArithmeticError):
        out.sum().backward()
    assert not sources._left


@pytest.mark.parametrize("backward", [False, True], ids=["forward alone", "backward too"])
def test_a_stack_is_freed(backward):
    "As soon as nobody holds it, without a search for cycles: its activations would stay for steps."
    x = leaves(layers())

    def step():
        sources = Sources(x["x"])
        out = run(sources, x)
        if backward:
            out.sum().backward()
        return weakref.ref(sources.tensors[2]), weakref.ref(sources)

    gc.collect()
    gc.disable()
    try:
        kept = [ref() is not None for ref in step()]
    finally:
        gc.enable()
    assert not any(kept)


def test_a_stack_is_freed_in_the_end():
    x = leaves(layers())

    def step():
        sources = Sources(x["x"])
        run(sources, x).sum().backward()
        return weakref.ref(sources.tensors[2]), weakref.ref(sources)

    refs = step()
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def test_a_source_that_has_changed():
    "In place, after a read: autograd refuses."
    x = leaves(layers())
    sources, h = Sources(x["x"]), x["a0"] * x["x"]
    sources.append(h)
    out = sources.read(x["q0"], x["w0"])
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified (by an )?inplace"):
        out.sum().backward()


def test_traced_stacks():
    "Under torch.compile it is the operator that is traced; the values agree."
    x = layers()
    traced = torch.compile(stack(), fullgraph=True, backend="aot_eager")
    got, want = gradients(traced, x), gradients(stack(Naive), in_float64(x))
    for n in want:
        assert_close(got[n], want[n], 5e-6, n)


def test_a_stack_without_values():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = {n: mode.from_tensor(t).requires_grad_() for n, t in layers().items()}
        out = stack()(**x)
        out.sum().backward()
    assert out.shape == (2, 20) and all(t.grad.shape == t.shape for t in x.values())


@either
def test_the_module(last):
    "Parameters row by row; zero queries are means."
    module = AttnResStack(20, 2, last, rms_eps=0.1, scale=2.0, device=DEVICE)
    x, a = randn(2, 20), [1 + randn(20, seed=i) / 4 for i in (1, 2)]
    mean = AttnResStack(20, 1, device=DEVICE)(x, [torch.sin])
    assert rel_err(mean, (x + x.sin()) / 2) < 1e-6
    for i, p in enumerate(module.parameters()):
        p.data += randn(*p.shape, seed=7 + i) / 4
    fns, weights = [partial(layer, t) for t in a], {n: p.detach() for n, p in module.named_parameters()}
    assert list(weights) == ["query", "rms_weight", "output_rms_weight"][: 2 + last]

    def naive(x, **w):
        sources = Naive(x, 0.1, 2.0)
        for i in range(3):
            out = sources.read(*(w[n][i] for n in weights))
            if i < 2:
                sources.append(layer(a[i].to(out.dtype), out))
        return out

    do = randn(2, 20, seed=98)
    got = gradients(lambda x, **w: torch.func.functional_call(module, w, (x, iter(fns))), dict(x=x) | weights, do)
    want = gradients(naive, in_float64(dict(x=x) | weights), do.double())
    for n in want:
        assert_close(got[n], want[n], 5e-6, n)


def test_the_module_counts_its_layers():
    module = AttnResStack(20, 2, device=DEVICE)
    for fns in [torch.sin], [torch.sin] * 3, []:
        with named(ValueError, "layers"):
            module(randn(1, 20), fns)
    for n in 0, -1, 64:
        with named(ValueError, "layers"):
            AttnResStack(20, n)
    assert sum(p.numel() for p in AttnResStack(20, 63, True).parameters()) == 3 * 64 * 20


def test_too_many_sources_in_a_stack():
    x = randn(1, 20)
    sources = Sources(x)
    for _ in range(63):
        sources.append(x)
    assert len(sources) == 64
    with named(ValueError, "x"):
        sources.append(x)
    assert len(sources) == 64


APPENDED = {
    "no tensor": (TypeError, lambda x: [1.0]),
    "None": (TypeError, lambda x: None),
    "fewer tokens": (ValueError, lambda x: x[1:]),
    "another D": (ValueError, lambda x: x[:, 1:]),
    "another dimension": (ValueError, lambda x: x[None]),
    "another dtype": (TypeError, lambda x: x.half()),
    "integers": (TypeError, lambda x: x.long()),
    "float64": (TypeError, lambda x: x.double()),
    "meta": (ValueError, lambda x: x.to("meta")),
}


@pytest.mark.parametrize("which", APPENDED)
def test_bad_appends(which):
    x, (error, change) = layers(), APPENDED[which]
    sources = Sources(x["x"])
    with named(error, "x"):
        sources.append(change(x["x"]))
    assert len(sources) == 1 and rel_err(sources.read(x["q0"], x["w0"]), x["x"]) == 0
    if which in ("no tensor", "None", "integers", "float64"):
        with named(error, "x"):
            Sources(change(x["x"]))
    with named(ValueError, "x"):
        Sources(x["x"][0, 0])


def test_costs():
    "Two sources of 3 by 4: read both, write one; backward read both and the gradient, write two."
    for dtype, size in ("bf16", 2), ("fp32", 4):
        cost, tensor = attnres_cost(2, 3, 4, dtype), 3 * 4 * size
        assert cost["fwd"].bytes == 3 * tensor and cost["fwd+bwd"].bytes == (3 + 5) * tensor
        assert (cost["fwd"].launches, cost["fwd+bwd"].launches) == (1, 3)
    plain, normed = attnres_cost(2, 3, 4), attnres_cost(2, 3, 4, output_norm=True)
    assert normed["fwd"].bytes == plain["fwd"].bytes and normed["fwd+bwd"].bytes == plain["fwd+bwd"].bytes
    # a source takes two sums of products and one scaled addition, two operations each; a norm squares, adds, and multiplies twice
    assert plain["fwd"].flops["fp32"] == 12 * 12 and normed["fwd"].flops["fp32"] == (12 + 4) * 12
    assert normed["fwd+bwd"].flops["fp32"] > plain["fwd+bwd"].flops["fp32"] > plain["fwd"].flops["fp32"]


def test_passes():
    """One layer: reads of one and two sources. Forward 2 + 3; gradients written 3 + 5; one addition is 3 passes, in place 1;
    without gradients 2 + 3, then pulls of two gradients and of one, each with its source and what it writes, 4 + 3."""
    assert stack_passes(1) == dict(autograd=5 + 8 + 3, in_place=5 + 8 + 1, pulled=5 + 5 + 4 + 3)
    assert stack_passes(0) == dict(autograd=2 + 3, in_place=2 + 3, pulled=2 + 2 + 3)
    assert stack_passes(2) == dict(autograd=9 + 15 + 9, in_place=9 + 15 + 3, pulled=9 + 9 + 5 + 4 + 3)


def test_ahead_of_time_cases_name_every_kernel():
    names = {c.kernel.rpartition(":")[2] if isinstance(c.kernel, str) else c.kernel.fn.__name__ for c in attnres.aot_cases()}
    assert names == {n for n in vars(attnres) if n.startswith("_attnres_") and n.endswith("_kernel")}
    assert not any(c.spill for c in attnres.aot_cases())


# On a GPU only.
def op_step(x, do):
    out = split(fused_attnres)(**x)
    return out.detach(), *torch.autograd.grad(out, list(x.values()), do)


def stack_step(x, do):
    out = stack()(**x)
    return out.detach(), *torch.autograd.grad(out, list(x.values()), do)


STEPS = dict(op=(op_step, problem), stack=(stack_step, layers))


def prepared(which):
    "A step, what makes its arguments, and both of them."
    step, make = STEPS[which]
    x = {n: t.requires_grad_() for n, t in make().items()}
    return step, make, x, randn(*next(t for t in x.values() if t.dim() > 1).shape, seed=98)


@GPU
@pytest.mark.parametrize("which", STEPS)
def test_captured(which):
    step, make, x, do = prepared(which)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, do)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, do)
    with torch.no_grad():
        for n, t in make(seed=40).items():
            x[n].copy_(t)
    graph.replay()
    assert same_bits(captured, step(x, do))


@GPU
@pytest.mark.parametrize("which", STEPS)
def test_the_host_never_waits(which):
    step, _, x, do = prepared(which)
    step(x, do)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, do)
        step({n: turned(t) if t.dim() > 1 else t for n, t in x.items()}, do)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@GPU
@either
def test_launches(last):
    from dormouse_fused.measure import launches

    x = problem(last=last)
    with torch.no_grad():
        assert launches(lambda: split(fused_attnres)(**x)).kernels == 1
    x, do = leaves(x), upstream(x)
    both = launches(lambda: op_step(x, do))
    assert both.kernels == 3 + last and both.syncs == 0
    last = x.get("output_rms_weight")

    def read():
        sources = Sources(x["v0"])
        sources.append(x["v1"])
        out = sources.read(x["query"], x["rms_weight"], last)
        torch.autograd.grad(out, [x["v0"], x["v1"], x["query"], x["rms_weight"]], do)

    pulled = launches(read)
    assert pulled.kernels == 1 + 2 + 2 and pulled.syncs == 0


@GPU
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("L,D,last", [(8, 768, False), (8, 768, True), (9, 4096, True)], ids=str)
def test_errors_at_real_sizes(L, D, last, dtype):
    x = problem(L, 64, D=D, dtype=dtype, last=last)
    x["query"] = x["query"] / D**0.5
    got, want = values(fused_attnres, x), exact(x)
    no_worse(got, values(fla_naive, x), want, dtype)


@GPU
def test_a_stack_at_a_real_size():
    as_naive(layers(5, 64, D=768), tolerance=2e-5)


@GPU
def test_torch_compile():
    x = problem(dtype=BF16)
    traced = torch.compile(fused_attnres, fullgraph=True)
    assert same_bits(values(traced, x), values(fused_attnres, x))


@GPU
def test_the_cpu_is_refused():
    x = arguments({n: t.cpu() for n, t in problem().items()})
    with named(ValueError, "residuals[0]"):
        fused_attnres(**x)


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("which", STEPS)
def test_another_device_than_the_current_one(which):
    step, _, x, do = prepared(which)
    there = {n: t.detach().to("cuda:1").requires_grad_() for n, t in x.items()}
    assert same_bits([t.to(DEVICE) for t in step(there, do.to("cuda:1"))], [*step(x, do)])


def test_pulling_is_as_exact_as_adding():
    "Softmaxes that have nearly chosen, one after the other: gradients of scores are small differences."
    x, queries, ones = randn(2, 48, seed=3), randn(7, 48, seed=4), torch.ones(48, device=DEVICE)

    def gradient(kind, dtype=F32):
        first, q, w = x.to(dtype).requires_grad_(), queries.to(dtype), ones.to(dtype)
        sources = Sources(first) if kind == "pulled" else [first]

        def read(query):
            if kind == "pulled":
                return sources.read(query, w)
            return (naive_attnres if kind == "oracle" else fused_attnres)(query, sources, w)

        for query in q[:-1]:
            sources.append(torch.tanh(2 * read(query)))
        return torch.autograd.grad(read(q[-1]).square().sum(), first)[0]

    want = gradient("oracle", torch.float64)
    assert rel_err(gradient("pulled"), want) < max(2 * rel_err(gradient("added"), want), 1e-6)

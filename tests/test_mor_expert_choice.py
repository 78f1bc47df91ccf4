"Mixture-of-Recursions, expert choice: the authors' golden tensors, float64, awkward seats, and what must be refused."

import math
import re
from functools import partial

import pytest
import torch
from depth import assert_captured, assert_never_waits, assert_whole_numbers_are_declared

from dormouse_fused import mor_expert_choice as mor
from dormouse_fused.mor_expert_choice import (
    CapacitySchedule,
    combine_expert_choice,
    mor_expert_choice,
    mor_expert_choice_cost,
    mor_top_k,
    naive_mor_expert_choice,
    naive_top_k,
    route_expert_choice,
)
from dormouse_fused.parity import assert_close, assert_deterministic, fenced, load_golden, poison, rel_err, same_bits
from dormouse_fused.triton import INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"
GPU = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
TOLERANCE = {F32: 1e-6, F16: 6e-4, BF16: 5e-3}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered", "ignore:divide by zero")


def randn(*shape, seed=0, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def problem(B=2, T=13, D=20, dtype=F32, weights=F32, seed=0):
    "Arguments by name: x, the routers, and the numbers of a block."
    x = dict(x=randn(B, T, D, seed=seed, dtype=dtype), block=randn(D, seed=seed + 3, dtype=dtype))
    return x | {n: (randn(D, seed=seed + i) / D**0.5).to(weights) for i, n in ((1, "router"), (2, "aux"))}


def block(numbers):
    "In float64: what it rounds is what it takes and gives."
    return lambda y, *_: torch.tanh(y.double() * numbers.double()).to(y.dtype)


def ours(x, router, aux, block_, k, prev=None, watched=False, weighted=True, **options):
    routed = route_expert_choice(x, router, k, prev, aux_router_weight=aux if watched else None, **options)
    return combine_expert_choice(routed, block(block_)(routed.tokens), weighted), routed._asdict() | dict(routed=routed)


def theirs(x, router, aux, block_, k, prev=None, watched=False, weighted=True, places=None, **options):
    "Section 3 of the chapter, with seats that are given; `prev` are places."
    choose = None if places is None else lambda *_: places
    kept = dict(aux_router_weight=aux if watched else None, weighted=weighted, choose=choose)
    return naive_mor_expert_choice(x, router, block(block_), k, prev, **kept, **options)


def values(rule, x, k, do=None, parts=(1.0, 30.0, 70.0), **options):
    "Outputs, losses and the gradient of every argument, for a loss with all its parts."
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    do = upstream(x) if do is None else do
    with poison():
        out, more = rule(leaves["x"], leaves["router"], leaves["aux"], leaves["block"], k, **options)
        pairs = [(out, do.to(out.dtype) * parts[0])]
        pairs += [(more[n], torch.full_like(more[n], c)) for n, c in zip(("aux_loss", "z_loss"), parts[1:]) if c]
        grads = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs], materialize_grads=True)
    got = dict(o=out.detach(), aux_loss=more["aux_loss"].detach(), z_loss=more["z_loss"].detach())
    return got | {f"d{n}": g for n, g in zip(leaves, grads)}, more


def upstream(x, seed=99):
    return randn(*x["x"].shape, seed=seed, dtype=x["x"].dtype)


def exact(x, k, more, do=None, prev=None, **options):
    "The oracle, with our seats."
    do, chosen = upstream(x) if do is None else do, more["selected_tokens"]
    places = chosen if prev is None else torch.searchsorted(prev, chosen)
    wide = {n: t.double() for n, t in x.items()}
    return values(theirs, wide, k, do.double(), prev=prev, places=places, **options)


def close(got, want, dtype, weights=F32, slack=1):
    "In half precision the block's output is rounded, and the router's gradient knows it."
    for n in want:
        kind = dtype if n in ("o", "dx", "dblock") else F32 if n in ("aux_loss", "z_loss") else weights
        assert got[n].dtype == kind, n
        if want[n].any():
            assert_close(got[n], want[n], slack * max(TOLERANCE[kind], TOLERANCE[dtype] if n == "drouter" else 0), n)
        else:
            assert not got[n].any(), n


def agree(x, k, dtype=F32, weights=F32, prev=None, **options):
    "Assert that all is as float64 has it, and return it."
    got, more = values(ours, x, k, prev=prev, **options)
    places = None if prev is None else prev.selected_tokens
    want, theirs_ = exact(x, k, more, prev=places, **options)
    close(got, want, dtype, weights)
    assert rel_err(more["weights"], theirs_["weights"]) < 1e-6
    for n in "sampling_acc", "topk_acc":
        if theirs_.get(n) is not None:
            assert abs(more[n].item() - theirs_[n].item()) < 1e-6, n
    return got, more


CAPACITIES = dict(B2T48=(0.5, 0.5), B3T37=(0.75, 0.34), B1T5=(0.2, 0.2))


def replay(golden, run, recursion):
    "Two recursions of the golden file and the gradient of x."
    x, T = golden[f"{run}/x"].clone().requires_grad_(), golden[f"{run}/x"].shape[1]
    h, prev, loss, found = x, None, 0, {}
    for r, capacity in enumerate(CAPACITIES[run.split("/")[2]]):
        W, w = golden[f"{run}/r{r}/W"], golden[f"{run}/r{r}/router"]
        h, prev, more = recursion(h, w, lambda y, *_, W=W: torch.tanh(y @ W), mor_top_k(capacity, T), prev)
        loss = loss + more["aux_loss"] + more["z_loss"]
        found |= {f"r{r}/{n}": more[n].detach() for n in ("aux_loss", "z_loss", "sampling_acc")}
        found |= {f"r{r}/hidden": h.detach(), f"r{r}/selected": more["selected_tokens"][..., None]}
    loss = loss + (h * golden[f"{run}/do"]).sum()
    return found | dict(dx=torch.autograd.grad(loss, x)[0])


def by_kernels(h, w, f, k, prev):
    routed = route_expert_choice(h, w, k, prev)
    return combine_expert_choice(routed, f(routed.tokens)), routed, routed._asdict()


def by_hand(h, w, f, k, prev, choose=None):
    out, more = naive_mor_expert_choice(h, w[0], f, k, prev, choose=choose)
    return out, more["selected_tokens"], more


@pytest.mark.parametrize("shape", CAPACITIES)
@pytest.mark.parametrize("file", ["cpu", "h200"])
@pytest.mark.parametrize("rule,dtype,limit", [
    (by_kernels, "float32", 5e-7), (by_hand, "float32", 5e-7), (by_hand, "float64", 1e-14),
    (partial(by_hand, choose=naive_top_k), "float64", 1e-14),
], ids=["kernels", "reference", "float64", "float64 by a stable sort"])  # fmt: skip
def test_golden(file, shape, rule, dtype, limit):
    golden, run = {n: t.to(DEVICE) for n, t in load_golden(f"mixture_of_recursions-{file}").items()}, f"expert/{dtype}/{shape}"
    for name, got in replay(golden, run, rule).items():
        want = golden[f"{run}/{name}"]
        if name.endswith("selected"):
            assert torch.equal(got, want)
        elif name.endswith("acc"):
            assert abs(got.item() - want.item()) < 1e-6
        else:
            assert_close(got, want, limit if name.endswith(("hidden", "dx")) else max(limit, 3e-6 if dtype == "float32" else 0), name)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("B,T,D,k", [(1, 1, 5, 1), (2, 13, 20, 6), (3, 9, 33, 9), (1, 20, 300, 1), (2, 11, 130, 10)], ids=str)
def test_float64(B, T, D, k, dtype):
    agree(problem(B, T, D, dtype), k, dtype)


OPTIONS = [
    dict(router_func="tanh"), dict(router_func=None), dict(alpha=3.0, temp=0.3), dict(num_items_in_batch=100), dict(weighted=False),
    dict(watched=True), dict(watched=True, router_func="tanh", temp=2, alpha=1), dict(watched=True, router_func=None),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(f"{n}={v}" for n, v in o.items()))
def test_options(options):
    x = problem()
    got, _ = agree(x, 5, **options)
    plain, _ = values(ours, x, 5)
    assert any(not same_bits(got[n], plain[n]) for n in got)
    assert bool(got["daux"].any()) == options.get("watched", False)


@pytest.mark.parametrize("weights", [BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_routers_have_their_own_dtype(dtype, weights):
    agree(problem(dtype=dtype, weights=weights), 5, dtype, weights, watched=True)


@pytest.mark.parametrize("watched", [False, True], ids=["one router", "two routers"])
@pytest.mark.parametrize("k,second", [(6, 4), (6, 6), (6, 1), (13, 5), (1, 1)], ids=str)
def test_the_recursion_before(k, second, watched):
    x = problem()
    prev = route_expert_choice(x["x"], x["aux"], k)
    _, more = agree(x, second, prev=prev, watched=watched)
    assert bool(torch.isin(more["selected_tokens"], prev.selected_tokens[:, :, None]).all())
    assert bool(((more["rank"] < 0) | (prev.rank >= 0)).all())


def test_two_recursions_in_one_backward():
    x = problem()

    def both(rule, x, prev_of):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
        h, loss, prev, found = leaves["x"], 0, None, []
        for i, (k, w) in enumerate(((7, "router"), (4, "aux"), (2, "router"))):
            h, more = rule(h, leaves[w], None, leaves["block"], k, **prev_of(prev, i))
            loss, prev = loss + 3 * more["aux_loss"].double() + 5 * more["z_loss"].double(), more
            found.append(more["selected_tokens"])
        loss = loss + (h.double() * upstream(x).double()).sum()
        return found, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

    seats, got = both(ours, x, lambda prev, i: dict(prev=prev and prev["routed"]))

    def given(prev, i):
        places = seats[i] if i == 0 else torch.searchsorted(seats[i - 1], seats[i])
        return dict(prev=prev and prev["selected_tokens"], places=places)

    _, want = both(theirs, {n: t.double() for n, t in x.items()}, given)
    for n in want:
        assert_close(got[n], want[n], 2e-6, n)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("options", [{}, dict(watched=True), dict(router_func="tanh")], ids=str)
def test_half_precision_is_no_worse_than_pytorch(dtype, options):
    x = problem(2, 40, 64, dtype, dtype)
    got, more = values(ours, x, 13, **options)
    want, _ = exact(x, 13, more, **options)
    narrow, _ = values(theirs, x, 13, places=more["selected_tokens"], **options)
    worse = {n: (rel_err(got[n], want[n]), rel_err(narrow[n], want[n])) for n in want if want[n].any()}
    assert all(a <= 1.02 * b for a, b in worse.values()), {n: e for n, e in worse.items() if e[0] > e[1]}


def routed_by(logits, k, **options):
    "Tokens whose first number is their score."
    x = torch.zeros(*logits.shape, 3, device=DEVICE)
    x[..., 0] = logits
    return route_expert_choice(x, torch.tensor([1.0, 0, 0], device=DEVICE), k, **options)


def coarse(B=2, T=21):
    return torch.randint(-2, 3, (B, T), generator=torch.Generator().manual_seed(1)).float().to(DEVICE)


SCORES = {
    "coarse": coarse,
    "equal": lambda: torch.zeros(2, 9, device=DEVICE),
    "signed zeros": lambda: torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0, -1.0, -0.0, 0.0]], device=DEVICE),
    "tiny": lambda: coarse() * 1e-42,
    "huge": lambda: coarse() * 1e38,
    "infinite": lambda: torch.where(coarse() == 0, 0.0, coarse() * math.inf),
    "all different": lambda: randn(2, 21),
    "neighbours": lambda: (torch.arange(16, dtype=torch.int32) + 0x3F800000).view(F32).flip(0)[None].to(DEVICE),
    "negative neighbours": lambda: -(torch.arange(16, dtype=torch.int32) + 0x3F800000).view(F32).flip(0)[None].to(DEVICE),
}


@pytest.fixture(params=[(8192, 1), (8192, 4), (8, 1), (8, 2)], ids=["held", "held in parts", "read again", "read again in parts"])
def held(request, monkeypatch):
    "Also sequences that are longer than registers hold, in blocks of 8, and programs that seat a part each."
    most, parts = request.param
    mor._select_launcher.cache_clear()
    monkeypatch.setattr(mor, "_HELD", most)
    monkeypatch.setattr(mor, "_parts", lambda B, T: parts)
    if most == 8:
        monkeypatch.setattr(mor, "_select_shape", lambda parts, T, aux: (dict(BLOCK=8, HELD=T <= 8, STEP=8, PARTS=parts), 1))
    yield request.param
    mor._select_launcher.cache_clear()


@pytest.mark.parametrize("name", SCORES)
def test_seats(held, name):
    "Those of a stable sort, for few seats, half and all."
    logits = SCORES[name]()
    T = logits.shape[1]
    for k in sorted({1, 2, T // 2, T - 1, T}):
        with poison():
            routed = routed_by(logits, k)
        assert torch.equal(routed.selected_tokens, naive_top_k(logits, k)), k
        ranks = torch.full_like(routed.rank, -1)
        ranks.scatter_(1, routed.selected_tokens, torch.arange(k, dtype=torch.int32, device=DEVICE).expand(len(logits), k))
        assert torch.equal(routed.rank, ranks) and routed.count.eq(k).all()


def test_nan_sits_first():
    "As in torch.topk; the earlier of several."
    logits = torch.tensor([[1.0, math.nan, math.inf, -math.nan, 2.0]], device=DEVICE)
    assert [routed_by(logits, k).selected_tokens[0].tolist() for k in (1, 2, 3, 4)] == [[1], [1, 3], [1, 2, 3], [1, 2, 3, 4]]


def test_seats_in_longer_sequences(held):
    x = problem(2, 45, 8)
    whole, more = agree(x, 17, watched=True)
    prev = route_expert_choice(x["x"], x["aux"], 30)
    agree(x, 11, prev=prev, watched=True)
    assert torch.equal(more["selected_tokens"], naive_top_k(x["x"].double() @ x["router"].double(), 17))


def test_ties_in_the_recursion_before():
    logits = torch.tensor([[0.0, 1, 0, 1, 0, 0, 1, 1]], device=DEVICE)
    first = routed_by(logits, 6)
    assert first.selected_tokens.tolist() == [[0, 1, 2, 3, 6, 7]]
    assert routed_by(logits, 5, prev=first).selected_tokens.tolist() == [[0, 1, 3, 6, 7]]
    assert routed_by(-logits, 3, prev=first).selected_tokens.tolist() == [[0, 1, 2]]
    assert routed_by(-logits, 6, prev=first).selected_tokens.tolist() == first.selected_tokens.tolist()


def test_one_token():
    x = problem(1, 1)
    got, more = agree(x, mor_top_k(0.5, 1), watched=True)
    assert more["selected_tokens"].tolist() == [[0]] and more["count"].tolist() == [1] and more["topk_acc"] == 1


def test_capacity():
    assert [mor_top_k(c, 5) for c in (0.01, 0.2, 0.39, 0.4, 0.999, 1.0, 1)] == [1, 1, 1, 2, 4, 5, 5]
    for bad in 0, -0.5, 1.01, math.nan, math.inf:
        with pytest.raises(ValueError, match="^capacity_factor: "):
            mor_top_k(bad, 5)
    x = problem()
    for c, k in (0.01, 1), (1.0, 13):
        out, routed = mor_expert_choice(x["x"], x["router"], block(x["block"]), c)
        assert routed.selected_tokens.shape == (2, k) and torch.equal(out, ours(*[x[n] for n in ("x", "router", "aux", "block")], k)[0])


def test_capacity_one_is_the_block_on_all():
    x = problem()
    got, more = agree(x, 13)
    assert torch.equal(more["selected_tokens"], torch.arange(13, device=DEVICE).expand(2, 13)) and torch.equal(more["tokens"], x["x"])
    assert more["sampling_acc"] == (x["x"] @ x["router"] >= 0).float().mean()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_copies_are_copies(dtype):
    x = problem(dtype=dtype)
    got, more = values(ours, x, 5)
    where = more["selected_tokens"][..., None].expand(-1, -1, 20)
    assert same_bits(more["tokens"], x["x"].gather(1, where)) and same_bits(got["o"][more["rank"] < 0], x["x"][more["rank"] < 0])
    assert more["selected_tokens"].dtype == torch.int64 and more["rank"].dtype == more["count"].dtype == torch.int32


def test_position_embeddings():
    x, k = problem(), 5
    tables = [randn(13, 7, seed=5), randn(1, 13, 64, seed=6, dtype=BF16), randn(2, 13, 70, seed=7), randn(13, 1, seed=8, dtype=F16)]
    with poison():
        routed = route_expert_choice(x["x"], x["router"], k, position_embeddings=[fenced(t) for t in tables])
    assert isinstance(routed.position_embeddings, tuple)
    for table, got in zip(tables, routed.position_embeddings):
        want = table.expand(2, 13, -1).gather(1, routed.selected_tokens[..., None].expand(-1, -1, table.shape[-1]))
        assert same_bits(got, want)
    strided = randn(7, 13, seed=5).mT
    (got,) = route_expert_choice(x["x"], x["router"], k, position_embeddings=(strided,)).position_embeddings
    assert torch.equal(got, strided[routed.selected_tokens])


def test_sequences_do_not_see_each_other():
    x = problem(3)
    whole = route_expert_choice(x["x"], x["router"], 5)
    alone = route_expert_choice(x["x"][1:2].clone(), x["router"], 5)
    for n in "tokens", "selected_tokens", "weights", "rank":
        assert same_bits(getattr(alone, n), getattr(whole, n)[1:2])


def test_a_fault_stays_in_its_sequence():
    x = problem(2)
    want, _ = values(ours, x, 5, parts=(1.0, 0, 0))
    x["x"][1, 4, 2] = math.nan
    got, more = values(ours, x, 5, parts=(1.0, 0, 0))
    assert same_bits(got["o"][0], want["o"][0]) and same_bits(got["dx"][0], want["dx"][0])
    assert got["o"][1, 4].isnan().any() and more["rank"][1, 4] >= 0 and got["aux_loss"].isnan()


# Layouts and autograd.
def turned(t):
    return t.mT.contiguous().mT


def padded(t):
    return fenced(t, between=3)


def moved(t):
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("change", [turned, padded, moved, fenced], ids=lambda f: f.__name__)
def test_layouts(change):
    x = problem()
    want, more = values(ours, x, 5, watched=True)
    vectors = {n: torch.stack([x[n], x[n] * math.nan], -1)[:, 0] for n in ("router", "aux")}
    got, _ = values(ours, x | vectors | dict(x=change(x["x"])), 5, do=change(upstream(x)), watched=True)
    assert same_bits(got, want)
    routed = more["routed"]
    h = block(x["block"])(routed.tokens.detach())
    assert same_bits(combine_expert_choice(routed, change(h)).detach(), want["o"])
    assert same_bits(combine_expert_choice(routed._replace(weights=turned(routed.weights)), h).detach(), want["o"])


def test_expanded_inputs_and_gradients():
    x = problem()
    x["x"] = x["x"][:, :1].expand(2, 13, 20)
    dense = {n: t.contiguous() for n, t in x.items()}
    assert same_bits(values(ours, x, 5)[0], values(ours, dense, 5)[0])
    ones = torch.ones_like(dense["x"])
    leaves = {n: t.clone().requires_grad_() for n, t in dense.items()}
    ours(*[leaves[n] for n in ("x", "router", "aux", "block")], 5)[0].sum().backward()
    want, _ = values(ours, dense, 5, do=ones, parts=(1.0, 0, 0))
    assert same_bits({f"d{n}": leaves[n].grad for n in ("x", "router", "block")}, {n: want[n] for n in ("dx", "drouter", "dblock")})


def test_a_router_of_two_dimensions():
    "As `nn.Linear` has it."
    x = problem()
    want, _ = values(ours, x, 5, watched=True)
    got, _ = values(ours, x | {n: x[n][None] for n in ("router", "aux")}, 5, watched=True)
    assert got["drouter"].shape == got["daux"].shape == (1, 20)
    assert same_bits(got | {n: got[n][0] for n in ("drouter", "daux")}, want)


@pytest.mark.parametrize("wanted", ["x", "router", "aux", "block", "x+aux", "router+aux", "router+block", "x+router"])
def test_gradients_of_some_inputs(wanted):
    x, wanted = problem(), wanted.split("+")
    want, _ = values(ours, x, 5, watched=True)
    leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in x.items()}
    out, more = ours(*[leaves[n] for n in ("x", "router", "aux", "block")], 5, watched=True)
    assert same_bits(out.detach(), want["o"])
    out.backward(upstream(x), retain_graph=True)
    for n, c in ("aux_loss", 30.0), ("z_loss", 70.0):
        if more[n].requires_grad:
            more[n].backward(torch.full_like(more[n], c), retain_graph=True)
    for n, t in leaves.items():
        if n not in wanted:
            assert t.grad is None
        elif want[f"d{n}"].any():
            assert_close(t.grad, want[f"d{n}"].double(), 2e-6, n)


def test_some_outputs_only():
    "Each output by itself, and none of the others' gradients."
    x = problem()
    order = [x[n] for n in ("x", "router", "aux", "block")]
    leaves = [t.clone().requires_grad_() for t in order]
    out, more = ours(*leaves, 5, watched=True)
    wide = [t.double().requires_grad_() for t in order]
    want_out, want = theirs(*wide, 5, watched=True, places=more["selected_tokens"])
    for n in "out", "tokens", "weights", "aux_loss", "z_loss", "residual":
        y, z = (out, want_out) if n == "out" else (more[n], wide[0] * 1 if n == "residual" else want[n])
        dy = randn(*y.shape, seed=41)
        got = torch.autograd.grad(y, leaves, dy, retain_graph=True, materialize_grads=True)
        expected = torch.autograd.grad(z, wide, dy.double(), retain_graph=True, materialize_grads=True)
        for name, a, b in zip(("x", "router", "aux", "block"), got, expected):
            assert rel_err(a, b) < 1e-6 if b.any() else not a.any(), (n, name)


def test_used_twice():
    "The tokens by two blocks, the residual besides, and a routing that nothing is added back to."
    x = problem()

    def run(rule, x, places=None):
        leaves = [x[n].detach().requires_grad_() for n in ("x", "router", "aux", "block")]
        out, more = rule(*leaves, 5, **({} if places is None else dict(places=places)))
        loss = (out.sin() * upstream(x)).sum() + more["tokens"].square().sum() + (leaves[0] * more["weights"].sum()).sum()
        other = rule(leaves[0], leaves[2], None, leaves[3], 3, **({} if places is None else dict(places=seats)))[1]
        return more, other, torch.autograd.grad(loss + other["aux_loss"], leaves)

    more, other, got = run(ours, x)
    seats = other["selected_tokens"]
    _, _, want = run(theirs, {n: t.double() for n, t in x.items()}, more["selected_tokens"])
    assert all(rel_err(a, b) < 1e-6 for a, b in zip(got, want))


def test_no_gradients():
    x = {n: t.requires_grad_() for n, t in problem().items()}
    want, _ = ours(*[x[n] for n in ("x", "router", "aux", "block")], 5)
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            out, more = ours(*[x[n] for n in ("x", "router", "aux", "block")], 5)
            assert not out.requires_grad and same_bits(out, want.detach()) and more["residual"] is x["x"]
    assert want.requires_grad


def test_what_needs_no_gradient_is_not_differentiable():
    x = {n: t.requires_grad_() for n, t in problem().items()}
    routed = route_expert_choice(x["x"], x["router"], 5, aux_router_weight=x["aux"])
    assert [n for n, t in routed._asdict().items() if isinstance(t, torch.Tensor) and t.requires_grad] == [
        "tokens", "weights", "aux_loss", "z_loss", "residual"]  # fmt: skip


def test_second_derivatives_are_refused():
    x = {n: t.requires_grad_() for n, t in problem().items()}
    out, more = ours(*[x[n] for n in ("x", "router", "aux", "block")], 5)
    for y in out.sum(), more["aux_loss"], more["tokens"].sum():
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(y, x["x"], create_graph=True)


def test_inputs_are_left_alone_and_outputs_stay():
    x = problem()
    before = {n: t.clone() for n, t in x.items()}
    first, _ = values(ours, x, 5)
    kept = {n: t.clone() for n, t in first.items()}
    values(ours, problem(seed=50), 5)
    assert same_bits(x, before) and same_bits(first, kept)


def test_two_runs():
    x = problem(2, 30 if INTERPRET else 5000, dtype=BF16)
    assert_deterministic(lambda: values(ours, x, 11, watched=True)[0])


def test_strips_of_the_backward(monkeypatch):
    "More tokens than a strip has, and a last one that is shorter."
    monkeypatch.setattr(mor, "_strip", lambda N, D, C: 10)
    agree(problem(2, 13), 5, watched=True)


def test_autocast():
    "Routing has the same bits; a block may leave another dtype."
    x = problem()
    plain = route_expert_choice(x["x"], x["router"], 5)
    with torch.autocast(DEVICE, BF16):
        routed = route_expert_choice(x["x"], x["router"], 5)
        h = routed.tokens @ randn(20, 20, seed=4)
        out = combine_expert_choice(routed, h)
    assert same_bits(routed[:3], plain[:3]) and h.dtype == BF16 and out.dtype == F32
    want = x["x"].double().scatter_add(1, routed.selected_tokens[..., None].expand(-1, -1, 20), (h * routed.weights[..., None]).double())
    assert rel_err(out, want) < 1e-6


# Capacity on the device, and generation.
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedule(warmup):
    "Python's numbers at every step; empty seats are zero and behind."
    x, T, c = problem(), 13, 0.4
    schedule = CapacitySchedule(c, T, warmup, device=DEVICE)
    assert list(schedule.state_dict()) == ["step"]
    for i in range(1, 10):
        schedule.advance()
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, i / warmup))) if warmup else 0.0
        k = max(1, int((c + (1 - c) * share) * T))
        if i not in (1, 3, 7, 9):
            continue
        with poison():
            routed = route_expert_choice(x["x"], x["router"], T, schedule=schedule, position_embeddings=[randn(13, 6)])
        assert routed.count.tolist() == [k, k]
        assert torch.equal(routed.selected_tokens[:, :k], naive_top_k(x["x"] @ x["router"], k))
        assert (routed.selected_tokens[:, k:] == T - 1).all() and not routed.weights[:, k:].any()
        assert not routed.tokens[:, k:].any() and not routed.position_embeddings[0][:, k:].any()


def test_scheduled_seats_are_as_good_as_fixed_ones():
    x, schedule = problem(), CapacitySchedule(0.4, 13, 0, device=DEVICE)
    want, more = values(ours, x, 5, watched=True)
    got, scheduled = values(ours, x, 11, watched=True, schedule=schedule)
    assert all(rel_err(got[n], want[n]) < 1e-6 if n == "dblock" else same_bits(got[n], want[n]) for n in want)
    next_ = [route_expert_choice(x["x"], x["aux"], 4, m["routed"]) for m in (more, scheduled)]
    assert all(same_bits(getattr(next_[0], n), getattr(next_[1], n)) for n in ("tokens", "aux_loss", "z_loss", "sampling_acc", "rank"))
    third = route_expert_choice(x["x"], x["aux"], 9, scheduled["routed"])
    assert third.count.tolist() == [5, 5] and torch.equal(third.rank, scheduled["rank"])


def test_fewer_seats_than_the_schedule_says():
    x, schedule = problem(), CapacitySchedule(0.4, 13, 5, device=DEVICE)
    routed = route_expert_choice(x["x"], x["router"], 3, schedule=schedule)
    assert routed.count.tolist() == [3, 3]


@pytest.mark.parametrize("func", ["sigmoid", "tanh", None])
@pytest.mark.parametrize("watched", [False, True], ids=["one router", "two routers"])
def test_threshold(held, func, watched):
    "Who is above the line sits, whatever comes after."
    x = problem()
    options = dict(sampling="threshold", router_func=func, aux_router_weight=x["aux"] if watched else None)
    logits = x["x"] @ x["aux" if watched else "router"]
    above = logits >= (0 if watched or func else 0.5)
    for k in 13, 3:
        with poison():
            routed = route_expert_choice(x["x"], x["router"], k, **options)
        places = above.cumsum(1) - 1
        assert torch.equal(routed.rank, torch.where(above & (places < k), places, -1).int())
        assert torch.equal(routed.count, above.sum(1).clamp(max=k).int())
        assert torch.equal(routed.tokens.any(2).sum(1), routed.count.long())
        if k == 13:
            assert (routed.sampling_acc == 1).all()
    early = route_expert_choice(x["x"][:, :6].clone(), x["router"], 6, **options)
    assert torch.equal(early.rank, route_expert_choice(x["x"], x["router"], 13, **options).rank[:, :6])


def test_nobody_sits():
    x = problem()
    x["x"] = -x["router"].expand(2, 13, 20).contiguous()
    got, more = values(ours, x, 4, sampling="threshold")
    assert more["count"].tolist() == [0, 0] and same_bits(got["o"], x["x"]) and not got["dblock"].any() and not more["tokens"].any()
    again = route_expert_choice(x["x"], x["aux"], 3, more["routed"])
    assert again.count.tolist() == [0, 0] and (again.rank == -1).all()
    assert all(torch.isfinite(t).all() for t in (again.aux_loss, again.z_loss, again.sampling_acc))


def test_gradients_with_a_threshold():
    x = problem()
    got, more = values(ours, x, 13, sampling="threshold", watched=True)
    assert all(t.isfinite().all() for t in got.values())
    leaves = {n: x[n].double().requires_grad_() for n in x}
    l, judged = leaves["x"] @ leaves["router"], leaves["x"].detach() @ leaves["aux"]
    sits = (judged >= 0).double()
    out = leaves["x"] + (sits * 0.1 * l.sigmoid())[..., None] * block(leaves["block"])(leaves["x"])
    loss = (out * upstream(x)).sum() + 70 * l.square().mean()
    loss = loss + 30 * torch.nn.functional.binary_cross_entropy_with_logits(judged, sits)
    for n, want in zip(leaves, torch.autograd.grad(loss, list(leaves.values()))):
        assert_close(got[f"d{n}"], want, 1e-6, n)


def test_no_sequences():
    x = {n: t.requires_grad_() for n, t in problem(0).items()}
    out, more = ours(*[x[n] for n in ("x", "router", "aux", "block")], 5, watched=True)
    (out.sum() + more["aux_loss"] + more["z_loss"]).backward()
    assert out.shape == (0, 13, 20) and more["aux_loss"] == 0 and not x["router"].grad.any() and x["x"].grad.shape == (0, 13, 20)


# What must be refused.
def named(error, name):
    return pytest.raises(error, match=rf"^{re.escape(name)}: ")


WRONG = {
    "x no tensor": (TypeError, "x", lambda a: dict(x=[1.0])),
    "x integers": (TypeError, "x", lambda a: dict(x=a["x"].int())),
    "x float64": (TypeError, "x", lambda a: dict(x=a["x"].double())),
    "x two dimensions": (ValueError, "x", lambda a: dict(x=a["x"][0])),
    "x four dimensions": (ValueError, "x", lambda a: dict(x=a["x"][None])),
    "x without tokens": (ValueError, "x", lambda a: dict(x=a["x"][:, :0])),
    "x without numbers": (ValueError, "x", lambda a: dict(x=a["x"][..., :0])),
    "router None": (TypeError, "router_weight", lambda a: dict(router_weight=None)),
    "router a list": (TypeError, "router_weight", lambda a: dict(router_weight=a["router_weight"].tolist())),
    "router shorter": (ValueError, "router_weight", lambda a: dict(router_weight=a["router_weight"][1:])),
    "router a column": (ValueError, "router_weight", lambda a: dict(router_weight=a["router_weight"][:, None])),
    "router two rows": (ValueError, "router_weight", lambda a: dict(router_weight=a["router_weight"].expand(2, 20))),
    "router integers": (TypeError, "router_weight", lambda a: dict(router_weight=a["router_weight"].int())),
    "router elsewhere": (ValueError, "router_weight", lambda a: dict(router_weight=a["router_weight"].to("meta"))),
    "aux shorter": (ValueError, "aux_router_weight", lambda a: dict(aux_router_weight=a["router_weight"][1:])),
    "aux float64": (TypeError, "aux_router_weight", lambda a: dict(aux_router_weight=a["router_weight"].double())),
    "k 0": (ValueError, "k", lambda a: dict(k=0)),
    "k too large": (ValueError, "k", lambda a: dict(k=14)),
    "k a real number": (TypeError, "k", lambda a: dict(k=5.0)),
    "k a flag": (TypeError, "k", lambda a: dict(k=True)),
    "k a tensor": (TypeError, "k", lambda a: dict(k=torch.tensor(5))),
    "k larger than before": (ValueError, "k", lambda a: dict(prev=a["prev"](4))),
    "prev of another length": (ValueError, "prev.rank", lambda a: dict(prev=a["prev"](6, T=12))),
    "prev of another batch": (ValueError, "prev.rank", lambda a: dict(prev=a["prev"](6, B=3))),
    "func": (ValueError, "router_func", lambda a: dict(router_func="relu")),
    "sampling": (ValueError, "sampling", lambda a: dict(sampling="random")),
    "alpha 0": (ValueError, "alpha", lambda a: dict(alpha=0)),
    "alpha negative": (ValueError, "alpha", lambda a: dict(alpha=-0.1)),
    "alpha infinite": (ValueError, "alpha", lambda a: dict(alpha=math.inf)),
    "alpha on the device": (TypeError, "alpha", lambda a: dict(alpha=torch.ones(()))),
    "temp NaN": (ValueError, "temp", lambda a: dict(temp=math.nan)),
    "temp 0": (ValueError, "temp", lambda a: dict(temp=0.0)),
    "items 0": (ValueError, "num_items_in_batch", lambda a: dict(num_items_in_batch=0)),
    "items on the device": (TypeError, "num_items_in_batch", lambda a: dict(num_items_in_batch=torch.ones(()))),
    "embedding shorter": (ValueError, "position_embeddings[0]", lambda a: dict(position_embeddings=[randn(12, 4)])),
    "embedding of another batch": (
        ValueError, "position_embeddings[1]", lambda a: dict(position_embeddings=[randn(13, 4), randn(3, 13, 4)])),
    "embedding integers": (TypeError, "position_embeddings[0]", lambda a: dict(position_embeddings=[randn(13, 4).int()])),
    "embedding with a gradient": (
        ValueError, "position_embeddings", lambda a: dict(position_embeddings=[randn(13, 4).requires_grad_()])),
    "schedule elsewhere": (ValueError, "schedule.table", lambda a: dict(schedule=CapacitySchedule(0.5, 13, 3, device="meta"))),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_bad_arguments(which):
    x, (error, name, change) = problem(), WRONG[which]

    def prev(k, B=2, T=13):
        return route_expert_choice(randn(B, T, 20), x["router"], k)

    args = dict(x=x["x"], router_weight=x["router"], k=5)
    for _ in range(2):
        with named(error, name):
            route_expert_choice(**args | change(args | dict(prev=prev)))


def test_bad_blocks():
    x = problem()
    routed = route_expert_choice(x["x"], x["router"], 5)
    for error, h in (TypeError, None), (ValueError, routed.tokens[:, 1:]), (ValueError, routed.tokens[..., 1:]), (
        TypeError, routed.tokens.double()), (ValueError, routed.tokens.to("meta")), (ValueError, x["x"]):  # fmt: skip
        with named(error, "h"):
            combine_expert_choice(routed, h)
    for bad in -1, 1.5, None:
        with named(ValueError, "warmup_steps"):
            CapacitySchedule(0.5, 13, bad)


# torch.library, torch.compile, fake tensors.
def op_arguments(watched=True):
    x = problem()
    prev = route_expert_choice(x["x"], x["aux"], 9)
    schedule = CapacitySchedule(0.4, 13, 3, device=DEVICE)
    return (x["x"], x["router"], x["aux"] if watched else None, [randn(13, 4)], prev.rank, prev.count, schedule.table, schedule.step, 5,
            "sigmoid", 0.1, 1.5, 1.0, False)  # fmt: skip


@pytest.mark.parametrize("watched", [False, True], ids=["one router", "two routers"])
def test_operators_keep_their_contract(watched):
    args = op_arguments(watched)
    tokens, selected, weights, aux_loss, z_loss, totals, rank, count, logits, _ = mor._op(*args)
    given = torch.randn_like(args[0]), torch.randn_like(tokens), torch.randn_like(weights), aux_loss, z_loss
    backward = *args[:3], args[4], rank, logits, totals, *given, 5, "sigmoid", 0.1, 1.5, 1.0, True, True
    some = *args[:3], args[4], rank, logits, totals, None, None, given[2], None, None, 5, "sigmoid", 0.1, 1.5, 1.0, False, True
    combine = args[0], torch.randn_like(tokens), weights, rank, selected, count
    combine_back = given[0], combine[1], weights, selected, count
    leaves = [a.clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    combine_leaves = [a.clone().requires_grad_() if a.is_floating_point() else a for a in combine]
    for op, arguments in (
        (mor._op, args), (mor._op, leaves), (mor._bwd_op, backward), (mor._bwd_op, some), (mor._combine_op, combine),
        (mor._combine_op, combine_leaves), (mor._combine_bwd_op, combine_back),
        (mor._combine_bwd_op, (*combine_back[:2], None, *combine_back[3:])),
    ):  # fmt: skip
        assert set(torch.library.opcheck(op, tuple(arguments)).values()) == {"SUCCESS"}


def recursions(x, router, aux, block_):
    "Two of them, and all losses."
    h, first = mor_expert_choice(x, router, block(block_), 0.5, aux_router_weight=aux, position_embeddings=[x.detach()[0, :, :4]])
    h, second = mor_expert_choice(h, aux, block(block_), 0.25, first, weighted=False)
    return h, first.aux_loss + first.z_loss + second.aux_loss + second.z_loss + first.position_embeddings[0].sum()


def step(x, router, aux, block_, do):
    h, losses = recursions(x, router, aux, block_)
    return h.detach(), *torch.autograd.grad((h * do).sum() + losses, (x, router, aux, block_))


def arguments(make=problem):
    x = make()
    return [x[n].requires_grad_() for n in ("x", "router", "aux", "block")] + [upstream(x)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_traced_without_a_break(dynamic):
    "Outputs are the same bits; gradients are added in another order."
    traced = torch.compile(recursions, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in (13, 16) if dynamic else (13,):
        *args, do = arguments(partial(problem, 2, T))
        got, want = traced(*args), recursions(*args)
        assert same_bits([t.detach() for t in got], [t.detach() for t in want])
        losses = [(h * do).sum() + losses for h, losses in (got, want)]
        grads = [torch.autograd.grad(loss, args) for loss in losses]
        assert all(rel_err(a, b.double()) < 1e-6 for a, b in zip(*grads))


def test_nothing_is_read_back():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        args = [mode.from_tensor(t) for t in arguments()]
        out, *grads = step(*args)
        schedule = CapacitySchedule(0.5, 13, 3, device=DEVICE)
        schedule.advance()
        routed = route_expert_choice(args[0], args[1], 13, schedule=schedule)
    assert out.shape == (2, 13, 20) and [g.shape for g in grads] == [a.shape for a in args[:4]] and routed.tokens.shape == (2, 13, 20)


def test_on_meta():
    args = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in arguments()]
    out, *grads = step(*args)
    assert out.is_meta and all(g.is_meta and g.shape == a.shape for g, a in zip(grads, args))


def test_costs():
    "3 T and 2 k rows forward if the gather hits the cache, one k more if not; backward 3 T and 4 k."
    small = mor_expert_choice_cost(2, 10, 4, 3, "bf16")
    assert small["fwd"].bytes == (60 + 12) * 4 * 2 and small["fwd+bwd"].bytes == (120 + 36) * 4 * 2
    assert (small["fwd"].launches, small["fwd+bwd"].launches) == (4, 7)
    assert mor_expert_choice_cost(2, 10, 4, 3, "fp32", l2_bytes=0)["fwd"].bytes == (60 + 18) * 4 * 4


def test_ahead_of_time_cases_name_every_kernel():
    names = {c.kernel.rpartition(":")[2] for c in mor.aot_cases()}
    assert names == {n for n in vars(mor) if n.startswith("_mor_") and n.endswith("_kernel")}
    assert not any(c.spill for c in mor.aot_cases())


def test_whole_numbers_are_not_specialised():
    assert_whole_numbers_are_declared(mor)


# On a GPU only.
@GPU
def test_captured():
    assert_captured(step, arguments(), arguments(partial(problem, seed=40)))


@GPU
def test_a_captured_schedule():
    x, schedule = problem(), CapacitySchedule(0.4, 13, 6, device=DEVICE)
    route_expert_choice(x["x"], x["router"], 13, schedule=schedule)
    graph, counts = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        schedule.advance()
        routed = route_expert_choice(x["x"], x["router"], 13, schedule=schedule)
    for _ in range(8):
        graph.replay()
        counts.append(routed.count[0].item())
    assert counts == [max(1, int((0.4 + 0.6 * 0.5 * (1 + math.cos(math.pi * min(1, i / 6)))) * 13)) for i in range(1, 9)]


@GPU
def test_the_host_never_waits():
    args = arguments()
    assert_never_waits(step, args, (turned(args[0]), *args[1:]))


@GPU
def test_launches():
    from dormouse_fused.measure import launches

    x = problem()

    def forward():
        routed = route_expert_choice(x["x"], x["router"], 5, aux_router_weight=x["aux"], position_embeddings=[randn(13, 4)])
        return combine_expert_choice(routed, routed.tokens)

    def both():
        routed = route_expert_choice(x["x"], x["router"], 5)
        out = combine_expert_choice(routed, routed.tokens)
        torch.autograd.grad((out, routed.aux_loss, routed.z_loss), (x["x"], x["router"]), (do, one, one))

    with torch.no_grad():
        assert launches(lambda: forward()).kernels == 4
    do, one = upstream(x), torch.ones((), device=DEVICE)
    for n in "x", "router":
        x[n].requires_grad_()
    found = launches(both)
    assert found.kernels == 7 and found.syncs == 0


@GPU
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("B,T,D,k", [(10, 512, 768, 256), (1, 8192, 4096, 4096), (1, 20000, 256, 5000)], ids=str)
def test_real_sizes(B, T, D, k, dtype):
    x = problem(B, T, D, dtype)
    got, more = values(ours, x, k, watched=True)
    assert torch.equal(more["selected_tokens"].sort(1).values, more["selected_tokens"])
    want, _ = exact(x, k, more, watched=True)
    close(got, want, dtype, slack=2)


@GPU
def test_torch_compile():
    *args, _ = arguments(partial(problem, dtype=BF16))
    traced = torch.compile(recursions, fullgraph=True)
    assert rel_err(traced(*args)[0].detach(), recursions(*args)[0].detach()) < 1e-2


@GPU
def test_the_cpu_is_refused():
    with named(ValueError, "x"):
        route_expert_choice(problem()["x"].cpu(), problem()["router"].cpu(), 5)


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    args = arguments()
    there = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in args]
    assert same_bits([t.to(DEVICE) for t in step(*there)], [*step(*args)])

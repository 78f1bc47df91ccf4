"Newton–Schulz: errors beside the authors' order of rounding, padding, pairs of steps, lists, awkward matrices, every path."

import math

import pytest
import torch
import triton
import triton.language as tl

from dormouse_fused import newton_schulz as ns
from dormouse_fused.newton_schulz import Shape, Workspace, naive_newton_schulz, newton_schulz, polar
from dormouse_fused.parity import assert_deterministic, fenced, load_golden, poison, rel_err, same_bits
from dormouse_fused.triton import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET else "cuda:0")
GPU = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
DTYPES = torch.float32, torch.bfloat16, torch.float16
COEFFICIENTS = "keller", "jiacheng", "polar_express"
SMALL, PAIRED, OWN, OWN_PAIRED = (24, 40), (16, 60), (65, 200), (66, 380)  # what takes another way through the kernels
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered", "ignore:divide by zero"
)  # in the interpreter


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def by_singular_values(G, steps, margin=1.0, eps=1e-7):
    "The iteration as a polynomial of singular values, in float64."
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / (margin * torch.linalg.matrix_norm(G.double())[..., None] + eps)
    for a, b, c in steps:
        S = a * S + b * S**3 + c * S**5
    return U * S[..., None, :] @ V


def oracle(G, **options):
    return naive_newton_schulz(G.bfloat16().double(), dtype=torch.float64, **options)


def check(G, got=None, **options):
    "No further from float64 than the authors' order of rounding."
    got, truth = newton_schulz(G, **options) if got is None else got, oracle(G, **options)
    assert got.shape == G.shape and got.dtype == torch.bfloat16
    ours, theirs = rel_err(got, truth), rel_err(naive_newton_schulz(G, **options), truth)
    assert ours <= theirs, f"{ours:.2e} against {theirs:.2e}"
    return got


def alike(a, b, tol=0.02):
    "The same bits in the interpreter; elsewhere a product may be cut otherwise when there are more or fewer matrices."
    return same_bits(a, b) if INTERPRET else rel_err(a, b) < tol


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 5, 5)])
def test_the_oracle(name, shape):
    "Against a singular value decomposition."
    G, iteration = make(*shape).double(), polar(name, 6)
    want = by_singular_values(G, iteration.steps, iteration.margin)
    assert rel_err(naive_newton_schulz(G, 6, name, dtype=torch.float64), want) < 1e-10


def test_coefficients_are_the_published_ones():
    assert polar() == ns.Polar(((3.4445, -4.7750, 2.0315),) * 5)
    assert polar("jiacheng", 2).steps == (
        (3955 / 1024, -8306 / 1024, 5008 / 1024),
        (3735 / 1024, -6681 / 1024, 3463 / 1024),
    )
    express = polar("polar_express", 9)
    assert express.margin == 1.01 and express.steps[7:] == ((1.875, -1.25, 0.375),) * 2
    first = 8.28721201814563 / 1.01, -23.595886519098837 / 1.01**3, 17.300387312530933 / 1.01**5
    assert express.steps[0] == pytest.approx(first, rel=1e-15) and polar("polar_express").steps == express.steps[:5]
    assert polar((1, 2.0, 3), 2).steps == ((1, 2.0, 3),) * 2 and polar([[1, 2, 3]], 1).steps == ((1, 2, 3),)
    assert polar(((1, 2, 3), (4, 5, 6), (7, 8, 9)), 3).steps[1] == (4, 5, 6)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_values_end_near_one(name):
    s, iteration = torch.logspace(-2, 0, 500, dtype=torch.float64), polar(name, 6)
    s = s / iteration.margin
    for a, b, c in iteration.steps:
        s = a * s + b * s**3 + c * s**5
    assert s.min() > 0.6 and s.max() < 1.25 and (name == "keller" or (s - 1).abs().max() < 0.05)


SHAPES = [
    SMALL, (40, 24), PAIRED, (60, 16), OWN, (200, 65), OWN_PAIRED,  # wide, tall, with pairs of steps, with the product kernel
    (16, 16), (17, 17), (32, 33), (33, 100), (63, 64), (7, 130), (3, 5), (129, 7),  # sides at and just beyond a tile's
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors(shape):
    check(make(3, *shape))


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (1, 1)], ids=str)
def test_one_row_or_column(shape):
    "Few roundings, so many matrices."
    check(make(16, *shape))


def test_several_tiles_of_the_product(calls):
    check(make(129, 130))
    assert "_product" in [name for name, *_ in calls]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SMALL, (60, 16)], ids=str)
def test_dtypes(dtype, shape):
    check(make(3, *shape, dtype=dtype))


@pytest.mark.parametrize(
    "name,ns_steps",
    [
        *(("keller", n) for n in range(1, 7)),
        ("jiacheng", 4),
        ("jiacheng", 5),
        ("jiacheng", 6),
        ("polar_express", 5),
        ("polar_express", 8),
    ],
)
@pytest.mark.parametrize("shape", [SMALL, PAIRED], ids=["alone", "in pairs"])
def test_steps(shape, name, ns_steps):
    check(make(3, *shape), ns_steps=ns_steps, ns_coefficients=name)


@pytest.mark.parametrize("shape", [SMALL, (60, 16)], ids=["alone", "in pairs"])
def test_own_coefficients(shape):
    "Different ones in every step, so that their order matters; and one triple for all."
    steps = [(3.0, -3.5, 1.5), (2.5, -2.0, 0.75), (1.875, -1.25, 0.375)]
    check(make(4, *shape), ns_steps=3, ns_coefficients=steps)
    check(make(4, *shape), ns_steps=3, ns_coefficients=steps[2])


def test_nearly_of_low_rank():
    "Tiny singular values, whose errors are amplified most."
    low = make(64, 4) @ make(4, 256, seed=1) + 0.01 * make(64, 256, seed=2)
    for G in low, low[:, :100]:
        check(G.contiguous())


@pytest.mark.parametrize("file", ["muon_plus-cpu", "muon_plus-h200"])
def test_golden(file):
    "What the authors' own function returned."
    golden = {name: x.to(DEVICE) for name, x in load_golden(file).items() if name.startswith("ns/")}
    cases = sorted({name.split("/")[1] for name in golden})
    for case, got in zip(cases, newton_schulz([golden[f"ns/{case}/g"] for case in cases])):
        truth = oracle(golden[f"ns/{case}/g"])
        assert rel_err(got, truth) <= rel_err(golden[f"ns/{case}/u"], truth), case
    assert len(cases) == 5


def test_more_dimensions():
    G = make(2, 3, 12, 20)
    check(G)
    assert newton_schulz(G).shape == (2, 3, 12, 20)
    for want, got in zip(newton_schulz(list(G.flatten(0, 1))), newton_schulz(G).flatten(0, 1)):
        assert alike(got, want)


def test_lists():
    "Shapes, dtypes, dimensions and alignments mixed; each result is what the matrix gives alone, in its place."
    shapes = (9, 16), (16, 9), (2, 9, 16), (9, 16), (0, 5), (16, 48), (9, 16)
    given = [make(*s, dtype=d, seed=n) for n, (s, d) in enumerate(zip(shapes, DTYPES * 3))]
    given[-1] = torch.cat([given[-1].flatten()[:1], given[-1].flatten()])[1:].view(9, 16)
    assert given[-1].data_ptr() % 16 and given[0].dtype == given[-1].dtype != given[2].dtype
    kept, got = [g.clone() for g in given], newton_schulz(given)
    assert isinstance(got, list) and same_bits(given, kept)
    for G, u in zip(given, got, strict=True):
        assert u.shape == G.shape and u.dtype == torch.bfloat16
        if G.numel():
            check(G, u)
            assert alike(u, newton_schulz(G))
    assert same_bits(newton_schulz(tuple(given)), got)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 6), (2, 0, 6)], ids=str)
def test_empty(shape):
    got = newton_schulz(torch.empty(shape, device=DEVICE))
    assert got.shape == shape and got.dtype == torch.bfloat16
    assert newton_schulz([]) == []


@pytest.mark.parametrize("shape", [(40, 56), (56, 40)], ids=str)
def test_not_contiguous(shape):
    G = make(*shape)
    want = newton_schulz(G)
    assert same_bits(newton_schulz(G.t().contiguous().t()), want)
    assert same_bits(newton_schulz(fenced(G, between=3)), want)
    assert same_bits(newton_schulz(torch.stack([G, G], -1)[..., 1]), want)
    rows = make(1, 40).expand(24, 40)
    assert same_bits(newton_schulz(rows), newton_schulz(rows.contiguous()))


@pytest.mark.parametrize("shape", [SMALL, (60, 16), OWN], ids=str)
def test_nothing_uninitialised_or_beyond_is_read(shape):
    G = make(2, *shape)
    want = newton_schulz(G)
    with poison():
        assert same_bits(newton_schulz(fenced(G)), want)
        assert same_bits(newton_schulz([fenced(g) for g in G]), list(want))


@pytest.mark.parametrize("shape", [SMALL, PAIRED, OWN], ids=str)
def test_workspaces_can_be_used_again(shape):
    "The result depends on X alone, B' is symmetric to the last bit, and padding stays zero."
    work = Workspace(Shape(*shape), 2, DEVICE)
    (n, m), results = sorted(shape), []
    X = make(2, *shape).bfloat16()
    X /= X.norm(dim=(1, 2), keepdim=True)
    for rubbish in 0.0, math.nan, 1e30:
        for t in work.x, work.y, work.b:
            t.fill_(rubbish)
        work.x.zero_()
        work.x[:, :n, :m] = X
        results.append(work.iterate(polar()).clone())
        assert same_bits(work.b, work.b.mT.contiguous())
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
    assert not results[0][:, n:].any() and not results[0][:, :, m:].any()
    check(X, results[0][:, :n, :m])


def test_deterministic():
    given = [make(*s) for s in (SMALL, PAIRED, OWN)]
    assert_deterministic(lambda: newton_schulz(given), 3 if DEVICE.type == "cuda" else 2)


def test_zeros():
    "Zero stays zero, and others beside it are what they are alone."
    for shape in SMALL, PAIRED:
        G = make(3, *shape)
        G[1] = 0
        got = newton_schulz(G)
        assert not got[1].any() and alike(got[[0, 2]], newton_schulz(G[[0, 2]])) and not newton_schulz(0 * G).any()
    assert not newton_schulz(torch.zeros(*SMALL, device=DEVICE), eps=0.0).any()


@pytest.mark.parametrize("shape", [SMALL, PAIRED], ids=["alone", "in pairs"])
@pytest.mark.parametrize("norm", [1e-12, 1e-9, 1e-7, 1e-3, 1e17])
def test_any_norm(shape, norm):
    """A norm of 1e-9 is small beside eps, and the result as small as (1) says. All that is left of a step is then a X: the authors'
    operators multiply by a, B' holds it rounded to bfloat16."""
    G = make(2, *shape)
    G *= norm / torch.linalg.matrix_norm(G)[:, None, None]
    if norm > 1e-8:
        check(G)
    else:
        assert rel_err(newton_schulz(G), oracle(G)) < 5 * 2**-8


def test_eps():
    G = make(4, *SMALL)
    G *= 1e-3 / torch.linalg.matrix_norm(G)[:, None, None]
    check(G, eps=1e-3)
    assert rel_err(newton_schulz(G, eps=1e-3), newton_schulz(G)) > 0.1


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_norm_that_float32_cannot_hold(name):
    "Zero, as x / inf is."
    G = make(3, *SMALL)
    G[1] *= 1e25
    got = newton_schulz(G, ns_coefficients=name)
    assert not got[1].any() and alike(got[[0, 2]], newton_schulz(G[[0, 2]], ns_coefficients=name))
    assert not naive_newton_schulz(G[1], ns_coefficients=name).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [SMALL, PAIRED], ids=["alone", "in pairs"])
def test_what_is_not_finite_stays_in_its_matrix(shape, value):
    G = make(3, *shape)
    want = newton_schulz(G)
    G[1, 7, 9] = value
    got = newton_schulz(G)
    assert got[1].isnan().any() and same_bits(got[[0, 2]], want[[0, 2]])
    assert torch.equal(got[1].isnan(), naive_newton_schulz(G[1]).isnan())


def test_no_history():
    G = make(*SMALL).requires_grad_()
    assert not newton_schulz(G).requires_grad and not newton_schulz([G])[0].requires_grad
    assert same_bits(newton_schulz(G), newton_schulz(G.detach()))


@triton.jit
def _triangle_kernel(t, out, N: tl.constexpr):
    at = tl.arange(0, N)
    i, j = ns._triangle(tl.load(t + at))
    tl.store(out + at, i)
    tl.store(out + N + at, j)


def test_triangle():
    "Every tile of small triangles, and the ends of the rows of a large one."
    every = [(i, j) for i in range(90) for j in range(i + 1)][:4096]
    ends = [(i, j) for i in range(90, 20_000, 37) for j in (0, 1, i - 1, i)][:2048]
    for tiles, first in (
        (every, [i * (i + 1) // 2 + j for i, j in every]),
        (ends, [i * (i + 1) // 2 + j for i, j in ends]),
    ):
        N = triton.next_power_of_2(len(tiles))
        t = torch.tensor(first + [0] * (N - len(tiles)), dtype=torch.int32, device=DEVICE)
        out = torch.empty(2, N, dtype=torch.int32, device=DEVICE)
        _triangle_kernel[(1,)](t, out, N)
        assert out[:, : len(tiles)].t().tolist() == [list(ij) for ij in tiles]
    assert first[0] == 90 * 91 // 2 and [*range(4005)] == [i * (i + 1) // 2 + j for i, j in every][:4005]


@pytest.fixture
def calls(monkeypatch):
    "Which kernels run, by name. With one multiprocessor, as in the interpreter, no product is too small for the kernel."
    monkeypatch.setattr(ns, "_multiprocessors", lambda device: 1)
    seen = []
    for name, real in ("_gram", ns._gram), ("_product", ns._product):
        monkeypatch.setattr(ns, name, lambda *a, real=real, name=name: seen.append((name, *a)) or real(*a))
    return seen


@pytest.mark.parametrize("shape", [SMALL, PAIRED, OWN, OWN_PAIRED], ids=str)
def test_pointers_give_what_descriptors_give(monkeypatch, calls, shape):
    G = make(2, *shape)
    want = check(G)
    monkeypatch.setattr(ns, "_has_tma", lambda device: False)
    got = newton_schulz(G)
    assert not Workspace(Shape(*shape), 1, DEVICE).tma and {call[-1] for call in calls} >= {False}
    check(G, got)
    assert alike(got, want)


@pytest.mark.parametrize("shape", [OWN, (200, 65)], ids=str)
def test_own_product_and_theirs(monkeypatch, calls, shape):
    G = make(2, *shape)
    ours = check(G)
    assert [name for name, *_ in calls].count("_product") == 5
    calls.clear()
    monkeypatch.setattr(ns, "OWN_PRODUCT", 0)
    theirs = check(G)
    assert not [name for name, *_ in calls].count("_product")
    assert rel_err(ours, theirs) < 0.02


def test_narrow_tiles_of_the_product(calls):
    "A width of 128 and no more, and tiles taken in turn."
    check(make(2, 100, 120))
    assert {call[1] for call in calls if call[0] == "_product"} == {128}


@pytest.mark.parametrize("programs", [2, 9, 10, 132])
def test_many_multiprocessors(monkeypatch, calls, programs):
    "With few tiles they are made smaller, so that more programs have one; those of the product are dealt out, or left to cuBLAS."
    monkeypatch.setattr(ns, "_multiprocessors", lambda device: programs)
    check(make(3, 65, 200))
    assert {call[1] for call in calls if call[0] == "_gram"} == {128 if programs == 2 else 64}
    assert {call[2] for call in calls if call[0] == "_product"} == ({min(programs, 3)} if programs < 10 else set())


@pytest.mark.parametrize(
    "rows,cols,pairs", [(16, 48, 2), (16, 47, 2), (16, 32, 0), (48, 16, 2), (17, 96, 2), (17, 64, 0), (200, 64, 2)]
)
def test_when_steps_go_in_pairs(calls, rows, cols, pairs):
    "By padded sides; a pair has five symmetric products, a step alone two."
    newton_schulz(make(rows, cols))
    assert [name for name, *_ in calls].count("_gram") == 6 * pairs + 2 * (5 - 2 * pairs)


def test_cost():
    n, m = 768, 2048
    assert ns.newton_schulz_cost(m, n, 3, 4, fused=False).flops == {
        "bf16": 3 * 4 * (2 * n * n * m + 2 * n**3 + 2 * n * n * m)
    }
    assert ns.newton_schulz_cost(n, m, 3).flops == {"bf16": 3 * 5 * (n * n * m + n**3 + 2 * n * n * m)}
    m = 3 * n
    pair = n * n * m + 5 * n**3 + 2 * n * n * m
    assert ns.newton_schulz_cost(n, m).flops == {"bf16": 2 * pair + 3 * n * n * m + n**3}


BAD = {
    r"G\[0\]: expected a tensor": (TypeError, lambda G: newton_schulz([None, G])),
    r"G\[1\]: expected a tensor, got float": (TypeError, lambda G: newton_schulz([G, 1.0])),
    r"G: expected shape \[..., rows, cols\], got \[40\]": (ValueError, lambda G: newton_schulz(G[0])),
    r"G\[1\]: expected shape": (ValueError, lambda G: newton_schulz([G, G[0]])),
    r"G: expected torch.float32 or .*float64": (TypeError, lambda G: newton_schulz(G.double())),
    r"G: expected torch.float32 or .*complex64": (TypeError, lambda G: newton_schulz(G.to(torch.complex64))),
    r"G: expected torch.float32 or .*int64": (TypeError, lambda G: newton_schulz(G.long())),
    r"G\[1\]: expected on": (ValueError, lambda G: newton_schulz([G, G.to("meta")])),
    r"ns_steps: expected a whole number of at least 1, got 0": (ValueError, lambda G: newton_schulz(G, 0)),
    r"ns_steps: expected a whole number of at least 1, got 2.0": (ValueError, lambda G: newton_schulz(G, 2.0)),
    r"ns_steps: Jiacheng's coefficients are for at most 6 steps, got 7": (ValueError, lambda G: newton_schulz(G, 7, "jiacheng")),
    r"ns_coefficients: expected keller, .*'jordan'": (ValueError, lambda G: newton_schulz(G, 5, "jordan")),
    r"ns_coefficients: expected \(a, b, c\), or one such for each of 5": (ValueError, lambda G: newton_schulz(G, 5, (1.0, 2.0))),
    r"ns_coefficients: .*of 3 steps": (ValueError, lambda G: newton_schulz(G, 3, [(1.0, 2.0, 3.0)] * 2)),
    r"ns_coefficients: .*of 2 steps": (ValueError, lambda G: newton_schulz(G, 2, [(1.0, 2.0, 3.0), (1.0, 2.0)])),
    r"ns_coefficients: .*'c'": (ValueError, lambda G: newton_schulz(G, 2, [("a", "b", "c")] * 2)),
    r"ns_coefficients: .*None": (ValueError, lambda G: newton_schulz(G, 2, None)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    kind, call = BAD[message]
    with pytest.raises(kind, match=message):
        call(make(*SMALL))


def test_every_kernel_is_compiled_ahead_of_time():
    cases = ns.aot_cases()
    assert {c.kernel.partition(":")[2] for c in cases} == {
        "_gram_kernel",
        "_product_kernel",
        "_pack_kernel",
        "_scale_kernel",
    }


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(768, 768), (768, 2048), (300, 1000), (2304, 2048), (256, 1024)], ids=str)
def test_errors_of_large_matrices(shape, dtype):
    for batch in 1, 3:
        G = make(batch, *shape, dtype=dtype)
        check(G)
        assert_deterministic(lambda G=G: newton_schulz(G))


@GPU
def test_the_host_never_waits():
    given = [make(*s, dtype=d) for s in (SMALL, PAIRED, OWN, (768, 768)) for d in DTYPES]
    newton_schulz(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        newton_schulz(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
def test_launches_do_not_grow_with_the_list():
    from dormouse_fused.measure import launches

    counts = {launches(lambda n=n: newton_schulz([make(64, 128)] * n)).kernels for n in (2, 126)}
    assert len(counts) == 1 and counts.pop() <= 20

"The firewall: norms, faults, verdicts, counters, clipping, awkward gradients, and a host that never waits."

import gc
import math
import weakref

import pytest
import torch
import triton
import triton.language as tl

from dormouse_fused import firewall as fw
from dormouse_fused import multi_tensor as mt
from dormouse_fused.firewall import Firewall, clip_grad_norm_, naive_check
from dormouse_fused.parity import assert_deterministic, fenced, poison, rel_err, same_bits
from dormouse_fused.triton import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET else "cuda:0")
DTYPES = torch.float32, torch.bfloat16, torch.float16
FAULTS = math.nan, math.inf, -math.inf
on_gpu = pytest.mark.skipif(INTERPRET, reason="needs a GPU")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")  # in the interpreter


def small_chunks(monkeypatch):
    for name, value in dict(CHUNK=256, BYTES=256, UNROLL=2, num_warps=1).items():
        monkeypatch.setitem(fw._TILE, name, value)


def make(*shapes, dtype=torch.float32, seed=0):
    dtypes = dtype if isinstance(dtype, list) else [dtype] * len(shapes)
    gen = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.zeros(s, dtype=d, device=DEVICE)) for s, d in zip(shapes, dtypes)]
    for p in params:
        p.grad = torch.randn(p.shape, generator=gen).to(p)
    return params


def copies(params):
    out = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for c, p in zip(out, params):
        c.grad = None if p.grad is None else p.grad.clone()
    return out


def beside(p):
    "The same gradient one element further on in memory, so at no multiple of 16 bytes."
    p.grad = torch.cat([p.grad.flatten()[:1], p.grad.flatten()])[1:].view(p.shape)


def check(params, wall, **options):
    norm, scale, go, counts = naive_check([p.grad for p in params], **options)
    verdict = wall()
    assert rel_err(wall.norm, norm) < 1e-6
    half = 2.0**-150  # of the smallest float32
    assert abs(verdict.scale_and_go[0].double() - scale) <= 1e-6 * scale + half and verdict.scale_and_go[1] == go
    assert sum(wall.read().nonfinite) == int(counts.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 127, 128, 129, 255, 256, 257, 513, 1000])
def test_sizes(dtype, n, monkeypatch):
    small_chunks(monkeypatch)
    for aligned in True, False:
        params = make((n,), dtype=dtype)
        if not aligned:
            beside(params[0])
        params[0].grad = fenced(params[0].grad, before=1024) if aligned else params[0].grad
        with poison():
            check(params, Firewall(params, 0.5), max_norm=0.5)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, "inf", 2])
def test_a_mixed_list_in_one_launch(norm_type, monkeypatch):
    small_chunks(monkeypatch)
    params = make((300,), (7, 9), (256,), (1,), (33,), (40,), dtype=[*DTYPES, *DTYPES])
    for p in params[1::2]:
        beside(p)
    launched = []
    real = fw._sums
    monkeypatch.setattr(fw, "_sums", lambda *a: launched.append(a) or real(*a))
    check(params, Firewall(params, 1.5, norm_type), max_norm=1.5, norm_type=float(norm_type))
    assert len(launched) == 1


@pytest.mark.parametrize("on_nonfinite", ["skip", "sanitize"])
@pytest.mark.parametrize("value", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element(dtype, value, on_nonfinite, monkeypatch):
    small_chunks(monkeypatch)
    for n, where in (1, 0), (5, 4), (256, 255), (301, 0), (301, 256), (301, 300):
        params = make((20,), (n,), (3,), dtype=dtype)
        beside(params[1])
        params[1].grad[where] = value
        wall = Firewall([dict(params=params[:1]), dict(params=params[1:2]), dict(params=params[2])], 1.0, on_nonfinite=on_nonfinite)
        check(params, wall, max_norm=1.0, on_nonfinite=on_nonfinite)
        assert wall.read()[:4] == (1, int(on_nonfinite == "skip"), 0, (0, 1, 0))
        assert wall.verdict.sanitize == (on_nonfinite == "sanitize")


def test_counters_add_up_by_group():
    params = make((30, 30), (50,), (4,))
    wall = Firewall([dict(params=params[:2]), dict(params=[]), dict(params=params[2:])])
    for n in range(3):
        params[0].grad[n, :n] = math.nan
        params[2].grad[n] = math.inf
        wall()
    params[0].grad.zero_()
    params[2].grad.zero_()
    wall()
    assert wall.read()[:4] == (4, 3, 0, (0 + 1 + 3, 0, 1 + 2 + 3))
    assert wall.read().norm == pytest.approx(params[1].grad.norm().item(), rel=1e-6)


def test_groups_of_gradients_that_were_copied_or_are_missing():
    params = make((4, 6), (5,), (7,), (0,), (3, 2))
    params[0].grad, params[1].grad = torch.randn(4, 12, device=DEVICE)[:, ::2], None
    params[0].grad[1, 2] = math.nan
    params[2].grad[:3] = math.inf
    params[4].grad[2] = -math.inf
    wall = Firewall([dict(params=p) for p in params])
    wall()
    assert wall.read().nonfinite == (1, 0, 3, 0, 2)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [3e38, 1e30, 2e19, 1e-13, 1e-25, 1e-38, 1e-44])
def test_finite_is_finite(value, norm_type, monkeypatch):
    "Squares that overflow or vanish, in one chunk of several, in all of them, in one element."
    small_chunks(monkeypatch)
    for fill in (lambda g: g.fill_(value), lambda g: g[:256].fill_(value), lambda g: g.mul_(0)[400].fill_(-value)):
        params = make((700,))
        fill(params[0].grad)
        check(params, Firewall(params, 1.0, norm_type), max_norm=1.0, norm_type=norm_type)


def test_large_and_bad_at_once():
    params = make((2000,), dtype=torch.bfloat16)
    params[0].grad.fill_(1e30)
    params[0].grad[1999] = math.nan
    wall = Firewall(params, 1.0)
    assert wall().scale_and_go[1] == 0 and wall.read().nonfinite == (1,)
    assert rel_err(wall.norm, params[0].grad[:1999].double().norm()) < 1e-6


def test_nothing_but_zeros():
    params = make((500,), (3,))
    for p in params:
        p.grad.zero_()
    wall = Firewall(params, 1.0)
    assert wall().scale_and_go.tolist() == [1, 1] and wall.read() == (1, 0, 0, (0,), 0.0)
    assert clip_grad_norm_(params, 1.0) == 0 and not params[0].grad.any()


def test_nothing_at_all():
    wall = Firewall([], 1.0)
    assert wall().scale_and_go.tolist() == [1, 1] and wall.read() == (1, 0, 0, (0,), 0.0)
    assert clip_grad_norm_([], 1.0) == 0
    params = make((3,), (0, 5))
    wall = Firewall(params, 1.0)
    params[0].grad = None
    assert wall().scale_and_go.tolist() == [1, 1] and clip_grad_norm_(params, 1.0) == 0
    params[1].grad = None
    assert wall().scale_and_go.tolist() == [1, 1] and clip_grad_norm_(params, 1.0) == 0
    assert wall.read() == (2, 0, 0, (0,), 0.0)


def awkward():
    params = make((40, 30), (8, 6), (50, 3), (0, 4), (), (2, 3, 4), (1, 9))
    params[0].grad = params[0].grad.t().contiguous().t()
    params[1].grad = torch.randn(8, 12, device=DEVICE)[:, ::2]
    params[2].grad = torch.randn(50, 1, device=DEVICE).expand(50, 3)
    params[5].grad = params[5].grad.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    params[6].grad = torch.randn((), device=DEVICE).expand(1, 9)
    return params


@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_gradients_that_lie_about(max_norm):
    params = awkward()
    between = params[1].grad._base.clone()
    norm, scale, _, _ = naive_check([p.grad for p in params], max_norm)
    want = [scale * p.grad.double() for p in params]
    with poison():
        check(params, Firewall(params, max_norm), max_norm=max_norm)
        assert rel_err(clip_grad_norm_(params, max_norm), norm) < 1e-6
    assert max(rel_err(p.grad, w) for p, w in zip(params, want)) < 1e-6
    assert same_bits(params[1].grad._base[:, 1::2], between[:, 1::2])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, [torch.float32, torch.bfloat16, torch.float16]])
def test_clipping_is_torch_s(dtype, norm_type, monkeypatch):
    small_chunks(monkeypatch)
    for max_norm in 0.0, 0.7, 1, 50.0:
        params = make((300,), (64, 9), (5,), dtype=dtype)
        beside(params[1])
        theirs = copies(params)
        norm, scale, _, _ = naive_check([p.grad for p in params], max_norm, norm_type)
        want = [scale * p.grad.double() for p in params]
        assert rel_err(torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type), norm) < 1e-2
        assert rel_err(got := clip_grad_norm_(iter(params), max_norm, norm_type), norm) < 1e-6
        assert got.dtype == torch.float32 and got.shape == () and got.device == DEVICE
        for p, t, w in zip(params, theirs, want):
            ours, rounding = rel_err(p.grad, w), 2.0**-23  # of the scale and of the product
            assert ours <= max(rel_err(t.grad, w), rounding) and p.grad.dtype == t.grad.dtype


def test_within_the_limit_every_bit_stays():
    params = make((300, 70), dtype=torch.float16)
    params[0].grad[0, 0] = 6e-8  # rounds to zero under any scale below a half
    before, version = params[0].grad.clone(), params[0].grad.data_ptr()
    clip_grad_norm_(params, 1e4)
    assert same_bits(before, params[0].grad) and params[0].grad.data_ptr() == version


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("values", [(math.nan,), (math.inf,), (-math.inf,), (math.nan, math.inf)])
def test_clipping_passes_on_what_is_not_finite(values, norm_type):
    params = make((30,), (2000,))
    for n, value in enumerate(values):
        params[1].grad[1999 - n] = value
    theirs = copies(params)
    want, got = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type), clip_grad_norm_(params, 1.0, norm_type)
    assert torch.equal(got.isnan(), want.isnan()) and (got.isnan() or got == want)
    for p, t in zip(params, theirs):
        assert torch.equal(p.grad.isnan(), t.grad.isnan()) and torch.equal(p.grad.nan_to_num(), t.grad.nan_to_num())


def test_large_gradients_are_clipped_not_lost():
    params = make((100,))
    params[0].grad.fill_(1e20)
    assert rel_err(clip_grad_norm_(params, 1.0), torch.tensor(1e21)) < 1e-6
    assert rel_err(params[0].grad, torch.full((100,), 0.1)) < 1e-6


def test_one_tensor_is_a_list_of_one():
    (p,) = make((50,))
    assert rel_err(clip_grad_norm_(p, 1.0, foreach=True), torch.nn.utils.clip_grad_norm_(p, 10.0)) > 0.5
    assert Firewall(p)().scale_and_go.tolist() == [1, 1]


def test_a_limit_on_the_device_follows_its_schedule():
    params, limit = make((50,)), torch.ones((), device=DEVICE)
    wall = Firewall(params, limit)
    for value in 0.3, 0.1, 1e6:
        limit.fill_(value)
        check(params, wall, max_norm=float(limit))
    norm = params[0].grad.norm()
    clip_grad_norm_(params, limit.fill_(0.25).double())
    assert rel_err(params[0].grad.norm(), torch.tensor(0.25)) < 1e-5 and norm > 1


def test_an_optimizer_s_groups():
    params = make((5,), (6,))
    optimizer = torch.optim.SGD([dict(params=params[:1]), dict(params=params[1:], lr=0.5)], lr=0.1)
    params[1].grad[2] = math.inf
    wall = Firewall(optimizer)
    wall()
    assert wall.read().nonfinite == (0, 1)
    assert clip_grad_norm_(optimizer.param_groups, 1.0).isinf()


def test_a_tied_parameter_counts_once():
    (p,) = make((40,))
    wall = Firewall([p, p])
    wall()
    assert rel_err(wall.norm, p.grad.norm()) < 1e-6
    want = p.grad / p.grad.norm()
    clip_grad_norm_([p, p], 1.0)
    assert rel_err(p.grad, want) < 1e-5


def test_gradients_come_go_and_move(monkeypatch):
    sent = []
    for module in fw, mt:
        monkeypatch.setattr(module, "upload", lambda values, *a, real=mt.upload: sent.append(len(values)) or real(values, *a))
    params = make((30,), (40,), (50,))
    wall = Firewall(params, 1.0)
    check(params, wall, max_norm=1.0)
    assert sent  # the layout, the map, the addresses
    sent.clear()
    for p in params:
        p.grad.mul_(2)
    check(params, wall, max_norm=1.0)
    assert not sent
    kept = params[1].grad
    params[1].grad = kept.clone()
    check(params, wall, max_norm=1.0)
    assert sent == [3]  # addresses alone
    params[1].grad = None
    wall()
    assert rel_err(wall.norm, torch.cat([params[0].grad, params[2].grad]).norm()) < 1e-6
    params[1].grad = kept
    check(params, wall, max_norm=1.0)
    params[1].grad = kept.view(8, 5).t().contiguous().t().as_strided((40,), (1,))
    check(params, wall, max_norm=1.0)


def test_no_gradient_is_kept_alive():
    params = make((30,), (8, 6))
    params[1].grad = torch.randn(8, 12, device=DEVICE)[:, ::2]
    wall = Firewall(params)
    wall()
    clip_grad_norm_(params, 1.0)
    grads = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    gc.collect()
    assert [g() for g in grads] == [None, None]


def test_many_layouts_are_forgotten_again():
    params = make(*[(2,)] * 8)
    grads, wall = [p.grad for p in params], Firewall(params)
    for n in range(100):
        for i, p in enumerate(params):
            p.grad = grads[i] if n >> i & 1 else None
        wall()
    assert len(wall._gradients.layouts) <= 64


@triton.jit
def _momentum_kernel(addresses, sizes, verdict, N, SANITIZE: tl.constexpr, BLOCK: tl.constexpr):
    "m = 0.9 m + g, w -= 0.1 m, for one tensor a program."
    i = tl.program_id(0)
    w, m = mt.tensor_at(addresses, i, tl.float32, False), mt.tensor_at(addresses, N + i, tl.float32, False)
    g = mt.tensor_at(addresses, 2 * N + i, tl.float32, False)
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + i)
    if not mt.stopped(verdict):
        new = 0.9 * tl.load(m + at, mask=inside) + mt.read_gradient(g, at, inside, verdict, SANITIZE)
        tl.store(m + at, new, mask=inside)
        tl.store(w + at, tl.load(w + at, mask=inside) - 0.1 * new, mask=inside)


class Momentum:
    def __init__(self, params):
        self.params, self.m, self.steps = params, [torch.zeros_like(p) for p in params], [torch.zeros((), device=DEVICE) for _ in params]
        self.addresses, self.counts = mt.Addresses(), mt.Addresses()
        self.sizes = mt.upload([p.numel() for p in params], torch.int32, DEVICE)

    def step(self, verdict):
        table = self.addresses(self.params, self.m, [p.grad for p in self.params])
        _momentum_kernel[(len(self.params),)](table, self.sizes, verdict.scale_and_go, len(self.params), verdict.sanitize, BLOCK=256)
        mt.advance(self.counts(self.steps).view(-1), verdict.scale_and_go)

    def everything(self):
        return [t.detach().clone() for t in (*self.params, *self.m, *self.steps)]


@pytest.mark.parametrize("value", FAULTS)
def test_a_skipped_step_leaves_everything(value):
    "And the run goes on as if the step had not been asked for."
    params = make((200,), (7, 9))
    twins = copies(params)
    a, b = Momentum(params), Momentum(twins)
    wall, other = Firewall(params, 1.0), Firewall(twins, 1.0)
    for n in range(5):
        for p, t in zip(params, twins):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).to(p)
            t.grad = p.grad.clone()
        if n in (0, 3):
            params[1].grad[6, 8] = value
            before = a.everything()
            a.step(wall())
            assert same_bits(a.everything(), before)
        else:
            a.step(wall())
            b.step(other())
            assert same_bits(a.everything(), b.everything())
    assert wall.read()[:2] == (5, 2) and int(a.steps[0]) == 3


def test_a_sanitized_step_is_a_step_with_zeros():
    params = make((200,), (7, 9))
    params[0].grad[::50] = math.nan
    twins = copies(params)
    twins[0].grad.nan_to_num_(0.0)
    a, b = Momentum(params), Momentum(twins)
    a.step(Firewall(params, 1.0, on_nonfinite="sanitize")())
    b.step(Firewall(twins, 1.0)())
    assert max(map(rel_err, a.everything(), b.everything())) < 1e-6 and int(a.steps[1]) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_losses(dtype):
    wall = Firewall(make((3,)))
    x = torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf], dtype=dtype, device=DEVICE, requires_grad=True)
    masked = wall.mask_loss(x)
    assert masked.tolist() == [1, 0, -3, 0, 0] and masked.dtype == dtype and masked.shape == x.shape
    masked.backward(torch.full_like(x, 2))
    assert x.grad.tolist() == [2, 0, 2, 0, 0]
    scalar = torch.tensor(math.nan, dtype=dtype, device=DEVICE, requires_grad=True)
    wall.mask_loss(scalar).backward()
    assert scalar.grad == 0 and wall.mask_loss(torch.ones((), device=DEVICE)) == 1
    assert wall.read()[:3] == (0, 0, 4)


def test_an_upstream_nan_stops_at_a_masked_element():
    wall, x = Firewall(make((3,))), torch.tensor([1.0, math.inf], device=DEVICE, requires_grad=True)
    wall.mask_loss(x).backward(torch.tensor([1.0, math.nan], device=DEVICE))
    assert x.grad.tolist() == [1, 0]


def test_a_loss_per_token():
    wall = Firewall(make((3,)))
    x = torch.randn(6, 500, device=DEVICE).t()
    x[7, 2] = math.nan
    got = wall.mask_loss(x)
    assert got.shape == x.shape and torch.equal(got, x.nan_to_num(0.0)) and wall.read().masked_losses == 1
    assert wall.mask_loss(x[:0]).shape == (0, 6)


def test_it_reports_at_its_cadence():
    wall = Firewall(make((3,)), read_every=3)
    seen = []
    for _ in range(7):
        wall()
        seen.append(wall.report())
    assert [n for n, report in enumerate(seen, 1) if report] == [3, 6]
    assert seen[2].checked == 3 and seen[5].checked == 6


def test_two_runs_agree(monkeypatch):
    small_chunks(monkeypatch)
    params = make((3000,), (77,), dtype=torch.bfloat16)
    params[0].grad[:600] *= 1e25

    def run():
        wall, ours = Firewall(params, 1.0), copies(params)
        return wall().scale_and_go, wall.norm, clip_grad_norm_(ours, 1.0), [p.grad for p in ours]

    with poison():
        assert_deterministic(run, 3)


BAD = {
    "on_nonfinite": (ValueError, lambda p: Firewall(p, on_nonfinite="ignore")),
    "max_norm": (ValueError, lambda p: Firewall(p, -0.5)),
    "max_norm: expected a number": (ValueError, lambda p: Firewall(p, math.nan)),
    "max_norm: expected one number": (ValueError, lambda p: Firewall(p, torch.ones(2, device=DEVICE))),
    "max_norm: expected on": (ValueError, lambda p: Firewall(p, torch.ones((), device="meta"))),
    "norm_type": (ValueError, lambda p: Firewall(p, norm_type=3.0)),
    "read_every": (ValueError, lambda p: Firewall(p, read_every=0)),
    "params: expected tensors": (TypeError, lambda p: Firewall([*p, 1.0])),
    "params: expected on one device": (ValueError, lambda p: Firewall([*p, torch.zeros(3, device="meta")])),
    "loss: expected a tensor": (TypeError, lambda p: Firewall(p).mask_loss(1.0)),
    "loss: expected float32": (TypeError, lambda p: Firewall(p).mask_loss(torch.ones(2, device=DEVICE, dtype=torch.int64))),
    "loss: expected on": (ValueError, lambda p: Firewall(p).mask_loss(torch.ones(2, device="meta"))),
    "error_if_nonfinite": (ValueError, lambda p: clip_grad_norm_(p, 1.0, error_if_nonfinite=True)),
    "max_norm: .*-1": (ValueError, lambda p: clip_grad_norm_(p, -1)),
    "max_norm: .*None": (ValueError, lambda p: clip_grad_norm_(p, None)),
    "norm_type: .*0": (ValueError, lambda p: clip_grad_norm_(p, 1.0, 0)),
    "one device": (ValueError, lambda p: clip_grad_norm_([*p, torch.zeros(3, device="meta")], 1.0)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    kind, call = BAD[message]
    with pytest.raises(kind, match=message):
        call(make((3,)))


@pytest.mark.parametrize("kind", ["coo", "complex", "float64"])
def test_bad_gradients(kind):
    eye = torch.eye(3)
    grad = dict(coo=eye.to_sparse, complex=lambda: eye.to(torch.complex64), float64=eye.double)[kind]()
    good, bad = make((3,))[0], torch.nn.Parameter(torch.zeros(3, 3, dtype=grad.dtype, device=DEVICE))
    bad.grad = grad.to(DEVICE)
    for call in (lambda: Firewall([good, bad])(), lambda: clip_grad_norm_([good, bad], 1.0)):
        with pytest.raises(TypeError, match="gradient 1: expected"):
            call()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    p = torch.nn.Parameter(torch.zeros(50, device="cuda:1"))
    p.grad = torch.ones_like(p)
    assert Firewall([p], 1.0)().scale_and_go.device.index == 1 and rel_err(clip_grad_norm_([p], 1.0), torch.tensor(50.0).sqrt()) < 1e-6


@on_gpu
def test_the_host_never_waits():
    params, limit = make((3000,), (40, 50), (7,), dtype=[*DTYPES]), torch.ones((), device=DEVICE)
    wall = Firewall(params, limit)

    def step():
        wall()
        clip_grad_norm_(params, 0.5)
        for p in params:
            p.grad = torch.randn_like(p)  # at another place
        wall.mask_loss(params[0].grad)
        assert wall.report() is None

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wall.read().checked == 2


@on_gpu
def test_launches():
    from dormouse_fused.measure import launches

    params = make((3000,), (40, 50), (7,), dtype=[*DTYPES])
    assert launches(Firewall(params, 1.0)).kernels == 2
    assert launches(lambda: clip_grad_norm_(params, 1.0)).kernels == 3


@on_gpu
def test_in_a_graph():
    "Verdicts, counters and a limit that changes, replayed; an eager check between replays moves nothing of the graph's."
    params, limit = make((3000,), (40, 50), dtype=[torch.float32, torch.bfloat16]), torch.ones((), device=DEVICE)
    wall, momentum = Firewall(params, limit), Momentum(make((200,)))
    source = [p.grad.clone() for p in params]

    def step():
        for p, s in zip(params, source):
            p.grad = s.clone()
        verdict = wall()
        momentum.step(verdict)
        return clip_grad_norm_(params, limit)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step()
    inside = [p.grad for p in params]
    step()
    done = wall.read().checked
    for n, value in enumerate((1.0, 0.5, math.nan, 0.25)):
        source[0][5] = value
        limit.fill_(value if math.isfinite(value) else 1.0)
        before = momentum.everything()
        graph.replay()
        want, scale, go, _ = naive_check(source, float(limit))
        assert wall.read().checked == done + n + 1 and rel_err(wall.norm, want) < 1e-6
        assert wall.verdict.scale_and_go[1] == go and same_bits(before, momentum.everything()) == (go == 0)
        if go:
            assert rel_err(norm, want) < 1e-6 and rel_err(inside[1], scale * source[1].double()) < 1e-2
        for p in params:
            p.grad = torch.randn_like(p)
        Firewall(params)()
        clip_grad_norm_(params, 1.0)


@on_gpu
def test_a_graph_needs_a_check_before_it():
    params = make((3000,))
    wall = Firewall(params)
    with pytest.raises(RuntimeError, match="capture a graph only after"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wall()


def test_every_kernel_is_compiled_ahead_of_time():
    cases = fw.aot_cases()
    assert {c.kernel.partition(":")[2] for c in cases} >= {"_sums_kernel", "_verdict_kernel", "_scale_kernel", "_mask_loss_kernel"}
    assert not any(c.spill for c in cases)

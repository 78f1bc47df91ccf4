"What the tests of the delta rules share: upstream gradients, the comparison with float64, and errors that name the argument."

from contextlib import contextmanager

import pytest
import torch

from dormouse_fused.parity import poison, rel_err

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def upstream(x, seed=9):
    "Gradients of the output and of the last state."
    gen = torch.Generator().manual_seed(seed)
    (B, _, H, K), V = x["q"].shape, x["v"].shape[-1]
    do = torch.randn(x["v"].shape, generator=gen).to(DEVICE, x["v"].dtype)
    return do, torch.randn(B, H, K, V, generator=gen).to(DEVICE)


def values(rule, x, do, dS, **options):
    "o, S and the gradient of every tensor in x."
    x = {n: t.detach().requires_grad_() for n, t in x.items()}
    o, S = rule(**x, output_final_state=True, **options)
    grads = torch.autograd.grad([o, S], list(x.values()), [do, dS])
    return dict(o=o.detach(), S=S.detach()) | {f"d{n}": d for n, d in zip(x, grads)}


def exact(rule, x, do, dS, **options):
    "The same in float64."
    return values(rule, {n: t.double() for n, t in x.items()}, do.double(), dS.double(), **options)


def compare(rule, naive, x, tolerance, skip=(), loose=(), **options):
    "`loose` names tensors with a tolerance of their own; the sums over all tokens behind A_log and dt_bias always have one."
    do, dS = upstream(x)
    want = exact(naive, x, do, dS, **options)
    with poison():
        got = values(rule, x, do, dS, **options)
    errors = {n: rel_err(got[n], want[n]) if want[n].norm() else got[n].norm().item() for n in want if n not in skip}
    allowed = dict(dA_log=4 * tolerance, ddt_bias=4 * tolerance) | dict(loose)
    wrong = {n: f"{e:.1e}" for n, e in errors.items() if not e <= allowed.get(n, tolerance)}
    assert not wrong, wrong
    for n, t in got.items():
        assert t.dtype == (x[n[1:]].dtype if n[0] == "d" else x["v"].dtype if n == "o" else torch.float32), n


@contextmanager
def refused(error, *words):
    with pytest.raises(error) as caught:
        yield
    assert all(w in str(caught.value) for w in words), str(caught.value)

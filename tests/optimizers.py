"What the optimizers' tests share: parameters with gradients for some steps, and what an optimizer makes of them."

import torch

from dormouse_fused.triton import INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"


def problem(*shapes, steps=3, dtype=torch.float32, seed=0):
    "Parameters of these shapes, and their gradients of every step."
    gen = torch.Generator().manual_seed(seed)

    def randn():
        return [torch.randn(s, generator=gen).to(DEVICE, dtype) for s in shapes]

    return randn(), [randn() for _ in range(steps)]


def leaves(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def result(opt, params):
    "Each parameter and its state."
    return [dict(p=p.detach().clone()) | {n: t.clone() for n, t in opt.state.get(p, {}).items()} for p in params]


def steps(opt, params, grads, verdicts=None):
    for n, step in enumerate(grads):
        for p, g in zip(params, step):
            p.grad = g
        opt.step(**({} if verdicts is None else dict(verdict=verdicts[n])))
    return result(opt, params)

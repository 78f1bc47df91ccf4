"What tests of what a token reads and does over depth share."
import inspect
import re

import torch

from dormouse_fused.parity import same_bits


class Fault(torch.autograd.Function):
    "A layer whose backward raises."

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, do):
        raise ArithmeticError("on purpose")


def assert_whole_numbers_are_declared(module):
    "Whole numbers that a kernel isn't specialised on; the launcher would take others for real ones."
    for c in module.aot_cases():
        source = inspect.getsource(getattr(module, c.kernel.rpartition(":")[2]).fn)
        declared = re.search(r"do_not_specialize=\[([^]]*)\]", source)
        whole = {n for n, kind in c.signature.items() if kind == "i32"}
        assert whole == set(re.findall(r"\w+", declared[1]) if declared else ()), c.kernel


def assert_captured(step, args, others):
    "A graph of step(*args), replayed with other values, gives what a call gives."
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*args)
    with torch.no_grad():
        for a, b in zip(args, others):
            a.copy_(b)
    graph.replay()
    assert same_bits(captured, step(*args))


def assert_never_waits(step, *calls):
    "No call of step, each with its arguments, after a first one."
    step(*calls[0])
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for args in calls:
            step(*args)
    finally:
        torch.cuda.set_sync_debug_mode(before)

"Tables of addresses, kinds, exact numbers, verdicts and step counts; on a GPU also graphs."

import math
import struct

import pytest
import torch
import triton
import triton.language as tl

from dormouse_fused import multi_tensor as mt
from dormouse_fused.parity import same_bits
from dormouse_fused.triton import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET else "cuda:0")
on_gpu = pytest.mark.skipif(INTERPRET, reason="needs a GPU")


@pytest.fixture
def sent(monkeypatch):
    "How many numbers each upload sent."
    counts, real = [], mt.upload
    monkeypatch.setattr(mt, "upload", lambda values, *a: counts.append(len(values)) or real(values, *a))
    return counts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[], [7], [0, -1, 2**31 - 1], list(range(1000))])
def test_upload(values, dtype):
    got = mt.upload(values, dtype, DEVICE)
    assert got.tolist() == values and got.dtype == dtype and got.device == DEVICE


def test_uploads_of_large_addresses():
    assert mt.upload([2**63 - 1], torch.int64, DEVICE).item() == 2**63 - 1


def tensors(n=3, size=5):
    return [torch.randn(size, device=DEVICE) for _ in range(n)]


def places(*lists):
    return [[t.data_ptr() for t in row] for row in lists]


def test_a_table_is_sent_again_only_if_something_moved(sent):
    a, b, addresses = tensors(), tensors(), mt.Addresses()
    first = addresses(a, b)
    assert first.tolist() == places(a, b) and first.dtype == torch.int64 and first.device == DEVICE and sent == [6]
    for t in a:
        t.mul_(2)
    assert addresses(a, list(b)) is first and sent == [6]
    b[1] = b[1].clone()
    second = addresses(a, b)
    assert second is not first and second.tolist() == places(a, b) and sent == [6, 6]
    assert first.tolist() != second.tolist() and addresses(a, b) is second
    shorter = addresses(a[:2], b[:2])
    assert shorter.tolist() == places(a[:2], b[:2]) and sent == [6, 6, 4]


def test_tables_of_one_list_and_of_views():
    base = torch.zeros(40, device=DEVICE)
    views = [base[1:3], base[7:], base[:0], base.bfloat16()]
    assert mt.Addresses()(views).tolist() == places(views)


def test_two_tables_don_t_know_each_other(sent):
    a, one, two = tensors(), mt.Addresses(), mt.Addresses()
    assert one(a) is not two(a) and sent == [3, 3]


@pytest.mark.parametrize("sizes,chunk", [([5], 5), ([6], 5), ([1, 2, 3], 1), ([0, 7, 0, 16, 1], 8), ([10**6], 10**5)])
def test_every_element_has_one_program(sizes, chunk):
    seen = [[0] * size if size < 100 else None for size in sizes]
    rows = mt.chunk_map(sizes, chunk, DEVICE)
    assert rows.dtype == torch.int32 and rows.shape == (sum(-(-s // chunk) for s in sizes), 2)
    for i, c in rows.tolist():
        assert 0 <= c * chunk < sizes[i]
        for at in range(c * chunk, min(sizes[i], (c + 1) * chunk)) if seen[i] else []:
            seen[i][at] += 1
    assert all(set(s) <= {1} for s in seen if s is not None)


def test_no_elements_no_programs():
    assert mt.chunk_map([], 4, DEVICE).shape == (0, 2) and mt.chunk_map([0, 0], 4, DEVICE).shape == (0, 2)


@triton.jit
def _double_kernel(addresses, sizes, N, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    i, at = tl.program_id(0), tl.arange(0, BLOCK)
    x, y = mt.tensor_at(addresses, i, DTYPE, ALIGNED), mt.tensor_at(addresses, N + i, DTYPE, ALIGNED)
    inside = at < tl.load(sizes + i)
    tl.store(y + at, tl.load(x + at, mask=inside), mask=inside)


def test_kinds_and_pointers():
    "A copy of every tensor: three dtypes, views beside multiples of 16, one launch a kind."
    base = {d: torch.randn(50, device=DEVICE).to(d) for d in mt.TYPES}
    x = [base[d][start:start + n] for d in mt.TYPES for start, n in ((0, 50), (1, 3), (3, 40), (16, 7), (0, 50), (8, 1))]
    y = [torch.full_like(t, math.nan) for t in x]
    kinds = mt.by_kind(x, y)
    assert len(kinds) == 6 and sorted(i for indices in kinds.values() for i in indices) == list(range(len(x)))
    for ((dtype, other), aligned), indices in kinds.items():
        assert dtype == other and all(x[i].dtype == y[i].dtype == dtype for i in indices)
        assert all((x[i].data_ptr() % 16 == 0) == aligned for i in indices)
        table = mt.Addresses()([x[i] for i in indices], [y[i] for i in indices])
        sizes = mt.upload([x[i].numel() for i in indices], torch.int32, DEVICE)
        _double_kernel[(len(indices),)](table, sizes, len(indices), DTYPE=mt.TYPES[dtype], ALIGNED=aligned, BLOCK=64)
    assert same_bits(x, y)


def test_kinds_of_pairs():
    a, b = torch.zeros(8, device=DEVICE), torch.zeros(8, device=DEVICE, dtype=torch.bfloat16)
    f, h = torch.float32, torch.bfloat16
    assert mt.by_kind([a, a, a[1:]], [a, b, a]) == {((f, f), True): [0], ((f, h), True): [1], ((f, f), False): [2]}
    assert mt.by_kind([]) == {}
    with pytest.raises(ValueError):
        mt.by_kind([a, a], [a])


@triton.jit(do_not_specialize=["x"])
def _real_kernel(x, out):
    tl.store(out, mt.real(x))


def through_kernel(x):
    out = torch.full((), 77.0, dtype=torch.float64, device=DEVICE)
    _real_kernel[(1,)](mt.bits(x), out)
    return out.item()


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 0.999, math.pi, 1e-8, 1e308, 5e-324, -5e-324, 2.0**-1022, 2.0**52 + 0.5]


@pytest.mark.parametrize("x", [*SPECIAL, math.inf, -math.inf, math.nan, 0, 1, -3, 2**40])
def test_numbers_arrive_whole(x):
    assert struct.pack("<d", through_kernel(x)) == struct.pack("<d", x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("x", [0.0, 1.0, -2.0, 0.1, 1e-5])
def test_numbers_from_the_device(x, dtype):
    tensor = torch.tensor(x, device=DEVICE).to(dtype)
    assert mt.bits(tensor) is tensor and through_kernel(tensor) == float(tensor)
    assert through_kernel(tensor.reshape(1)) == float(tensor)
    tensor.add_(1)
    assert through_kernel(tensor) == float(tensor)


def test_one_number_only():
    for wrong in torch.ones(2, device=DEVICE), torch.ones(0, device=DEVICE):
        with pytest.raises(ValueError, match="one number"):
            mt.bits(wrong)


def verdict(scale, go):
    return torch.tensor([scale, go], dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 700])
def test_step_counts(n):
    steps = [torch.full((), float(i), device=DEVICE) for i in range(n)]
    fence = torch.full((4,), 5.0, device=DEVICE)
    table = mt.Addresses()(steps).view(-1)
    for go, added in (verdict(0.5, 1.0), 1), (verdict(math.nan, 0.0), 1), (None, 2):
        mt.advance(table, go)
        assert [float(s) for s in steps] == [i + added for i in range(n)]
    assert (fence == 5).all()


def test_no_step_counts():
    mt.advance(torch.zeros(0, dtype=torch.int64, device=DEVICE), verdict(1.0, 1.0))


@triton.jit
def _read_kernel(grad, out, verdict, N, SANITIZE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    g = mt.read_gradient(grad, at, (at < N) if MASKED else None, verdict, SANITIZE)
    if not mt.stopped(verdict):
        tl.store(out + at, g, mask=at < N)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", mt.TYPES)
def test_gradients_as_the_verdict_wants_them(dtype, masked):
    n = 13 if masked else 16
    grad = torch.randn(16, device=DEVICE).to(dtype)
    grad[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0], device=DEVICE)
    for go in None, verdict(0.3, 1.0), verdict(0.3, 0.0):
        for sanitize in False, True:
            out = torch.full((16,), 7.0, device=DEVICE)
            _read_kernel[(1,)](grad, out, go, n, SANITIZE=sanitize, MASKED=masked, BLOCK=16)
            want = torch.full((16,), 7.0, device=DEVICE)
            if go is None or go[1]:
                g = torch.where(grad.isfinite(), grad, 0.0) if sanitize else grad
                want[:n] = (g.float() if go is None else g.float() * go[0])[:n]
            assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(9.0), want.nan_to_num(9.0))


def test_a_verdict_is_two_numbers_and_a_choice():
    v = mt.Verdict(verdict(1.0, 1.0))
    assert v.sanitize is False and v.scale_and_go.shape == (2,) and mt.Verdict(v.scale_and_go, True).sanitize


def test_wide_loads_are_what_a_promise_gives():
    "Compiled for a GPU in a process of its own, since here kernels may be the interpreter's."
    import os
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    code = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from dormouse_fused.multi_tensor import read_gradient, tensor_at
@triton.jit
def kernel(addresses, verdict, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    at = tl.arange(0, 1024)
    x = tensor_at(addresses, tl.program_id(0), DTYPE, ALIGNED)
    tl.store(x + at, read_gradient(x, at, None, verdict, True).to(DTYPE))
for dtype in tl.float32, tl.bfloat16:
    for aligned in True, False:
        types = dict(addresses="*i64", verdict="*fp32", DTYPE="constexpr", ALIGNED="constexpr")
        source = triton.compiler.ASTSource(kernel, types, dict(DTYPE=dtype, ALIGNED=aligned))
        ptx = triton.compile(source, GPUTarget("cuda", 90, 32), dict(num_warps=4)).asm["ptx"]
        print(int("ld.global.v4" in ptx and "st.global.v4" in ptx))
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.py").write_text(code)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        env = os.environ | dict(TRITON_INTERPRET="0", PYTHONPATH=path)
        child = subprocess.run([sys.executable, f"{folder}/kernel.py"], env=env, capture_output=True, text=True)
    assert child.stdout.split() == ["1", "0", "1", "0"], child.stderr


def test_ahead_of_time_cases():
    assert [set(c.signature) for c in mt.aot_cases()] == [{"addresses", "N", "verdict"}, {"addresses", "N"}]


@triton.jit
def _increase_kernel(addresses):
    x = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(x, tl.load(x) + 1.0)


def increase(addresses, x):
    _increase_kernel[(len(x),)](addresses(x).view(-1))


@on_gpu
def test_the_host_never_waits():
    addresses, x = mt.Addresses(), tensors()
    increase(addresses, x)
    table = addresses(x).view(-1)
    mt.advance(table)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = [t.clone() for t in x]
        increase(addresses, moved)
        mt.advance(addresses(x).view(-1), torch.ones(2, device=DEVICE))
        mt.chunk_map([3000, 5], 16, DEVICE)
        mt.chunk_map([], 16, DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(m, torch.cat([t[:1] - 1, t[1:]]) + (torch.arange(5, device=DEVICE) == 0)) for m, t in zip(moved, x))


@on_gpu
@pytest.mark.parametrize("moved", [False, True])
def test_a_graph_keeps_its_table(moved):
    "Steps outside of the graph, with tensors elsewhere, between its replays."
    addresses, outside = mt.Addresses(), tensors(4)
    increase(addresses, outside)
    inside = tensors(4) if moved else outside
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        increase(addresses, inside)
    for n in range(3):
        before, others = [t.clone() for t in inside], tensors(4)
        increase(addresses, others)  # another table goes up, by other memory
        torch.cuda.synchronize()
        untouched = [t.clone() for t in others]
        graph.replay()
        assert all(i[0] == b[0] + 1 and torch.equal(i[1:], b[1:]) for i, b in zip(inside, before)), n
        assert same_bits(others, untouched)
        assert addresses(others).tolist() == places(others)


@on_gpu
def test_tensors_made_in_the_capture():
    addresses, out = mt.Addresses(), [torch.zeros(5, device=DEVICE) for _ in range(3)]
    increase(addresses, tensors())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [torch.ones(5, device=DEVICE) for _ in range(3)]
        increase(addresses, made)
        for o, m in zip(out, made):
            o.copy_(m)
    for _ in range(3):
        for o in out:
            o.zero_()
        graph.replay()
        assert all(o.tolist() == [2, 1, 1, 1, 1] for o in out)


@on_gpu
def test_several_captures_in_a_row():
    addresses, x = mt.Addresses(), [tensors() for _ in range(mt.SPARE)]
    increase(addresses, tensors())
    graphs = [torch.cuda.CUDAGraph() for _ in x]
    before = [[t.clone() for t in row] for row in x]
    for graph, row in zip(graphs, x):
        with torch.cuda.graph(graph):
            increase(addresses, row)
    increase(addresses, tensors())
    for graph in [*graphs, *graphs[::-1]]:
        graph.replay()
    assert all(t[0] == b[0] + 2 for row, old in zip(x, before) for t, b in zip(row, old))


@on_gpu
@pytest.mark.parametrize("before", [None, 2])
def test_a_capture_without_a_step_before_it(before):
    addresses, x = mt.Addresses(), tensors()
    _increase_kernel[(3,)](mt.Addresses()(tensors()).view(-1))  # compiled already
    if before:
        addresses(tensors(before))
    with pytest.raises(RuntimeError, match="capture a graph only after"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        increase(addresses, x)
    increase(addresses, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        increase(addresses, tensors())
    graph.replay()


@on_gpu
def test_a_skipped_step_in_a_graph():
    steps, go, addresses = [torch.zeros((), device=DEVICE) for _ in range(3)], verdict(1.0, 1.0), mt.Addresses()
    mt.advance(addresses(steps).view(-1), go)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mt.advance(addresses(steps).view(-1), go)
    for value in 1.0, 0.0, 1.0:
        go[1] = value
        graph.replay()
    assert [float(s) for s in steps] == [3, 3, 3]

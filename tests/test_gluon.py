"Gluon's building blocks, and the interpreter that runs them without a GPU."
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dormouse_fused.gluon import (
    _twice_kernel,
    barriers,
    interpret,
    nearest,
    put,
    signal,
    take,
    tile_index,
    tile_layout,
    token_rows,
)


@gluon.jit
def _through_parts(x, y, PARTS: gl.constexpr):
    L: gl.constexpr = tile_layout(gl.float32)
    i, j = tile_index(L)
    s = gl.allocate_shared_memory(gl.bfloat16, [PARTS, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
    put(s, gl.load(x + (i * 64 + j)), gl.bfloat16, PARTS)
    gl.store(y + (i * 64 + j), take(s, L, PARTS))


@pytest.mark.parametrize(("count", "bits"), [(2, 16), (3, 23)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_parts_keep_their_bits(count, bits, size):
    x = size * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    y = torch.full_like(x, float("nan"))
    interpret(_through_parts, 1, x, y, PARTS=count)
    assert ((y - x).abs() <= 2.0**-bits * x.abs()).all()


def test_a_part_of_a_16_bit_number_is_itself():
    x = torch.randn(64, 64).bfloat16().float()
    y = torch.full_like(x, float("nan"))
    interpret(_through_parts, 1, x, y, PARTS=2)
    assert torch.equal(x, y)


@gluon.jit
def _to_tf32(x, y):
    i, j = tile_index(tile_layout(gl.float32))
    gl.store(y + (i * 64 + j), nearest(gl.load(x + (i * 64 + j))))


def test_nearest_keeps_tf32s_digits_and_rounds():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[0, :3] = torch.tensor([1.0 + 2.0**-11, 1.0 + 2.0**-12, -1.0 - 2.0**-10])  # a tie, below a tie, in TF32
    y = torch.full_like(x, float("nan"))
    interpret(_to_tf32, 1, x, y)
    assert not (y.view(torch.int32) & 0x1FFF).any()
    assert ((y - x).abs() <= 2.0**-11 * x.abs()).all()
    assert y[0, :3].tolist() == [1.0 + 2.0**-10, 1.0, -1.0 - 2.0**-10]


@gluon.jit
def _copy_rows(x, y, T, H):
    L: gl.constexpr = tile_layout(gl.bfloat16)
    p, m = token_rows(x, gl.program_id(0) // H, gl.program_id(0) % H, 64, T, H, L)
    r, _ = token_rows(y, gl.program_id(0) // H, gl.program_id(0) % H, 64, T, H, L)
    gl.store(r, gl.load(p, mask=m, other=0.0), mask=m)


def test_token_rows_stop_at_the_last_token():
    x = torch.randn(2, 100, 3, 64).bfloat16()
    y = torch.zeros_like(x)
    interpret(_copy_rows, 6, x, y, 100, 3)
    assert torch.equal(y[:, 64:], x[:, 64:])
    assert not y[:, :64].any()


@gluon.jit
def _out_of_bounds(x):
    i, j = tile_index(tile_layout(gl.float32))
    gl.store(x + (i * 64 + j + 1), 0.0)


def test_the_interpreter_checks_bounds():
    with pytest.raises(IndexError, match="leaves the tensor"):
        interpret(_out_of_bounds, 1, torch.zeros(64, 64))


@gluon.jit
def _wrong_dtype(x):
    s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
    i, j = tile_index(tile_layout(gl.float32))
    s.store(gl.load(x + (i * 64 + j)))


def test_the_interpreter_checks_dtypes():
    with pytest.raises(TypeError, match="float32 into shared memory of torch.bfloat16"):
        interpret(_wrong_dtype, 1, torch.zeros(64, 64))


@gluon.jit
def _writer(x_s, full, empty, N: gl.constexpr):
    for n in range(N):
        mbarrier.wait(empty.index(n % 2), n // 2 % 2 ^ 1)
        x_s.index(n % 2).store(gl.zeros([64], gl.float32, None) + n)
        signal(full.index(n % 2))


@gluon.jit
def _reader(x_s, y, full, empty, N: gl.constexpr):
    for n in range(N):
        mbarrier.wait(full.index(n % 2), n // 2 % 2)
        gl.store(y + n * 64 + gl.arange(0, 64, None), x_s.index(n % 2).load(None))
        signal(empty.index(n % 2))


@gluon.jit
def _hand_over(y, N: gl.constexpr, COUNT: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float32, [2, 64], None)
    full, empty = barriers(2, COUNT), barriers(2, 1)
    gl.warp_specialize([(_writer, (x_s, full, empty, N)), (_reader, (x_s, y, full, empty, N))], [4], [64])


def test_jobs_hand_tiles_over_in_turn():
    y = torch.full((7, 64), float("nan"))
    interpret(_hand_over, 1, y, N=7, COUNT=1)
    assert torch.equal(y, torch.arange(7.0)[:, None].expand(7, 64))


def test_a_barrier_that_nobody_fills_is_an_error(monkeypatch):
    import threading

    wait_for = threading.Condition.wait_for
    monkeypatch.setattr(threading.Condition, "wait_for", lambda self, done, timeout=None: wait_for(self, done, 0.1))
    with pytest.raises(RuntimeError, match="never filled"):
        interpret(_hand_over, 1, torch.zeros(7, 64), N=7, COUNT=2)


def test_products_of_small_integers_are_exact():
    a, b = (torch.randint(-4, 5, (64, 64)).float() for _ in range(2))
    c = torch.empty(64, 64)
    interpret(_twice_kernel, 1, a, b, c, PARTS=2)
    assert torch.equal(c, a @ b.mT @ b)

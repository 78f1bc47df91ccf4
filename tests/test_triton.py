"""What chapter 03 can't say well: import orders, edge shapes, bad input, and every kernel compiled for every target."""

import importlib
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from book import Book
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from dormouse_fused import triton as dt
from dormouse_fused.parity import assert_deterministic, errors, evaluate, fenced, in_float64, rel_err, same_bits
from dormouse_fused.triton import check_tensor, l2norm, naive_l2norm, tl, triton

DEVICE = "cpu" if dt.INTERPRET else "cuda"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def python(code, **env):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **env}
    )
    return run.stdout + run.stderr


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("first", "env", "interpret"),
    [
        ("", {}, True),
        ("", {"TRITON_INTERPRET": "0"}, False),
        ("import triton", {}, False),
        ("import triton", {"TRITON_INTERPRET": "1"}, True),
    ],
)
def test_who_decides_about_the_interpreter(first, env, interpret):
    code = f"{first}\nimport torch\nfrom dormouse_fused import triton as dt\nprint(dt.INTERPRET)\ndt.l2norm(torch.ones(2, 3))"
    out = python(code, **env)
    assert out.startswith(str(interpret))
    assert interpret or "RuntimeError: x is on the CPU" in out and "import dormouse_fused before triton" in out


@WITHOUT_GPU
def test_numpy_is_asked_for_where_it_is_needed():
    code = "import sys\nsys.modules['numpy'] = None\nfrom dormouse_fused import triton as dt\nprint(dt.INTERPRET)\nimport torch\n"
    out = python(code + "dt.l2norm(torch.ones(2, 3))")
    assert "False" in out.splitlines() and "RuntimeError: x is on the CPU" in out and "install numpy" in out


def test_float32_precision_follows_the_switch():
    before = torch.get_float32_matmul_precision()
    try:
        for precision, want in (("highest", "ieee" if torch.version.hip else "tf32x3"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(precision)
            assert dt.fp32_precision(torch.float32) == want
            assert dt.fp32_precision(torch.bfloat16) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


@triton.jit
def _store_cast_kernel(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, dt.cast(tl.load(x + i, mask=i < n), y.dtype.element_ty), mask=i < n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_cast_rounds_as_pytorch_does(source, dtype):
    special = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.3895e38, 3.4e38, float("inf"), -float("inf")]
    x = torch.cat([torch.tensor(special), torch.randn(1000, generator=torch.Generator().manual_seed(0))]).to(DEVICE, source)
    y = torch.empty_like(x, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy remarks on overflow to float16
        _store_cast_kernel[(1,)](x, y, len(x), 1024)
    assert same_bits(y, x.to(dtype))
    nan = torch.full((1,), float("nan"), device=DEVICE, dtype=source)
    _store_cast_kernel[(1,)](nan, y, 1, 1024)
    assert y[0].isnan()


@triton.jit
def _dot_kernel(a, b, c, N: tl.constexpr, PREC: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i
    tl.store(c + at, dt.dot(tl.load(a + at), tl.load(b + at), PREC))


@pytest.mark.parametrize(
    ("dtype", "prec", "tol"),
    [(torch.bfloat16, "tf32", 1e-6), (torch.float16, "tf32", 1e-6), (torch.float32, "tf32x3", 2e-6), (torch.float32, "ieee", 1e-6)],
)
def test_dot(dtype, prec, tol):
    a, b, c = randn(32, 32, dtype=dtype), randn(32, 32, dtype=dtype, seed=1), torch.empty(32, 32, device=DEVICE)
    _dot_kernel[(1,)](a, b, c, 32, prec)
    assert rel_err(c, a.double() @ b.double()) < tol


@pytest.mark.parametrize("shape", [(64,), (1, 1), (257, 3), (2, 3, 5, 48), (3, 4097), (1, 16385), (65, 64)])
@pytest.mark.parametrize("dtype", dt.FLOATS)
def test_l2norm_against_float64(shape, dtype):
    inputs, dy = dict(x=randn(*shape, dtype=dtype), eps=4.0), randn(*shape, dtype=dtype, seed=1)
    found = errors(evaluate(l2norm, inputs, [dy]), evaluate(naive_l2norm, in_float64(inputs), [dy]))
    assert max(found.values()) < {torch.float32: 3e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[::2],
        lambda x: x[..., ::2],
        lambda x: x[..., 3:],
        lambda x: x[:1].expand(6, -1, -1),
        lambda x: x.flip(0).permute(2, 0, 1),
    ],
)
def test_l2norm_of_views(view):
    x = randn(6, 5, 40)
    leaf = x.clone().requires_grad_()
    y = l2norm(view(leaf))
    (dx,) = torch.autograd.grad(y, leaf, view(randn(6, 5, 40, seed=1)))
    wide = x.double().requires_grad_()
    want = naive_l2norm(view(wide))
    (dwant,) = torch.autograd.grad(want, wide, view(randn(6, 5, 40, seed=1)).double())
    assert y.is_contiguous() and rel_err(y, want) < 2e-7 and rel_err(dx, dwant) < 3e-7


@pytest.mark.parametrize("before", [1, 2, 3])
def test_l2norm_of_misaligned_memory(before):
    x = fenced(randn(9, 33), before)
    assert rel_err(l2norm(x), naive_l2norm(x.double())) < 2e-7


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 5)])
def test_l2norm_of_nothing(shape):
    x = torch.empty(shape, device=DEVICE, requires_grad=True)
    y = l2norm(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape


def test_a_bad_row_stays_alone():
    x = randn(70, 64)
    want = l2norm(x)
    x[13], x[14, 5] = 0.0, float("nan")
    got = l2norm(x)
    assert torch.equal(got[13], torch.zeros_like(got[13])) and got[14].isnan().all()
    keep = torch.ones(70, dtype=torch.bool, device=DEVICE)
    keep[13:15] = False
    assert same_bits(got[keep], want[keep])


def test_large_float16_does_not_overflow():
    x = torch.full((2, 64), 6e4, device=DEVICE, dtype=torch.float16)
    assert rel_err(l2norm(x), torch.full_like(x, 0.125)) < 1e-3


def test_two_backwards_agree_and_accumulate():
    x = randn(5, 48).requires_grad_()
    y = l2norm(x)
    y.backward(torch.ones_like(y), retain_graph=True)
    once = x.grad.clone()
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, 2 * once)
    assert_deterministic(lambda: torch.autograd.grad(l2norm(x).sum(), x))


def test_no_gradient_is_prepared_where_none_is_wanted():
    x = randn(5, 48)
    assert l2norm(x).grad_fn is None
    x.requires_grad_()
    with torch.no_grad():
        assert l2norm(x).grad_fn is None
    with torch.inference_mode():
        assert l2norm(x).is_inference()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert l2norm(x).dtype == torch.float32


def test_a_second_derivative_is_refused():
    x = randn(5, 48).requires_grad_()
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        torch.autograd.grad(l2norm(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        torch.autograd.functional.hessian(lambda x: l2norm(x).sum(), x.detach())


def test_in_place_change_of_the_saved_input_is_noticed():
    x = randn(5, 48).requires_grad_()
    z = 1 * x
    y = l2norm(z)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, "x: expected a tensor, got list"),
        (torch.ones(()), ValueError, r"x: expected shape \[..., D\], got \[\]"),
        (torch.ones(2, dtype=torch.float64), TypeError, "x: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float64"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.ones(1, 65537), ValueError, r"x: expected D <= 65536, got \[1, 65537\]"),
    ],
)
def test_bad_input(x, error, message):
    with pytest.raises(error, match=message):
        l2norm(x.to(DEVICE) if isinstance(x, torch.Tensor) else x)


@pytest.mark.parametrize(
    ("shape", "want", "fits"),
    [
        ((2, 3), (2, 3), True),
        ((2, 3), (2, "D"), True),
        ((2, 3), ("D",), False),
        ((2, 3), (..., 3), True),
        ((2, 3), (..., "B", "T", "D"), False),
        ((2, 3), (..., 4), False),
        ((), (...,), True),
        ((), (), True),
        ((0, 3), (0, 3), True),
        ((2, 3, 4), (2, 3), False),
    ],
)
def test_shapes(shape, want, fits):
    x = torch.ones(shape)
    if fits:
        check_tensor("q", x, want)
    else:
        with pytest.raises(ValueError, match="q: expected shape"):
            check_tensor("q", x, want)


def test_dtype_and_device():
    check_tensor("q", torch.ones(2), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(TypeError, match="q: expected torch.float16, got torch.float32"):
        check_tensor("q", torch.ones(2), dtype=torch.float16)
    with pytest.raises(ValueError, match="q: expected on meta, got cpu"):
        check_tensor("q", torch.ones(2), device=torch.device("meta"))


def test_shapes_without_values():
    assert l2norm(torch.empty(3, 4, device="meta")).shape == (3, 4)
    with FakeTensorMode():
        x = torch.empty(4, 3, device=DEVICE).T.requires_grad_()
        y = l2norm(x)
        y.sum().backward()
        assert y.is_contiguous() and x.grad.shape == (3, 4)


def test_compiled_with_sizes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: l2norm(x) * 2, fullgraph=True, dynamic=True)
    for n in (4, 7, 33):
        x = randn(n, 24).requires_grad_()
        assert same_bits(*(torch.autograd.grad(f(x).sum(), x) for f in (compiled, lambda x: l2norm(x) * 2)))


def _scale(x, y, s):
    return x * s if y is None else x * s + y


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, s):
        ctx.s = s
        return dt.below_autograd(_scale_op, x, y, s)

    @staticmethod
    @dt.first_order
    def backward(ctx, d):
        return d * ctx.s, d if ctx.needs_input_grad[1] else None, None


def _scale_fake(x, y, s):
    return torch.empty_like(x)


_scale_op = dt.register("scale(Tensor x, Tensor? y, float s) -> Tensor", _scale, _scale_fake, _Scale)


def test_register_takes_optional_tensors_and_some_gradients():
    x, y = torch.ones(3), torch.ones(3, requires_grad=True)
    assert _scale_op(x, None, 2.0).grad_fn is None
    assert torch.equal(torch.autograd.grad(_scale_op(x, y, 2.0).sum(), y)[0], torch.ones(3))
    assert set(torch.library.opcheck(_scale_op, (x, y, 2.0)).values()) == {"SUCCESS"}


def test_register_twice_takes_the_second():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    first = dt.register("again(Tensor x) -> Tensor", one, one)
    assert first(torch.zeros(())) == 1
    assert dt.register("again(Tensor x) -> Tensor", two, two)(torch.zeros(())) == 2


def test_async_guard_finds_a_read():
    x = randn(4)
    assert dt.assert_async(lambda x, n: x * n, x, 3).shape == x.shape
    for read in (lambda x: x * x.sum().item(), lambda x: x if x.sum() > 0 else -x, lambda x: x[x > 0], lambda x: x.nonzero()):
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            dt.assert_async(read, x)


def test_ahead_of_time_errors_name_their_reason():
    case = dt.aot_cases(dims=(64,), dtypes=("bf16",))[0]
    with pytest.raises(RuntimeError, match="_no_such_kernel"):
        dt.aot_all([case._replace(kernel="dormouse_fused.triton:_no_such_kernel")])
    with pytest.raises(ValueError, match="export"):
        kernel = type(dt._l2norm_fwd_kernel)(lambda x: None)
        kernel.fn.__module__ = "__main__"
        dt.aot(kernel, {}, {})


def kernels(module):
    jitted = type(dt._l2norm_fwd_kernel)
    return {name for name, value in vars(module).items() if isinstance(value, jitted) and name.endswith("_kernel")}


MODULES = [importlib.import_module(f"dormouse_fused.{path.stem}") for path in Book().modules]


@pytest.mark.parametrize("module", [m for m in MODULES if kernels(m)], ids=lambda m: m.__name__)
def test_every_kernel_has_a_case(module):
    "What `tools/aot.py` compiles for every target, which the gate runs after the tests."
    cases = module.aot_cases()
    assert {c.kernel.partition(":")[2] if isinstance(c.kernel, str) else c.kernel.fn.__name__ for c in cases} == kernels(module)
    for arch in dt.TARGETS:
        assert dt.for_targets(cases, (arch,)) or module.__name__.endswith(("hopper", "mma", "gluon")), arch


def test_a_check_remembers_what_passed():
    seen = []

    @dt.remembered
    def check(x, flag, number):
        seen.append((x, flag, number))
        if x.shape[0] == 3:
            raise ValueError("x: expected no 3")

    for x in torch.ones(2), torch.zeros(2):
        check(x, True, 1.0)
        check(x, True, 2.0)
    assert len(seen) == 1
    for other in (torch.ones(4), True, 1.0), (torch.ones(2).double(), True, 1.0), (torch.ones(2), False, 1.0), (torch.ones(2), True, None):
        check(*other)
    assert len(seen) == 5
    for _ in range(2):
        with pytest.raises(ValueError, match="no 3"):
            check(torch.ones(3), True, 1.0)
    assert len(seen) == 7


def product(*lines):
    lines = ["WARPGROUP.ARRIVE", *lines, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "IMAD.MOV.U32 R93, RZ, RZ, R24"]
    return "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines))


OPERAND = "PRMT R92, R95, 0x5410, R92", "CS2R R94, SRZ"
FIRST = "HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR28].tnspB, RZ, !UPT"
LAST = "@P0 HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR28].tnspB, R24, gsb0"
CONSTANT = "IMAD.MOV.U32 R93, RZ, RZ, 0x3f803f80"


@pytest.mark.parametrize("code,registers", [
    ((*OPERAND, CONSTANT, FIRST, LAST), []),
    ((*OPERAND, FIRST, CONSTANT, LAST), [93, 93]),  # as CUDA 12.8 has it: not there yet, and then too late
    ((*OPERAND, CONSTANT, FIRST, LAST, "LDG.E.64 R94, desc[UR8][R2.64]"), [94, 95]),
    ((*OPERAND, CONSTANT, FIRST, LAST, "STG.E.64 desc[UR8][R2.64], R94"), []),
    ((*OPERAND, CONSTANT, LAST, "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], gdesc[UR8], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1",
      CONSTANT), []),
    ((*OPERAND, CONSTANT, LAST, LAST, "WARPGROUP.DEPBAR.LE gsb0, 0x1", CONSTANT), [93]),
])  # fmt: skip
def test_registers_of_a_running_product(code, registers):
    assert [n for _, n, _ in dt.operand_hazards(product(*code))] == registers


class Noting:
    "A kernel that runs nothing and notes the arguments of each launch, and what was compiled for it."

    def __init__(self, arg_names, do_not_specialize):
        self.arg_names, self.do_not_specialize, self.compiled, self.heard = arg_names, do_not_specialize, 0, []

    def __getitem__(self, grid):
        return self.first

    def first(self, *args):
        kinds = dt._seen(args)[1]
        self.compiled += 1
        self.heard.append((kinds, dt._seen(args)[0]))
        return SimpleNamespace(function=None, packed_metadata=None, run=lambda *a: self.heard.append((kinds, list(a[9:]))))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dt, "INTERPRET", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


@pytest.mark.parametrize("same_kind", [True, False])
def test_launcher_takes_an_int_where_a_real_number_is_meant(as_on_a_gpu, same_kind):
    "Triton compiles an int's kind into the kernel, and the value 1 itself; the next call's scale would be ignored."
    x, kernel = torch.zeros(4), Noting(["x", "scale", "T", "C"], ["T"])
    launch = dt.launcher(kernel, same_kind, C=64)
    for scale in (1, 0.5, 2):
        launch(1, x, scale, 7)
    assert [(a[1], type(a[1]), a[2], type(a[2])) for _, a in kernel.heard] == [(float(s), float, 7, int) for s in (1, 0.5, 2)]


def test_what_a_compiled_kernel_depends_on():
    "Triton compiles whole numbers in a tuple in, if they are 1 or multiples of 16, whatever `do_not_specialize` says."
    x = torch.zeros(8)
    cases = (
        [(1, 4)], [(4, 4)], [(4, 16)], [(x, x)], [(x, x[1:])], [(x.double(), x)], [4], [1 << 40], [1.0], [None],
        [x, x], [x, x[1:]], [x, None], [(x,), x], [(x, None), x],
    )  # fmt: skip
    seen = [dt._seen(args) for args in cases]
    assert len({tuple(kinds) for _, kinds in seen}) == len(cases)
    assert dt._seen([(4, 5), 16])[1] == dt._seen([(6, 7), 1])[1]
    for n, ((values, _), args) in enumerate(zip(seen, cases)):
        got, _, odd = dt._written(dt._pattern(args))(*args)
        assert list(got) == values and bool(odd) == (n in (4, 7, 11))


def test_launches_find_what_was_compiled_for_such_arguments(as_on_a_gpu):
    "Whatever came before: other dtypes, nothing where a tensor was, a tuple of other length, an address off by four bytes."
    x, long = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    parameter = torch.nn.Parameter(torch.zeros(8))
    kinds = [
        (x, x, (x, x), 0.5, 7), (x, None, (x, x), 0.5, 7), (x.double(), x, (x, x), 0.5, 7), (x[1:], x, (x, x), 0.5, 7),
        (x, x, (x,), 0.5, 7), (x, x, (x, None), 0.5, 7), (x, x, None, 0.5, 7), (x, x, (x, x), 0.5, 1 << 40),
        (x, x, (x, x[1:]), 0.5, 7), (x, x, (x, 16), 0.5, 7), (x, x, (x, 15), 0.5, 7), (x, long, (x, x), 0.5, 7),
        (x, x, (x, long), 0.5, 7), (x, x, (x, x), 0.5, True), (x, 3, (x, x), 0.5, 7),
    ]  # fmt: skip
    calls = [kind for kind in kinds for _ in range(3)] + [kinds[i] for i in torch.randint(len(kinds), (300,)).tolist()]
    calls += [(parameter, x, (x, x), 0.25, -9), (x, x, (parameter, x), 1, 0), (x, x, (x, x), 0.5, -(1 << 31) - 1)]
    kernel = Noting(["x", "y", "many", "scale", "N"], ["N"])
    launch = dt.launcher(kernel)
    for args in calls:
        launch(1, *args)
    assert kernel.compiled == len(kinds)
    for (compiled_for, values), (*tensors, scale, n) in zip(kernel.heard, calls, strict=True):
        assert (values, compiled_for) == dt._seen((*tensors, float(scale), n))


def test_a_function_asks_the_dispatcher_only_if_somebody_listens():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listener(TorchDispatchMode):
        heard = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.heard += (func,)
            return func(*args, **kwargs or {})

    x = torch.randn(3, 8, device="cpu" if dt.INTERPRET else "cuda", requires_grad=True)
    quiet = dt.l2norm(x)
    with Listener() as listener:
        loud = dt.l2norm(x)
    assert dt._l2norm_op in listener.heard and torch.equal(quiet, loud)
    assert torch.equal(*[torch.autograd.grad(y.square().sum() + y.sum(), x)[0] for y in (quiet, loud)])

"""The instruments of chapter 02 reject what they must reject."""

import os
import sys

import pytest
import torch

from dormouse_fused import parity
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
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["x", "ref", "both"])
def test_nothing_passes_that_is_not_finite(value, side):
    good, bad = torch.ones(3), torch.tensor([1.0, value, 1.0])
    x, ref = {"x": (bad, good), "ref": (good, bad), "both": (bad, bad)}[side]
    with pytest.raises(AssertionError):
        assert_close(x, ref, tol=1e30)
    with pytest.raises(AssertionError):
        assert_no_worse({"o": rel_err(x, ref)}, {"o": rel_err(x, ref)}, slack=0.99)


@pytest.mark.parametrize(("ours", "theirs"), [(NAN, 1.0), (1.0, NAN), (NAN, NAN), (1.1, 1.0)])
def test_no_worse_is_strict(ours, theirs):
    with pytest.raises(AssertionError, match="dq"):
        assert_no_worse({"o": 0.0, "dq": ours}, {"o": 0.0, "dq": theirs})


def test_shapes_are_never_broadcast():
    with pytest.raises(ValueError, match=r"expected shape \[3, 1\], got \[3\]"):
        rel_err(torch.ones(3), torch.ones(3, 1))


def test_empty_and_scalar():
    assert rel_err(torch.empty(0, 3), torch.empty(0, 3)) == 0
    assert rel_err(torch.tensor(1.5), torch.tensor(1.0)) == 0.5


def test_a_missing_tensor_is_an_error():
    with pytest.raises(ValueError, match="dq"):
        errors({"o": torch.ones(1)}, {"o": torch.ones(1), "dq": torch.ones(1)})
    with pytest.raises(ValueError, match="dq"):
        assert_no_worse({"o": 0.0}, {"o": 0.0, "dq": 0.0})


def test_evaluate_names_outputs_and_gradients():
    inputs = dict(a=torch.ones(3), n=torch.arange(3), b=None, c=2.0, unused=torch.ones(2))
    got = evaluate(lambda a, n, b, c, unused: (a * n * c, a.sum()), inputs, [torch.ones(3), None], outputs=("o", "s"))
    assert list(got) == ["o", "s", "da", "dunused"]
    assert torch.equal(got["da"], torch.tensor([0.0, 2.0, 4.0])) and torch.equal(got["dunused"], torch.zeros(2))
    assert not any(t.requires_grad for t in got.values())
    only = evaluate(lambda a, n, b, c, unused: a * unused.sum(), inputs, [torch.ones(3)], wrt=["unused"])
    assert list(only) == ["o", "dunused"]


def test_evaluate_keeps_strides():
    seen = []
    evaluate(lambda x: seen.append(x.stride()) or x * 2, dict(x=torch.ones(4, 3).T), [torch.ones(3, 4)])
    assert seen == [(1, 3)]


def test_oracle_inputs_are_wider_and_equal():
    x = torch.randn(5).bfloat16()
    wide = in_float64(dict(x=x, n=torch.arange(2), s=None))
    assert wide["x"].dtype == torch.float64 and torch.equal(wide["x"].bfloat16(), x)
    assert wide["n"].dtype == torch.int64 and wide["s"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_reaches_every_way_to_get_memory(dtype):
    like = torch.ones(2, 3, dtype=dtype)
    with poison():
        for t in (
            torch.empty(4, dtype=dtype),
            torch.empty_like(like),
            like.new_empty(4),
            torch.empty_strided((2, 2), (1, 2), dtype=dtype),
        ):
            assert t.isnan().all()


def test_poison_restores_the_mode_also_after_an_error():
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), poison():
        assert torch.are_deterministic_algorithms_enabled()
        1 / 0  # noqa: B018
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 3), (3, 0), (2, 1, 1)])
@pytest.mark.parametrize("between", [0, 3])
@pytest.mark.parametrize("before", [16, 1])
def test_fences_hold_values_and_surround_them(shape, between, before):
    x = torch.randn(shape)
    y = fenced(x, before, between)
    assert y.shape == x.shape and torch.equal(y, x)
    assert between or y.is_contiguous()
    whole = torch.as_strided(y, (y.untyped_storage().nbytes() // 4,), (1,), 0)
    assert (~whole.isnan()).sum() == x.numel()
    assert whole[0].isnan() and whole[-1].isnan()


def test_bits():
    assert same_bits((torch.ones(2), None, {"a": torch.zeros(())}), [torch.ones(2), None, {"a": torch.zeros(())}])
    assert same_bits(torch.tensor([NAN]), torch.tensor([NAN]))
    for other in (torch.ones(2, dtype=torch.float64), torch.ones(3), torch.tensor([1.0, 1 + 2**-23]), None):
        assert not same_bits(torch.ones(2), other)
    assert same_bits(torch.ones(3, 2).T, torch.ones(2, 3))


def test_determinism_finds_one_late_difference():
    runs = iter([torch.zeros(2), torch.zeros(2), torch.tensor([0.0, -0.0])])
    with pytest.raises(AssertionError, match="run 3 of 3"):
        assert_deterministic(lambda: next(runs), n=3)


def test_every_golden_file_is_the_manifest_s():
    assert all(parity.load_golden(name.removesuffix(".safetensors")) for name in parity.golden_manifest())


def test_a_changed_golden_file_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "refs" / "golden"
    folder.mkdir(parents=True)
    (folder / "x.safetensors").write_bytes(b"changed")
    (folder / "manifest.json").write_text('{"x.safetensors": {"sha256": "0"}}')
    monkeypatch.setattr(parity, "repo_root", lambda: tmp_path)
    with pytest.raises(ValueError, match="x.safetensors"):
        parity.load_golden("x")


def test_without_the_sanitizer_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(parity, "which", lambda name: None)
    assert parity.sanitizer("print()", jobs="_a_kernel") == {}


FAKE = """#!{python}
import subprocess, sys
tool, command = sys.argv[2], sys.argv[3:]
code = subprocess.run(command).returncode
print("=========     Race reported between Write access at _job_kernel+0x10 in a.py:1" if tool == "racecheck" else "")
print("========= RACECHECK SUMMARY: 3 hazards displayed" if tool == "racecheck" else "========= ERROR SUMMARY: 2 errors")
"""


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    "A program in the sanitizer's place, since there is none without a GPU: 2 errors a tool, 3 races, one of them at `_job_kernel`."
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_reports_are_counted(sanitizer, capfd):
    assert parity.sanitizer("import dormouse_fused") == dict(sanitizer_errors=7)
    assert parity.sanitizer("import dormouse_fused", jobs="_job", none="_other") == dict(sanitizer_errors=6, jobs=1, none=0)
    assert parity.sanitizer([("memcheck", "import dormouse_fused")]) == dict(sanitizer_errors=2)
    assert "Race reported" in capfd.readouterr().out


def test_a_program_that_fails_is_no_clean_program(sanitizer):
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        parity.sanitizer("1 / 0")

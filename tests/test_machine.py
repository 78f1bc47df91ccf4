"""Machines, costs and bounds: what the notebook doesn't stop for."""

import os

import pytest
import torch

from dormouse_fused import machine
from dormouse_fused.machine import (
    A100,
    H100,
    H200,
    Cost,
    bound,
    dtype_key,
    intensity,
    matmul_cost,
    repo_root,
    savefig,
    tensor_bytes,
)


def test_machines_are_hashable_and_ordered():
    assert len({H200, H100, A100}) == 3
    assert H200.bandwidth > H100.bandwidth > A100.bandwidth


@pytest.mark.parametrize("dtype", ["float16", "int8", torch.int64, None])
def test_unknown_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype: expected one of bf16"):
        tensor_bytes((2, 3), dtype)


def test_torch_dtypes_and_names_agree():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert tensor_bytes((5, 7), dtype) == torch.empty(5, 7, dtype=dtype).nbytes == tensor_bytes((5, 7), dtype_key(dtype))
    assert tensor_bytes((), "fp32") == 4
    assert tensor_bytes((4, 0, 3), "fp32") == 0


def test_costs_of_several_dtypes_add_by_dtype():
    cost = Cost(8, 10) + Cost(2, {"bf16": 5}, 1) + Cost(0, {"bf16": 1, "fp32": 2}, 2)
    assert cost == Cost(10, {None: 10, "bf16": 6, "fp32": 2}, 3)
    assert sum([Cost(1, 2, 3)] * 4, Cost()) == Cost(1, 2, 3) * 4 == Cost(4, 8, 12)
    by_hand = 10 / H200.flops["fp32"] + 6 / H200.flops["bf16"] + 2 / H200.flops["fp32"]
    assert bound(cost, H200, "fp32").flops_us == pytest.approx(1e6 * by_hand)


def test_the_order_of_a_sum_does_not_matter():
    a, b = matmul_cost(3, 4, 5), Cost(7, 9.0, 2)
    assert a + b == b + a


def test_nothing_costs_nothing():
    assert bound(Cost(), H200).us == 0
    assert intensity(Cost()) == float("inf")


def test_a_missing_rate_is_named():
    with pytest.raises(ValueError, match="H200 has a rate for bf16, fp16, tf32, fp32, not for fp64"):
        bound(Cost(flops={"fp64": 1}), H200)
    assert bound(Cost(bytes=8, flops={"fp64": 0}), H200).binds == "bytes"


def test_root_is_found_from_below_and_refused_outside(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").touch()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert repo_root() == tmp_path
    (tmp_path / "settings.ini").unlink()
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="settings.ini"):
        repo_root()


def test_the_same_figure_gives_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").touch()
    monkeypatch.chdir(tmp_path)
    points = {"a": matmul_cost(64, 64, 64), "b": Cost(100, 100, 1)}
    written = []
    for _ in range(2):
        savefig(machine.roofline_plot(points, H200, measured={"a": 1e-5}), "plot")
        written.append((tmp_path / "figures" / "plot.svg").read_bytes())
    assert written[0] == written[1]
    assert b"<dc:date>" not in written[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the CPU")
def test_a_cpu_has_no_matrix_formats():
    here = machine.this_machine()
    assert set(here.flops) == {"fp32"} and here.source == "measured"
    assert here.sms == torch.get_num_threads() and here.l2_bytes >= 0
    assert machine.this_machine() is here


def test_measuring_restores_the_matmul_precision():
    before = torch.get_float32_matmul_precision()
    machine._matmul_rate("tf32", 8, "cuda" if torch.cuda.is_available() else "cpu")
    assert torch.get_float32_matmul_precision() == before


def test_l2_size_is_read_where_the_system_tells(monkeypatch):
    monkeypatch.setattr(os, "sysconf_names", {})
    if not torch.cuda.is_available():
        assert machine.this_machine.__wrapped__().l2_bytes == 0

"""Clocks, counts and records: what the notebook doesn't stop for."""

import math
import subprocess
import sys
import warnings

import pandas as pd
import pytest
import torch

from dormouse_fused import measure
from dormouse_fused.measure import (
    FIELDS,
    Launches,
    bars,
    bound_row,
    caption,
    cold_s,
    compare,
    measured_or_recorded,
    module_sha256,
    passes,
    percentiles,
    read_records,
    read_rows,
    record_path,
    result_table,
    row,
    stale,
    trace_counts,
    unit,
    wall_ms,
    write_records,
)

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    "An empty checkout with one module, and the working directory in it."
    (tmp_path / "settings.ini").touch()
    (tmp_path / "dormouse_fused").mkdir()
    (tmp_path / "dormouse_fused" / "toy.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DORMOUSE_RECORD", raising=False)
    return tmp_path


def toy(impl="dormouse", metric="wall_ms", samples=1.0, shape="N1", pass_="fwd"):
    return row("toy", impl, shape, "fp32", pass_, metric, samples)


def test_percentiles_by_definition():
    assert percentiles(list(range(11))) == dict(p50=5, p20=2, p80=8)
    assert all(math.isnan(v) for v in percentiles(math.nan).values())
    with pytest.raises((RuntimeError, IndexError)):
        percentiles([])


@cpu
@pytest.mark.parametrize("name", ["device_ms", "graph_rep", "peak_mib", "launches", "host_syncs"])
def test_gpu_metrics_say_that_there_is_no_gpu(name):
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        getattr(measure, name)(lambda: None)


def test_wall_counts_its_calls():
    calls = []
    assert len(wall_ms(lambda: calls.append(1), samples=3, calls=5)) == 3
    assert len(calls) >= 15


def test_a_real_trace_has_its_region():
    code = (
        "import torch; from dormouse_fused.measure import _trace, trace_counts, ProfilerActivity as P\n"
        "print('counts', tuple(trace_counts(_trace(lambda: torch.ones(3) + 1, [P.CPU]))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "counts (0, 0, 0, 0, ())" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("cudaDeviceSynchronize", 1),
        ("cudaStreamSynchronize", 1),
        ("cudaEventSynchronize", 1),
        ("cuStreamSynchronize", 1),
        ("cuCtxSynchronize", 1),
        ("cudaStreamSynchronize_ptsz", 1),
        ("cudaMemcpy", 1),
        ("cuMemcpyDtoH_v2", 1),
        ("cudaMemcpyAsync", 0),
        ("cuMemcpyDtoHAsync_v2", 0),
        ("cudaLaunchKernel", 0),
        ("cudaStreamWaitEvent", 0),
    ],
)
def test_blocking_calls_by_name(name, blocks):
    events = [
        dict(cat="user_annotation", name=measure.REGION, ts=0.0, dur=10.0),
        dict(cat="cuda_runtime", name=name, ts=5.0, dur=1.0),
        dict(cat="cuda_runtime", name=name, ts=11.0, dur=1.0),
        dict(ph="M", name="process_name"),
    ]
    assert trace_counts(events) == Launches(0, 0, 0, blocks, ())


def test_kernels_are_counted_in_order_wherever_they_ran():
    events = [
        dict(cat="user_annotation", name=measure.REGION, ts=0, dur=1),
        dict(cat="kernel", name="second", ts=9, dur=1),
        dict(cat="kernel", name="first", ts=3, dur=1),
        dict(cat="gpu_memset", name="Memset", ts=2, dur=1),
        dict(cat="gpu_user_annotation", name=measure.REGION, ts=2, dur=9),
    ]
    assert trace_counts(events) == Launches(2, 0, 1, 0, ("first", "second"))


def test_cold_start_has_its_own_caches_and_excludes_the_set_up(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seconds = cold_s(
        """
        assert os.environ["TRITON_CACHE_DIR"] != before and not os.path.exists(os.environ["TRITON_CACHE_DIR"])
        assert os.environ["EXTRA"] == "1"
        """,
        setup=f"import os, time; time.sleep(1); before = {str(tmp_path)!r}",
        env={"EXTRA": "1"},
    )
    assert 0 <= seconds < 0.5


def test_gradients_are_returned_and_not_accumulated():
    x, y = torch.randn(3), torch.randn(3)
    run = passes(lambda a, b: (a * b, None, (a + b).detach()), [x, y], [torch.ones(3)])
    for _ in range(2):
        dx, dy = run["fwd+bwd"]()
        assert torch.equal(dx, y) and torch.equal(dy, x)
    assert x.grad is None and not x.requires_grad


@cpu
def test_an_implementation_that_cannot_is_left_out_with_a_warning():
    def fails():
        raise RuntimeError("no such thing")

    turns = iter([None])
    impls = {"ours": {"fwd": lambda: None}, "theirs": {"fwd": lambda: next(turns, 0) == 0 and fails()}}
    with pytest.warns(UserWarning) as caught:
        rows = compare("toy", "N1", "fp32", impls, metrics=("peak_mib", "device_ms"), rounds=1)
    assert rows == []
    assert {str(w.message).split(":")[0] for w in caught} == {"ours", "theirs"}


def test_comparison_measures_each_pass_of_each_implementation():
    impls = {"a": {"fwd": lambda: None, "fwd+bwd": lambda: None}, "b": {"fwd": lambda: None}}
    rows = compare("toy", "N1", "fp32", impls, metrics=("wall_ms",), rounds=2)
    assert [(r["impl"], r["pass"]) for r in rows] == [("a", "fwd"), ("b", "fwd"), ("a", "fwd+bwd")]
    assert all(tuple(r) == FIELDS for r in rows)


def test_units():
    assert [unit(m) for m in ("device_ms", "peak_mib", "err_dq", "host_syncs", "cold_s", "bound_us")] == [
        "ms", "MiB", "relative", "count", "s", "us"
    ]  # fmt: skip


def test_versions_come_from_what_is_imported():
    assert toy("torch")["version"] == torch.__version__
    assert toy("dormouse")["version"] == __import__("dormouse_fused").__version__
    assert toy("nobody_wrote_this")["version"] == ""


def test_the_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("DORMOUSE_COMMIT", "abc")
    measure._commit.cache_clear()
    assert toy()["commit"] == "abc"
    measure._commit.cache_clear()


def test_records_merge_by_key_and_keep_six_digits(checkout):
    write_records("99_toy", [toy(samples=1.23456789), toy("fla", samples=2)])
    write_records("99_toy", [toy("fla", samples=3), toy("torch", samples=4)])
    assert [(r["impl"], r["p50"]) for r in read_rows("99_toy")] == [("dormouse", 1.23457), ("fla", 3), ("torch", 4)]
    lines = record_path("99_toy").read_text().splitlines()
    assert lines[0] == ",".join(FIELDS) and len(lines) == 4


def test_a_record_is_stale_from_the_first_changed_byte(checkout):
    write_records("99_toy", [toy()])
    df = read_records("99_toy")
    assert stale(df).empty and stale(pd.DataFrame(df.to_dict("records")), "99_toy").empty
    (checkout / "dormouse_fused" / "toy.py").write_text("x = 1 \n")
    assert len(stale(df)) == 1
    write_records("99_toy", [toy("fla")])
    assert list(stale(read_records("99_toy"))["impl"]) == ["dormouse"]


def test_module_hash_takes_module_or_chapter(checkout):
    assert module_sha256("toy") == module_sha256("99_toy")
    with pytest.raises(FileNotFoundError):
        module_sha256("nothing")


@cpu
def test_recording_needs_a_gpu(checkout, monkeypatch):
    monkeypatch.setenv("DORMOUSE_RECORD", "1")
    with pytest.raises(RuntimeError, match="DORMOUSE_RECORD=1 needs a CUDA device"):
        measured_or_recorded("99_toy", lambda: [toy()])


@cpu
def test_without_a_gpu_the_record_is_read_and_nothing_measured(checkout):
    write_records("99_toy", [toy(metric="wall_ms"), toy(metric="cold_s"), toy(metric="launches")])
    df = measured_or_recorded("99_toy", lambda: 1 / 0, metric=("cold_s", "launches"))
    assert list(df["metric"]) == ["cold_s", "launches"]
    assert caption(df).startswith("recorded: cpu, torch")


def test_recording_writes_and_says_measured(checkout, monkeypatch):
    monkeypatch.setenv("DORMOUSE_RECORD", "1")
    rows = [{**toy(), "gpu": "H200"}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    df = measured_or_recorded("99_toy", lambda: rows)
    assert caption(df).startswith("measured now: H200")
    assert read_rows("99_toy")[0]["source_sha256"] == module_sha256("99_toy")


def test_no_record_is_said_in_table_plot_and_caption(checkout):
    df = read_records("99_toy")
    words = "no record yet: `make record CHAPTER=99` on a GPU"
    assert caption(df) == words
    assert words in result_table("99_toy").to_string()
    assert bars(df).axes[0].get_title(loc="left") == words
    assert stale(df).empty


def test_table_ratio_bound_and_gaps(checkout):
    rows = [
        toy(metric="device_ms", samples=[0.02]), toy("fla", "device_ms", [0.07]), toy("torch", "wall_ms", 1234.5),
        toy(metric="host_syncs", samples=0), toy("fla", "host_syncs", 2), bound_row("toy", "N1", "fp32", "fwd", 7.0),
    ]  # fmt: skip
    write_records("99_toy", rows)
    table = result_table("99_toy").set_index("metric")
    assert table.loc["device_ms", "fla / dormouse"] == "3.5"
    assert table.loc["device_ms", "bound"] == "0.007" and table.loc["wall_ms", "bound"] == ""
    assert table.loc["host_syncs", "fla / dormouse"] == "∞" and table.loc["host_syncs", "dormouse"] == "0"
    assert table.loc["wall_ms", "torch"] == "1,234" and table.loc["wall_ms", "fla"] == ""
    assert list(result_table("99_toy", metric="device_ms")["bound"]) == ["0.007"]
    assert list(result_table("99_toy", impl=["torch"])["metric"]) == ["wall_ms"]


def test_table_names_once_what_all_rows_share(checkout):
    rows = [toy(shape=shape, metric=m, samples=1) for shape in ("N1", "N2") for m in ("launches", "copies")]
    write_records("99_toy", rows)
    table = result_table("99_toy")
    assert table.columns.name == "toy"
    assert list(table.index.names) == ["shape", "dtype", "pass"]
    assert list(table["metric"]) == ["launches", "copies"] * 2
    assert table.to_html().count("N1") == 1
    assert result_table("99_toy", shape="N2").columns.name == "toy N2"


def test_bars_draw_every_case_and_its_bound(checkout):
    rows = [toy(impl, "device_ms", [0.01, 0.02, 0.03], shape) for shape in ("N1", "N2") for impl in ("dormouse", "fla")]
    rows.append(bound_row("toy", "N1", "fp32", "fwd", 7.0))
    write_records("99_toy", rows)
    ax = bars("99_toy").axes[0]
    assert len(ax.patches) == 4
    assert [t.get_text() for t in ax.get_yticklabels()] == ["N1", "N2"]
    assert [t.get_text() for t in ax.get_legend().get_texts()].count("bound") == 1


def test_one_bar_needs_no_label(checkout):
    write_records("99_toy", [toy(metric="device_ms", samples=1.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(bars("99_toy").axes[0].patches) == 1


@cuda
def test_gpu_counts_are_exact():
    x = torch.zeros(2**18, device="cuda")
    assert measure.peak_mib(lambda: x + 1) == 1
    assert measure.launches(lambda: x.add_(1)).kernels == 1
    assert measure.launches(lambda: (x + 1).mul_(2)).kernels == 2
    assert measure.host_syncs(lambda: x.add_(1)) == 0
    assert measure.host_syncs(lambda: x.sum().item()) == 1


@cuda
def test_gpu_clocks_and_a_function_that_no_graph_can_hold():
    x = torch.zeros(2**26, device="cuda")
    impls = {"ours": {"fwd": lambda: x.add_(1)}, "theirs": {"fwd": lambda: x.sum().item()}}
    with pytest.warns(UserWarning, match="theirs: no device_ms: it makes the host wait"):
        rows = compare("toy", "N67108864", "fp32", impls, rounds=2)
    found = {(r["impl"], r["metric"]): r["p50"] for r in rows}
    assert ("theirs", "device_ms") not in found and found["theirs", "host_syncs"] == 1
    assert 0.05 < found["ours", "device_ms"] <= 1.1 * found["ours", "wall_ms"]


@cuda
def test_gpu_backward_is_captured():
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    rows = compare("toy", "N1024", "bf16", {"torch": passes(torch.relu, [x])}, metrics=("device_ms",), rounds=1)
    forward, both = (r["p50"] for r in rows)
    assert both > forward

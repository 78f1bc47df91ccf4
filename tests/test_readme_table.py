"README's block follows the records, and the check sees when it doesn't."
import json

import pytest
import readme_table

FIELDS = "op,impl,version,shape,dtype,pass,metric,unit,p50,p20,p80,gpu,torch,triton,commit,source_sha256,date"


def line(impl, metric, p50, pass_="fwd+bwd", shape="B1_T64", version="1"):
    return f"gated_delta,{impl},{version},{shape},bf16,{pass_},{metric},ms,{p50},{p50},{p50},H200,2.11,3.7.1,abc,0,2026-01-01"


@pytest.fixture
def root(tmp_path):
    for folder in ("refs/records", "nbs", "figures"):
        (tmp_path / folder).mkdir(parents=True)
    cells = [{"cell_type": "code", "source": ["x = 1\n", "print(x)"]}]
    (tmp_path / "nbs" / "index.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "README.md").write_text(f"# A\n\n{readme_table.BEGIN}\n{readme_table.END}\n\n```python\nx = 1\nprint(x)\n```\n")
    return tmp_path


def record(root, *lines, stem="10_gated_delta"):
    (root / "refs" / "records" / f"{stem}.csv").write_text("\n".join([FIELDS, *lines]) + "\n")


def run(root, *options):
    return readme_table.main(["--root", str(root), *options])


def test_without_a_record_it_says_so(root):
    assert run(root, "--check") == 1 and run(root) == 0 and run(root, "--check") == 0
    assert readme_table.NONE in (root / "README.md").read_text()


def test_ours_beside_theirs_and_where_from(root):
    record(root, line("dormouse", "device_ms", 0.05), line("fla", "device_ms", 0.2, version="0.6.0"),
           line("dormouse", "launches", 4), line("fla", "launches", 16, version="0.6.0"), line("dormouse", "peak_mib", 40))
    assert run(root) == 0
    text = (root / "README.md").read_text()
    assert "| gated_delta | B1 T64 | bf16 | fwd+bwd | fla | 0.05 / 0.2 (4.0×) |  |  | 4 / 16 (4.0×) |" in text
    assert "H200; torch 2.11, Triton 3.7.1, fla 0.6.0; 2026-01-01" in text and readme_table.NONE not in text
    assert "front.svg" not in text and text.startswith("# A\n") and text.endswith("```\n")


@pytest.mark.parametrize("impl", ["fla", *readme_table.APART])
def test_it_says_who_was_measured_otherwise(root, impl):
    record(root, line("dormouse", "device_ms", 1), line(impl, "device_ms", 2))
    run(root)
    text = (root / "README.md").read_text()
    assert [name for name, sentence in readme_table.APART.items() if sentence in text] == [impl] * (impl in readme_table.APART)


def test_the_figure_is_named_once_it_exists(root):
    record(root, line("dormouse", "device_ms", 1), line("fla", "device_ms", 2))
    (root / "figures" / "front.svg").write_text("<svg/>")
    run(root)
    assert "](figures/front.svg)" in (root / "README.md").read_text()


def test_a_new_record_makes_the_block_stale(root, capsys):
    record(root, line("dormouse", "device_ms", 1), line("fla", "device_ms", 2))
    run(root)
    before = (root / "README.md").read_text()
    record(root, line("dormouse", "device_ms", 1.5), line("fla", "device_ms", 2))
    assert run(root, "--check") == 1 and (root / "README.md").read_text() == before
    assert "+| gated_delta | B1 T64 | bf16 | fwd+bwd | fla | 1.5 / 2 (1.3×)" in capsys.readouterr().err


def test_forward_alone_and_rows_without_a_peer_stay_out(root):
    record(root, line("dormouse", "device_ms", 1, "fwd"), line("fla", "device_ms", 2, "fwd"),
           line("dormouse", "device_ms", 1, shape="B2_T64"), line("fla", "peak_mib", 2, shape="B2_T64"))
    run(root)
    assert readme_table.NONE in (root / "README.md").read_text()


def test_another_form_of_ours_is_no_peer(root):
    record(root, line("dormouse", "device_ms", 1), line("dormouse_roomy", "device_ms", 2))
    run(root)
    assert readme_table.NONE in (root / "README.md").read_text()


@pytest.mark.parametrize("text", ["no markers", f"{readme_table.END}\n{readme_table.BEGIN}", readme_table.BEGIN])
def test_markers_must_be_there(root, capsys, text):
    (root / "README.md").write_text(text)
    assert run(root) == 1 and (root / "README.md").read_text() == text
    assert "needs the markers" in capsys.readouterr().err


def test_an_example_the_gate_does_not_run_is_an_error(root, capsys):
    run(root)
    path = root / "README.md"
    path.write_text(path.read_text() + "```python\nx = 2\n```\n")
    assert run(root, "--check") == 1 and "not a cell" in capsys.readouterr().err

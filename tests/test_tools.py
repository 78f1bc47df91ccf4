"""The tools at their edges."""

import os
import subprocess
import sys

import aot
import check_wheel
import docs
import pytest
import torch
import unchanged
from book import ROOT, Book, read_chapter, references
from small_book import GOOD, notebook, write


@pytest.fixture
def book(tmp_path) -> Book:
    return write(tmp_path, GOOD)


def test_references_are_found_in_prose_only():
    text = "A @one, [@two; -@three, p. 4]; not `@code`, $x@y$, me@site.org, http://x.org/@z.\n```\n@fence\n```\n"
    assert references(text) == ["one", "two", "three"]


def test_directives_are_parted_from_code(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(notebook(("code", "#| exports\n#| label: fig-x\n\nx = 1\n%time x\n# | no: directive")))
    cell = read_chapter(path).cells[0]
    assert cell.directives == {"exports": "", "label": "fig-x"}
    assert cell.code == "x = 1\n\n# | no: directive"


def test_citations_and_labels_become_links(book):
    resolve = docs.Resolver(book)
    assert resolve("[@paper, p. 2]") == "([A, 2020](references.html#ref-paper), p. 2)"
    assert resolve("@paper says") == "[A (2020)](references.html#ref-paper) says"
    assert resolve("by @eq-how") == "by [Equation 0.1](thing.html#eq-how)"
    assert resolve("`@paper` and @unknown") == "`@paper` and @unknown"
    assert resolve("see [it](01_thing.ipynb#how)") == "see [it](thing.html#how)"
    assert resolve("$$a=b$$ {#eq-how}") == "[]{#eq-how}\n\n$$a=b \\tag{0.1}$$"


def test_a_page_that_leads_nowhere_is_reported(book, tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "OUT", tmp_path / "_docs")
    write(tmp_path / "_docs", {
        "index.html": "<h1>Front</h1><a href='thing.html#eq-how'>x</a><a href='gone.html'>y</a>",
        "thing.html": "<h1>Thing</h1> ?@fig-lost",
    })  # fmt: skip
    assert sorted(docs.check(book)) == [
        "index.html: gone.html leads nowhere",
        "index.html: thing.html#eq-how has no such anchor",
        "thing.html: ?@fig-lost stands unresolved",
    ]


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1), ("touch new", 1), ("rm old", 1)])
def test_unchanged(command, code, tmp_path, monkeypatch):
    (tmp_path / "old").write_text("x")
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["unchanged.py", ".", "--", *command.split()])
    assert unchanged.main() == code


def test_kernels_without_a_case_are_missed(tmp_path):
    module = tmp_path / "m.py"
    module.write_text(
        "@triton.jit\ndef tile(x): pass\n@triton.jit\ndef _a_kernel(x): pass\ndef _b_kernel(x): pass\n"
        "@gluon.jit\ndef await_last_kernel(): pass\n"
    )
    assert aot.kernels(module) == {"_a_kernel"}


def test_a_kernel_that_fails_to_compile_is_named():
    from dormouse_fused.triton import Case

    bad = Case("dormouse_fused.triton:_no_such_kernel", {}, {}, "sm_90")
    assert isinstance(aot.compile_all([aot.Job("bad", bad)])[0], RuntimeError)


def test_the_lent_environment_is_torch_triton_and_theirs():
    lent: dict = {}
    for name in ("torch", "triton"):
        check_wheel.required(name, lent)
    assert {"torch", "triton", "sympy"} <= lent.keys()
    assert not {"numpy", "pytest", "nbdev", "matplotlib"} & lent.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_record_wants_a_gpu():
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run([sys.executable, ROOT / "tools" / "record.py", "00"], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and "no GPU" in done.stdout


def test_unknown_chapters_are_named():
    with pytest.raises(SystemExit, match="no chapter '55'"):
        Book().chapter("55")

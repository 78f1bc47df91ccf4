"""Every notebook runs afresh, and says what its committed outputs say."""

import re

import papermill
import pytest
import torch
from book import Book, Cell, read_chapter

CHAPTERS = Book().chapters
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)", re.I)
ASIDE = [
    (re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?\s?(?:ns|[µu]s|ms|s|min|tokens?/s|[KMGT]i?B/s|[GT]FLOP/s|it/s)\b"), "<time>"),
    (re.compile(r"(?:/[\w.@+-]+){2,}/?"), "<path>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
]
TEXT = ("text/plain", "text/markdown", "text/html", "text/latex")
ROUNDING = 1e-4  # errors of float arithmetic are below this; their digits are the processor's


def written(cell: Cell) -> str:
    "What a cell printed or showed as text, with the kinds of its pictures; warnings aside."
    parts = []
    for output in cell.outputs:
        if output["output_type"] == "stream" and output["name"] == "stdout":
            parts.append("".join(output["text"]))
        data = output.get("data", {})
        parts += ["".join(data[kind]) for kind in TEXT if kind in data]
        parts += [f"<{kind}>" for kind in sorted(data) if kind.startswith("image/")]
    return "".join(parts)


def same(old: str, new: str) -> bool:
    "Equal words, and equal numbers up to rounding, times and paths aside."
    for pattern, name in ASIDE:
        old, new = pattern.sub(name, old), pattern.sub(name, new)
    shapes = [re.sub(r"[-\s]+", " ", NUMBER.sub("#", text)) for text in (old, new)]
    return shapes[0] == shapes[1] and all(map(close, NUMBER.findall(old), NUMBER.findall(new)))


def close(old: str, new: str) -> bool:
    "Integers exactly; other numbers to 0.1 % or their last digit; rounding errors within a factor of four."
    if old == new:
        return True
    if re.fullmatch(r"[-+]?[\d,]+", old) or re.fullmatch(r"[-+]?[\d,]+", new):
        return False
    a, b = (float(text.replace(",", "")) for text in (old, new))
    if max(abs(a), abs(b)) < ROUNDING:
        return max(abs(a), abs(b)) <= 4 * min(abs(a), abs(b)) or min(abs(a), abs(b)) == 0
    mantissa, _, exponent = old.lower().partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(a - b) <= max(1e-3 * max(abs(a), abs(b)), 1.001 * last_digit)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_runs_and_says_the_same(chapter, tmp_path):
    out = tmp_path / chapter.path.name
    papermill.execute_notebook(
        chapter.path, out, cwd=chapter.path.parent, kernel_name="python3", progress_bar=False, execution_timeout=600
    )
    if torch.cuda.is_available():
        return  # the committed outputs are those of a run without a GPU
    for old, new in zip(chapter.cells, read_chapter(out).cells, strict=True):
        assert old.source == new.source
        assert same(written(old), written(new)), (
            f"{chapter.path.name} cell {old.index} no longer says what it said (make refresh CHAPTER={chapter.stem[:2]}):"
            f"\n--- committed\n{written(old)[:2000]}\n--- now\n{written(new)[:2000]}"
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("took 3.1 ms in /tmp/a/b", "took 12 ms in /var/c/d"),
        ("error 3.1e-07", "error 2.2e-07"),
        ("loss 2.3025", "loss 2.3026"),
        ("speed 812 tokens/s", "speed 1,204 tokens/s"),
        ("<f at 0x7f001122aabb>", "<f at 0x7f99aabbccdd>"),
        ("| a |  1.20 |", "| a | 1.20 |"),
    ],
)
def test_times_paths_and_rounding_are_aside(old, new):
    assert same(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3 launches", "4 launches"),
        ("ratio 3.10", "ratio 3.40"),
        ("passes", "fails"),
        ("error 3.1e-07", "error 3.1e-06"),
        ("error 1.0e-05", "error nan"),
        ("shape [2, 64]", "shape [2, 65]"),
        ("x = -1.5", "x = 1.5"),
    ],
)
def test_what_a_page_says_is_not_aside(old, new):
    assert not same(old, new)

"""The book as data: its chapters, cells and modules, for the tools and the tests."""

import ast
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dormouse_fused"


@dataclass(frozen=True)
class Cell:
    "One notebook cell, its `#|` lines split from its code."

    index: int
    kind: str
    source: str
    outputs: tuple = field(default=(), repr=False)

    @cached_property
    def directives(self) -> dict[str, str]:
        "`#| name value` and `#| name: value` lines at the top."
        found = {}
        for line in self.source.splitlines():
            match = re.match(r"\s*#\s*\|\s*([\w-]+)\s*:?\s*(.*?)\s*$", line)
            if match:
                found[match[1]] = match[2]
            elif line.strip():
                break
        return found

    @cached_property
    def code(self) -> str:
        "The source without directives, magics and shell lines."
        lines = self.source.splitlines()
        while lines and (not lines[0].strip() or re.match(r"\s*#\s*\|", lines[0])):
            lines.pop(0)
        return "\n".join("" if re.match(r"\s*[%!]", line) else line for line in lines)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.code if self.kind == "code" else "")


@dataclass(frozen=True)
class Chapter:
    "A notebook: `NN_name.ipynb`, or the front page."

    path: Path
    cells: tuple[Cell, ...] = field(repr=False)

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def number(self) -> int | None:
        match = re.match(r"(\d\d)_", self.stem)
        return int(match[1]) if match else None

    @property
    def name(self) -> str:
        return re.sub(r"^\d\d_", "", self.stem)

    @property
    def markdown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def is_mechanism(self) -> bool:
        return self.number is not None and 10 <= self.number < 90


def read_chapter(path: Path) -> Chapter:
    "Read a notebook."
    cells = []
    for index, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        cells.append(Cell(index, cell["cell_type"], "".join(cell["source"]), tuple(cell.get("outputs", ()))))
    return Chapter(path, tuple(cells))


class Book:
    "The repository as the rules see it."

    def __init__(self, root: Path = ROOT):
        self.root = Path(root)

    @cached_property
    def chapters(self) -> list[Chapter]:
        "The front page, then the chapters in reading order."
        paths = sorted((self.root / "nbs").glob("*.ipynb"))
        return sorted(map(read_chapter, paths), key=lambda chapter: (chapter.stem != "index", chapter.stem))

    @cached_property
    def numbered(self) -> list[Chapter]:
        return [chapter for chapter in self.chapters if chapter.number is not None]

    @property
    def package(self) -> Path:
        return self.root / PACKAGE

    @cached_property
    def modules(self) -> list[Path]:
        "Exported modules, in reading order where a chapter stands behind them."
        order = {chapter.name: chapter.number for chapter in self.numbered}
        paths = [path for path in self.package.glob("*.py") if not path.name.startswith("_")]
        return sorted(paths, key=lambda path: (order.get(path.stem, 100), path.stem))

    def chapter(self, key: str) -> Chapter:
        "The chapter with this number, name or stem."
        for chapter in self.chapters:
            if key in (chapter.stem, chapter.name, chapter.stem[:2]):
                return chapter
        raise SystemExit(f"no chapter {key!r}; there are: {', '.join(chapter.stem for chapter in self.numbered)}")


def unfenced(markdown: str) -> str:
    "Markdown without its code blocks."
    return re.sub(r"^(```+|~~~+).*?^\1", "", markdown, flags=re.M | re.S)


def prose(markdown: str) -> str:
    "Markdown without code, mathematics and addresses, which hold no references and no English."
    text = re.sub(r"`[^`\n]*`", "", unfenced(markdown))
    text = re.sub(r"\$\$.*?\$\$|(?<!\\)\$[^$\n]+\$", "", text, flags=re.S)
    return re.sub(r"<?https?://\S+|\]\([^)]*\)", "]", text)


REFERENCE = re.compile(r"(?<![\w.@/\\])-?@([A-Za-z][\w:.-]*\w)")
CROSS_REFERENCE = re.compile(r"(fig|tbl|eq|sec|lst)-")


def references(markdown: str) -> list[str]:
    "Keys named by `@key`: citations and cross-references."
    return REFERENCE.findall(prose(markdown))


def labels(chapter: Chapter) -> list[str]:
    "Labels that `@label` may point at."
    found = [cell.directives["label"] for cell in chapter.code if "label" in cell.directives]
    for cell in chapter.markdown:
        found += re.findall(r"\{#((?:fig|tbl|eq|sec|lst)-[\w-]+)", cell.source)
    return found


def bibliography(root: Path = ROOT):
    "The entries of refs/references.bib."
    import bibtexparser

    return bibtexparser.parse_file(str(Path(root) / "refs" / "references.bib"))

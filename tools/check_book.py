"""The book's own rules. Prints every breach and exits 1 if there is one."""

import ast
import csv
import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import yaml
from book import CROSS_REFERENCE, PACKAGE, Book, Cell, Chapter, bibliography, labels, prose, references, unfenced

SECTIONS = (
    "At a glance", "The idea", "Derivation", "Reference", "Roofline", "Kernel", "Backward",
    "Parity", "Benchmark", "Reading the plot", "Exercises",
)  # fmt: skip
RECORD_FIELDS = (
    "op,impl,version,shape,dtype,pass,metric,unit,p50,p20,p80,gpu,torch,triton,commit,source_sha256,date".split(",")
)
BANNED = re.compile(
    r"\b(blazing(ly)?|lightning[- ]fast|revolutionary|game[- ]chang\w+|cutting[- ]edge|state[- ]of[- ]the[- ]art"
    r"|seamless(ly)?|effortless(ly)?|leverag(e|es|ed|ing)|delv(e|es|ing)|unleash\w*|supercharg\w*|obviously|simply"
    r"|TODO|FIXME|XXX|lorem ipsum)\b",
    re.I,
)
BANNER = re.compile(r"^\s*#\s*[-=#*~]{4,}", re.M)
CELL_LINES, KERNEL_LINES = 30, 75  # a cell should have about 15, a kernel about 60

Rule = Callable[[Book], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(check: Rule) -> Rule:
    RULES[check.__name__] = check
    return check


def at(chapter: Chapter, cell: Cell) -> str:
    return f"{chapter.path.name} cell {cell.index}"


def listed(items: list) -> Iterator[str]:
    "File names of a `chapters:` list, parts flattened."
    for item in items:
        if isinstance(item, dict):
            if not str(item.get("part", "")).strip() or str(item["part"]).endswith((".qmd", ".ipynb", ".md")):
                yield str(item.get("part"))
            yield from listed(item.get("chapters", []))
        else:
            yield str(item)


@rule
def chapter_list(book: Book) -> Iterator[str]:
    "_quarto.yml lists the notebooks, all of them, in reading order."
    config = yaml.safe_load((book.root / "_quarto.yml").read_text(encoding="utf-8"))
    names = [name for name in listed(config["book"]["chapters"]) if name.endswith(".ipynb")]
    present = [chapter.path.name for chapter in book.chapters]
    if names != present:
        yield f"_quarto.yml lists {names}, nbs/ holds {present}"
    numbers = Counter(chapter.number for chapter in book.numbered)
    yield from (f"two chapters are numbered {number:02}" for number, count in numbers.items() if count > 1)
    yield from (f"{c.path.name}: a chapter is NN_name.ipynb" for c in book.chapters[1:] if c.number is None)
    if not book.chapters or book.chapters[0].stem != "index":
        yield "nbs/index.ipynb is missing"


@rule
def title_cell(book: Book) -> Iterator[str]:
    "The first markdown cell is `# Name`, an empty line, `> claim`, and nothing else."
    for chapter in book.chapters:
        first = chapter.markdown[0] if chapter.markdown else None
        if first is None or not re.fullmatch(r"# [^\n]+\n\n> [^\n]+", first.source.strip()):
            yield f"{chapter.path.name}: the title cell must be '# Name', an empty line, '> claim', and nothing else"
        elif any(cell.code.strip() for cell in chapter.code if cell.index < first.index):
            yield f"{chapter.path.name}: code stands before the title"
        for cell in chapter.markdown[1:]:
            if re.search(r"^# ", prose(cell.source), re.M):
                yield f"{at(chapter, cell)}: a second title"


@rule
def sections(book: Book) -> Iterator[str]:
    "A mechanism has the template's sections in order; any chapter numbers its sections and ends in exercises."
    for chapter in book.numbered:
        text = "\n\n".join(cell.source for cell in chapter.markdown)
        headings = re.findall(r"^## (.+?)\s*(?:\{.*\})?\s*$", unfenced(text), re.M)
        found = [re.fullmatch(r"(\d+)\.? (.+)", heading) for heading in headings]
        if not all(found):
            bare = [heading for heading, match in zip(headings, found, strict=True) if not match]
            yield f"{chapter.path.name}: sections are '## N Name'; not so: {bare}"
            continue
        numbers, names = [int(match[1]) for match in found], [match[2] for match in found]
        if chapter.is_mechanism:
            want = [f"{number} {name}" for number, name in enumerate(SECTIONS)]
            have = [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]
            if len(have) != len(want) or not all(h.startswith(w) for h, w in zip(have, want, strict=False)):
                yield f"{chapter.path.name}: sections are {have}, the template has {want}"
        elif not numbers or numbers[0] not in (0, 1) or any(a >= b for a, b in zip(numbers, numbers[1:], strict=False)):
            yield f"{chapter.path.name}: section numbers {numbers} do not rise from 0 or 1"
        if not names or not names[-1].startswith("Exercises"):
            yield f"{chapter.path.name}: the last section is 'Exercises'"
        else:
            last = re.split(r"^## ", text, flags=re.M)[-1]
            folded = len(re.findall(r"<details|collapse=\"?true", last))
            if folded < 3:
                yield f"{chapter.path.name}: {folded} folded answers, an exercise section has three"


def is_import(node: ast.stmt) -> bool:
    "An import, or what an import needs before it: an environment variable, a guard."
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If | ast.Try | ast.With):
        bodies = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
        bodies += [handler.body for handler in getattr(node, "handlers", [])]
        return all(is_import(child) or isinstance(child, ast.Pass) for body in bodies for child in body)
    return "os.environ" in ast.unparse(node) and isinstance(node, ast.Expr | ast.Assign)


@rule
def imports_alone(book: Book) -> Iterator[str]:
    "nbdev runs import cells when it renders, so they hold nothing else."
    for chapter in book.chapters:
        for cell in chapter.code:
            imports = [isinstance(node, ast.Import | ast.ImportFrom) for node in cell.tree.body]
            if any(imports) and not all(map(is_import, cell.tree.body)):
                yield f"{at(chapter, cell)}: imports stand alone in their cell"


@rule
def one_module(book: Book) -> Iterator[str]:
    "One notebook, one module, one test file, one stem."
    for chapter in book.chapters:
        targets = [cell.directives["default_exp"] for cell in chapter.code if "default_exp" in cell.directives]
        if chapter.number is None:
            if targets:
                yield f"{chapter.path.name}: the front page exports nothing"
            continue
        if targets != [chapter.name]:
            yield f"{chapter.path.name}: exports {targets}, expected ['{chapter.name}']"
        for cell in chapter.code:
            other = [cell.directives[d] for d in ("export", "exports", "exporti") if cell.directives.get(d)]
            if other:
                yield f"{at(chapter, cell)}: exports into {other[0]}"
        if not (book.package / f"{chapter.name}.py").exists():
            yield f"{PACKAGE}/{chapter.name}.py is missing"
        if not (book.root / "tests" / f"test_{chapter.name}.py").exists():
            yield f"tests/test_{chapter.name}.py is missing"
    names = {chapter.name: chapter for chapter in book.numbered}
    for module in book.modules:
        source = f"../nbs/{names[module.stem].path.name}" if module.stem in names else None
        if source is None or f"File to edit: {source}" not in module.read_text(encoding="utf-8"):
            yield f"{PACKAGE}/{module.name}: not the export of a chapter of its name"


def package_imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    "Modules of the package imported below a node, and whether by a star."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name.split(".")[1], False) for a in node.names if a.name.startswith(f"{PACKAGE}."))
        elif isinstance(node, ast.ImportFrom):
            star = any(alias.name == "*" for alias in node.names)
            parts = (node.module or "").split(".")
            if node.level:
                parts = [PACKAGE, *filter(None, parts)]
            if parts[0] != PACKAGE:
                continue
            yield from [(parts[1], star)] if len(parts) > 1 else ((alias.name, star) for alias in node.names)


@rule
def no_forward_imports(book: Book) -> Iterator[str]:
    "A chapter imports only earlier chapters, from the package, by name."
    order = {chapter.name: chapter.number for chapter in book.numbered}
    for chapter in book.chapters:
        for cell in chapter.code:
            for module, star in package_imports(cell.tree):
                if star:
                    yield f"{at(chapter, cell)}: import * from {module}"
                if module not in order:
                    yield f"{at(chapter, cell)}: imports {PACKAGE}.{module}, which no chapter exports"
                elif chapter.number is not None and order[module] >= chapter.number:
                    yield f"{at(chapter, cell)}: imports {PACKAGE}.{module}, which is no earlier chapter"
    for module in book.modules:
        for other, _ in package_imports(ast.parse(module.read_text(encoding="utf-8"))):
            if order.get(other, 100) >= order.get(module.stem, 100):
                yield f"{PACKAGE}/{module.name}: imports {other}, which is no earlier chapter"


@rule
def references_resolve(book: Book) -> Iterator[str]:
    "Labels are unique, cross-references have labels, citations have entries, entries are whole."
    library = bibliography(book.root)
    for block in library.failed_blocks:
        yield f"references.bib line {block.start_line}: {block.error}"
    keys = {entry.key for entry in library.entries}
    for entry in library.entries:
        missing = [name for name in ("title", "author", "year", "url") if name not in entry.fields_dict]
        if missing:
            yield f"references.bib: {entry.key} lacks {', '.join(missing)}"
    where: dict[str, str] = {}
    for chapter in book.chapters:
        for label in labels(chapter):
            if label in where:
                yield f"{chapter.path.name}: label {label} stands in {where[label]} too"
            where[label] = chapter.path.name
    for chapter in book.chapters:
        texts = [(cell, cell.source) for cell in chapter.markdown]
        texts += [(cell, cell.directives.get(name, "")) for cell in chapter.code for name in ("fig-cap", "tbl-cap")]
        for cell, text in texts:
            for key in references(text):
                if key.startswith("sec-"):
                    yield f"{at(chapter, cell)}: @{key}: sections carry their own numbers, so link to the heading"
                elif CROSS_REFERENCE.match(key):
                    if key not in where:
                        yield f"{at(chapter, cell)}: @{key} has no label"
                elif key not in keys:
                    yield f"{at(chapter, cell)}: @{key} is not in references.bib"


@rule
def records(book: Book) -> Iterator[str]:
    "A record belongs to a chapter, has the schema, and was made by today's module."
    chapters = {chapter.stem: chapter for chapter in book.numbered}
    for path in sorted((book.root / "refs" / "records").glob("*")):
        if path.suffix != ".csv" or path.stem not in chapters:
            yield f"refs/records/{path.name}: no chapter has this stem"
            continue
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        if reader.fieldnames != RECORD_FIELDS:
            yield f"refs/records/{path.name}: columns are {reader.fieldnames}, expected {RECORD_FIELDS}"
            continue
        name = chapters[path.stem].name
        modules = [book.package / f"{name}.py", *sorted(book.package.glob(f"{name}_*.py"))]
        today = hashlib.sha256(b"".join(m.read_bytes() for m in modules)).hexdigest() if modules[0].exists() else None
        stale = Counter(row["source_sha256"] for row in rows if row["source_sha256"] != today)
        if stale:
            yield f"refs/records/{path.name}: {sum(stale.values())} of {len(rows)} rows are stale; record them again"
        for line, row in enumerate(rows, 2):
            spot = f"refs/records/{path.name} line {line}"
            try:
                p20, p50, p80 = (float(row[name] or row["p50"]) for name in ("p20", "p50", "p80"))
            except ValueError:
                yield f"{spot}: p50, p20 and p80 must be numbers"
                continue
            if not p20 <= p50 <= p80:
                yield f"{spot}: {p20}, {p50}, {p80} are no quantiles"
            if row["metric"] == "sanitizer_errors" and p50:
                yield f"{spot}: compute-sanitizer reports {p50:g} errors"
            if not re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]):
                yield f"{spot}: date {row['date']!r}"


@rule
def readme_table(book: Book) -> Iterator[str]:
    "README.md's table is what tools/readme_table.py makes of the records."
    tool = book.root / "tools" / "readme_table.py"
    if not tool.exists():
        yield "tools/readme_table.py is missing, so README.md's table is unchecked"
        return
    done = subprocess.run([sys.executable, tool, "--check"], cwd=book.root, capture_output=True, text=True)
    if done.returncode:
        yield f"README.md's table is not today's: {(done.stdout + done.stderr).strip()}"


@rule
def words(book: Book) -> Iterator[str]:
    "No advertising, no unfinished business, no banners."
    for chapter in book.chapters:
        for cell in chapter.cells:
            yield from (f"{at(chapter, cell)}: {match[0]!r}" for match in BANNED.finditer(cell.source))
            if cell.kind == "code":
                yield from (f"{at(chapter, cell)}: banner {match[0]!r}" for match in BANNER.finditer(cell.source))
    texts = [path for path in book.root.glob("*.md")]
    texts += [path for folder in ("tools", "tests") for path in sorted((book.root / folder).glob("*.py"))]
    for path in texts:
        if path.name in ("check_book.py", "test_rules.py"):
            continue
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(book.root)
        yield from (f"{name}: {match[0]!r}" for match in BANNED.finditer(text))
        if path.suffix == ".py":
            yield from (f"{name}: banner {match[0]!r}" for match in BANNER.finditer(text))


@rule
def figures(book: Book) -> Iterator[str]:
    "Pictures exist, are SVG without a date, are used, and are shown from code cells."
    used = set()
    for chapter in book.chapters:
        for cell in chapter.markdown:
            for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", unfenced(cell.source)):
                yield f"{at(chapter, cell)}: show {target} from a labelled code cell; a markdown image is not copied"
        for cell in chapter.code:
            for name in re.findall(r"figures/([\w.-]+\.svg)", cell.source):
                used.add(name)
                if not (book.root / "figures" / name).exists():
                    yield f"{at(chapter, cell)}: figures/{name} is missing"
            for output in cell.outputs:
                raster = {"image/png", "image/jpeg"} & output.get("data", {}).keys()
                if raster:
                    yield f"{at(chapter, cell)}: {raster.pop()} output; draw SVG"
    readme = book.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if not text:
        yield "README.md is missing"
    for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)|<img[^>]+src=\"([^\"]+)", text):
        target = "".join(target)
        if not re.match(r"https?:", target) and not (book.root / target).exists():
            yield f"README.md: {target} is missing"
    source = text + "".join(cell.source for chapter in book.chapters for cell in chapter.code)
    for path in sorted((book.root / "figures").glob("*")):
        if path.suffix != ".svg":
            yield f"figures/{path.name}: figures are SVG"
            continue
        if path.stem not in source:
            yield f"figures/{path.name}: no chapter shows it"
        if "<dc:date>" in path.read_text(encoding="utf-8"):
            yield f"figures/{path.name}: holds its date, so it changes with every run"


@rule
def cells(book: Book) -> Iterator[str]:
    "Cells are short, ran without complaint, and install nothing."
    for chapter in book.chapters:
        for cell in chapter.code:
            limit = KERNEL_LINES if re.search(r"\b(triton|gluon)\.jit\b", cell.code) else CELL_LINES
            if (count := counted_lines(cell)) > limit:
                yield f"{at(chapter, cell)}: {count} lines, at most {limit}"
            if re.search(r"^\s*[!%].*\b(pip|conda|wget|curl)\b|urlopen|urlretrieve|requests\.get", cell.source, re.M):
                yield f"{at(chapter, cell)}: downloads or installs"
            for output in cell.outputs:
                if output["output_type"] == "error":
                    yield f"{at(chapter, cell)}: ended in {output['ename']}"
                if output["output_type"] == "stream" and output["name"] == "stderr":
                    yield f"{at(chapter, cell)}: wrote to stderr: {''.join(output['text'])[:80]!r}"


def counted_lines(cell: Cell) -> int:
    "Lines of code, without empty ones, docstrings and the one-per-line parameters of docments."
    skipped = set()
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.FunctionDef):
            skipped |= set(range(node.lineno + 1, node.body[0].lineno))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            skipped |= set(range(doc.lineno, doc.end_lineno + 1))
    return sum(bool(line.strip()) and n not in skipped for n, line in enumerate(cell.code.splitlines(), 1))


def problems(book: Book) -> list[str]:
    "Every breach of every rule."
    return [f"{name}: {problem}" for name, check in RULES.items() for problem in check(book)]


def main() -> int:
    book = Book()
    found = problems(book)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(book.chapters)} chapters, {len(RULES)} rules, {len(found)} problem(s)")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

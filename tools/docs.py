"""Make the site in _docs/: with Quarto where it is on PATH, otherwise with smalldocs, which knows neither
citations nor cross-references, so that they are resolved here. What was written is checked either way."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from book import CROSS_REFERENCE, REFERENCE, ROOT, Book, bibliography, prose, read_chapter

OUT = ROOT / "_docs"
NAMES = {"fig": "Figure", "tbl": "Table", "eq": "Equation", "sec": "Section", "lst": "Listing"}
VERBATIM = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]*`|\$\$.*?\$\$|(?<!\\)\$[^$\n]+\$|<?https?://\S+|\]\([^)]*\)", re.M | re.S)


def page_of(stem: str) -> str:
    "nbdev names a chapter's page after its module."
    return re.sub(r"^\d\d_", "", stem) + ".html"


class Resolver:
    "Turns `@key` into links, as Quarto would."

    def __init__(self, book: Book):
        self.entries = {entry.key: entry for entry in bibliography(book.root).entries}
        self.targets: dict[str, tuple[str, str]] = {}
        for chapter in book.chapters:
            counts = dict.fromkeys(NAMES, 0)
            for cell in chapter.cells:
                found = [cell.directives["label"]] if "label" in cell.directives else []
                if cell.kind == "markdown":
                    found += re.findall(r"\{#((?:fig|tbl|eq|sec|lst)-[\w-]+)", cell.source)
                for label in filter(CROSS_REFERENCE.match, found):
                    kind = label.split("-")[0]
                    counts[kind] += 1
                    number = f"{chapter.number}.{counts[kind]}" if chapter.number is not None else str(counts[kind])
                    self.targets[label] = (f"{NAMES[kind]} {number}", f"{page_of(chapter.stem)}#{label}")

    def author(self, key: str) -> str:
        names = self.entries[key].fields_dict["author"].value.split(" and ")
        first = names[0].strip("{}").split(",")[0]
        return first if len(names) == 1 else f"{first} and {names[1].split(',')[0]}" if len(names) == 2 else f"{first} et al."

    def year(self, key: str) -> str:
        return self.entries[key].fields_dict["year"].value

    def one(self, match: re.Match) -> str:
        key = match[1]
        if key in self.targets:
            return "[{}]({})".format(*self.targets[key])
        return f"[{self.author(key)} ({self.year(key)})](references.html#ref-{key})" if key in self.entries else match[0]

    def group(self, match: re.Match) -> str:
        parts = []
        for part in match[1].split(";"):
            key = re.match(r"\s*-?@([\w:.-]*\w)(.*)", part, re.S)
            if key is None or key[1] not in self.entries:
                return match[0]
            parts.append(f"[{self.author(key[1])}, {self.year(key[1])}](references.html#ref-{key[1]}){key[2]}")
        return f"({'; '.join(parts)})"

    def plain(self, text: str) -> str:
        text = re.sub(r"\[(\s*-?@[^\]]+)\]", self.group, text)
        return REFERENCE.sub(self.one, text)

    def __call__(self, markdown: str) -> str:
        "Resolve references outside code, mathematics and addresses; number labelled equations; link chapters by their pages."
        out, end = [], 0
        for match in VERBATIM.finditer(markdown):
            out += [self.plain(markdown[end : match.start()]), match[0]]
            end = match.end()
        text = "".join([*out, self.plain(markdown[end:])])
        text = re.sub(r"\]\((\w+)\.ipynb(?=[#)])", lambda m: f"]({page_of(m[1])}", text)
        return re.sub(r"\$\$(.*?)\$\$\s*\{#(eq-[\w-]+)\}", self.equation, text, flags=re.S)

    def equation(self, match: re.Match) -> str:
        number = self.targets[match[2]][0].split()[1]
        return f"[]{{#{match[2]}}}\n\n$${match[1].rstrip()} \\tag{{{number}}}$$"

    def caption(self, source: str) -> str:
        "A labelled cell's caption, numbered."
        label = re.search(r"^#\|\s*label:\s*(\S+)", source, re.M)
        if not label or label[1] not in self.targets:
            return source
        number = self.targets[label[1]][0]
        return re.sub(
            r"^(#\|\s*(?:fig|tbl)-cap:\s*)[\"']?(.*?)[\"']?\s*$",
            lambda m: m[1] + json.dumps(f"{number}: {m[2]}", ensure_ascii=False),
            source,
            flags=re.M,
        )

    def bibliography_page(self) -> str:
        "The references as a page."
        lines = ["---", "title: References", "---", ""]
        for key, entry in sorted(self.entries.items(), key=lambda item: (self.author(item[0]), self.year(item[0]))):
            value = {name: re.sub(r"[{}]|\\(?=\")", "", field.value) for name, field in entry.fields_dict.items()}
            people = "; ".join(" ".join(reversed(name.split(", "))) for name in value["author"].split(" and "))
            venue = value.get("booktitle") or value.get("journal") or ""
            where = f" *{venue}*." if venue else f" arXiv:{value['eprint']}." if "eprint" in value else ""
            lines.append(f"[]{{#ref-{key}}}{people} ({value['year']}). [{value['title']}]({value['url']}).{where}\n")
        return "\n".join(lines)


def sidebar(chapters: list) -> list:
    "Quarto's list of chapters as a website's sidebar, pages named as nbdev names them."
    items = []
    for item in chapters:
        if isinstance(item, dict):
            items.append({"section": item["part"], "contents": sidebar(item["chapters"])})
        else:
            path = Path(item)
            items.append(f"{page_of(path.stem).removesuffix('.html')}{path.suffix}")
    return items


def fallback(book: Book, processed: Path) -> None:
    "Render what nbdev processed with smalldocs."
    from smalldocs.site import build

    config, resolve = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8")), Resolver(book)
    about, options = config["book"], config["format"]["html"]
    site = {
        "project": {"type": "website", "output-dir": "_site"},
        "website": {
            "title": about["title"],
            "description": about["description"],
            "repo-url": about["repo-url"],
            "search": True,
            "page-navigation": True,
            "sidebar": {"style": "floating", "contents": sidebar(about["chapters"])},
        },
        "format": {
            "html": {key: options[key] for key in ("theme", "css", "toc", "toc-depth")}
            | {"max-width": options["grid"]["body-width"]}
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in processed.iterdir():
            if path.suffix == ".css":
                shutil.copy(path, folder)
            elif path.suffix == ".qmd" and path.stem != "references":
                (folder / path.name).write_text(resolve(path.read_text(encoding="utf-8")), encoding="utf-8")
            elif path.suffix == ".ipynb":
                notebook = json.loads(path.read_text(encoding="utf-8"))
                for cell in notebook["cells"]:
                    source = "".join(cell["source"])
                    if cell["cell_type"] == "markdown":
                        cell["source"] = resolve(source)
                    elif cell["cell_type"] == "raw":
                        cell["source"] = re.sub(r"^output-file:.*\n", "", source, flags=re.M)
                    elif cell["cell_type"] == "code":
                        cell["source"] = resolve.caption(source)
                target = folder / page_of(path.stem).replace(".html", ".ipynb")
                target.write_text(json.dumps(notebook), encoding="utf-8")
        (folder / "references.qmd").write_text(resolve.bibliography_page(), encoding="utf-8")
        (folder / "_quarto.yml").write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")
        built = build(folder, quiet=True)
        shutil.rmtree(OUT, ignore_errors=True)
        shutil.copytree(built.out, OUT)
        if built.warnings:
            raise SystemExit("smalldocs warns:\n  " + "\n  ".join(built.warnings))


class Page(HTMLParser):
    "Anchors, links, pictures and text of a rendered page."

    def __init__(self, html: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[str] = []
        self.text: list[str] = []
        self.skip = 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "img" and values.get("src"):
            self.images.append(values["src"])
        self.skip += tag in ("script", "style", "code", "pre")

    def handle_endtag(self, tag):
        self.skip -= tag in ("script", "style", "code", "pre")

    def handle_data(self, data):
        if not self.skip:
            self.text.append(data)


def check(book: Book) -> list[str]:
    "What is wrong with the pages in _docs/."
    pages = {path.relative_to(OUT).as_posix(): Page(path.read_text(encoding="utf-8")) for path in OUT.rglob("*.html")}
    wrong = [f"{page_of(c.stem)} is missing" for c in book.chapters if page_of(c.stem) not in pages]
    for name, page in pages.items():
        for link in page.links + page.images:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            target = (Path(name).parent / unquote(parts.path)).as_posix() if parts.path else name
            if target not in pages and not (OUT / target).exists():
                wrong.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                wrong.append(f"{name}: {link} has no such anchor")
        text = prose("".join(page.text))
        wrong += [f"{name}: {key} stands unresolved" for key in re.findall(r"\?@[\w-]+|(?<!\w)@(?:fig|tbl|eq|sec)-[\w-]+", text)]
        wrong += [f"{name}: {mark!r} stands in the text" for mark in re.findall(r":::+ ?\{[^}]*\}?", text)]
    for chapter in book.chapters:
        html = OUT / page_of(chapter.stem)
        title = re.match(r"# ([^\n]+)", chapter.markdown[0].source)[1].replace("`", "") if chapter.markdown else ""
        if html.exists() and title not in "".join(pages[html.name].text):
            wrong.append(f"{html.name}: its title {title!r} is not on the page")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fallback", action="store_true", help="use smalldocs even where Quarto is")
    book = Book()
    if shutil.which("quarto") and not parser.parse_args().fallback:
        maker = "Quarto, through nbdev_docs"
        subprocess.run(["nbdev_docs"], cwd=ROOT, check=True)
    else:
        from nbdev.serve import proc_nbs

        maker = "smalldocs, after nbdev's own processing"
        processed = proc_nbs(n_workers=2, force=True)
        shown = {read_chapter(path).path.name for path in processed.glob("*.ipynb")}
        lost = [chapter.path.name for chapter in book.chapters if chapter.path.name not in shown]
        if lost:
            print(f"nbdev lost {', '.join(lost)} while processing")
            return 1
        fallback(book, processed)
    wrong = check(book)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"_docs/ was made with {maker}: {len(list(OUT.rglob('*.html')))} pages, {len(wrong)} problem(s)")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""The book's rules hold, nothing reads the device from the host, and both checks catch what they are for."""

import ast
import json
from pathlib import Path

import check_book
import pytest
from book import ROOT, Book
from small_book import GOOD, notebook, write

BOOK = Book()

# Modules and functions which are the host's side by nature: what they wait for, they are asked to wait for.
HOST_SIDE: dict[str, str | set[str]] = {
    "machine": "*",  # measures this machine
    "measure": "*",  # reads clocks and counters
    "parity": "*",  # compares values
    "gluon": {"_Pointer", "_language"},  # its interpreter, on the CPU
    "multi_tensor": {"upload"},  # from pinned memory, and only what has changed
    "firewall": {"read"},  # the counters, at the caller's cadence
    "mor_expert_choice": {"_capacity_table"},  # when it is made
    "mor_token_choice": {"naive_mor_token_choice"},  # as the authors' code goes about it
    "train": {"block", "draw_losses", "recursion_shares"},  # the declared read every so many steps, the plot, the closing table
}
WAITING_METHODS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    "is_nonzero", "equal", "allclose", "synchronize", "from_numpy", "pin_memory",
}  # fmt: skip
COPYING_CALLS = {"torch.tensor", "torch.as_tensor", "torch.Tensor", "torch.LongTensor"}
REDUCTIONS = {"any", "all", "sum", "max", "min", "amax", "amin", "mean", "norm", "isnan", "isfinite", "isinf", "count_nonzero"}


def is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def host_code(tree: ast.Module, exempt: set[str]):
    "Nodes of a module outside kernels and exempt functions."
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if is_jitted(node) or getattr(node, "name", None) in exempt:
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def reduces(node: ast.AST) -> bool:
    "Whether an expression holds a tensor's reduction."
    calls = (child for child in ast.walk(node) if isinstance(child, ast.Call))
    return any(isinstance(call.func, ast.Attribute) and call.func.attr in REDUCTIONS for call in calls)


def of_a_flag(tree: ast.Module) -> set[ast.Call]:
    "Calls such as `bool(flag)`, of a parameter that its function declares a bool."
    calls = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        flags = {a.arg for a in [*function.args.args, *function.args.kwonlyargs] if a.annotation and ast.unparse(a.annotation) == "bool"}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and len(node.args) == 1 and getattr(node.args[0], "id", None) in flags:
                calls.add(node)
    return calls


def waits(tree: ast.Module, exempt: set[str] = frozenset()) -> list[str]:
    "Where the host waits for the device, or copies a fresh Python value to it."
    found, flags = [], of_a_flag(tree)
    for node in host_code(tree, exempt):
        why = None
        if isinstance(node, ast.Call):
            name, attr = ast.unparse(node.func), getattr(node.func, "attr", None)
            given = {keyword.arg for keyword in node.keywords}
            if attr in WAITING_METHODS:
                why = name
            elif name in COPYING_CALLS:
                why = f"{name}, a copy from the host"
            elif attr == "repeat_interleave" and "output_size" not in given:
                why = f"{name} without output_size"
            elif name == "torch.where" and len(node.args) == 1 and not node.keywords:
                why = f"{name} of one argument"
            elif attr == "to" and any("cpu" in ast.unparse(arg) for arg in [*node.args, *(k.value for k in node.keywords)]):
                why = f"{name} to the CPU"
            elif (name == "bool" and node not in flags) or (name in ("int", "float") and any(map(reduces, node.args))):
                why = f"{name}() of a tensor"
        elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) and reduces(node.test):
            why = f"branch on {ast.unparse(node.test)}"
        if why:
            found.append(f"line {node.lineno}: {why}")
    return sorted(found)


@pytest.mark.parametrize("module", BOOK.modules, ids=lambda path: path.stem)
def test_no_module_waits_for_the_device(module):
    exempt = HOST_SIDE.get(module.stem, set())
    if exempt == "*":
        return
    found = waits(ast.parse(module.read_text(encoding="utf-8")), exempt)
    assert not found, f"{module.name}:\n  " + "\n  ".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "x.sum().tolist()",
        "x.cpu()",
        "x.to('cpu')",
        "x.to(device='cpu')",
        "torch.nonzero(x)",
        "bool(x)",
        "float(x.max())",
        "torch.tensor([1, 2], device=x.device)",
        "x.repeat_interleave(y)",
        "torch.where(x > 0)",
        "y = 1 if x.any() else 2",
        "assert torch.isfinite(x).all()",
        "while x.max() > 0: pass",
        "torch.cuda.synchronize()",
    ],
)
def test_the_guard_sees(line):
    assert waits(ast.parse(f"def f(x, y):\n    {line}"))


def test_the_guard_sees_a_tensor_beside_a_flag():
    assert waits(ast.parse("def f(x:Tensor, flag:bool):\n    return bool(x) and bool(flag)")) == ["line 2: bool() of a tensor"]


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return x.to(torch.float32)",
        "def f(x):\n    return torch.where(x > 0, x, 0)",
        "def f(x, n):\n    return x.repeat_interleave(x, output_size=n)",
        "def f(scale):\n    return float(scale)",
        "def f(x, flag:bool=False):\n    return bool(flag)",
        "@triton.jit\ndef f(x):\n    while x.max() > 0: pass",
        "def f(x):\n    if x.shape[0] == 0: return x",
    ],
)
def test_the_guard_lets_pass(code):
    assert not waits(ast.parse(code))


@pytest.mark.parametrize("rule", check_book.RULES, ids=str)
def test_rule(rule):
    found = list(check_book.RULES[rule](BOOK))
    assert not found, "\n".join(found)


THING = json.loads(GOOD["nbs/00_thing.ipynb"])


def edited(index: int, source: str) -> str:
    cells = [(cell["cell_type"], cell["source"]) for cell in THING["cells"]]
    cells[index] = (cells[index][0], source)
    return notebook(*cells)


def test_a_good_book_has_no_problems(tmp_path):
    assert check_book.problems(write(tmp_path, GOOD)) == []


CSV = ",".join(check_book.RECORD_FIELDS)
ROW = "thing,dormouse,0.1,B1,bf16,fwd,device_ms,ms,1,1,1,H200,2.11,3.7.1,abc,{sha},2026-01-01"
BREACHES = {
    "unlisted": ("chapter_list", {"_quarto.yml": "book:\n  chapters: [index.ipynb]\n"}),
    "title": ("title_cell", {"nbs/00_thing.ipynb": edited(0, "# Thing\n\n> It holds.\n\nMore.")}),
    "unnumbered": ("sections", {"nbs/00_thing.ipynb": edited(3, "## How\n\n$$a=b$$ {#eq-how}")}),
    "no exercises": ("sections", {"nbs/00_thing.ipynb": edited(5, "## 2 Exercises\n\nNone.")}),
    "order": ("sections", {"nbs/00_thing.ipynb": edited(3, "## 3 How\n\n$$a=b$$ {#eq-how}")}),
    "import": ("imports_alone", {"nbs/00_thing.ipynb": edited(2, "#| export\nimport math\nx = 1")}),
    "module": ("one_module", {"nbs/00_thing.ipynb": edited(1, "#| default_exp other")}),
    "orphan": ("one_module", {"dormouse_fused/orphan.py": ""}),
    "untested": ("one_module", {"tests/test_thing.py": None}),
    "forward": ("no_forward_imports", {"nbs/00_thing.ipynb": edited(2, "#| export\nfrom dormouse_fused.thing import thing")}),
    "star": ("no_forward_imports", {"nbs/00_thing.ipynb": edited(2, "#| export\nfrom dormouse_fused.thing import *")}),
    "label": ("references_resolve", {"nbs/00_thing.ipynb": edited(3, "## 1 How\n\nAs in [@paper].")}),
    "citation": ("references_resolve", {"nbs/00_thing.ipynb": edited(3, "## 1 How\n\n$$a=b$$ {#eq-how}\n\nAs in [@papers].")}),
    "section": ("references_resolve", {"nbs/00_thing.ipynb": edited(3, "## 1 How\n\n$$a=b$$ {#eq-how} See @sec-how.")}),
    "entry": ("references_resolve", {"refs/references.bib": "@misc{paper, title={T}}"}),
    "stale": ("records", {"refs/records/00_thing.csv": f"{CSV}\n{ROW.format(sha=0)}\n"}),
    "schema": ("records", {"refs/records/00_thing.csv": "op,impl\n"}),
    "stray record": ("records", {"refs/records/11_other.csv": f"{CSV}\n"}),
    "no table": ("readme_table", {"tools/readme_table.py": None}),
    "old table": ("readme_table", {"tools/readme_table.py": "raise SystemExit('old')"}),
    "word": ("words", {"README.md": "A blazingly fast book.\n"}),
    "banner": ("words", {"nbs/00_thing.ipynb": edited(4, "# ------------\nx = 1")}),
    "figure": ("figures", {"nbs/00_thing.ipynb": edited(4, "SVG('../figures/none.svg')")}),
    "markdown image": ("figures", {"nbs/00_thing.ipynb": edited(3, "## 1 How\n\n$$a=b$$ {#eq-how}\n\n![x](../figures/x.svg)")}),
    "unused figure": ("figures", {"figures/unused.svg": "<svg/>"}),
    "long cell": ("cells", {"nbs/00_thing.ipynb": edited(4, "x = 1\n" * 40)}),
    "install": ("cells", {"nbs/00_thing.ipynb": edited(4, "!pip install x")}),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_rule_catches(breach, tmp_path):
    rule, files = BREACHES[breach]
    assert list(check_book.RULES[rule](write(tmp_path, GOOD | files)))


def test_requirements_pin_everything_exactly():
    lines = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line and "://" not in line for line in lines)
    assert {"torch==2.13.0", "triton==3.7.1", "flash-linear-attention==0.6.0", "nbdev==2.4.14"} <= set(lines)


def test_the_library_is_this_checkout():
    import dormouse_fused

    assert Path(dormouse_fused.__file__).parent == BOOK.package

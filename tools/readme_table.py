"Write README's measurement block from refs/records; with --check, only say whether it is up to date."
import argparse
import csv
import difflib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- records: begin (tools/readme_table.py) -->", "<!-- records: end -->"
COLUMNS = {"device_ms": "device, ms", "wall_ms": "wall, ms", "peak_mib": "peak, MiB", "launches": "launches"}
PASSES = ("fwd+bwd", "step")
NONE = "No measurement is recorded yet: `make record CHAPTER=10` on a GPU host writes the first."
APART = {"flash_attn_res": "flash_attn_res was measured after ours, its device time as the sum of its kernels' times."}


def read_rows(folder):
    "All rows of all records, in the order of the chapters."
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def number(value):
    "Three significant digits, without an exponent where one isn't needed."
    value = float(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def pair(ours, theirs):
    "`ours / theirs (how many times less)`; empty where either is missing."
    if ours is None or theirs is None:
        return ""
    times = f" ({theirs / ours:.1f}×)" if ours and theirs else ""
    return f"{number(ours)} / {number(theirs)}{times}"


def groups(rows):
    "{(op, shape, dtype, pass): {impl: {metric: p50}}}, full steps and forward + backward only."
    found = {}
    for row in rows:
        if row["pass"] in PASSES:
            key = row["op"], row["shape"], row["dtype"], row["pass"]
            found.setdefault(key, {}).setdefault(row["impl"], {})[row["metric"]] = float(row["p50"])
    return found


def table(rows):
    "Markdown lines: one per shape, dtype, pass and peer that were both timed; other forms of ours are no peers."
    lines = []
    for (op, shape, dtype, pass_), impls in groups(rows).items():
        ours = impls.get("dormouse", {})
        for peer, theirs in impls.items():
            if peer.startswith("dormouse") or not any(ours.get(m) and theirs.get(m) for m in ("device_ms", "wall_ms")):
                continue
            cells = [pair(ours.get(metric), theirs.get(metric)) for metric in COLUMNS]
            lines.append(f"| {op} | {shape.replace('_', ' ')} | {dtype} | {pass_} | {peer} | {' | '.join(cells)} |")
    if not lines:
        return []
    head = ["op", "shape", "dtype", "pass", "against", *COLUMNS.values()]
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]


def origin(rows):
    "Where, with what and when the rows were measured."
    def seen(*names):
        return ", ".join(dict.fromkeys(" ".join(row[n] for n in names).strip() for row in rows if all(row[n] for n in names)))
    peers = [row for row in rows if not row["impl"].startswith("dormouse") and row["impl"] not in ("torch", "bound")
             and row["metric"] in COLUMNS]
    versions = ", ".join(dict.fromkeys(f"{row['impl']} {row['version']}" for row in peers if row["version"]))
    return (f"Ours / theirs, and how many times less. {seen('gpu')}; torch {seen('torch')}, Triton {seen('triton')}"
            f"{', ' if versions else ''}{versions}; {seen('date')}. Device time is a CUDA graph replayed, wall time an eager "
            "call, memory what a call adds to its inputs. Both sides were measured in one process, turn by turn. fp32 is float32 "
            "at PyTorch's precision highest; fla multiplies it in TF32 all the same."
            + "".join(f" {text}" for impl, text in APART.items() if any(row["impl"] == impl for row in peers)))


def block(root):
    "What stands between the markers."
    rows = read_rows(root / "refs" / "records")
    lines = table(rows)
    if not lines:
        return NONE
    used = [row for row in rows if row["pass"] in PASSES]
    figure = ["![Time and memory against fla](figures/front.svg)", ""] if (root / "figures" / "front.svg").exists() else []
    return "\n".join([*figure, *lines, "", origin(used)])


def rendered(readme, root):
    "README's text with a fresh block."
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md needs the markers {BEGIN!r} and {END!r}, once and in this order")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{block(root)}\n{END}{rest.split(END)[1]}"


def strange_examples(readme, root):
    "README's Python blocks that aren't a code cell of the front page, which the gate runs."
    cells = json.loads((root / "nbs" / "index.ipynb").read_text())["cells"]
    code = {"".join(cell["source"]).strip() for cell in cells if cell["cell_type"] == "code"}
    return [block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if block.strip() not in code]


def main(argv=None):
    "Exit status 0 if README is, or now is, up to date."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and show the difference if stale")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    path = args.root / "README.md"
    old = path.read_text()
    try:
        new = rendered(old, args.root)
    except ValueError as error:
        print(f"readme_table: {error}", file=sys.stderr)
        return 1
    strange = strange_examples(new, args.root)
    for example in strange:
        print(f"readme_table: not a cell of nbs/index.ipynb:\n{example}", file=sys.stderr)
    if args.check and old != new:
        sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "README.md", "from the records"))
        print("readme_table: README.md is stale; run tools/readme_table.py", file=sys.stderr)
    elif old != new:
        path.write_text(new)
    return int(bool(strange) or (args.check and old != new))


if __name__ == "__main__":
    sys.exit(main())

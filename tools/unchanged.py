"""Run a command and fail if it changes files: `unchanged.py PATH… -- COMMAND…`."""

import hashlib
import subprocess
import sys
from pathlib import Path

from book import ROOT

IGNORED = {"__pycache__", ".ipynb_checkpoints"}


def snapshot(paths: list[str]) -> dict[str, str]:
    "A digest for every file below the paths."
    digests = {}
    for path in map(ROOT.joinpath, paths):
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and not IGNORED & set(file.parts):
                digests[str(file.relative_to(ROOT))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def main() -> int:
    split = sys.argv.index("--")
    paths, command = sys.argv[1:split], sys.argv[split + 1 :]
    before = snapshot(paths)
    code = subprocess.run(command, cwd=ROOT).returncode
    after = snapshot(paths)
    changed = sorted(file for file in before.keys() | after.keys() if before.get(file) != after.get(file))
    if changed:
        name = Path(command[0]).name
        print(f"{name} changed {len(changed)} file(s); commit what it makes of them:", *changed, sep="\n  ")
    return code or bool(changed)


if __name__ == "__main__":
    sys.exit(main())

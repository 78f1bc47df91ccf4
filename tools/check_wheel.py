"""Build the wheel, install it where only torch, triton and what those require exist, and import every module."""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from book import PACKAGE, ROOT, Book
from packaging.requirements import Requirement

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("imported", *sys.argv[1:])
"""


def required(name: str, seen: dict[str, Distribution]) -> dict[str, Distribution]:
    "The distribution and everything it requires here, extras aside."
    if name.lower() not in seen:
        seen[name.lower()] = dist = distribution(name)
        for line in dist.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, seen)
    return seen


def lend(dist: Distribution, site: Path) -> None:
    "Link a distribution's top-level files and folders into another environment."
    home = Path(sysconfig.get_paths()["purelib"])
    for top in sorted({Path(file).parts[0] for file in dist.files or []} - {"..", "__pycache__"}):
        if (home / top).exists() and not (site / top).exists():
            (site / top).symlink_to(home / top)


def main() -> int:
    def run(*command):
        return subprocess.run(list(map(str, command)), check=True, cwd=folder, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        try:
            source = folder / "source"
            shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
            for name in ("setup.py", "settings.ini", "README.md", "LICENSE"):
                shutil.copy(ROOT / name, source)
            run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
            wheel = next(folder.glob("*.whl"))
            venv.create(folder / "env", with_pip=False, symlinks=True)
            python = folder / "env" / "bin" / "python"
            site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
            lent: dict[str, Distribution] = {}
            for name in ("torch", "triton"):
                required(name, lent)
            for dist in lent.values():
                lend(dist, site)
            run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
            needs = [Requirement(r) for r in distribution(PACKAGE).requires or []]
            names = {r.name for r in needs if r.marker is None}
            if names != {"torch", "triton"}:
                print(f"the package requires {sorted(names)}; at run time it may require torch and triton")
                return 1
            print(run(python, "-I", "-c", PROBE, PACKAGE, *(f"{PACKAGE}.{m.stem}" for m in Book().modules)).strip())
            print(run(folder / "env" / "bin" / "dormouse-train", "--help").splitlines()[0])
        except subprocess.CalledProcessError as error:
            print(f"{' '.join(error.cmd[:4])} … failed:\n{error.stdout}{error.stderr}")
            return 1
        print(f"{wheel.name} works with {', '.join(sorted(lent))} and nothing else")
    return 0


if __name__ == "__main__":
    sys.exit(main())

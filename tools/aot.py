"""Compile every Triton kernel of every module ahead of time, for GPUs that need not be here.

A module with kernels has `aot_cases()`, a list of `dormouse_fused.triton.Case` or of tuples (kernel, signature,
constexprs, num_warps, num_stages, label). NVIDIA targets must spill no more than the case allows, which is nothing unless it says
otherwise; every target must keep within the shared memory of a program.
"""

import ast
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from book import PACKAGE, Book


class Job(NamedTuple):
    label: str
    case: object


def kernels(module: Path) -> set[str]:
    "Names of the module's launchable kernels."
    names = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        jitted = isinstance(node, ast.FunctionDef) and any(re.search(r"(triton|gluon)\.jit", ast.unparse(d)) for d in node.decorator_list)
        if jitted and node.name.endswith("_kernel") and node.args.args:  # without arguments it could reach no memory
            names.add(node.name)
    return names


def jobs(modules: list[Path]) -> tuple[list[Job], list[str]]:
    "What to compile, and which kernels no case names."
    from dormouse_fused.triton import Case, for_targets

    found, missing = [], []
    for path in modules:
        module, wanted = import_module(f"{PACKAGE}.{path.stem}"), kernels(path)
        cases = list(getattr(module, "aot_cases", list)())
        for case in cases:
            if isinstance(case, Case):
                types = dict.fromkeys(kind[1:] for kind in case.signature.values() if kind[0] == "*")
                label = " ".join([*types, *(f"{name}={value}" for name, value in case.constexprs.items())])
            else:
                kernel, signature, constexprs, warps, stages, label = case
                case = Case(kernel, signature, constexprs, num_warps=warps, num_stages=stages)
            wanted.discard(case.kernel.rpartition(":")[2] if isinstance(case.kernel, str) else case.kernel.fn.__name__)
            found += [Job(label, target) for target in for_targets([case])]
        missing += [f"{path.name}: aot_cases() has no case for {name}" for name in sorted(wanted)]
    return found, missing


def compile_all(work: list[Job]) -> list:
    "A `Usage` or an error for each job, compiled in a process per core; a batch that fails is halved to find out why."
    from dormouse_fused.triton import aot_all

    def batch(part: list[Job]) -> list:
        try:
            return aot_all([job.case for job in part])
        except RuntimeError as error:
            if len(part) == 1:
                return [error]
            half = len(part) // 2
            return batch(part[:half]) + batch(part[half:])

    cores = min(2, os.cpu_count() or 1, len(work)) or 1
    results: list = [None] * len(work)
    with ThreadPoolExecutor(cores) as pool:
        for start, part in enumerate(pool.map(batch, (work[start::cores] for start in range(cores)))):
            results[start::cores] = part
    return results


def main() -> int:
    from dormouse_fused.triton import SHARED_BYTES

    start = time.monotonic()
    work, failures = jobs(Book().modules)
    for job, usage in zip(work, compile_all(work), strict=True):
        arch, where = job.case.arch, f"{job.label} {job.case.arch}"
        if isinstance(usage, Exception):
            failures.append(f"{where}: {str(usage).strip().splitlines()[-1]}")
            continue
        print(f"{usage.kernel:36} {job.label:48} {arch:7} {usage.registers:4} registers"
              f" {usage.spill:5} B spilled {usage.shared:7} B shared")  # fmt: skip
        if not arch.startswith("gfx") and usage.spill > job.case.spill:
            failures.append(f"{where}: {usage.kernel} spills {usage.spill} bytes, {job.case.spill} allowed")
        if usage.hazards:
            failures.append(f"{where}: {usage.kernel} has {usage.hazards} registers of a running product that are not what they should be")
        if usage.shared > SHARED_BYTES[arch]:
            failures.append(f"{where}: {usage.kernel} wants {usage.shared} bytes of shared memory")
    print(*failures, sep="\n", end="\n" if failures else "")
    print(f"{len(work)} kernels compiled ahead of time in {time.monotonic() - start:.0f} s, {len(failures)} problem(s)")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())

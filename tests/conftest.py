"""Puts tools/ and this folder where tests can import them; the package itself is the installed one."""

import sys
from pathlib import Path

import dormouse_fused.triton  # noqa: F401  before any other import of triton, so that kernels run without a GPU

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"), str(HERE)]

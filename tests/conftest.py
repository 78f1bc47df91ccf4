"""Puts tools/ and this folder where tests can import them; the package itself is the installed one. Every test starts at
PyTorch's precision "highest"."""

import sys
from pathlib import Path

import pytest
import torch

import dormouse_fused.triton  # noqa: F401  before any other import of triton, so that kernels run without a GPU

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"), str(HERE)]


@pytest.fixture(autouse=True)
def _highest():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)

"What tests of attention over depth share."
import torch


class Fault(torch.autograd.Function):
    "A layer whose backward raises."

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, do):
        raise ArithmeticError("on purpose")

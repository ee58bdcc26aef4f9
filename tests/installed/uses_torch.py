"""A module, and a compiled function, beside eager PyTorch."""

import copy
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from onnxtrain import ORTModule

COMMAND = Path(sys.executable).with_name("onnxtrain")


def train(model: nn.Module) -> list[float]:
    """Losses of a few steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(8):
        x = torch.randn(6, 3 + step, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
eager = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 1))
others = [ORTModule(copy.deepcopy(eager)), torch.compile(copy.deepcopy(eager), backend="onnxtrain")]
wanted = train(eager)
for other in others:
    torch.testing.assert_close(train(other), wanted, rtol=1e-4, atol=1e-5)
said = subprocess.run([COMMAND, "doctor"], capture_output=True, text=True)
assert torch.__version__.partition("+")[0] in said.stdout, said.stdout
print(f"torch {torch.__version__}: losses are eager's, {wanted[0]:.3f} to {wanted[-1]:.3f}")

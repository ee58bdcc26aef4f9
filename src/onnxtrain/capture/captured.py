"""The nouns of capture: a traced call, and one that is a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from onnxtrain.capture.attribute_reads import Attribute
from onnxtrain.capture.carried import Carried
from onnxtrain.capture.flat_module import FlatModule
from onnxtrain.capture.found_elsewhere import Borrowed, borrowed_among
from onnxtrain.capture.given import Change
from onnxtrain.capture.made_of_parts import Part
from onnxtrain.capture.places import Place
from onnxtrain.capture.replay import Path
from onnxtrain.capture.rewritten import Rewritten
from onnxtrain.capture.schema import Schema
from onnxtrain.capture.size_guards import Form, Order, SizeGuards
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.layers import Layers


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured forward pass and how to give its outputs back.

    Args:
        graph: the ONNX graph; its user inputs are the call's tensors in order.
        inputs: schema of the call, ``(args, kwargs)``.
        outputs: schema of the module's output.
        sources: for each tensor of the output, the position among the graph's outputs.
        guards: what was asked of input sizes, with the answers that the graph stands on.
        left: what a call leaves on the module.
        given: what it changes in the containers among its arguments; where there is any of both, the output's schema is
            that of the output, of what is left, and of what the containers get.
        rewritten: what its inputs hold afterwards, where it changes them in place.
        path: what the call saw in tensors; a call that sees something else is not what the graph computes.
        borrowed: the tensors that the graph reads beside the module's, by the names that its signature has for them:
            they themselves, or where they are found.
        read: the attributes that the call read and that are collections, numbers or tensors.
        unread: those of users' classes that it did not read.
        kept: the file of the graph cache that holds the graph; None where there is none.
    """

    graph: ForwardGraph
    inputs: Schema
    outputs: Schema
    sources: tuple[int, ...]
    guards: SizeGuards
    left: tuple[Place, ...] = ()
    given: tuple[Change, ...] = ()
    rewritten: tuple[Rewritten, ...] = ()
    path: Path = dataclasses.field(default_factory=Path)
    borrowed: Mapping[str, torch.Tensor | Carried | Part] = dataclasses.field(default_factory=dict)
    read: frozenset[Attribute] = frozenset()
    unread: frozenset[Attribute] = frozenset()
    kept: str | None = None

    @property
    def leaves(self) -> bool:
        """Whether a call leaves more than what it returns."""
        return bool(self.left or self.given)


@dataclasses.dataclass(frozen=True)
class Traced:
    """One traced call of a module, not yet translated.

    Args:
        program: what torch.export recorded.
        flat: the module that was traced; its result is the structure of the output.
        inputs: schema of the call.
        input_names: a name for each of its tensors.
        buffers: names of the module's buffers, and of the parameters that the call changes, with whether these are
            trained.
        sizes: of its tensors.
        form: of its tensors, where the module asked for it.
        order: of its tensors in memory, where outputs have one.
        layers: rows of layers of which only some were traced.
    """

    program: torch.export.ExportedProgram
    flat: FlatModule
    inputs: Schema
    input_names: tuple[str, ...]
    buffers: Mapping[str, bool]
    sizes: tuple[torch.Size, ...]
    form: Form | None = None
    order: Order | None = None
    layers: tuple[Layers, ...] = ()

    @property
    def borrowed(self) -> dict[str, Borrowed]:
        """The tensors that it reads beside the module's, by the names that the program has for them."""
        return borrowed_among(self.program.constants, self.flat.result.borrowed)

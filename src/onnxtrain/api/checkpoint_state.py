"""CheckpointState: parameters, properties, and what the optimizer and the random generators need to go on."""

from __future__ import annotations

import math
import os
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import numpy as np

from onnxtrain import checkpoint as files
from onnxtrain.api.tensors import Place, Tensor
from onnxtrain.checkpoint import Checkpoint, Form
from onnxtrain.errors import CheckpointError, DataError, UnsupportedDataError, close_to

Property = int | float | str | bool


class Parameter:
    """One weight of the model.

    Attributes:
        form: its element type and shape.
        tensor: its content in place; None where a nominal checkpoint says its form alone.
        gradient: the gradient accumulated so far, in place; None before a ``Module`` has the state.
    """

    def __init__(self, name: str, form: Form, requires_grad: bool, content: np.ndarray | None) -> None:
        self._name, self._requires_grad, self.form = name, requires_grad, form
        self.tensor = None if content is None else Place("cpu").tensor(content)
        self.gradient: Tensor | None = None

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self._name

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._requires_grad

    @property
    def data(self) -> np.ndarray:
        """A copy of its content; assigning an array of the same type and shape replaces it.

        Raises:
            CheckpointError: it has no content yet, or the array is of another form.
        """
        return self.held().numpy()

    @data.setter
    def data(self, content: np.ndarray) -> None:
        array = np.asarray(content)
        if Form.of(array) != self.form:
            raise CheckpointError(
                f"{self.name} is {self.form}, it was given {Form.of(array)}",
                cure="give an array of the same type and shape",
            )
        if self.tensor is None:
            self.tensor = Place("cpu").tensor(array)
        else:
            self.tensor.assign(array)

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of the gradient accumulated so far; None before a ``Module`` has the state, or if not trained."""
        return None if self.gradient is None else self.gradient.numpy()

    def held(self) -> Tensor:
        """The tensor itself.

        Raises:
            CheckpointError: it has no content yet.
        """
        if self.tensor is None:
            raise CheckpointError(
                f"{self.name} has no content, the checkpoint is nominal. Please load the model parameters first.",
                cure="Module.copy_buffer_to_parameters(buffer), or assign parameter.data",
            )
        return self.tensor

    def __repr__(self) -> str:
        return f"Parameter({self.name}, {self.form}, {'trained' if self.requires_grad else 'frozen'})"


class Parameters:
    """All weights of a model by name; iterating gives names and parameters, assigning an array sets the content."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = dict(parameters)

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._parameters:
            raise KeyError(f"the model has no parameter {name}{close_to(name, self._parameters)}")
        return self._parameters[name]

    def __setitem__(self, name: str, content: np.ndarray) -> None:
        self[name].data = content

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def __len__(self) -> int:
        return len(self._parameters)

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._parameters.keys()

    def values(self) -> ValuesView[Parameter]:
        """The parameters."""
        return self._parameters.values()

    def items(self) -> ItemsView[str, Parameter]:
        """Names and parameters."""
        return self._parameters.items()

    def __repr__(self) -> str:
        return f"Parameters({list(self._parameters.values())})"


class Properties:
    """The user's own values, saved with the checkpoint: int, float, str and bool, each coming back as what it was."""

    def __init__(self, content: Mapping[str, Property]) -> None:
        self._content = dict(content)

    def __getitem__(self, name: str) -> Property:
        return self._content[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if not isinstance(value, int | float | str | bool):
            what = f"the property {name} is {type(value).__name__}; properties are int, float, str or bool"
            raise UnsupportedDataError(what, cure="convert it")
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"the property {name} is {value}, which JSON cannot say", cure="keep it as a str")
        if not isinstance(name, str):
            raise UnsupportedDataError(f"the name of the property is {type(name).__name__}", cure="give a str")
        self._content[name] = value

    def __delitem__(self, name: str) -> None:
        del self._content[name]

    def __contains__(self, name: object) -> bool:
        return name in self._content

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        yield from self._content.items()

    def __len__(self) -> int:
        return len(self._content)

    def as_dict(self) -> dict[str, Property]:
        """A copy as a dictionary."""
        return dict(self._content)

    def __repr__(self) -> str:
        return f"Properties({self._content})"


class CheckpointState:
    """The state of a training: read by ``Module`` and ``Optimizer``, which change it in place.

    Args:
        content: what was read from a file.
        name: what errors call it.

    Attributes:
        parameters: the weights, trained and frozen.
        properties: the user's own values.
        optimizer: the optimizer's tensors by name, once there is one.
        settings: the optimizer, its learning rate and its schedule.
        random: seed of dropout, and the number of training steps so far.
        set_id: of the set of artifacts that it belongs to; empty until it has one.
    """

    def __init__(self, content: Checkpoint, name: str = "the checkpoint") -> None:
        self.name, self.set_id = name, content.set_id
        made = {
            name: Parameter(name, form, name in content.trainable, content.tensors.get(name))
            for name, form in content.forms.items()
        }
        self.parameters = Parameters(made)
        self.properties = Properties(content.properties)
        self.optimizer: dict[str, Tensor] = {n: Place("cpu").tensor(a) for n, a in content.optimizer.items()}
        self.settings: dict[str, Any] = dict(content.settings)
        self.random: dict[str, int] = dict(content.random)

    @classmethod
    def load_checkpoint(
        cls, checkpoint_uri: str | os.PathLike[str] | bytes, *, of_any_set: bool = False
    ) -> CheckpointState:
        """Read a state from a file, or from its bytes.

        Args:
            checkpoint_uri: the file, or its bytes.
            of_any_set: the models that it is used with may be of another call of ``generate_artifacts``; that its
                parameters are theirs, by name, type and shape, is checked all the same.

        Raises:
            CheckpointError: it cannot be read, is damaged, or is no checkpoint of onnxtrain.
        """
        content = files.read(checkpoint_uri)
        if of_any_set:
            content.set_id = ""
        return cls(content, "the checkpoint" if isinstance(checkpoint_uri, bytes) else str(checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Write a state: to a temporary name, then renamed, so a kill leaves the old file or the new one.

        Args:
            state: what to write.
            checkpoint_uri: the file.
            include_optimizer_state: also what the optimizer needs to go on exactly: its tensors, learning rate and
                schedule. The state of dropout is always written.
        """
        files.write(state.content(include_optimizer_state), os.fspath(checkpoint_uri))

    def content(self, include_optimizer_state: bool) -> Checkpoint:
        """What a file would hold."""
        trained, frozen = (
            {p.name: p.form for p in self.parameters.values() if p.requires_grad == kind} for kind in (True, False)
        )
        tensors = {p.name: p.tensor.view() for p in self.parameters.values() if p.tensor is not None}
        made = Checkpoint(trained, frozen, tensors, set_id=self.set_id)
        made.random, made.properties = dict(self.random), self.properties.as_dict()
        if include_optimizer_state:
            made.optimizer = {name: tensor.view() for name, tensor in self.optimizer.items()}
            made.settings = dict(self.settings)
        return made

    def move(self, place: Place) -> None:
        """Bring everything to where sessions compute; on the CPU everything stays where it is."""
        if place.kind == "cpu":
            return
        for parameter in self.parameters.values():
            if parameter.tensor is not None:
                parameter.tensor = place.tensor(parameter.tensor.numpy())
        self.optimizer = {name: place.tensor(tensor.numpy()) for name, tensor in self.optimizer.items()}

    def __repr__(self) -> str:
        return f"CheckpointState({len(self.parameters)} parameters, {len(self.properties)} properties)"

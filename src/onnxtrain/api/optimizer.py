"""Optimizer: new parameters and states written over the old ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from onnxtrain.api.in_place import unsafe_updates
from onnxtrain.api.module import Module, form_of
from onnxtrain.api.session import Session, Source, read_model
from onnxtrain.api.tensors import Tensor
from onnxtrain.artifact_names import LEARNING_RATE, STEP, gradient, updated
from onnxtrain.errors import ArtifactError, CheckpointError

_FIRST_RATE = 1e-3


class Optimizer:
    """Updates the trained parameters of a module by its gradients.

    What the state says of an earlier training is taken up: tensors, number of updates, learning rate.

    Args:
        optimizer_uri: ``optimizer_model.onnx``, or its bytes.
        module: the module that is trained.

    Raises:
        ArtifactError: the model is damaged, not of these artifacts, or would be wrong if it were updated in place.
        CheckpointError: the state is that of another optimizer.
    """

    def __init__(self, optimizer_uri: Source, module: Module) -> None:
        proto, self._facts, self._name = read_model(optimizer_uri, "optimizer")
        self._module, state = module, module.state
        self._parameters = list(self._facts["parameters"])
        if odd := sorted(set(self._parameters) ^ {n for n, p in state.parameters if p.requires_grad}):
            what = f"{self._name} and the module differ in whether {odd[0]} is trained"
            raise ArtifactError(what, cure="use models of the same artifacts")
        if unsafe := unsafe_updates(proto):
            what = f"{self._name} may read {unsafe[0]} after it is overwritten"
            raise ArtifactError(what, cure="let each old value be read only by what its new value depends on")
        self._session = Session(proto, self._name, module.place, None)
        self._states = self._restored(proto)
        self._rate = module.place.tensor(np.array(_FIRST_RATE, np.float32))
        self.set_learning_rate(state.settings.get(LEARNING_RATE, _FIRST_RATE))
        self._is_bound = False

    def _restored(self, proto: onnx.ModelProto) -> dict[str, Tensor]:
        """The optimizer's tensors: the state's, or fresh ones."""
        state, kind = self._module.state, self._facts["optimizer"]
        if state.optimizer and state.settings.get("optimizer", kind) != kind:
            what = f"the state is that of {state.settings['optimizer']}, not of {kind}"
            raise CheckpointError(what, cure="use that optimizer, or a checkpoint without optimizer state")
        state.settings["optimizer"] = kind
        first = {STEP: 0, **self._facts["states"]}
        for value in proto.graph.input:
            if value.name not in first:
                continue
            form, found = form_of(value), state.optimizer.get(value.name)
            if found is None:
                content = np.full(form.shape, first[value.name], form.dtype)
                state.optimizer[value.name] = self._module.place.tensor(content)
            elif found.form != form:
                what = f"{value.name} is {found.form} in the state, {form} in {self._name}"
                raise CheckpointError(what, cure="use the checkpoint of these artifacts")
        return {name: state.optimizer[name] for name in first}

    def step(self) -> None:
        """Update all trained parameters once; the gradients stay until they are reset.

        Raises:
            ArtifactError: no training step ran yet, so there are no gradients.
        """
        if not self._is_bound:
            self._bind()
        self._session.run({})

    def _bind(self) -> None:
        parameters = self._module.state.parameters
        if any(parameters[name].gradient is None for name in self._parameters):
            raise ArtifactError("there are no gradients", cure="run a training step of the module first")
        kept = {name: parameters[name].held() for name in self._parameters} | self._states
        given = {gradient(name): tensor for name, tensor in self._module.gradients().items()}
        written = {updated(name): tensor for name, tensor in kept.items()}
        self._session.bind({LEARNING_RATE: self._rate, **kept, **given}, written)
        self._is_bound = True

    @property
    def updates(self) -> int:
        """Number of updates so far, those before a restart included."""
        return int(self._states[STEP].view())

    def get_learning_rate(self) -> float:
        """The learning rate of the next update; 1e-3 at first."""
        return float(self._rate.view())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next update."""
        self._rate.assign(np.float32(learning_rate))
        self.settings[LEARNING_RATE] = float(learning_rate)

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint keeps of the optimizer besides tensors."""
        return self._module.state.settings

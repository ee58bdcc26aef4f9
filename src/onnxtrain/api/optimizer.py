"""Optimizer: new parameters and states written over the old ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from onnxtrain.api.in_place import unsafe_updates
from onnxtrain.api.matching import form_of, match_optimizer, match_sets
from onnxtrain.api.module import Module
from onnxtrain.api.session import Session, Source, read_model
from onnxtrain.api.tensors import Tensor
from onnxtrain.artifact_names import LEARNING_RATE
from onnxtrain.errors import ArtifactError, CheckpointError, OptionError
from onnxtrain.number_ranges import check_number

_FIRST_RATE = 1e-3
_LARGEST_RATE = float(np.finfo(np.float32).max)


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
        if not isinstance(module, Module):
            raise ArtifactError(f"the module is {type(module).__name__}, no Module of onnxtrain.api", cure="pass one")
        self._module, state = module, module.state
        self._parameters = list(self._facts["parameters"])
        match_sets(module.facts, module.name, self._facts, self._name)
        match_optimizer(state, self._facts, proto, self._name)
        if unsafe := unsafe_updates(proto, self._facts["updates"]):
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
        first = {self._facts["step"]: 0, **self._facts["states"]}
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
        if not self._module.has_gradients:
            raise ArtifactError("there are no gradients", cure="run a training step of the module first")
        kept = {name: parameters[name].held() for name in self._parameters} | self._states
        given = {self._facts["parameters"][name]: tensor for name, tensor in self._module.gradients().items()}
        written = {self._facts["updates"][name]: tensor for name, tensor in kept.items()}
        self._session.bind({self._facts["learning_rate"]: self._rate, **kept, **given}, written)
        self._is_bound = True

    @property
    def updates(self) -> int:
        """Number of updates so far, those before a restart included."""
        return int(self._states[self._facts["step"]].view())

    def get_learning_rate(self) -> float:
        """The learning rate of the next update; 1e-3 at first."""
        return float(self._rate.view())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next update.

        Raises:
            OptionError: it is negative, or no finite number of float32.
        """
        check_number(LEARNING_RATE, learning_rate, least=0, most=_LARGEST_RATE, error=OptionError)
        self._rate.assign(np.float32(learning_rate))
        self.settings[LEARNING_RATE] = float(learning_rate)

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint keeps of the optimizer besides tensors."""
        return self._module.state.settings

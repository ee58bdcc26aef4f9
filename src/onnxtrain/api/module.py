"""Module: the training model and the evaluation model over one set of parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnxtrain.api.batches import check_batch
from onnxtrain.api.checkpoint_state import CheckpointState, Parameter
from onnxtrain.api.exporting import inference_model
from onnxtrain.api.in_place import unsafe_updates
from onnxtrain.api.matching import match_evaluation, match_state
from onnxtrain.api.session import Session, Source, read_model
from onnxtrain.api.tensors import Place, Tensor
from onnxtrain.errors import ArtifactError, CheckpointError, DataError, OnnxTrainError, OptionError
from onnxtrain.number_ranges import check_whole
from onnxtrain.portable import save


class Module:
    """A model that is called in a loop: in training a call gives the loss and adds to the gradients.

    Attributes:
        has_gradients: whether a training step ran, of this module or of another one that had the state.

    Args:
        train_model_uri: ``training_model.onnx``, or its bytes.
        state: the parameters; they are changed in place.
        eval_model_uri: ``eval_model.onnx``, or its bytes; needed by ``eval`` and ``export_model_for_inferencing``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or the name of a provider of onnxruntime.
        session_options: onnxruntime's; they register libraries of custom operators, for example.
        seed: of dropout; None is the state's, or else the one that the artifacts have.

    Raises:
        ArtifactError: a model is damaged, or not of these artifacts.
        CheckpointError: the state is not of this model.
        BackendError: onnxruntime cannot run the model on the device.
    """

    def __init__(
        self,
        train_model_uri: Source,
        state: CheckpointState,
        eval_model_uri: Source | None = None,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        self.state, self.training, self.place = state, True, Place(device)
        proto, self._facts, name = read_model(train_model_uri, "training")
        if not isinstance(state, CheckpointState):
            cure = "pass CheckpointState.load_checkpoint(path)"
            raise CheckpointError(f"the state is {type(state).__name__}, no CheckpointState", cure=cure)
        match_state(state, self._facts, proto, name)
        if unsafe := unsafe_updates(proto, self._updates()):
            what = f"{name} may read {unsafe[0]} after it is overwritten"
            raise ArtifactError(what, cure="let each old value be read only by what its new value depends on")
        if seed is not None:
            check_whole("seed", seed, error=OptionError)
        state.move(self.place)
        self.has_gradients = all(state.parameters[n].gradient is not None for n in self._facts["trainable"])
        self.gradients()
        state.random = {"seed": seed, "draws": 0} if seed is not None else {"seed": 0, "draws": 0} | state.random
        self._proto, self.name, self._options = proto, name, session_options
        self._reset = self.place.tensor(np.array(True))
        self._train = self._training_session()
        self._eval: Session | None = None
        if eval_model_uri is not None:
            evaluation = read_model(eval_model_uri, "evaluation")
            match_evaluation((proto, self._facts, name), evaluation)
            self._eval_proto, self._eval_facts, name = evaluation
            self._eval = Session(self._eval_proto, name, self.place, session_options)
        self._is_bound = False

    def __call__(self, *user_inputs: np.ndarray | ort.OrtValue) -> Any:
        """Run a step.

        Args:
            user_inputs: arrays or OrtValues in the order of ``input_names()``.

        Returns:
            The loss, or a tuple of it and the additional outputs: arrays, or OrtValues where one was given.

        Raises:
            DataError: too few or too many inputs, one of the wrong type, shape or without rows, a label out of range.
            CheckpointError: the parameters have no content yet.
        """
        self._bind()
        names = self.input_names()
        session = self._train if self.training else self._evaluation()
        check_batch(names, user_inputs, session.inputs)
        as_numpy = not any(isinstance(v, ort.OrtValue) for v in user_inputs)
        try:
            outputs = session.run(dict(zip(names, user_inputs, strict=True)), as_numpy)
        except OnnxTrainError:
            if self.training and self._facts["draws"]:  # some dropout has drawn, some has not: all begin anew from here
                self._train, self._is_bound = self._training_session(), False
            raise
        if self.training:
            self._reset.assign(False)
            self.has_gradients = True
            self.state.random["draws"] += 1
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _training_session(self) -> Session:
        """The training model with dropout where the state stands."""
        return Session(_reseeded(self._proto, self.state.random), self.name, self.place, self._options)

    def _bind(self) -> None:
        """Bind parameters and gradients at the first call: those of a nominal checkpoint have content by then."""
        if self._is_bound:
            return
        parameters = {p.name: p.held() for p in self.state.parameters.values()}
        inputs, outputs = {self._facts["reset"]: self._reset, **parameters}, {}
        for name, gradient in self.gradients().items():
            before, after = self._facts["gradients"][name]
            inputs[before] = outputs[after] = gradient
        outputs |= {new: parameters[old] for old, new in self._facts["updates"].items()}
        self._train.bind(inputs, outputs, self._facts["outputs"])
        if self._eval is not None:
            self._eval.bind(parameters, {}, self._eval_facts["outputs"])
        self._is_bound = True

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the training model says of itself."""
        return self._facts

    def _updates(self) -> dict[str, str]:
        """The output that is written over each input: gradients so far, and running statistics."""
        return dict(self._facts["gradients"].values()) | self._facts["updates"]

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each trained parameter, in place; zeros before the first training step."""
        for name in self._facts["trainable"]:
            parameter = self.state.parameters[name]
            if parameter.gradient is None:
                parameter.gradient = self.place.tensor(np.zeros(parameter.form.shape, parameter.form.dtype))
        return {n: t for n in self._facts["trainable"] if (t := self.state.parameters[n].gradient) is not None}

    def _evaluation(self) -> Session:
        if self._eval is None:
            raise ArtifactError("there is no evaluation model", cure="pass eval_model_uri to Module")
        return self._eval

    def train(self, mode: bool = True) -> Module:
        """Train from now on; with False, evaluate."""
        if not mode:
            return self.eval()
        self.training = True
        return self

    def eval(self) -> Module:
        """Evaluate from now on: a call gives the loss without dropout and leaves gradients as they are.

        Raises:
            ArtifactError: there is no evaluation model.
        """
        self._evaluation()
        self.training = False
        return self

    def lazy_reset_grad(self) -> None:
        """Drop the gradients at the next training step, which then begins anew; until then they can be read."""
        self._reset.assign(True)

    def input_names(self) -> list[str]:
        """Names of the inputs of a call."""
        return list(self._facts["inputs"] if self.training else self._eval_facts["inputs"])

    def output_names(self) -> list[str]:
        """Names of the outputs of a call, the loss first."""
        return list(self._facts["outputs"] if self.training else self._eval_facts["outputs"])

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Number of elements of all parameters, or of those that are trained."""
        return sum(p.form.size for p in self._chosen(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> ort.OrtValue:
        """All parameters as one vector on the CPU, in the order of the state: what federated averaging sends.

        Raises:
            CheckpointError: the parameters are of different types, or have no content.
        """
        arrays = [p.held().view().reshape(-1) for p in self._chosen(trainable_only)]
        flat = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
        made = ort.OrtValue.ortvalue_from_shape_and_type(list(flat.shape), flat.dtype.type)  # memory of its own
        made.update_inplace(flat)
        return made

    def copy_buffer_to_parameters(self, buffer: ort.OrtValue | np.ndarray, trainable_only: bool = True) -> None:
        """Set all parameters, or those that are trained, from one vector as ``get_contiguous_parameters`` gives it.

        Raises:
            DataError: the vector has another number of elements, or another type.
        """
        chosen = self._chosen(trainable_only)
        if not isinstance(buffer, np.ndarray | ort.OrtValue):
            raise DataError(f"the buffer is {type(buffer).__name__}", cure="pass a numpy array or an OrtValue")
        flat = (buffer if isinstance(buffer, np.ndarray) else buffer.numpy()).reshape(-1)
        wanted = self.get_parameters_size(trainable_only)
        if flat.size != wanted or (chosen and flat.dtype.name != chosen[0].form.dtype):
            what = f"the buffer has {flat.size} elements of {flat.dtype.name}, the parameters {wanted}"
            raise DataError(what, cure="check trainable_only, and the type")
        start = 0
        for parameter in chosen:
            parameter.data = flat[start : start + parameter.form.size].reshape(parameter.form.shape)
            start += parameter.form.size

    def _chosen(self, trainable_only: bool) -> list[Parameter]:
        chosen = [p for p in self.state.parameters.values() if p.requires_grad or not trainable_only]
        if len({p.form.dtype for p in chosen}) > 1:
            raise CheckpointError("the parameters are of different types", cure="read them one by one")
        return chosen

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str] | None = None
    ) -> None:
        """Write an ordinary model with the trained parameters, without loss and labels.

        Args:
            inference_model_uri: the file.
            graph_output_names: values of the evaluation model to give back; None is the outputs of the model that the
                artifacts were made of.

        Raises:
            ArtifactError: there is no evaluation model, or it has no such value.
        """
        self._evaluation()
        names = list(graph_output_names or self._eval_facts["predictions"])
        weights = {p.name: p.held().view() for p in self.state.parameters.values()}
        save(inference_model(self._eval_proto, names, weights), os.fspath(inference_model_uri))


def _reseeded(model: onnx.ModelProto, random: Mapping[str, int]) -> onnx.ModelProto:
    """The model with dropout where the state stands: at each run onnxruntime adds 1 to the seed of a node."""
    made, offset = onnx.ModelProto(), random["seed"] + random["draws"]
    made.CopyFrom(model)
    for node in made.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Dropout" and attribute.name == "seed":
                attribute.i = (attribute.i + offset) % 2**31
    return made

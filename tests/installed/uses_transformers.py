"""A model of Transformers beside eager PyTorch."""

import copy

import torch
import transformers

from onnxtrain import ORTModule

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)
config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
eager = transformers.BertForSequenceClassification(config)
ours = ORTModule(copy.deepcopy(eager))
for length in (5, 9):
    ids = torch.randint(50, (3, length))
    mask = torch.arange(length) < torch.tensor([[length], [3], [2]])
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.tensor([0, 1, 1])}
    losses = [model(**batch).loss for model in (eager, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
for wanted, got in zip(eager.parameters(), ours.parameters(), strict=True):
    torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-5)
print(f"transformers {transformers.__version__}: loss and gradients are eager's")

"""Those who wrap a model and run its loop themselves: as docs/frameworks.md has it, where installed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import horovod_sparse.ddp
from support.documents import blocks
from support.replicas import same_on_all_replicas


def documented(mark: str, words: str) -> str:
    """The one block of code with these words, of those that say which test runs them."""
    (block,) = [one for one in blocks() if mark in one.what and words in one.text]
    return block.text


def _examples() -> TensorDataset:
    torch.manual_seed(0)
    images = torch.randn(64, 20)
    return TensorDataset(images, images[:, :5].argmax(1))


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))


def _check(sync, net, steps: int) -> None:
    assert sync.step == steps
    names = {name.split("net.")[-1] for name in sync.state_dict()["residuals"]}
    assert names == {"0.bias", "0.weight", "2.bias", "2.weight"}
    assert same_on_all_replicas(*net.parameters())
    assert 0.0 < sync.telemetry.last.density_union < 0.5
    before = _net().parameters()
    assert not any(torch.equal(one, other) for one, other in zip(net.parameters(), before, strict=True))


def test_lightning(tmp_path, monkeypatch, size):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    if size != 2:
        pytest.skip("for two ranks")
    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch, index):
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    given = {
        "lightning": lightning,
        "horovod_sparse": horovod_sparse,
        "module": Module(),
        "batches": DataLoader(_examples(), batch_size=8),
    }
    exec(documented("test_trainers.py", "lightning.Trainer"), given)
    _check(given["sparsely"].sync, given["module"].net, 8)


def test_accelerate(size):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    if size != 2:
        pytest.skip("for two ranks")
    net = _net()
    given = {
        "Accelerator": accelerate.Accelerator,
        "horovod_sparse": horovod_sparse,
        "cross_entropy": cross_entropy,
        "net": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "batches": DataLoader(_examples(), batch_size=4),
    }
    exec(documented("test_trainers.py", "Accelerator("), given)
    _check(given["sync"], net, 8)


def test_the_trainer_of_transformers(tmp_path, size):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if size != 2:
        pytest.skip("for two ranks")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, images, labels=None):
            logits = self.net(images)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    given = {
        "Trainer": transformers.Trainer,
        "TrainerCallback": transformers.TrainerCallback,
        "horovod_sparse": horovod_sparse,
        "net": Net(),
        "examples": [{"images": one, "labels": label} for one, label in _examples()],
        "arguments": transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            report_to=[],
            save_strategy="no",
            max_grad_norm=0,
        ),
    }
    exec(documented("test_trainers.py", "TrainerCallback"), given)
    _check(given["sparsely"].sync, given["net"].net, 8)

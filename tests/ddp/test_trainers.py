"""Trainers that run the loop themselves: train, evaluate, save, are killed, resume; where installed."""

import contextlib
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import horovod_sparse.ddp
from horovod_sparse import trainers
from support.replicas import same_on_all_replicas

schedules = pytest.mark.parametrize(("every", "delay"), [(1, 0), (2, 1)])
TEXT = "best:density=0.1"


class _KilledError(Exception):
    """Ends a training in the middle."""


def _examples() -> TensorDataset:
    torch.manual_seed(0)
    images = torch.randn(256, 20)
    return TensorDataset(images, images[:, :5].argmax(1))


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))


def _loss(net: torch.nn.Module) -> float:
    images, labels = _examples().tensors
    with torch.no_grad():
        return float(cross_entropy(net.cpu().eval()(images), labels))


def _check(*runs: tuple[torch.nn.Module, Any]) -> None:
    """Of runs undisturbed, killed and resumed: the last one ends where the first does; both have learned."""
    undisturbed, killed, resumed = (_loss(net) for net, _ in runs)
    assert undisturbed < 0.8 * _loss(_net())
    assert abs(undisturbed - killed) > 0.02
    assert abs(undisturbed - resumed) < 0.01
    for net, sync in runs[::2]:
        assert same_on_all_replicas(*net.parameters())
        assert sync.step > 0


@schedules
def test_transformers_trainer_resumes_where_it_was_killed(every, delay, folder, size):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, images, labels=None):
            logits = self.net(images)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            if state.global_step == 22:
                raise _KilledError

    examples = [{"images": one, "labels": label} for one, label in _examples()]

    def run(name: str, *more, resumes=None):
        arguments = transformers.TrainingArguments(
            f"{folder}/{name}",
            use_cpu=True,
            max_steps=40,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            save_steps=10,
            eval_steps=10,
            eval_strategy="steps",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            load_best_model_at_end=name == "whole",
        )
        sparse = trainers.transformers_callback(TEXT, every=every, delay=delay)
        trainer = transformers.Trainer(
            Net(), arguments, train_dataset=examples, eval_dataset=examples[:32], callbacks=[sparse, *more]
        )
        with contextlib.suppress(_KilledError):
            trainer.train(resume_from_checkpoint=resumes)
        return trainer.model.net, sparse.sync

    _check(run("whole"), run("killed", Kill()), run("killed", resumes=f"{folder}/killed/checkpoint-20"))


@schedules
def test_lightning_resumes_where_it_was_killed(every, delay, folder, size):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch, index):
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=5e-3)

    class Kill(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 22:
                raise _KilledError

    def run(name: str, *more, resumes=None):
        module, sparse = Module(), trainers.lightning_callback(TEXT, every=every, delay=delay)
        saving = lightning.pytorch.callbacks.ModelCheckpoint(
            f"{folder}/{name}", every_n_train_steps=10, save_top_k=-1
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=size,
            max_epochs=5,
            logger=False,
            gradient_clip_val=10.0,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[sparse, saving, *more],
        )
        batches = DataLoader(_examples(), batch_size=16)
        with contextlib.suppress(_KilledError):
            trainer.fit(module, batches, batches, ckpt_path=resumes)
        return module.net, sparse.syncs[0]

    _check(
        run("whole"), run("killed", Kill()), run("killed", resumes=f"{folder}/killed/epoch=2-step=20.ckpt")
    )


@schedules
def test_accelerate_resumes_where_it_was_killed(every, delay, folder, size):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def run(stop: int = 40, resumes: bool = False):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
        model, optimizer, batches = accelerator.prepare(
            net, optimizer, DataLoader(_examples(), batch_size=16)
        )
        sync = horovod_sparse.ddp.attach(model, TEXT, optimizer, every=every, delay=delay)
        if resumes:
            accelerator.load_state(f"{folder}/state")
        step = 20 if resumes else 0
        for _ in range(10):
            for images, labels in batches:
                if step == stop:
                    break
                optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 40)
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(images), labels))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    if step == 20 and not resumes and stop == 22:
                        with sync.common():
                            accelerator.save_state(f"{folder}/state")
        sync.finish()
        return accelerator.unwrap_model(model), sync

    _check(run(), run(stop=22), run(resumes=True))

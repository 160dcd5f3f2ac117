"""The memories behind the PyTorch front end give the same bits, and refuse devices that cannot serve."""

import numpy as np
import pytest
import torch

from horovod_sparse import errors
from horovod_sparse.feedback import Bucket, recipe
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.device_memory import DeviceMemory
from horovod_sparse.tensors.gradients import GradientBucket, GradientMemory, gradient_memory
from horovod_sparse.tensors.layout import view_into
from horovod_sparse.training.engine import PartSpec, carry_out
from support.memories import choose_memory

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_the_meta_device_is_refused():
    with pytest.raises(errors.UnsupportedError, match=r"the gradient of w is on meta.*Train on the CPU"):
        gradient_memory(torch.device("meta"), "w")


@pytest.mark.parametrize(
    "memory", [GradientMemory(), DeviceMemory(torch.device("cpu"))], ids=["host", "device"]
)
def test_dense_parameters_send_what_was_held_back_and_name_what_is_bad(memory):
    info, dense = BucketInfo("all", 5, 1, 3), recipe("topk").for_dense()
    bucket = Bucket(info, dense, memory.accumulator(info, dense, whole=True), {"a": (0, 2), "b": (2, 5)})
    bucket.accumulator.assign_arrays([np.arange(5, dtype=np.float32)])

    def step(*bad, **more):
        gradient = torch.ones(5).index_fill(0, torch.tensor(bad, dtype=torch.int64), torch.inf)
        return carry_out(bucket.step(memory.fold_input([gradient]), **more), lambda request: request.buffer)

    assert step().values.tolist() == [1, 2, 3, 4, 5]
    bucket.accept()
    for element, name in enumerate("aabbb"):
        with pytest.raises(errors.NonFiniteGradientError, match=f"rank 1: {name}"):
            step(element)
    with pytest.raises(errors.EditedGradientError):
        step(mark_cancelled=True)


def parameters(dtype=torch.float32):
    made = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(4, 5), (), (3,)]]
    made.append(torch.nn.Parameter(torch.ones(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)))
    made.append(torch.nn.Parameter(torch.ones(6, 7, dtype=dtype).t()))
    return made


def filled(made):
    facts = {str(number): (ParameterFacts(str(number), 1), one) for number, one in enumerate(made)}
    gradient = GradientBucket(PartSpec("w", tuple(facts), recipe("topk")), facts, (0, 1))
    for parameter, like, (start, stop) in zip(made, gradient.layouts, gradient.spans, strict=True):
        values = torch.arange(start, stop).to(parameter.dtype)
        parameter.grad = view_into(values, 0, like).clone(memory_format=torch.preserve_format)
    return gradient


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_sum_takes_the_place_of_gradients_as_they_lie(memory, dtype, scale, monkeypatch):
    choose_memory(monkeypatch, memory)
    made = parameters(dtype)
    gradient = filled(made)
    before = [parameter.grad for parameter in made]
    gradient.take_gradients()
    folded = gradient.fold_input(2.0)
    kind = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
    given = folded.joined(kind) if memory == "host" else folded.double().numpy()
    np.testing.assert_array_equal(given, np.arange(gradient.bucket.info.num_elements) / 2)
    assert not gradient.edited_names()
    indices = np.array([0, 19, 23, 150, 0, 20, 161], np.int32)
    assert gradient.scatter(indices, np.arange(1.0, 8.0).astype(kind), scale) == 6
    expected = np.zeros(gradient.bucket.info.num_elements)
    np.add.at(expected, indices, np.arange(1.0, 8.0) * scale)
    for parameter, old, (start, stop) in zip(made, before, gradient.spans, strict=True):
        assert parameter.grad is old
        found = parameter.grad.as_strided((stop - start,), (1,)).double().numpy()
        np.testing.assert_array_equal(found, expected[start:stop])
    whole = np.arange(expected.size, dtype=kind)  # a sum of all elements
    assert gradient.scatter(None, whole, scale) == whole.size
    for parameter, (start, stop) in zip(made, gradient.spans, strict=True):
        found = parameter.grad.as_strided((stop - start,), (1,)).double().numpy()
        np.testing.assert_array_equal(found, (whole * scale)[start:stop])


EDITS = {
    "in place": lambda p: p.grad.add_(1.0),
    "clipping": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "foreach": lambda p: torch._foreach_add_([p.grad], 1.0),
    "backward": lambda p: p.sum().backward(),
    "inference mode": lambda p: torch.inference_mode()(p.grad.add_)(1.0),
    "data": lambda p: p.grad.data.add_(0.5),
    "other data": lambda p: setattr(p.grad, "data", p.grad.data * 2.0),
    "cleared": lambda p: setattr(p, "grad", None),
    "another": lambda p: setattr(p, "grad", p.grad.clone()),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_noticed(edit):
    made = parameters()
    gradient = filled(made)
    gradient.take_gradients()
    made[3].grad.data = made[3].grad.data.clone()  # the same values elsewhere
    assert not gradient.edited_names()
    edit(made[4])
    assert gradient.edited_names() == ["4"]

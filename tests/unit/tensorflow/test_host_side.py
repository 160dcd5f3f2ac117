"""What the TensorFlow front end does on the host: tasks, dense outputs, names, choices; without ranks."""

import inspect

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import horovod_sparse.tensorflow as hvd  # noqa: E402
from horovod_sparse.collectives import AllGather, AllReduce  # noqa: E402
from horovod_sparse.errors import ArgumentError, CollectiveMismatchError, UnknownNameError  # noqa: E402
from horovod_sparse.merging import Plan, fixed, min_elements  # noqa: E402
from horovod_sparse.tensorflow.parts import DenseOutput  # noqa: E402
from horovod_sparse.tensorflow.task import Task  # noqa: E402
from horovod_sparse.tensorflow.tensors import numpy_dtype  # noqa: E402
from horovod_sparse.tensorflow.waiting import Watch, _Thread  # noqa: E402

pytestmark = pytest.mark.tensorflow

_WORDS = np.arange(3, dtype=np.int32)


def _two_rounds(fails_after=None):
    yield AllGather(_WORDS)
    if fails_after == 0:
        raise ValueError("on purpose")
    total = yield AllReduce(np.ones(2, np.float32))
    return float(total.sum())


def _zero():
    return np.float32(0)


def _task(*kinds):
    return Task("task", kinds, np.dtype(np.float32))


def test_a_task_that_fails_sends_empty_messages_of_the_right_type():
    task = _task(AllGather, AllReduce)
    task.start(_two_rounds(fails_after=0), (0, 2))
    buffer, _ = task.resume(_WORDS, _WORDS[:0])
    assert isinstance(task.error, ValueError)
    assert (buffer.size, buffer.dtype) == (0, np.float32)
    task.resume(buffer, _WORDS[:0])
    assert isinstance(task.error, ValueError)


@pytest.mark.parametrize("kinds", [(AllReduce, AllReduce), (AllGather,), (AllGather, AllReduce, AllGather)])
def test_rounds_that_were_not_declared_are_an_error(kinds):
    task = _task(*kinds)
    _, splits = task.start(_two_rounds(), (0, 2))
    for _ in kinds:
        _, splits = task.resume(np.zeros(2, np.float32), splits)
    assert isinstance(task.error, CollectiveMismatchError)
    assert not task.under_way


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_dense_outputs_are_not_copied_and_used_again_only_when_let_go(dtype):
    shapes = [(3,), (), (2, 5)]
    output = DenseOutput(shapes, numpy_dtype(dtype))
    values = np.array([1.0, 2.0, 4.0], np.float64 if dtype == "float64" else np.float32)

    def tensors(indices):
        arrays, num_union = output.write(np.array(indices, np.int32), values, 0.5)
        assert num_union == len(set(indices))
        places = [array.ctypes.data for array in arrays]
        given = [arrays]  # so that nothing here holds them
        del arrays
        # eagerly, TensorFlow would copy
        results = tf.function(
            lambda: tf.numpy_function(lambda: given.pop(), [], [tf.as_dtype(dtype)] * 3), autograph=False
        )()
        return results, places

    first, where = tensors([0, 3, 13])
    assert where[0] % 64 == where[1] % 64 == where[2] % 64 == 0
    flat = np.concatenate([tensor.numpy().reshape(-1).astype(float) for tensor in first])
    assert flat[[0, 3, 13]].tolist() == [0.5, 1.0, 2.0] and flat.sum() == 3.5
    second, elsewhere = tensors([2, 2, 13])
    assert elsewhere != where, "memory that is in use was used again"
    assert np.concatenate([t.numpy().reshape(-1).astype(float) for t in first]).sum() == 3.5
    flat = np.concatenate([tensor.numpy().reshape(-1).astype(float) for tensor in second])
    assert flat[[2, 13]].tolist() == [1.5, 2.0] and flat.sum() == 3.5
    del first
    # TensorFlow lets go of arrays at its next call
    tf.function(lambda: tf.numpy_function(_zero, [], tf.float32), autograph=False)()
    third, again = tensors([1, 4, 5])
    assert again == where, "memory was not used again"
    flat = np.concatenate([tensor.numpy().reshape(-1).astype(float) for tensor in third])
    assert flat[[1, 4, 5]].tolist() == [0.5, 1.0, 2.0] and flat.sum() == 3.5


def test_choices_are_those_of_pytorch():
    torch_front_end = pytest.importorskip("horovod_sparse.torch")
    ours, theirs = dir(hvd.Compression), dir(torch_front_end.Compression)
    assert {name for name in ours if name[0] != "_"} == {name for name in theirs if name[0] != "_"}
    for name in ("topk", "exdyna", "randomk"):
        made, other = getattr(hvd.Compression, name), getattr(torch_front_end.Compression, name)
        expected = [item for item in inspect.signature(other).parameters if item != "named_parameters"]
        assert list(inspect.signature(made).parameters) == expected
        assert made(density=0.25).recipe == other(density=0.25).recipe
        assert repr(made(density=0.25)) == repr(other(density=0.25))
    assert hvd.Compression.parse("fp16") is hvd.Compression.fp16
    with pytest.raises(UnknownNameError, match="topk"):
        hvd.Compression.parse("topq")
    with pytest.raises(AttributeError, match="topk"):
        hvd.Compression.topq()


def test_arguments_that_every_step_makes_anew_are_compared_by_value():
    def bound(compression, size=100, **more):
        return compression.bind(
            process_set=hvd.global_process_set,
            tensor_selection=min_elements(size),
            **{"merging": fixed(bytes=1000), **more},
        )

    compression = hvd.Compression.topk(density=0.5)
    assert bound(compression) is bound(compression)
    with pytest.raises(ArgumentError, match=r"tensor_selection.*made once"):
        bound(compression, size=101)
    with pytest.raises(ArgumentError, match=r"merging.*made once"):
        bound(compression, merging="single")
    planned = hvd.Compression.topk(density=0.5)
    first = planned.bind(process_set=hvd.global_process_set, plan=Plan((("a", "b"),)))
    assert planned.bind(process_set=hvd.global_process_set, plan=Plan((("a", "b"),))) is first


def test_a_watch_that_fails_leaves_the_others_their_deadlines(monkeypatch, caplog):
    thread, looked = _Thread(), []
    monkeypatch.setattr(thread, "_runs", True)  # by hand

    def look(watch, now):
        looked.append(watch)
        raise ValueError("Horovod has not been initialized; use hvd.init().")

    monkeypatch.setattr(Watch, "look", look)
    watches = [Watch(60, hvd.global_process_set) for _ in range(2)]
    for watch in watches:
        thread.look_after(watch)
    assert 0 < thread._looked() <= 1.0
    thread._looked()
    assert looked.count(watches[0]) == looked.count(watches[1]) == 2
    assert [record.getMessage() for record in caplog.records if "tried again" in record.getMessage()] == [
        "what waits for other ranks could not be looked at, which is tried again: "
        "Horovod has not been initialized; use hvd.init()."
    ]

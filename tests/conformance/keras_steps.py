"""Own steps of Keras' optimizers: those of Keras 3, and the new ones of Keras 2."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from conformance.keras import CLOSE, NIGHT, descend, sgd, variable
from horovod_sparse.errors import NonFiniteGradientError
from support.keras_models import fit, flat, keras, make_model


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (5, 1), pytest.param(2, 0, marks=NIGHT)])
def test_own_steps_all_sent_are_late_averages_of_steps_made_alone(every, delay, rank, size, everywhere):
    """A rank moves alone by a in `every` steps; `delay` exchanges later ``theta + a - mean(a)``.

    With every=1 and delay=0 that is dense training, since velocities add up.
    """

    class LateAverages(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.before, self.count = flat(self.model), 0
            self.flying = [0.0 * self.before]

        def on_train_batch_end(self, batch, logs=None):
            self.flying[-1] += self.before - flat(self.model)
            self.count += 1
            if self.count % every == 0:
                self.flying.append(0.0 * self.before)
                self.land(delay)
            self.before = flat(self.model)

        def on_train_end(self, logs=None):
            self.flying.append(0.0 * self.before)
            self.land(0)

        def land(self, most):
            while len(self.flying) - 1 > most:
                own = self.flying.pop(0)
                values = flat(self.model) + own - everywhere(own).mean(axis=0)
                weights = self.model.trainable_weights
                stops = np.cumsum([np.prod(one.shape) for one in weights])
                for one, new in zip(weights, np.split(values, stops[:-1]), strict=True):
                    one.assign(new.reshape(one.shape))

    model, alone = make_model(), make_model()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    plain = sgd(rate=rate)
    optimizer = hvd.DistributedOptimizer(plain, compression="best:density=1.0", every=every, delay=delay)
    fit(model, optimizer, rank, size, run_eagerly=every == 2)
    optimizer.finish()
    fit(alone, sgd(rate=rate), rank, size, callbacks=[LateAverages()])
    np.testing.assert_allclose(flat(model), flat(alone), **CLOSE)
    assert (everywhere(flat(model)) == flat(model)).all() and int(optimizer.iterations) == 12


@pytest.mark.parametrize("every", [1, 2])
def test_a_gradient_that_is_not_finite_ends_an_own_step_on_all_ranks(every, rank, everywhere):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.AdamW(0.5), compression="best:density=0.5", every=every
    )
    weight = variable(np.ones(4))
    for bad in (False, True):
        gradients = tf.constant([np.nan if bad and rank == 0 else 1.0, 2.0, 3.0, 4.0])
        for number in range(every):
            if bad and number == every - 1:
                with pytest.raises(NonFiniteGradientError):
                    descend(optimizer, [weight], [gradients])
            else:
                descend(optimizer, [weight], [gradients])
        assert (everywhere(weight.numpy()) == everywhere(weight.numpy())[0]).all()
    assert np.isfinite(weight.numpy()).all()
